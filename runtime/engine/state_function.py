"""A program as a function of memory: from the arrays of variables before a run to those after it.

Input: a graph, a program, the variables that are read after a run, and the host that answers its transfers. Output: a
`StateFunction` that `jax.jit` can trace. Its operands are the variables that the program needs, its results those that
it may change. With several replicas the arrays have a leading axis of replicas.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import jax

from ipujax.runtime.analysis import EffectsOf
from ipujax.runtime.engine.engine import prepare_engine
from ipujax.runtime.engine.outside import Outside, Record
from ipujax.runtime.graph import Graph, Program, RemoteIn, RemoteOut, distinct
from ipujax.runtime.host import GuardedHost
from ipujax.runtime.tensor import Variable


class StateFunction:
    """A program as a function of memory.

    Args:
        graph: holds the vertex groups and constants.
        program: the program; not to be changed afterwards.
        persistent: the variables, of tiles or remote buffers, that may be read after a run.
        host: answers transfers as they happen.
        exact_splits: see `engine_function`.
        record: see `engine_function`.

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
        record: Record | None = None,
    ) -> None:
        self._engine = prepare_engine(graph, program, Outside(record, host), persistent, exact_splits=exact_splits)
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
        return self._engine.export(values, self.writes)


def remote_memories(program: Program) -> list[Variable]:
    """List the variables behind the remote buffers that a program reads or writes."""
    remote = (node.buffer.memory for node in distinct(program) if isinstance(node, (RemoteIn, RemoteOut)))
    return list(dict.fromkeys(remote))
