"""A program as a function of memory: from what variables hold before a run to what they hold after it.

Input: a graph, a program, the variables that matter after a run, and the host that answers its transfers. Output: a
`StateFunction` that `jax.jit` can trace. Only what the program needs comes in, only what it may have changed goes out.
Of several replicas the arrays have a leading axis.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import jax

from ipujax.runtime.analysis import EffectsOf
from ipujax.runtime.engine.engine import prepared
from ipujax.runtime.engine.single import Record
from ipujax.runtime.graph import Graph, Program, RemoteIn, RemoteOut, distinct
from ipujax.runtime.host import GuardedHost
from ipujax.runtime.tensor import Variable


class StateFunction:
    """A program as a function of memory.

    Args:
        graph: holds the vertex groups and constants.
        program: what to run; not to be changed afterwards.
        kept: the variables, of tiles or remote buffers, whose values matter after a run.
        host: answers transfers as they happen.
        exact_splits: see `engine_function`.
        record: see `engine_function`.

    Attributes:
        reads: the variables whose value before a run matters to it.
        writes: those of `kept` that it may write.
    """

    def __init__(
        self,
        graph: Graph,
        program: Program,
        kept: Collection[Variable],
        host: GuardedHost,
        *,
        exact_splits: bool = False,
        record: Record | None = None,
    ) -> None:
        self._engine = prepared(graph, program, kept, host, exact_splits=exact_splits, record=record)
        self._program, self._kept = program, frozenset(kept)
        effects, remote = EffectsOf(graph)(program), remote_memories(program)
        order = [*graph.variables, *remote]
        written = (effects.writes | set(remote)) & self._kept
        self.writes = tuple(v for v in order if v in written)
        passed = {v for v in effects.reads if not v.is_constant} | (written - effects.kills)
        self.reads = tuple(v for v in order if v in passed)

    def __call__(self, state: Mapping[Variable, Any]) -> dict[Variable, jax.Array]:
        """Runs the program once.

        Args:
            state: an array for each of `reads`.

        Returns:
            An array for each of `writes`.
        """
        values = self._engine.memory({variable: state[variable] for variable in self.reads})
        self._engine.go(self._program, values, self._kept)
        return self._engine.held(values, self.writes)


def remote_memories(program: Program) -> list[Variable]:
    """The memories of the remote buffers a program touches."""
    remote = (node.buffer.memory for node in distinct(program) if isinstance(node, (RemoteIn, RemoteOut)))
    return list(dict.fromkeys(remote))
