"""Plans of recomputation for a chain of steps: fewest cycles in a budget of bytes.

Input: steps in a row, each with the cycles and bytes of its forward and its backward part. Output: a `RecomputePlan`,
the order of forward and backward parts that takes fewest cycles, of those that store a value until its gradient has
run. With several inputs in flight, as in a stage of a pipeline, values stored from the forward to the backward task
count for each of them, see `stashes`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from numbers import Integral
from typing import NamedTuple

import numpy as np

from ipujax.lowering.recomputation.segment_table import ChainStep, Curve, SegmentTable, StepAction
from ipujax.lowering.recomputation.stashes import StashPlans
from ipujax.runtime.errors import ArgumentTypeError, ArgumentValueError, shortened


@dataclass(frozen=True, slots=True)
class RecomputePlan:
    """The order in which the parts of a chain run.

    Args:
        actions: the parts, in order.
        cycles: of all of them.
        peak_bytes: peak live bytes, the chain's input included.
    """

    actions: tuple[StepAction, ...]
    cycles: int
    peak_bytes: int


def plan_recompute(
    steps: Sequence[ChainStep], result_bytes: int, budget_bytes: int, in_flight: int = 1
) -> RecomputePlan:
    """Finds which values of a network to store for its gradient and which to recompute, in a budget of bytes.

    The plan takes the fewest cycles of those that keep a stored value until its gradient has run. One that drops it
    before may take fewer: in a chain of four steps 10 instead of 13.

    Args:
        steps: the network as a chain of steps; the last one's result is differentiated.
        result_bytes: bytes of that result, and of its gradient.
        budget_bytes: highest peak of live bytes, with the input of the chain.
        in_flight: number of inputs at once whose forward parts have run and whose backward parts have not.

    Raises:
        ArgumentValueError: no plan fits the budget, there are no steps, or a number is out of its range.
        ArgumentTypeError: for anything but steps and whole numbers.
    """
    return ChainPlans(steps, result_bytes, in_flight).plan(budget_bytes)


class TradeOff(NamedTuple):
    """A budget at which fewer cycles are possible than below, and these cycles."""

    budget_bytes: int
    cycles: int


def trade_off(steps: Sequence[ChainStep], result_bytes: int, in_flight: int = 1) -> list[TradeOff]:
    """Trade-off curve of a chain, in rising budgets.

    Arguments and errors are those of `plan_recompute`.
    """
    return ChainPlans(steps, result_bytes, in_flight).points


class ChainPlans:
    """The best plans of a chain for all budgets; arguments and errors are those of `plan_recompute`."""

    def __init__(self, steps: Sequence[ChainStep], result_bytes: int, in_flight: int = 1) -> None:
        self._steps = _checked(steps)
        self._result_bytes = _non_negative("result_bytes", result_bytes)
        self._in_flight = _integer("in_flight", in_flight)
        if self._in_flight < 1:
            raise ArgumentValueError("no input is in flight", expected="in_flight of 1 or more", got=str(in_flight))
        self._input_bytes = self._in_flight * self._steps[0].input_bytes

    @cached_property
    def _plans(self) -> SegmentTable | StashPlans:
        table = SegmentTable(self._steps, self._result_bytes)
        return table if self._in_flight == 1 else StashPlans(table, self._in_flight)

    @cached_property
    def _curve(self) -> Curve:
        """The curve of the entire chain without its input, with the exact point of storing all."""
        curve = self._plans.curve
        keep_all_plan = self.keep_all()
        num_bytes = np.append(curve.num_bytes, keep_all_plan.peak_bytes - self._input_bytes)
        return Curve.best(num_bytes, np.append(curve.cycles, keep_all_plan.cycles))

    def keep_all(self) -> RecomputePlan:
        """The plan without recomputation."""
        saves = [StepAction("save", n) for n in range(len(self._steps))]
        actions = (*saves, *(StepAction("backward", n) for n in reversed(range(len(self._steps)))))
        return self._plan_of(actions)

    @property
    def points(self) -> list[TradeOff]:
        """Trade-off curve, see `trade_off`."""
        pairs = zip(self._curve.num_bytes, self._curve.cycles, strict=True)
        return [TradeOff(int(num_bytes) + self._input_bytes, int(cycles)) for num_bytes, cycles in pairs]

    @property
    def least_bytes(self) -> int:
        """Smallest budget that a plan fits."""
        return int(self._curve.num_bytes[0]) + self._input_bytes

    def plan(self, budget_bytes: int) -> RecomputePlan:
        """The plan of fewest cycles whose peak of live bytes is within a budget; raises if none is."""
        budget_bytes = _integer("budget_bytes", budget_bytes)
        keep_all_plan = self.keep_all()
        available_bytes = budget_bytes - self._input_bytes
        if keep_all_plan.peak_bytes <= budget_bytes:
            return keep_all_plan
        if not self._curve.holds(available_bytes):
            message = "no order of recomputation fits the budget"
            raise ArgumentValueError(message, expected=f"at least {self.least_bytes:,} bytes", got=f"{budget_bytes:,}")
        return self._plan_of(tuple(self._plans.plan(available_bytes)))

    def _plan_of(self, actions: tuple[StepAction, ...]) -> RecomputePlan:
        steps = self._steps
        cycles = sum(steps[n].backward_cycles if a == "backward" else steps[n].forward_cycles for a, n in actions)
        return RecomputePlan(actions, cycles, peak_bytes(steps, self._result_bytes, actions, self._in_flight))


def peak_bytes(steps: Sequence[ChainStep], result_bytes: int, actions: Sequence[StepAction], in_flight: int = 1) -> int:
    """Peak live bytes when the forward and backward parts of a chain of steps run in an order.

    Args:
        steps: the chain, from first to last.
        result_bytes: bytes of the result of the last step, and of its gradient.
        actions: the parts in order; the first ones run each step forwards once.
        in_flight: number of inputs at once whose forward parts have run and whose backward parts have not: what is
            stored after the forward parts counts for each.
    """
    inputs = [*(step.input_bytes for step in steps), result_bytes]
    stored = {0}  # steps whose inputs are in memory
    saved: set[int] = set()  # steps of which all values for the backward part are
    gradient = len(steps)  # step whose input has the gradient that is in memory
    peak = 0
    stash = 0  # bytes that are stored between the forward and the backward parts of one input

    def live_bytes(*extra_bytes: int) -> int:
        # A stored input of a step whose predecessor is saved is among what that one has saved.
        values = sum(inputs[n] for n in stored if n - 1 not in saved)
        left_bytes = sum(step.left_bytes for step in steps[gradient:])
        return values + sum(steps[n].saved_bytes for n in saved) + inputs[gradient] + left_bytes + sum(extra_bytes)

    for count, (action, number) in enumerate(actions):
        if count == len(steps):  # all forward parts have run once, and the result has gone on
            stored.discard(len(steps))
            stash = live_bytes() - result_bytes
        step = steps[number]
        if action == "backward":
            peak = max(peak, live_bytes(inputs[number], step.backward_temp_bytes, step.left_bytes))
            saved.discard(number)
            stored = {n for n in stored if n < number}
            gradient = number
        elif action == "save":
            peak = max(peak, live_bytes(step.saved_bytes, step.forward_temp_bytes))
            saved.add(number)
            stored.add(number + 1)
        else:  # "forward" or "keep": the result is stored, and after "forward" the input is dropped
            peak = max(peak, live_bytes(inputs[number + 1], step.forward_temp_bytes))
            stored.add(number + 1)
            if action == "forward":
                stored.discard(number)
    return peak + (in_flight - 1) * stash


def _checked(steps: Sequence[ChainStep]) -> tuple[ChainStep, ...]:
    """Checks the steps of a chain that a user gives; returns them with sizes as Python's integers."""
    if not isinstance(steps, Iterable):
        expected = "a sequence of ChainStep"
        raise ArgumentTypeError("chain steps must be a sequence", expected=expected, got=shortened(steps))
    chain = tuple(steps)
    if not chain:
        raise ArgumentValueError("a chain has no steps", expected="one step or more")
    for n, step in enumerate(chain):
        if not isinstance(step, ChainStep):
            raise ArgumentTypeError(
                f"step {n} of a chain is not a ChainStep", expected="a ChainStep", got=shortened(step)
            )
    names = [field.name for field in fields(ChainStep)]
    return tuple(
        ChainStep(*(_non_negative(f"{x} of step {n}", getattr(s, x)) for x in names)) for n, s in enumerate(chain)
    )


def _non_negative(name: str, value: int) -> int:
    if _integer(name, value) < 0:
        raise ArgumentValueError(f"{name} is below zero", expected="0 or more", got=str(value))
    return int(value)


def _integer(name: str, value: int) -> int:
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise ArgumentTypeError(f"{name} is not a whole number", expected="a whole number", got=shortened(value))
    return int(value)
