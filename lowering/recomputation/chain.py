"""Which results of a chain of steps are kept for the backward pass, and which are computed again, in a budget of bytes.

Input: steps in a row, each with what its forward and its backward part cost and hold. Output: a `RecomputePlan`, the
order of forward and backward parts that takes fewest cycles, of those that keep what they keep until its gradient has
run. With several inputs in flight, as in a stage of a pipeline, what is kept from the forward to the backward task is
held for each of them, see `stashes`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from numbers import Integral

import numpy as np

from ipujax.lowering.recomputation.segment_table import Action, ChainStep, Curve, SegmentTable
from ipujax.lowering.recomputation.stashes import StashPlans
from ipujax.runtime.errors import ArgumentTypeError, ArgumentValueError, shortened


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


def plan_recompute(
    steps: Sequence[ChainStep], result_bytes: int, budget_bytes: int, in_flight: int = 1
) -> RecomputePlan:
    """Finds what to keep and what to compute again, such that a budget is kept in few cycles.

    An order that drops a value before its gradient may take fewer: in a chain of four steps 10 in place of 13.

    Args:
        steps: the chain; the last one's result is what is differentiated.
        result_bytes: of that result, and of its gradient.
        budget_bytes: the most that may be held at once, with the input of the chain.
        in_flight: inputs whose forward parts have run, and whose backward parts have not, at once.

    Raises:
        ArgumentValueError: no plan keeps the budget, there are no steps, or a number is out of its range.
        ArgumentTypeError: for anything but steps and whole numbers.
    """
    return ChainPlans(steps, result_bytes, in_flight).plan(budget_bytes)


def trade_off(steps: Sequence[ChainStep], result_bytes: int, in_flight: int = 1) -> list[tuple[int, int]]:
    """All budgets, in bytes, at which fewer cycles are possible than below, each with these cycles.

    Arguments and errors are those of `plan_recompute`.
    """
    return ChainPlans(steps, result_bytes, in_flight).points


class ChainPlans:
    """The best plans of a chain for all budgets at once; arguments and errors are those of `plan_recompute`."""

    def __init__(self, steps: Sequence[ChainStep], result_bytes: int, in_flight: int = 1) -> None:
        self._steps, self._result_bytes = _checked(steps), _count("result_bytes", result_bytes)
        self._in_flight = _whole("in_flight", in_flight)
        if self._in_flight < 1:
            raise ArgumentValueError("nothing is in flight", expected="in_flight of 1 or more", got=str(in_flight))
        self._input_bytes = self._in_flight * self._steps[0].input_bytes

    @cached_property
    def _plans(self) -> SegmentTable | StashPlans:
        table = SegmentTable(self._steps, self._result_bytes)
        return table if self._in_flight == 1 else StashPlans(table, self._in_flight)

    @cached_property
    def _whole(self) -> Curve:
        """The curve of the whole chain, its input not counted, with what keeping all takes in truth."""
        curve, everything = self._plans.whole, self.keep_all()
        num_bytes = np.append(curve.num_bytes, everything.peak_bytes - self._input_bytes)
        return Curve.best(num_bytes, np.append(curve.cycles, everything.cycles))

    def keep_all(self) -> RecomputePlan:
        """The plan without recomputation."""
        saves: list[tuple[Action, int]] = [("save", n) for n in range(len(self._steps))]
        actions = (*saves, *(("backward", n) for n in reversed(range(len(self._steps)))))
        return self._planned(actions)

    @property
    def points(self) -> list[tuple[int, int]]:
        """Budgets and cycles, see `trade_off`."""
        curve = self._whole
        return [(int(b) + self._input_bytes, int(c)) for b, c in zip(curve.num_bytes, curve.cycles, strict=True)]

    def plan(self, budget_bytes: int) -> RecomputePlan:
        """The best plan in a budget."""
        budget_bytes = _whole("budget_bytes", budget_bytes)
        everything, left = self.keep_all(), budget_bytes - self._input_bytes
        if everything.peak_bytes <= budget_bytes:
            return everything
        if not self._whole.holds(left):
            least = int(self._whole.num_bytes[0]) + self._input_bytes
            what = "no order of recomputation keeps the budget"
            raise ArgumentValueError(what, expected=f"at least {least:,} bytes", got=f"{budget_bytes:,}")
        return self._planned(tuple(self._plans.plan(left)))

    def _planned(self, actions: tuple[tuple[Action, int], ...]) -> RecomputePlan:
        steps = self._steps
        cycles = sum(steps[n].backward_cycles if a == "backward" else steps[n].forward_cycles for a, n in actions)
        return RecomputePlan(actions, cycles, peak_bytes(steps, self._result_bytes, actions, self._in_flight))


def peak_bytes(
    steps: Sequence[ChainStep], result_bytes: int, actions: Sequence[tuple[Action, int]], in_flight: int = 1
) -> int:
    """The most bytes that are held at once when the parts of a chain run in an order."""
    inputs = [*(step.input_bytes for step in steps), result_bytes]
    held, saved, gradient, most, stash = {0}, set[int](), len(steps), 0, 0

    def total(*more: int) -> int:
        values = sum(inputs[n] for n in held if n - 1 not in saved)
        left = sum(step.left_bytes for step in steps[gradient:])
        return values + sum(steps[n].saved_bytes for n in saved) + inputs[gradient] + left + sum(more)

    for count, (action, number) in enumerate(actions):
        if count == len(steps):  # all forward parts have run once, and the result has gone on
            held.discard(len(steps))
            stash = total() - result_bytes
        step = steps[number]
        if action == "backward":
            most = max(most, total(inputs[number], step.backward_temp_bytes, step.left_bytes))
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
    return most + (in_flight - 1) * stash


def _checked(steps: Sequence[ChainStep]) -> tuple[ChainStep, ...]:
    """The steps of a chain, with Python's numbers."""
    if not isinstance(steps, Iterable):
        expected = "a sequence of ChainStep"
        raise ArgumentTypeError("the steps of a chain are no sequence", expected=expected, got=shortened(steps))
    found = tuple(steps)
    if not found:
        raise ArgumentValueError("a chain of no steps", expected="one step or more")
    for n, step in enumerate(found):
        if not isinstance(step, ChainStep):
            raise ArgumentTypeError(f"step {n} of a chain is none", expected="a ChainStep", got=shortened(step))
    names = [field.name for field in fields(ChainStep)]
    return tuple(ChainStep(*(_count(f"{x} of step {n}", getattr(s, x)) for x in names)) for n, s in enumerate(found))


def _count(what: str, value: int) -> int:
    if _whole(what, value) < 0:
        raise ArgumentValueError(f"{what} is below zero", expected="0 or more", got=str(value))
    return int(value)


def _whole(what: str, value: int) -> int:
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise ArgumentTypeError(f"{what} is no whole number", expected="a whole number", got=shortened(value))
    return int(value)
