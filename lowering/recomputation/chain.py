"""Plans of recomputation for a chain of steps: fewest cycles in a budget of bytes.

Input: steps in a row, each with the cycles and bytes of its forward and its backward part. Output: a `RecomputePlan`,
the order of forward and backward parts that takes fewest cycles, of those that store a value until its gradient has
run. With several inputs in flight, as in a stage of a pipeline, values stored from the forward to the backward task
count for each of them, see `stashes`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ipujax.lowering.recomputation.segment_table import ChainStep, Curve, SegmentTable, StepAction
from ipujax.lowering.recomputation.stashes import StashPlans


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


class ChainPlans:
    """The best plans of a chain for all budgets.

    A plan takes the fewest cycles of those that keep a stored value until its gradient has run. One that drops it
    before may take fewer: in a chain of four steps 10 instead of 13.

    Args:
        steps: the chain, at least one step; the last one's result is differentiated.
        result_bytes: bytes of that result, and of its gradient.
        in_flight: number of inputs at once, at least 1, whose forward parts have run and whose backward parts have not.
    """

    def __init__(self, steps: Sequence[ChainStep], result_bytes: int, in_flight: int = 1) -> None:
        self._steps = steps
        self._result_bytes = result_bytes
        self._in_flight = in_flight
        self._input_bytes = in_flight * steps[0].input_bytes

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
    def least_bytes(self) -> int:
        """Smallest budget that a plan fits."""
        return int(self._curve.num_bytes[0]) + self._input_bytes

    def plan(self, budget_bytes: int) -> RecomputePlan:
        """The plan of fewest cycles whose peak of live bytes is within a budget of at least `least_bytes`."""
        keep_all_plan = self.keep_all()
        available_bytes = budget_bytes - self._input_bytes
        if keep_all_plan.peak_bytes <= budget_bytes:
            return keep_all_plan
        assert self._curve.holds(available_bytes), "no order of recomputation fits the budget"
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
