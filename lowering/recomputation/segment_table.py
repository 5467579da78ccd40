"""Segments of a chain of steps, each with its trade-off curve of cycles against bytes.

Input: steps in a row, each with the cycles and bytes of its forward and its backward part. Output: the curve of each
segment, and the order of parts for each point. A segment either saves all values that its first step's backward part
needs, or stores only the input of a later step, runs the rest from there, and then runs its beginning again. The best
of both, for every segment and every budget at once, is its curve.

Source: dynamic program of rotor (Beaumont et al., "Optimal checkpointing for heterogeneous chains", HAL hal-02352969;
reference parallel.md §3.2), here over curves instead of slots of memory, so that bytes are exact.
Limits: best among plans that store a value until it is used, as in the source; others are up to a quarter cheaper.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

import numpy as np

Action = Literal["forward", "keep", "save", "backward"]


@dataclass(frozen=True, slots=True)
class ChainStep:
    """A step of a chain.

    Args:
        forward_cycles: of its forward part.
        backward_cycles: of its backward part.
        input_bytes: of its operands from the previous step, and of their gradients.
        saved_bytes: of values that its forward part stores for the backward part, its result included, its input not.
        forward_temp_bytes: of other values that are live in the forward part.
        backward_temp_bytes: of other values that are live in the backward part.
        left_bytes: of results of the backward part that stay live: gradients of parameters.
    """

    forward_cycles: int
    backward_cycles: int
    input_bytes: int
    saved_bytes: int
    forward_temp_bytes: int = 0
    backward_temp_bytes: int = 0
    left_bytes: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Curve:
    """Fewest cycles in so many bytes: `num_bytes` ascends, `cycles` descends, int64[points] each."""

    num_bytes: np.ndarray
    cycles: np.ndarray

    @staticmethod
    def best(num_bytes: np.ndarray, cycles: np.ndarray) -> Curve:
        """The trade-off curve of some points."""
        order = np.lexsort((cycles, num_bytes))
        num_bytes = num_bytes[order]
        cycles = cycles[order]
        is_better = np.ones(len(cycles), bool)
        is_better[1:] = cycles[1:] < np.minimum.accumulate(cycles)[:-1]
        return Curve(num_bytes[is_better], cycles[is_better])

    def holds(self, num_bytes: int) -> bool:
        return bool(self.num_bytes[0] <= num_bytes)

    def cycles_in(self, num_bytes: int | np.ndarray) -> np.ndarray:
        """Cycles within so many bytes, at least those of the first point."""
        return self.cycles[np.searchsorted(self.num_bytes, num_bytes, side="right") - 1]

    def shifted(self, extra_bytes: int, min_bytes: int, extra_cycles: int) -> Curve:
        """The curve with more bytes and cycles, and a minimum of bytes."""
        return Curve.best(np.maximum(self.num_bytes + extra_bytes, min_bytes), self.cycles + extra_cycles)

    def plus(self, other: Curve) -> Curve:
        """The curve of both, one after the other in the same bytes."""
        num_bytes = np.union1d(self.num_bytes, other.num_bytes)
        num_bytes = num_bytes[num_bytes >= max(self.num_bytes[0], other.num_bytes[0])]
        return Curve.best(num_bytes, self.cycles_in(num_bytes) + other.cycles_in(num_bytes))


class SegmentTable:
    """The curves of all segments of a chain; that of steps a to b does not count the input of a, which is live."""

    def __init__(self, steps: tuple[ChainStep, ...], result_bytes: int) -> None:
        self.steps = steps
        self.inputs = [*(step.input_bytes for step in steps), result_bytes]
        left_bytes = [0, *accumulate(step.left_bytes for step in reversed(steps))]
        self.left_bytes = left_bytes[::-1]  # bytes of results of the backward parts of a step and all later ones
        self.curves: dict[tuple[int, int], Curve] = {}
        for length in range(len(steps)):  # the curve of a segment is made of those of shorter ones
            for first in range(len(steps) - length):
                options = [curve for _, curve in self._options(first, first + length)]
                self.curves[first, first + length] = Curve.best(
                    np.concatenate([curve.num_bytes for curve in options]),
                    np.concatenate([curve.cycles for curve in options]),
                )

    @property
    def curve(self) -> Curve:
        """The curve of the entire chain."""
        return self.curves[0, len(self.steps) - 1]

    def _options(self, first: int, last: int) -> list[tuple[int | None, Curve]]:
        """Ways to run a segment, each with its trade-off curve.

        None saves all values of the first step; a number stores the input of that later step, and recomputes the steps
        before it.
        """
        step = self.steps[first]
        inputs = self.inputs
        # Bytes that are live while the segment runs: the gradient of its result, and the results of later steps.
        live_bytes = inputs[last + 1] + self.left_bytes[last + 1]
        forward_bytes = live_bytes + step.saved_bytes + step.forward_temp_bytes
        backward_bytes = inputs[first + 1] + inputs[first] + step.saved_bytes + step.backward_temp_bytes
        backward_bytes += self.left_bytes[first]
        peak_bytes = max(forward_bytes, backward_bytes)
        total_cycles = step.forward_cycles + step.backward_cycles
        if first == last:
            return [(None, Curve(np.array([peak_bytes]), np.array([total_cycles])))]
        tail = self.curves[first + 1, last]
        options: list[tuple[int | None, Curve]] = [(None, tail.shifted(step.saved_bytes, peak_bytes, total_cycles))]
        min_bytes = live_bytes + inputs[first + 1] + step.forward_temp_bytes
        cycles = step.forward_cycles
        for stored in range(first + 1, last + 1):
            tail_of_stored = self.curves[stored, last].shifted(inputs[stored], min_bytes, cycles)
            options.append((stored, tail_of_stored.plus(self.curves[first, stored - 1])))
            next_step = self.steps[stored]
            min_bytes = max(min_bytes, live_bytes + inputs[stored] + inputs[stored + 1] + next_step.forward_temp_bytes)
            cycles += next_step.forward_cycles
        return options

    def plan(self, num_bytes: int) -> list[tuple[Action, int]]:
        """The actions of the chain, in order, in so many bytes."""
        return self.actions(0, len(self.steps) - 1, num_bytes)

    def actions(self, first: int, last: int, num_bytes: int) -> list[tuple[Action, int]]:
        """The actions of a segment, in order, in so many bytes."""
        fitting = [(stored, curve) for stored, curve in self._options(first, last) if curve.holds(num_bytes)]
        stored, _ = min(fitting, key=lambda option: int(option[1].cycles_in(num_bytes)))
        if stored is not None:
            skipped: list[tuple[Action, int]] = [("forward", n) for n in range(first + 1, stored)]
            tail = self.actions(stored, last, num_bytes - self.inputs[stored])
            return [("keep", first), *skipped, *tail, *self.actions(first, stored - 1, num_bytes)]
        if first == last:
            return [("save", first), ("backward", first)]
        tail = self.actions(first + 1, last, num_bytes - self.steps[first].saved_bytes)
        return [("save", first), *tail, ("backward", first)]
