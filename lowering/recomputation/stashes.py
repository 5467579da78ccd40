"""Plans of a chain several of whose inputs are in flight: what waits for the backward task is held for each of them.

Input: the segments of a chain, and how many inputs wait at once. Output: the curve of the whole chain, and the order of
parts for a point of it. The forward task saves a step, or keeps the input of a segment, which the backward task
computes again in the best way in the bytes it works with: those are held once.

    held at once ≤ inputs in flight × what one keeps + bytes to work with

What one keeps is counted until its backward task ends; in truth it is freed on the way, see `peak_bytes`.
"""

from __future__ import annotations

from functools import cache, cached_property

import numpy as np

from ipujax.lowering.recomputation.segment_table import Action, Curve, SegmentTable

_MOST_WORKING_SIZES = 16  # that are tried for the bytes to work with, besides those that have to be


class StashPlans:
    """The best plans of a chain with several inputs in flight; its input is not counted.

    Args:
        table: the segments of the chain.
        in_flight: how many inputs wait.
    """

    def __init__(self, table: SegmentTable, in_flight: int) -> None:
        self._table, self._in_flight = table, in_flight
        self._kept_curves = cache(self._kept_curves_of)

    @cached_property
    def _working_sizes(self) -> list[int]:
        """Bytes to work with that are tried, evenly among all that change anything.

        With the least to keep all, and the least to compute all again from the chain's input.
        """
        to_keep_all = max(least for least, _ in map(self._saved, range(len(self._table.steps))))
        sizes = np.unique(np.concatenate([curve.num_bytes for curve in self._table.curves.values()]))
        sizes = sizes[sizes >= to_keep_all]
        tried = sizes[np.linspace(0, len(sizes) - 1, min(len(sizes), _MOST_WORKING_SIZES)).astype(int)]
        to_keep_none = max(int(self._table.whole.num_bytes[0]), self._forward_bytes(0, len(self._table.steps)))
        return sorted({to_keep_all, to_keep_none, *tried.tolist()})

    @cached_property
    def whole(self) -> Curve:
        """Fewest cycles in so many bytes."""
        curves = [self._kept_curves(working)[0] for working in self._working_sizes]
        num_bytes = [c.num_bytes * self._in_flight + w for c, w in zip(curves, self._working_sizes, strict=True)]
        return Curve.best(np.concatenate(num_bytes), np.concatenate([curve.cycles for curve in curves]))

    def plan(self, num_bytes: int) -> list[tuple[Action, int]]:
        """What runs, in order, in so many bytes."""
        able = [w for w in self._working_sizes if self._kept_curves(w)[0].holds((num_bytes - w) // self._in_flight)]
        best = min(able, key=lambda w: int(self._kept_curves(w)[0].cycles_in((num_bytes - w) // self._in_flight)))
        return self._actions(best, (num_bytes - best) // self._in_flight)

    def _saved(self, step: int) -> tuple[int, int]:
        """Bytes to work with that a step needs if all is saved that its backward part needs, and its cycles."""
        one, inputs = self._table.steps[step], self._table.inputs
        backward = inputs[step] + inputs[step + 1] + one.backward_temp_bytes + self._table.left[step]
        return max(one.forward_temp_bytes + inputs[-1], backward), one.forward_cycles + one.backward_cycles

    def _forward_bytes(self, first: int, end: int) -> int:
        """Bytes to work with that the forward task needs in a segment of which it keeps the input alone.

        Room for the gradient of the chain's result is there from the beginning. What the last step makes is counted
        as kept, unless that is the result.
        """
        steps, inputs = self._table.steps, self._table.inputs
        read = [0, *inputs[first + 1 : end]]
        made = [*inputs[first + 1 : end], inputs[end] if end == len(steps) else 0]
        needed = (r + m + steps[n].forward_temp_bytes for n, r, m in zip(range(first, end), read, made, strict=True))
        return inputs[-1] + max(needed)

    def _kept_curves_of(self, working: int) -> list[Curve]:
        """Fewest cycles against bytes kept, from each step on, and behind the last."""
        found = [Curve(np.zeros(1, np.int64), np.zeros(1, np.int64))]
        for first in reversed(range(len(self._table.steps))):
            options = [curve for _, curve in self._options(first, working, found)]
            num_bytes, cycles = ([getattr(c, name) for c in options] for name in ("num_bytes", "cycles"))
            found.insert(0, Curve.best(np.concatenate(num_bytes), np.concatenate(cycles)))
        return found

    def _options(self, first: int, working: int, rest: list[Curve]) -> list[tuple[int | None, Curve]]:
        """Ways to begin: saving a step (None), or computing again what is before a later one; `rest` from the next."""
        steps, inputs = self._table.steps, self._table.inputs
        options: list[tuple[int | None, Curve]] = []
        needed, cycles = self._saved(first)
        if needed <= working:
            options.append((None, rest[0].moved(steps[first].saved_bytes, 0, cycles)))
        forward = 0
        for end in range(first + 1, len(steps) + 1):
            forward += steps[end - 1].forward_cycles
            segment = self._table.curves[first, end - 1]
            if segment.holds(working) and self._forward_bytes(first, end) <= working:
                kept = inputs[end] if end < len(steps) else 0
                again = forward + int(segment.cycles_in(working))
                options.append((end, rest[end - first - 1].moved(kept, 0, again)))
        return options

    def _actions(self, working: int, kept_bytes: int) -> list[tuple[Action, int]]:
        forward, backward = list[tuple[Action, int]](), list[list[tuple[Action, int]]]()
        curves, at = self._kept_curves(working), 0
        while at < len(self._table.steps):
            options = self._options(at, working, curves[at + 1 :])
            end, _ = min(
                ((end, curve) for end, curve in options if curve.holds(kept_bytes)),
                key=lambda option: int(option[1].cycles_in(kept_bytes)),
            )
            if end is None:
                forward.append(("save", at))
                backward.append([("backward", at)])
                kept_bytes, at = kept_bytes - self._table.steps[at].saved_bytes, at + 1
            else:
                forward += [("keep", at), *((("forward", n)) for n in range(at + 1, end))]
                backward.append(self._table.actions(at, end - 1, working))
                kept_bytes, at = kept_bytes - (self._table.inputs[end] if end < len(self._table.steps) else 0), end
        return [*forward, *(action for part in reversed(backward) for action in part)]
