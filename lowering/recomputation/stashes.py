"""Plans of a chain with several inputs in flight: bytes that wait for the backward task count for each of them.

Input: the segments of a chain, and the number of inputs in flight. Output: the curve of the entire chain, and the order
of parts for a point of it. The forward task saves a step, or stores the input of a segment, which the backward task
recomputes with fewest cycles in its working bytes: those count once.

    live bytes ≤ inputs in flight × stored bytes of one + working bytes

Stored bytes count until the backward task ends; in truth they are freed on the way, see `peak_bytes`.
"""

from __future__ import annotations

from functools import cache, cached_property

import numpy as np

from ipujax.lowering.recomputation.segment_table import Action, Curve, SegmentTable

_MAX_WORKING_SIZES = 16  # tried besides the two that are always


class StashPlans:
    """The best plans of a chain with several inputs in flight; its input is not counted."""

    def __init__(self, table: SegmentTable, in_flight: int) -> None:
        self._table = table
        self._in_flight = in_flight
        self._stored_curves = cache(self._stored_curves_of)

    @cached_property
    def _working_sizes(self) -> list[int]:
        """Working bytes that are tried, with the fewest to store all, and the fewest to recompute all."""
        to_store_all = max(num_bytes for num_bytes, _ in map(self._saved, range(len(self._table.steps))))
        sizes = np.unique(np.concatenate([curve.num_bytes for curve in self._table.curves.values()]))
        sizes = sizes[sizes >= to_store_all]
        samples = sizes[np.linspace(0, len(sizes) - 1, min(len(sizes), _MAX_WORKING_SIZES)).astype(int)]
        to_store_none = max(int(self._table.curve.num_bytes[0]), self._forward_bytes(0, len(self._table.steps)))
        return sorted({to_store_all, to_store_none, *samples.tolist()})

    @cached_property
    def curve(self) -> Curve:
        """Trade-off curve of the entire chain."""
        curves = [self._stored_curves(size)[0] for size in self._working_sizes]
        num_bytes = [c.num_bytes * self._in_flight + w for c, w in zip(curves, self._working_sizes, strict=True)]
        return Curve.best(np.concatenate(num_bytes), np.concatenate([curve.cycles for curve in curves]))

    def plan(self, num_bytes: int) -> list[tuple[Action, int]]:
        """The actions of the chain, in order, in so many bytes."""
        fitting = [
            w for w in self._working_sizes if self._stored_curves(w)[0].holds((num_bytes - w) // self._in_flight)
        ]
        best = min(fitting, key=lambda w: int(self._stored_curves(w)[0].cycles_in((num_bytes - w) // self._in_flight)))
        return self._actions(best, (num_bytes - best) // self._in_flight)

    def _saved(self, step: int) -> tuple[int, int]:
        """Working bytes of a step that saves all values of its backward part, and its cycles."""
        chain_step = self._table.steps[step]
        inputs = self._table.inputs
        backward = inputs[step] + inputs[step + 1] + chain_step.backward_temp_bytes + self._table.left_bytes[step]
        working_bytes = max(chain_step.forward_temp_bytes + inputs[-1], backward)
        return working_bytes, chain_step.forward_cycles + chain_step.backward_cycles

    def _forward_bytes(self, first: int, end: int) -> int:
        """Working bytes of the forward task in a segment of which it stores the input alone."""
        # The gradient of the chain's result has its bytes from the beginning; the result of the last step counts as
        # stored, unless it is the chain's.
        steps = self._table.steps
        inputs = self._table.inputs
        operand_bytes = [0, *inputs[first + 1 : end]]
        result_bytes = [*inputs[first + 1 : end], inputs[end] if end == len(steps) else 0]
        live_bytes = (
            r + m + steps[n].forward_temp_bytes
            for n, r, m in zip(range(first, end), operand_bytes, result_bytes, strict=True)
        )
        return inputs[-1] + max(live_bytes)

    def _stored_curves_of(self, working_bytes: int) -> list[Curve]:
        """Curves of cycles against stored bytes, from each step on, and after the last."""
        curves = [Curve(np.zeros(1, np.int64), np.zeros(1, np.int64))]
        for first in reversed(range(len(self._table.steps))):
            options = [curve for _, curve in self._options(first, working_bytes, curves)]
            num_bytes, cycles = ([getattr(c, name) for c in options] for name in ("num_bytes", "cycles"))
            curves.insert(0, Curve.best(np.concatenate(num_bytes), np.concatenate(cycles)))
        return curves

    def _options(self, first: int, working_bytes: int, tails: list[Curve]) -> list[tuple[int | None, Curve]]:
        """Curves of a first action: saving a step (None), or recomputing up to a later one; `tails` start after it."""
        steps = self._table.steps
        inputs = self._table.inputs
        options: list[tuple[int | None, Curve]] = []
        bytes_to_save, cycles = self._saved(first)
        if bytes_to_save <= working_bytes:
            options.append((None, tails[0].shifted(steps[first].saved_bytes, 0, cycles)))
        forward_cycles = 0
        for end in range(first + 1, len(steps) + 1):
            forward_cycles += steps[end - 1].forward_cycles
            segment = self._table.curves[first, end - 1]
            if segment.holds(working_bytes) and self._forward_bytes(first, end) <= working_bytes:
                stored_bytes = inputs[end] if end < len(steps) else 0
                total_cycles = forward_cycles + int(segment.cycles_in(working_bytes))
                options.append((end, tails[end - first - 1].shifted(stored_bytes, 0, total_cycles)))
        return options

    def _actions(self, working_bytes: int, stored_bytes: int) -> list[tuple[Action, int]]:
        """The fastest actions of the chain, in order; an input of the pipeline stores `stored_bytes` between tasks."""
        # The backward task runs in reverse order: each action of the forward task adds a part to its front.
        forward: list[tuple[Action, int]] = []
        backward: list[list[tuple[Action, int]]] = []
        curves = self._stored_curves(working_bytes)
        step = 0
        while step < len(self._table.steps):
            options = self._options(step, working_bytes, curves[step + 1 :])
            end, _ = min(
                ((end, curve) for end, curve in options if curve.holds(stored_bytes)),
                key=lambda option: int(option[1].cycles_in(stored_bytes)),
            )
            if end is None:
                forward.append(("save", step))
                backward.append([("backward", step)])
                stored_bytes -= self._table.steps[step].saved_bytes
                step += 1
            else:
                forward += [("keep", step), *(("forward", n) for n in range(step + 1, end))]
                backward.append(self._table.actions(step, end - 1, working_bytes))
                stored_bytes -= self._table.inputs[end] if end < len(self._table.steps) else 0
                step = end
        return [*forward, *(action for part in reversed(backward) for action in part)]
