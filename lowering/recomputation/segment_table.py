"""Segments of a chain of steps, each with its best ways to run: fewest cycles in so many bytes.

Input: steps in a row, each with what its forward and its backward part cost and hold. Output: for each segment a curve
of cycles against bytes, and the order of parts that a point of it stands for. A segment either saves all that its first
step's backward part needs, or keeps only what a later step reads, runs the rest from there, and then runs its beginning
again. The best of both, for every segment and every budget at once, is its curve.

Source: dynamic program of rotor (Beaumont et al., "Optimal checkpointing for heterogeneous chains", HAL hal-02352969;
reference parallel.md §3.2), here over curves in place of slots of memory, so that bytes are exact.
Limits: best among plans that keep a value until it is used, as in the source; others are up to a quarter cheaper.
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
        input_bytes: what it reads of the step before it, and what the gradient of that takes.
        saved_bytes: what its forward part leaves for the backward part, its result included, its input not.
        forward_temp_bytes: what else the forward part holds while it runs.
        backward_temp_bytes: what else the backward part holds while it runs.
        left_bytes: what the backward part leaves for behind the chain: gradients of parameters.
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
        """The curve through the best of some points."""
        order = np.lexsort((cycles, num_bytes))
        num_bytes, cycles = num_bytes[order], cycles[order]
        is_better = np.ones(len(cycles), bool)
        is_better[1:] = cycles[1:] < np.minimum.accumulate(cycles)[:-1]
        return Curve(num_bytes[is_better], cycles[is_better])

    def holds(self, num_bytes: int) -> bool:
        return bool(self.num_bytes[0] <= num_bytes)

    def cycles_in(self, num_bytes: int | np.ndarray) -> np.ndarray:
        """Cycles with so many bytes, at least those of the first point."""
        return self.cycles[np.searchsorted(self.num_bytes, num_bytes, side="right") - 1]

    def moved(self, more_bytes: int, least_bytes: int, more_cycles: int) -> Curve:
        """The same with more of both, and at least so many bytes."""
        return Curve.best(np.maximum(self.num_bytes + more_bytes, least_bytes), self.cycles + more_cycles)

    def plus(self, other: Curve) -> Curve:
        """One after the other in the same bytes."""
        num_bytes = np.union1d(self.num_bytes, other.num_bytes)
        num_bytes = num_bytes[num_bytes >= max(self.num_bytes[0], other.num_bytes[0])]
        return Curve.best(num_bytes, self.cycles_in(num_bytes) + other.cycles_in(num_bytes))


class SegmentTable:
    """The curves of all segments of a chain; that of steps a to b does not count the input of a, which is held."""

    def __init__(self, steps: tuple[ChainStep, ...], result_bytes: int) -> None:
        self.steps = steps
        self.inputs = [*(step.input_bytes for step in steps), result_bytes]
        left = [0, *accumulate(step.left_bytes for step in reversed(steps))]
        self.left = left[::-1]  # by the backward parts of a step and those behind it
        self.curves: dict[tuple[int, int], Curve] = {}
        for length in range(len(steps)):
            for first in range(len(steps) - length):
                options = [curve for _, curve in self._options(first, first + length)]
                self.curves[first, first + length] = Curve.best(
                    np.concatenate([curve.num_bytes for curve in options]),
                    np.concatenate([curve.cycles for curve in options]),
                )

    @property
    def whole(self) -> Curve:
        """That of the whole chain."""
        return self.curves[0, len(self.steps) - 1]

    def _options(self, first: int, last: int) -> list[tuple[int | None, Curve]]:
        """Ways to run a segment: saving all of its first step (None), or keeping the input of a later one."""
        step, inputs = self.steps[first], self.inputs
        gradient = inputs[last + 1] + self.left[last + 1]
        forward = gradient + step.saved_bytes + step.forward_temp_bytes
        backward = inputs[first + 1] + inputs[first] + step.saved_bytes + step.backward_temp_bytes
        backward += self.left[first]
        both = step.forward_cycles + step.backward_cycles
        if first == last:
            return [(None, Curve(np.array([max(forward, backward)]), np.array([both])))]
        rest = self.curves[first + 1, last]
        options: list[tuple[int | None, Curve]] = [(None, rest.moved(step.saved_bytes, max(forward, backward), both))]
        least, cycles = gradient + inputs[first + 1] + step.forward_temp_bytes, step.forward_cycles
        for kept in range(first + 1, last + 1):
            after = self.curves[kept, last].moved(inputs[kept], least, cycles)
            options.append((kept, after.plus(self.curves[first, kept - 1])))
            one = self.steps[kept]
            least = max(least, gradient + inputs[kept] + inputs[kept + 1] + one.forward_temp_bytes)
            cycles += one.forward_cycles
        return options

    def plan(self, num_bytes: int) -> list[tuple[Action, int]]:
        """What runs, in order, in so many bytes."""
        return self.actions(0, len(self.steps) - 1, num_bytes)

    def actions(self, first: int, last: int, num_bytes: int) -> list[tuple[Action, int]]:
        """What runs of a segment, in order, in so many bytes."""
        able = [(kept, curve) for kept, curve in self._options(first, last) if curve.holds(num_bytes)]
        kept, _ = min(able, key=lambda option: int(option[1].cycles_in(num_bytes)))
        if kept is not None:
            on_the_way: list[tuple[Action, int]] = [("forward", n) for n in range(first + 1, kept)]
            after = self.actions(kept, last, num_bytes - self.inputs[kept])
            return [("keep", first), *on_the_way, *after, *self.actions(first, kept - 1, num_bytes)]
        if first == last:
            return [("save", first), ("backward", first)]
        inside = self.actions(first + 1, last, num_bytes - self.steps[first].saved_bytes)
        return [("save", first), *inside, ("backward", first)]
