"""Plans of recomputation for a chain of steps: fewest cycles in a budget of bytes.

Input: steps in a row, each with the cycles and bytes of its forward and its backward part. Output: a `RecomputePlan`,
the order of forward and backward parts that takes fewest cycles, of those that store a value until its gradient has
run.

With several inputs in flight, as in a stage of a pipeline, values stored from the forward to the backward task count
for each of them. The forward task saves a step, or stores the input of a segment, which the backward task recomputes
with fewest cycles in its working bytes: those count once.

    live bytes ≤ inputs in flight × stored bytes of one + working bytes

Stored bytes count until the backward task ends; in truth they are freed on the way, see `peak_bytes`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np

from ipujax.lowering.recomputation.segment_table import ChainStep, Curve, Option, SegmentTable, StepAction, fastest

_MAX_WORKING_SIZES = 16  # tried besides the two that are always


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
    def _plans(self) -> SegmentTable | _StashPlans:
        table = SegmentTable(self._steps, self._result_bytes)
        return table if self._in_flight == 1 else _StashPlans(table, self._in_flight)

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


class _StashPlans:
    """The best plans of a chain with several inputs in flight; the bytes of its input are not counted.

    They divide the bytes that there are into working bytes, which count once, and stored bytes, which count for each
    input in flight.

    Args:
        table: the least costs of segments of the chain.
        in_flight: number of inputs whose forward task has run and whose backward task has not.
    """

    def __init__(self, table: SegmentTable, in_flight: int) -> None:
        self._table = table
        self._in_flight = in_flight
        self._stored_curves = cache(self._stored_curves_of)

    @cached_property
    def _working_sizes(self) -> list[int]:
        """Numbers of working bytes to search plans with, ascending: a sample of those at which plans change.

        Always among them are the fewest with which all values can be stored, and with which none need be.
        """
        to_store_all = max(map(self._bytes_to_save, range(len(self._table.steps))))
        sizes = np.unique(np.concatenate([curve.num_bytes for curve in self._table.curves.values()]))
        sizes = sizes[sizes >= to_store_all]  # with fewer, some step could not even be saved
        samples = sizes[np.linspace(0, len(sizes) - 1, min(len(sizes), _MAX_WORKING_SIZES)).astype(int)]
        to_store_none = max(int(self._table.curve.num_bytes[0]), self._forward_bytes(0, len(self._table.steps)))
        return sorted({to_store_all, to_store_none, *samples.tolist()})

    @cached_property
    def curve(self) -> Curve:
        """Fewest cycles of the entire chain by bytes, those of all inputs in flight together."""
        stored = [(size, self._stored_curve(size)) for size in self._working_sizes]
        return Curve.best_of([Curve(x.num_bytes * self._in_flight + size, x.cycles) for size, x in stored])

    def _stored_curve(self, working_bytes: int) -> Curve:
        """Curve of cycles against stored bytes of the entire chain, whose steps are all from the first one on."""
        return self._stored_curves(working_bytes)[0]

    def plan(self, num_bytes: int) -> list[StepAction]:
        """The actions of the plan with fewest cycles in `num_bytes`, which must be enough for one: see `curve`."""
        # By the working bytes: what remains for the values stored for one input.
        stored_bytes = {size: (num_bytes - size) // self._in_flight for size in self._working_sizes}
        curves = {size: self._stored_curve(size) for size in self._working_sizes}
        fitting = [size for size, curve in curves.items() if curve.holds(stored_bytes[size])]
        best = min(fitting, key=lambda size: int(curves[size].cycles_in(stored_bytes[size])))
        return self._actions(best, stored_bytes[best])

    def _bytes_to_save(self, step: int) -> int:
        """Working bytes that a step takes if all values for its backward part are stored: bytes of all other values."""
        chain_step = self._table.steps[step]
        input_bytes = self._table.input_bytes
        backward = (
            input_bytes[step] + input_bytes[step + 1] + chain_step.backward_temp_bytes + self._table.left_bytes[step]
        )
        # The gradient of the chain's result has its bytes from the beginning.
        return max(chain_step.forward_temp_bytes + input_bytes[-1], backward)

    def _forward_bytes(self, first: int, end: int) -> int:
        """Peak bytes, beside stored ones, of the forward task in steps `first` to `end` − 1 if it stores their input.

        At each of these steps its operands, its result and its temporary values are live. The result of the last one
        counts as stored, unless it is the chain's.
        """
        steps = self._table.steps
        input_bytes = self._table.input_bytes
        operand_bytes = [0, *input_bytes[first + 1 : end]]
        result_bytes = [*input_bytes[first + 1 : end], input_bytes[end] if end == len(steps) else 0]
        temp_bytes = [step.forward_temp_bytes for step in steps[first:end]]
        # The gradient of the chain's result has its bytes from the beginning.
        return input_bytes[-1] + max(map(sum, zip(operand_bytes, result_bytes, temp_bytes, strict=True)))

    def _stored_curves_of(self, working_bytes: int) -> list[Curve]:
        """Curves of cycles against stored bytes, of the steps from each one on, and of none after the last."""
        curves = [Curve(np.zeros(1, np.int64), np.zeros(1, np.int64))]
        for first in reversed(range(len(self._table.steps))):
            options = self._options(first, working_bytes, curves)
            curves.insert(0, Curve.best_of([option.curve for option in options]))
        return curves

    def _options(self, first: int, working_bytes: int, tails: list[Curve]) -> list[Option]:
        """Ways to run the steps from `first` to the last, each with its curve of cycles against stored bytes.

        One saves the values that the backward part of `first` needs. The others each store the input of a later step,
        and recompute the steps before it in the backward task, whose cycles the segment table has.

        Args:
            first: number of the step.
            working_bytes: bytes for a task of one input at a time, beside stored ones.
            tails: curves of the steps from `first + 1` to the last, from `first + 2` to the last, and so on.
        """
        steps = self._table.steps
        input_bytes = self._table.input_bytes
        options: list[Option] = []
        if self._bytes_to_save(first) <= working_bytes:
            cycles = steps[first].forward_cycles + steps[first].backward_cycles
            options.append(Option(stored=None, curve=tails[0].shifted(steps[first].saved_bytes, 0, cycles)))
        forward_cycles = 0
        for end in range(first + 1, len(steps) + 1):
            forward_cycles += steps[end - 1].forward_cycles
            segment = self._table.curves[first, end - 1]
            if segment.holds(working_bytes) and self._forward_bytes(first, end) <= working_bytes:
                stored_bytes = input_bytes[end] if end < len(steps) else 0
                total_cycles = forward_cycles + int(segment.cycles_in(working_bytes))
                tail = tails[end - first - 1]
                options.append(Option(stored=end, curve=tail.shifted(stored_bytes, 0, total_cycles)))
        return options

    def _actions(self, working_bytes: int, stored_bytes: int) -> list[StepAction]:
        """The fastest actions of the chain, in order: those of the forward task, then those of the backward task.

        Args:
            working_bytes: bytes for a task of one input at a time, beside stored ones.
            stored_bytes: bytes that each input may store between its forward and its backward task.
        """
        # The backward task runs in reverse order: each action of the forward task adds a part to its front.
        forward: list[StepAction] = []
        backward: list[list[StepAction]] = []
        curves = self._stored_curves(working_bytes)
        step = 0
        while step < len(self._table.steps):
            options = self._options(step, working_bytes, tails=curves[step + 1 :])
            # The segment from `step` ends before the step whose input is stored next.
            end = fastest(options, stored_bytes).stored
            if end is None:  # no segment: all values that the backward part of `step` needs are saved
                forward.append(StepAction("save", step))
                backward.append([StepAction("backward", step)])
                stored_bytes -= self._table.steps[step].saved_bytes
                step += 1
            else:  # "keep" stores the input of `step`, "forward" nothing but what the next step reads
                forward += [StepAction("keep", step), *(StepAction("forward", n) for n in range(step + 1, end))]
                backward.append(self._table.actions(step, end - 1, working_bytes))
                stored_bytes -= self._table.input_bytes[end] if end < len(self._table.steps) else 0
                step = end
        return [*forward, *(action for part in reversed(backward) for action in part)]


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
