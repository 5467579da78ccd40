"""The engine: a whole program as one JAX function, for one call of XLA a step.

Input: a graph and a program. Output: a function that `jax.jit` can trace: from the values of host streams to those of
host streams (`engine_function`), or on memory itself, with streams answered by a host as it runs (`state_function`).
`engine.engine_plan` prepares it, `engine.single` traces one replica, `engine.replicated` several.

Limits: without a host, a host stream has one value a run: the last one written, or zeros. Memory that was never written
reads as zeros (the verifier refuses such programs unless told not to). The body of a `Function` with host transfers is
traced once for each call.

A program as a function of memory: from the arrays of variables before a run to those after it.

Input: a graph, a program, the variables that are read after a run, and the host that answers its transfers. Output: a
`StateFunction` that `jax.jit` can trace. Its operands are the variables that the program needs, its results those that
it may change. With several replicas the arrays have a leading axis of replicas.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax

from ipujax.runtime.analysis import EffectsOf
from ipujax.runtime.engine.engine_plan import EnginePlan
from ipujax.runtime.engine.replicated import ReplicatedProgram
from ipujax.runtime.engine.single import EngineProgram, Streams
from ipujax.runtime.engine.values import DecisionLog, Outside, StepClock
from ipujax.runtime.graph import CrossReplicaCopy, Graph, HostStream, Program, RemoteIn, RemoteOut, distinct
from ipujax.runtime.host import ALONE, GuardedHost, HostCalls, Instances
from ipujax.runtime.tensor import Variable
from ipujax.runtime.verify import Inventory, cross_replica, divergent_control


def engine_function(
    graph: Graph,
    program: Program,
    *,
    exact_splits: bool = False,
    log: DecisionLog | None = None,
    calls: HostCalls | None = None,
    instances: Instances = ALONE,
    clock: StepClock | None = None,
    observed: Collection[HostStream] = (),
) -> Callable[[Mapping[HostStream, Any]], Streams]:
    """Return the function that runs a program.

    Args:
        graph: holds the vertex groups and constants.
        program: the program; not to be changed afterwards.
        exact_splits: compute every vertex by itself instead of unsplit: slower, with the splits of the machine.
        log: takes the decisions of data-dependent control, of several replicas those of the first.
        calls: calls the host's functions; their exceptions pass through XLA when None.
        instances: processes among which replicas are shared; with several, the function must be traced inside a
            `jax.shard_map` over them.
        clock: clocks that codelets read; without it those codelets read zeros.
        observed: output streams whose values are those that later steps read: XLA, which may compute a value again for
            each reader, and round it otherwise there, computes them once.

    Returns:
        `run(inputs)`: takes an array of shape and dtype of each stream that the program reads, and returns one for each
        stream that it writes. With several replicas the arrays have a leading axis of the local ones, except those of
        broadcast streams. It can be traced. It raises `ArgumentError` for a missing input, or another shape or dtype.

    Raises:
        VerifyError: replicas may not reach a meeting point together, see `verify.replicas`.
    """
    outside = Outside(log, None, calls or HostCalls(guarded=False), clock)
    return prepare_engine(
        graph, program, outside, exact_splits=exact_splits, instances=instances, observed=observed
    ).run


def prepare_engine(
    graph: Graph,
    program: Program,
    outside: Outside | None = None,
    persistent: Collection[Variable] = (),
    *,
    exact_splits: bool = False,
    instances: Instances = ALONE,
    observed: Collection[HostStream] = (),
) -> EngineProgram:
    """Prepare a program for tracing; `persistent` lasts beyond a run, other arguments as of `engine_function`."""
    single = EngineProgram(EnginePlan.of(graph, program, exact_splits, persistent, observed), outside or Outside())
    if graph.replication_factor > 1 or any(isinstance(node, CrossReplicaCopy) for node in distinct(program)):
        # A program may come here without the verifier; these two rules keep a trace from wrong numbers.
        inventory = Inventory.of(graph, program, EffectsOf(graph))
        for rule in (cross_replica, divergent_control):
            for error in rule(inventory):
                raise error
    return single if graph.replication_factor == 1 else ReplicatedProgram(single, graph.replication_factor, instances)


class StateFunction:
    """A program as a function of memory.

    Args:
        graph: holds the vertex groups and constants.
        program: the program; not to be changed afterwards.
        persistent: the variables, of tiles or remote buffers, that may be read after a run.
        host: answers transfers as they happen.
        exact_splits: see `engine_function`.
        log: see `engine_function`.

    Attributes:
        reads: variables whose values before a run it depends on.
        writes: those of `persistent` that it may write.
    """

    def __init__(
        self,
        graph: Graph,
        program: Program,
        persistent: Collection[Variable],
        host: GuardedHost,
        *,
        exact_splits: bool = False,
        log: DecisionLog | None = None,
    ) -> None:
        self._engine = prepare_engine(graph, program, Outside(log, host), persistent, exact_splits=exact_splits)
        self._program = program
        self._persistent = frozenset(persistent)
        effects = EffectsOf(graph)(program)
        remote = remote_memories(program)
        # Sets have no fixed order; operands and results of a jitted function must have one.
        order = [*graph.variables, *remote]
        written = (effects.writes | set(remote)) & self._persistent
        self.writes = tuple(v for v in order if v in written)
        # A variable that is not surely written in full comes back with some of its old elements.
        read = {v for v in effects.reads if not v.is_constant} | (written - effects.kills)
        self.reads = tuple(v for v in order if v in read)

    def __call__(self, state: Mapping[Variable, Any]) -> dict[Variable, jax.Array]:
        """Trace one run of the program; takes an array for each of `reads`, and returns one for each of `writes`."""
        values = self._engine.load_values({variable: state[variable] for variable in self.reads})
        self._engine.run_program(self._program, values, self._persistent)
        self._engine.end(values)
        return self._engine.export(values, self.writes)


def remote_memories(program: Program) -> list[Variable]:
    """List the variables behind the remote buffers that a program reads or writes."""
    remote = (node.buffer.memory for node in distinct(program) if isinstance(node, (RemoteIn, RemoteOut)))
    return list(dict.fromkeys(remote))
