"""Cycle counters of a running program: the clocks of its IPUs as arrays that the engine computes on the way.

Input: the clock step of each leaf and decision, and the program as the engine traces it. Output: the clocks where a
codelet reads them, which are those that a profile of the same run has, data-dependent control included.
Steps between two pieces of control flow are one max-plus matrix: code without loops and branches has constant counts.
Replicas have clocks of their own, on a leading axis. Reading takes no time here; its steps are in the profile.
Limits: replicas do not wait for each other where they meet, as in the profile, which is that of one replica.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping

import jax
import jax.numpy as jnp
import numpy as np

from ipujax.runtime.graph import Block, Branch, Collective, ComputeSet, Execute, Graph, Leaf, Program, Repeat
from ipujax.runtime.tensor import Variable, write
from ipujax.runtime.timeline import maxplus
from ipujax.runtime.timeline.clocks import ClockStep

_WORD_BITS = 32
_LOW_WORD = (1 << _WORD_BITS) - 1

Arrays = MutableMapping[Variable, jax.Array]


class CycleCounter:
    """Clocks of the IPUs while a program is traced.

    Args:
        graph: graph of the program.
        steps: clock step of each leaf and decision.
        slots: rows of the clock state beside the IPUs.

    Attributes:
        variable: the clocks, uint32[IPUs + slots, 2], low word first; of several replicas [replicas, …].
        readings: compute sets that read them.
    """

    def __init__(self, graph: Graph, steps: Mapping[Program, ClockStep], slots: int) -> None:
        size = graph.target.num_ipus + slots
        self.variable = Variable((size, 2), np.dtype(np.uint32), "cycle counter")
        self.readings = readings(graph)
        self._graph = graph
        self._steps = steps
        self._waiting = maxplus.identity(size)  # effect of the steps that `variable` does not have yet

    def before(self, step: Program, arrays: Arrays) -> None:
        """Account for a step, which is traced next, in the arrays that are traced."""
        if isinstance(step, Execute) and step.compute_set in self.readings:
            self.settle(arrays)
        elif isinstance(step, Leaf):
            self._add(step)
        elif isinstance(step, Collective):
            self._add_rounds(step)
        else:
            # The decision of a branch comes before it, that of a loop after its test.
            if isinstance(step, Branch):
                self._add(step)
            self.settle(arrays)

    def decide(self, loop: Program, arrays: Arrays) -> None:
        """Account for the decision of a loop, after its test."""
        self._add(loop)
        self.settle(arrays)

    def settle(self, arrays: Arrays) -> None:
        """Bring the array of the clocks up to date."""
        effect = self._waiting
        identity = maxplus.identity(len(effect))
        if (effect != identity).any():
            arrays[self.variable] = _advanced_clocks(arrays[self.variable], effect)
            self._waiting = identity

    def write_counts(self, compute_set: ComputeSet, arrays: Arrays) -> None:
        """Write the clock of each vertex's IPU to the results of a compute set of cycle counters."""
        for group in self._graph.groups[compute_set]:
            (access,) = group.accesses
            ipus = group.tile.reshape(-1) // self._graph.target.tiles_per_ipu
            counts = arrays[self.variable][ipus].reshape(access.tensor.shape)
            arrays.update(write(access.tensor, arrays, counts))

    def _add_rounds(self, program: Program) -> None:
        """Account for the rounds of a collective, which the engine does not run: it computes the result at once."""
        if isinstance(program, Repeat):
            for _ in range(program.count):
                self._add_rounds(program.body)
        elif isinstance(program, Block):
            for child in program.children():
                self._add_rounds(child)
        else:
            self._add(program)

    def _add(self, node: Program) -> None:
        step = self._steps[node]
        # In place, as the clocks of a timeline: the matrix of all steps so far goes through this one.
        step.start(self._waiting)
        step.finish(self._waiting)


def readings(graph: Graph) -> frozenset[ComputeSet]:
    """Return the compute sets that read the cycle counter."""
    return frozenset(
        compute_set for compute_set, groups in graph.groups.items() if any(g.codelet.reads_clock for g in groups)
    )


def _advanced_clocks(clocks: jax.Array, effect: np.ndarray) -> jax.Array:
    """Return clocks of two words after steps with the max-plus matrix `effect`."""
    is_finite = effect >= 0
    added = np.where(is_finite, effect, 0).astype(np.uint64)
    added_low = jnp.asarray((added & _LOW_WORD).astype(np.uint32))
    low = clocks[..., None, :, 0] + added_low
    carry = (low < added_low).astype(jnp.uint32)
    high = clocks[..., None, :, 1] + jnp.asarray((added >> _WORD_BITS).astype(np.uint32)) + carry
    high = jnp.where(is_finite, high, 0)
    top = high.max(-1)
    low = jnp.where(is_finite & (high == top[..., None]), low, 0).max(-1)
    return jnp.stack([low, top], -1)
