"""Which results of a chain of steps are kept for the backward pass, and which are computed again, in a budget of bytes.

Input: steps in a row, each with what its forward and its backward part cost and hold. Output: a `RecomputePlan`, the
order of forward and backward parts that takes fewest cycles. A segment of the chain either saves all that its first
step's backward part needs, or keeps only what a later step reads, runs the rest from there, and then runs its beginning
again. The best of both, for every segment and every budget at once, is a curve of cycles against bytes.

Source: dynamic program of rotor (Beaumont et al., "Optimal checkpointing for heterogeneous chains", HAL hal-02352969;
reference parallel.md §3.2), here over curves in place of slots of memory, so that bytes are exact.
Limits: best among plans that keep a value until it is used, as in the source; others are up to a quarter cheaper.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Literal

import numpy as np

from ipujax.runtime.errors import ArgumentValueError

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
    """

    forward_cycles: int
    backward_cycles: int
    input_bytes: int
    saved_bytes: int
    forward_temp_bytes: int = 0
    backward_temp_bytes: int = 0


@dataclass(frozen=True, slots=True)
class RecomputePlan:
    """In what order the parts of a chain run.

    Args:
        actions: each with the number of a step. "forward" leaves the result alone, "keep" also what the step read,
            "save" all that its backward part needs, "backward" runs that.
        cycles: of all of them.
        peak_bytes: the most that is held at once, the chain's input included.
    """

    actions: tuple[tuple[Action, int], ...]
    cycles: int
    peak_bytes: int


def plan_recompute(steps: Sequence[ChainStep], result_bytes: int, budget_bytes: int) -> RecomputePlan:
    """Finds what to keep and what to compute again, such that a budget is kept in fewest cycles.

    Args:
        steps: the chain; the last one's result is what is differentiated.
        result_bytes: of that result, and of its gradient.
        budget_bytes: the most that may be held at once, with the input of the chain.

    Raises:
        ArgumentValueError: no plan keeps the budget, there are no steps, or a number is below zero.
    """
    _check(steps, result_bytes)
    table = _Table(tuple(steps), result_bytes)
    left = budget_bytes - steps[0].input_bytes
    if not table.whole.holds(left):
        least = int(table.whole.num_bytes[0]) + steps[0].input_bytes
        raise ArgumentValueError(
            "no order of recomputation keeps the budget", expected=f"at least {least:,} bytes", got=f"{budget_bytes:,}"
        )
    actions = tuple(table.actions(0, len(steps) - 1, left))
    return RecomputePlan(actions, int(table.whole.cycles_in(left)), peak_bytes(steps, result_bytes, actions))


def trade_off(steps: Sequence[ChainStep], result_bytes: int) -> list[tuple[int, int]]:
    """All budgets, in bytes, at which fewer cycles are possible than below, each with these cycles.

    Arguments and errors are those of `plan_recompute`.
    """
    _check(steps, result_bytes)
    curve = _Table(tuple(steps), result_bytes).whole
    return [(int(b) + steps[0].input_bytes, int(c)) for b, c in zip(curve.num_bytes, curve.cycles, strict=True)]


def peak_bytes(steps: Sequence[ChainStep], result_bytes: int, actions: Sequence[tuple[Action, int]]) -> int:
    """The most bytes that are held at once when the parts of a chain run in an order."""
    inputs = [*(step.input_bytes for step in steps), result_bytes]
    held, saved, gradient, most = {0}, set[int](), len(steps), 0

    def total(*more: int) -> int:
        values = sum(inputs[n] for n in held if n - 1 not in saved)
        return values + sum(steps[n].saved_bytes for n in saved) + inputs[gradient] + sum(more)

    for action, number in actions:
        step = steps[number]
        if action == "backward":
            most = max(most, total(inputs[number], step.backward_temp_bytes))
            saved.discard(number)
            held = {n for n in held if n < number}
            gradient = number
        elif action == "save":
            most = max(most, total(step.saved_bytes, step.forward_temp_bytes))
            saved.add(number)
            held.add(number + 1)
        else:
            most = max(most, total(inputs[number + 1], step.forward_temp_bytes))
            held.add(number + 1)
            if action == "forward":
                held.discard(number)
    return most


def _check(steps: Sequence[ChainStep], result_bytes: int) -> None:
    if not steps:
        raise ArgumentValueError("a chain of no steps", expected="one step or more")
    numbers = [("result_bytes", result_bytes)]
    numbers += [(f"{f.name} of step {n}", getattr(step, f.name)) for n, step in enumerate(steps) for f in fields(step)]
    for name, value in numbers:
        if value < 0:
            raise ArgumentValueError(f"{name} is below zero", expected="0 or more", got=str(value))


@dataclass(frozen=True, slots=True, eq=False)
class _Curve:
    """Fewest cycles in so many bytes: `num_bytes` ascends, `cycles` descends, int64[points] each."""

    num_bytes: np.ndarray
    cycles: np.ndarray

    @staticmethod
    def best(num_bytes: np.ndarray, cycles: np.ndarray) -> _Curve:
        """The curve through the best of some points."""
        order = np.lexsort((cycles, num_bytes))
        num_bytes, cycles = num_bytes[order], cycles[order]
        is_better = np.ones(len(cycles), bool)
        is_better[1:] = cycles[1:] < np.minimum.accumulate(cycles)[:-1]
        return _Curve(num_bytes[is_better], cycles[is_better])

    def holds(self, num_bytes: int) -> bool:
        return bool(self.num_bytes[0] <= num_bytes)

    def cycles_in(self, num_bytes: int | np.ndarray) -> np.ndarray:
        """Cycles with so many bytes, at least those of the first point."""
        return self.cycles[np.searchsorted(self.num_bytes, num_bytes, side="right") - 1]

    def moved(self, more_bytes: int, least_bytes: int, more_cycles: int) -> _Curve:
        """The same with more of both, and at least so many bytes."""
        return _Curve.best(np.maximum(self.num_bytes + more_bytes, least_bytes), self.cycles + more_cycles)

    def plus(self, other: _Curve) -> _Curve:
        """One after the other in the same bytes."""
        num_bytes = np.union1d(self.num_bytes, other.num_bytes)
        num_bytes = num_bytes[num_bytes >= max(self.num_bytes[0], other.num_bytes[0])]
        return _Curve.best(num_bytes, self.cycles_in(num_bytes) + other.cycles_in(num_bytes))


class _Table:
    """The curves of all segments of a chain; that of steps a to b does not count the input of a, which is held."""

    def __init__(self, steps: tuple[ChainStep, ...], result_bytes: int) -> None:
        self._steps = steps
        self._inputs = [*(step.input_bytes for step in steps), result_bytes]
        self._curves: dict[tuple[int, int], _Curve] = {}
        for length in range(len(steps)):
            for first in range(len(steps) - length):
                options = [curve for _, curve in self._options(first, first + length)]
                self._curves[first, first + length] = _Curve.best(
                    np.concatenate([curve.num_bytes for curve in options]),
                    np.concatenate([curve.cycles for curve in options]),
                )

    @property
    def whole(self) -> _Curve:
        """That of the whole chain."""
        return self._curves[0, len(self._steps) - 1]

    def _options(self, first: int, last: int) -> list[tuple[int | None, _Curve]]:
        """Ways to run a segment: saving all of its first step (None), or keeping the input of a later one."""
        step, inputs = self._steps[first], self._inputs
        gradient = inputs[last + 1]
        forward = gradient + step.saved_bytes + step.forward_temp_bytes
        backward = inputs[first + 1] + inputs[first] + step.saved_bytes + step.backward_temp_bytes
        both = step.forward_cycles + step.backward_cycles
        if first == last:
            return [(None, _Curve(np.array([max(forward, backward)]), np.array([both])))]
        rest = self._curves[first + 1, last]
        options: list[tuple[int | None, _Curve]] = [(None, rest.moved(step.saved_bytes, max(forward, backward), both))]
        least, cycles = gradient + inputs[first + 1] + step.forward_temp_bytes, step.forward_cycles
        for kept in range(first + 1, last + 1):
            after = self._curves[kept, last].moved(inputs[kept], least, cycles)
            options.append((kept, after.plus(self._curves[first, kept - 1])))
            one = self._steps[kept]
            least = max(least, gradient + inputs[kept] + inputs[kept + 1] + one.forward_temp_bytes)
            cycles += one.forward_cycles
        return options

    def actions(self, first: int, last: int, num_bytes: int) -> list[tuple[Action, int]]:
        """What runs, in order, in so many bytes."""
        able = [(kept, curve) for kept, curve in self._options(first, last) if curve.holds(num_bytes)]
        kept, _ = min(able, key=lambda option: int(option[1].cycles_in(num_bytes)))
        if kept is not None:
            on_the_way: list[tuple[Action, int]] = [("forward", n) for n in range(first + 1, kept)]
            after = self.actions(kept, last, num_bytes - self._inputs[kept])
            return [("keep", first), *on_the_way, *after, *self.actions(first, kept - 1, num_bytes)]
        if first == last:
            return [("save", first), ("backward", first)]
        inside = self.actions(first + 1, last, num_bytes - self._steps[first].saved_bytes)
        return [("save", first), *inside, ("backward", first)]
