"""The engine: a whole program as one JAX function, for one call of XLA a step.

Input: a graph and a program. Output: a function that `jax.jit` can trace: from the values of host streams to those of
host streams (`engine_function`), or on memory itself, with streams answered by a host as it runs (`state_function`).
`engine.engine_plan` prepares it, `engine.single` traces one replica, `engine.replicated` several.

Limits: without a host, a host stream has one value a run: the last one written, or zeros. Memory that was never written
reads as zeros (the verifier refuses such programs unless told not to). The body of a `Function` with host transfers is
traced once for each call.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from ipujax.runtime.analysis import EffectsOf
from ipujax.runtime.engine.engine_plan import EnginePlan
from ipujax.runtime.engine.outside import Outside, Record, StepClock
from ipujax.runtime.engine.replicated import ReplicatedProgram
from ipujax.runtime.engine.single import EngineProgram, Streams
from ipujax.runtime.graph import CrossReplicaCopy, Graph, HostStream, Program, distinct
from ipujax.runtime.host import ALONE, HostCalls, Instances
from ipujax.runtime.tensor import Variable
from ipujax.runtime.verify import Inventory, cross_replica, divergent_control


def engine_function(
    graph: Graph,
    program: Program,
    *,
    exact_splits: bool = False,
    record: Record | None = None,
    calls: HostCalls | None = None,
    instances: Instances = ALONE,
    clock: StepClock | None = None,
) -> Callable[[Mapping[HostStream, Any]], Streams]:
    """Return the function that runs a program.

    Args:
        graph: holds the vertex groups and constants.
        program: the program; not to be changed afterwards.
        exact_splits: compute every vertex by itself instead of unsplit: slower, with the splits of the machine.
        record: called, in program order, with each node of data-dependent control and its outcome: trip count of a
            loop, 1 or 0 of an `If`, case of a `Switch` (number of cases for its default). Each call is a slow host
            callback. Of several replicas the first is recorded.
        calls: calls the host's functions; their exceptions pass through XLA when None.
        instances: processes among which replicas are shared; with several, the function must be traced inside a
            `jax.shard_map` over them.
        clock: clocks that codelets read; without it those codelets read zeros.

    Returns:
        `run(inputs)`: takes an array of shape and dtype of each stream that the program reads, and returns one for each
        stream that it writes. With several replicas the arrays have a leading axis of the local ones, except those of
        broadcast streams. It can be traced. It raises `ArgumentError` for a missing input, or another shape or dtype.

    Raises:
        VerifyError: replicas may not reach a meeting point together, see `verify.replicas`.
    """
    outside = Outside(record, None, calls or HostCalls(guarded=False), clock)
    return prepare_engine(graph, program, outside, exact_splits=exact_splits, instances=instances).run


def prepare_engine(
    graph: Graph,
    program: Program,
    outside: Outside | None = None,
    persistent: Collection[Variable] = (),
    *,
    exact_splits: bool = False,
    instances: Instances = ALONE,
) -> EngineProgram:
    """Prepare a program for tracing; `persistent` lasts beyond a run, other arguments as of `engine_function`."""
    single = EngineProgram(EnginePlan.of(graph, program, exact_splits, persistent), outside or Outside())
    if graph.replication_factor > 1 or any(isinstance(node, CrossReplicaCopy) for node in distinct(program)):
        # A program may come here without the verifier; these two rules keep a trace from wrong numbers.
        inventory = Inventory.of(graph, program, EffectsOf(graph))
        for rule in (cross_replica, divergent_control):
            for error in rule(inventory):
                raise error
    return single if graph.replication_factor == 1 else ReplicatedProgram(single, graph.replication_factor, instances)
