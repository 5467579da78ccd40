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

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, NamedTuple

import numpy as np

Action = Literal["forward", "keep", "save", "backward"]


class StepAction(NamedTuple):
    """Run of a part of a step, given by its number in the chain.

    "forward" stores the result alone, "keep" also the input of the step, "save" all values that its backward part
    needs, "backward" runs that.
    """

    action: Action
    step: int


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
    def best_of(curves: Sequence[Curve]) -> Curve:
        """The trade-off curve of the points of several."""
        return Curve.best(np.concatenate([x.num_bytes for x in curves]), np.concatenate([x.cycles for x in curves]))

    @staticmethod
    def best(num_bytes: np.ndarray, cycles: np.ndarray) -> Curve:
        """The trade-off curve of some points: those with fewer cycles than all points of at most as many bytes."""
        order = np.lexsort((cycles, num_bytes))
        num_bytes = num_bytes[order]
        cycles = cycles[order]
        is_better = np.ones(len(cycles), bool)
        is_better[1:] = cycles[1:] < np.minimum.accumulate(cycles)[:-1]
        return Curve(num_bytes[is_better], cycles[is_better])

    def holds(self, num_bytes: int) -> bool:
        """True if so many bytes are enough for a point."""
        return bool(self.num_bytes[0] <= num_bytes)

    def cycles_in(self, num_bytes: int | np.ndarray) -> np.ndarray:
        """Fewest cycles within so many bytes, of which the curve must hold each."""
        return self.cycles[np.searchsorted(self.num_bytes, num_bytes, side="right") - 1]

    def shifted(self, extra_bytes: int, min_bytes: int, extra_cycles: int) -> Curve:
        """The curve with more bytes and cycles, and a minimum of bytes."""
        return Curve.best(np.maximum(self.num_bytes + extra_bytes, min_bytes), self.cycles + extra_cycles)

    def plus(self, other: Curve) -> Curve:
        """The curve of both, one after the other in the same bytes, which must be enough for either."""
        num_bytes = np.union1d(self.num_bytes, other.num_bytes)
        num_bytes = num_bytes[num_bytes >= max(self.num_bytes[0], other.num_bytes[0])]
        return Curve.best(num_bytes, self.cycles_in(num_bytes) + other.cycles_in(num_bytes))


class Option(NamedTuple):
    """A way to run the steps from some step on, and its curve.

    Args:
        stored: a later step whose input is stored, while the steps before it are run again; None if all values of the
            first step are saved.
        curve: cycles against bytes.
    """

    stored: int | None
    curve: Curve


class SegmentTable:
    """The curves of all segments of a chain; that of steps a to b does not count the input of a, which is live."""

    def __init__(self, steps: Sequence[ChainStep], result_bytes: int) -> None:
        """Computes the curve of each segment, the least cycles for each peak of bytes, shorter segments first.

        That is the best of the ways to run it, see `_options`. `result_bytes` are those of the chain's result.
        """
        self.steps = steps
        self.input_bytes = [*(step.input_bytes for step in steps), result_bytes]
        left_bytes = [0, *accumulate(step.left_bytes for step in reversed(steps))]
        self.left_bytes = left_bytes[::-1]  # bytes of results of the backward parts of a step and all later ones
        self.curves: dict[tuple[int, int], Curve] = {}
        for length in range(len(steps)):  # the curve of a segment is made of those of shorter ones
            for first in range(len(steps) - length):
                options = self._options(first, first + length)
                self.curves[first, first + length] = Curve.best_of([option.curve for option in options])

    @property
    def curve(self) -> Curve:
        """The curve of the entire chain."""
        return self.curves[0, len(self.steps) - 1]

    def _options(self, first: int, last: int) -> list[Option]:
        """Ways to run the steps from `first` to `last` forwards and backwards, each with its curve of cycles and bytes.

        One saves the values that the first step's backward part needs: its forward part, the rest of the segment, its
        backward part. The others each store the input of a later step: the forward parts up to that step, the rest
        from there, then the steps before it once more, in the bytes that the rest has freed. Curves of shorter segments
        must be known.
        """
        step = self.steps[first]
        input_bytes = self.input_bytes
        # Bytes that are live while the segment runs: the gradient of its result, and the results of later steps.
        live_bytes = input_bytes[last + 1] + self.left_bytes[last + 1]
        forward_bytes = live_bytes + step.saved_bytes + step.forward_temp_bytes
        backward_bytes = input_bytes[first + 1] + input_bytes[first] + step.saved_bytes + step.backward_temp_bytes
        backward_bytes += self.left_bytes[first]
        peak_bytes = max(forward_bytes, backward_bytes)
        total_cycles = step.forward_cycles + step.backward_cycles
        if first == last:
            return [Option(stored=None, curve=Curve(np.array([peak_bytes]), np.array([total_cycles])))]
        tail = self.curves[first + 1, last]
        options = [Option(stored=None, curve=tail.shifted(step.saved_bytes, peak_bytes, total_cycles))]
        # Peak bytes and cycles of the forward parts that lead to the stored input.
        min_bytes = live_bytes + input_bytes[first + 1] + step.forward_temp_bytes
        cycles = step.forward_cycles
        for stored in range(first + 1, last + 1):
            tail_of_stored = self.curves[stored, last].shifted(input_bytes[stored], min_bytes, cycles)
            options.append(Option(stored=stored, curve=tail_of_stored.plus(self.curves[first, stored - 1])))
            next_step = self.steps[stored]
            min_bytes = max(
                min_bytes, live_bytes + input_bytes[stored] + input_bytes[stored + 1] + next_step.forward_temp_bytes
            )
            cycles += next_step.forward_cycles
        return options

    def plan(self, num_bytes: int) -> list[StepAction]:
        """The actions of the chain, in order, in so many bytes."""
        return self.actions(0, len(self.steps) - 1, num_bytes)

    def actions(self, first: int, last: int, num_bytes: int) -> list[StepAction]:
        """The fastest actions, in order, that run the steps `first` to `last` forwards and backwards in `num_bytes`.

        `num_bytes` must be enough for a point of the segment's curve.
        """
        stored = fastest(self._options(first, last), num_bytes).stored
        # None: all values of `first` are saved. Else the input of this step is stored; the steps before it run twice.
        if stored is not None:
            skipped = [StepAction("forward", n) for n in range(first + 1, stored)]
            tail = self.actions(stored, last, num_bytes - self.input_bytes[stored])
            return [StepAction("keep", first), *skipped, *tail, *self.actions(first, stored - 1, num_bytes)]
        if first == last:
            return [StepAction("save", first), StepAction("backward", first)]
        tail = self.actions(first + 1, last, num_bytes - self.steps[first].saved_bytes)
        return [StepAction("save", first), *tail, StepAction("backward", first)]


def fastest(options: Sequence[Option], num_bytes: int) -> Option:
    """The option of fewest cycles in so many bytes, the first of equals; one must fit."""
    fitting = [option for option in options if option.curve.holds(num_bytes)]
    return min(fitting, key=lambda option: int(option.curve.cycles_in(num_bytes)))
