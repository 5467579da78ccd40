"""The engine: a whole program as one JAX function, for one call of XLA a step.

Input: a graph and a program. Output: a function that `jax.jit` can trace: from the values of host streams to those of
host streams (`engine_function`), or on memory itself, with streams answered by a host as it runs (`state_function`).
One replica runs as `engine.single` says, several as `engine.replicated` says.

Limits: without a host, a host stream holds one value a run; a stream written several times keeps the last value, one
never written gives zeros. Memory that was never written reads as zeros (the verifier refuses such programs unless told
not to). The body of a `Function` with host transfers is traced once for each call.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from ipujax.runtime.analysis import EffectsOf
from ipujax.runtime.engine.replicated import ReplicatedProgram
from ipujax.runtime.engine.single import EngineProgram, Record, Streams
from ipujax.runtime.graph import CrossReplicaCopy, Graph, HostStream, Program, distinct
from ipujax.runtime.host import ALONE, GuardedHost, HostCalls, Instances
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
) -> Callable[[Mapping[HostStream, Any]], Streams]:
    """Makes the function that runs a program.

    Args:
        graph: holds the vertex groups and constants.
        program: what to run; not to be changed afterwards.
        exact_splits: compute every vertex by itself instead of unsplit: slower, the very splits of the machine.
        record: called, in order, with what data-dependent control does: the iterations of a loop, 1 or 0 of
            an `If`, the case of a `Switch` (their number for its default). It calls back to the host each time, and is
            slow. Of several replicas the first is recorded.
        calls: makes the calls of the host's functions; what they raise goes through XLA when None.
        instances: processes among which replicas are shared; with several, the function is to be traced inside a
            `jax.shard_map` over them.

    Returns:
        `run(inputs)`: takes for each stream the program reads an array of its shape and dtype, returns one for each
        stream it writes. Where the graph has several replicas the arrays have a leading axis of those that are here,
        but for streams that are broadcast. It can be traced; it raises `ArgumentError` for an input that is missing, or
        of another shape or dtype.

    Raises:
        VerifyError: replicas that would have to meet where they cannot, see `verify.replicas`.
    """
    return prepared(graph, program, exact_splits=exact_splits, record=record, calls=calls, instances=instances).run


def prepared(
    graph: Graph,
    program: Program,
    kept: Collection[Variable] = (),
    host: GuardedHost | None = None,
    *,
    exact_splits: bool = False,
    record: Record | None = None,
    calls: HostCalls | None = None,
    instances: Instances = ALONE,
) -> EngineProgram:
    """A program prepared for tracing.

    Args:
        graph: as `engine_function`.
        program: as `engine_function`.
        kept: variables whose values matter after a run.
        host: answers transfers as they happen; streams hold one value a run when None.
        exact_splits: as `engine_function`.
        record: as `engine_function`.
        calls: as `engine_function`.
        instances: as `engine_function`.

    Raises:
        VerifyError: as `engine_function`.
    """
    alone = EngineProgram(graph, program, exact_splits, record, kept, host, calls)
    if graph.replication_factor > 1 or any(isinstance(node, CrossReplicaCopy) for node in distinct(program)):
        facts = Inventory.of(graph, program, EffectsOf(graph))
        for rule in (cross_replica, divergent_control):
            for error in rule(facts):
                raise error
    return alone if graph.replication_factor == 1 else ReplicatedProgram(alone, graph.replication_factor, instances)
