"""Decisions of data-dependent control, written to memory of the program and sent to the host in parts.

A call of the host for each decision would take about 0.1 ms. Rows of a node and its outcome are written to an array
instead, which the host takes when it is full, and at the end of a run.

Input: outcomes in a trace. Output: the decisions of each node, in order.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback

from ipujax.runtime.graph import Program
from ipujax.runtime.tensor import Variable

Arrays = MutableMapping[Variable, jax.Array]
_ROWS = 4096  # 32 KiB; a call of the host for so many rows takes no time


class DecisionLog:
    """Decisions of the runs of programs that are traced with it.

    Args:
        most_decisions: number after which a run ends, with results that mean nothing; None for no limit.

    Attributes:
        rows, count: variables for rows that the host has not taken, int32[rows, 2], and their number, int32[].
    """

    def __init__(self, most_decisions: int | None = None) -> None:
        self.rows = Variable((_ROWS, 2), jnp.dtype(jnp.int32), "decisions")
        self.count = Variable((), jnp.dtype(jnp.int32), "number of decisions")
        self._most_decisions = most_decisions
        self._nodes: dict[Program, int] = {}
        self._total = 0
        self._decisions: dict[Program, list[int]] = {}

    @property
    def decisions(self) -> dict[Program, list[int]]:
        """Trip count of each run of a loop, 1 or 0 of an `If`, case of a `Switch` (number of cases for its default)."""
        jax.effects_barrier()  # they arrive by callbacks, which may run after the results are ready
        return self._decisions

    def clear(self) -> None:
        """Forget all decisions."""
        self._decisions = {}
        self._total = 0

    def write(self, node: Program, outcome: jax.Array, values: Arrays, has_failed: Variable, is_on: Any = True) -> None:
        """Trace the decision of a node.

        Args:
            node: the node.
            outcome: int32[] or bool[].
            values: hold the rows, which change, and `has_failed`, which ends loops.
            has_failed: variable of `EnginePlan`.
            is_on: bool[], whether the decision counts.
        """
        number = self._nodes.setdefault(node, len(self._nodes))
        row = jnp.stack([jnp.int32(number), outcome.astype(jnp.int32)])
        rows = values[self.rows].at[values[self.count]].set(row)
        count = values[self.count] + jnp.asarray(is_on, jnp.int32)
        state = jax.lax.cond(count == _ROWS, self._sent, lambda *state: state, rows, count, values[has_failed])
        values.update(zip((self.rows, self.count, has_failed), state, strict=True))

    def end(self, values: Arrays) -> None:
        """Trace the end of a run."""
        self._sent(values[self.rows], values[self.count], jnp.zeros((), bool))

    def _sent(self, rows: jax.Array, count: jax.Array, has_failed: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        is_over = io_callback(self._take, jax.ShapeDtypeStruct((), bool), rows, count, ordered=True)
        return rows, jnp.zeros_like(count), has_failed | is_over

    def _take(self, rows: Any, count: Any) -> np.ndarray:
        """Add rows to the decisions; return whether the run should end."""
        decisions = np.asarray(rows)[: int(count)]
        self._total += len(decisions)
        nodes = list(self._nodes)
        for number in np.unique(decisions[:, 0]).tolist():
            outcomes = decisions[decisions[:, 0] == number, 1].tolist()
            self._decisions.setdefault(nodes[number], []).extend(outcomes)
        return np.asarray(self._most_decisions is not None and self._total > self._most_decisions)
