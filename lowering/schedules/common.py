"""The schedules of every pipeline library: one stage on one IPU, unsplit forward and backward tasks.

    sequential    one task at a time, on one IPU after the other
    gpipe         all forward tasks, then all backward tasks
    1f1b          as few forward tasks ahead as keep all IPUs busy, then one forward, one backward
    eager-1f1b    the same with twice as many ahead, which hides the time of copies between IPUs

With p stages, m micro-batches and equal stages that take T_F and T_B, free copies and enough buffers, the last three
idle for (p − 1)(T_F + T_B) on every IPU; the stash of stage s holds m, min(m, p − s) and min(m, 2(p − 1 − s) + 1)
micro-batches.

Source: GPipe (arXiv 1811.06965), PipeDream-flush (arXiv 2006.09503) for 1F1B, JaxPP for eager 1F1B.
Limits: backward tasks run first in, first out in all schedules, also in GPipe, so that all add up gradients in the same
order and give the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ipujax.lowering.schedules.schedule import Schedule, Times, alternating, forward_backward, in_order
from ipujax.lowering.schedules.tasks import FORWARD, TaskList


@dataclass(frozen=True, slots=True)
class Sequential(Schedule):
    """One task at a time: a micro-batch passes all stages forwards and backwards before the next one starts."""

    name = "sequential"

    def tasks(self, num_stages: int, micro_batches: int) -> Sequence[TaskList]:
        start = 2 * num_stages * np.arange(micro_batches)
        last = 2 * num_stages - 1
        return [forward_backward(s, start + s, start + last - s, as_slots=True) for s in range(num_stages)]

    def forward_tasks(self, num_stages: int, micro_batches: int) -> Sequence[TaskList]:
        start = num_stages * np.arange(micro_batches)
        return [in_order((Times(s, FORWARD, start + s),), as_slots=True) for s in range(num_stages)]


@dataclass(frozen=True, slots=True)
class GPipe(Schedule):
    """All forward tasks, then all backward tasks."""

    name = "gpipe"

    def tasks(self, num_stages: int, micro_batches: int) -> Sequence[TaskList]:
        return [_forwards_ahead(s, micro_batches, micro_batches) for s in range(num_stages)]


@dataclass(frozen=True, slots=True)
class OneForwardOneBackward(Schedule):
    """Stage s runs p − 1 − s forward tasks ahead, then one forward and one backward task in turn."""

    name = "1f1b"

    def tasks(self, num_stages: int, micro_batches: int) -> Sequence[TaskList]:
        return [_forwards_ahead(s, micro_batches, num_stages - 1 - s) for s in range(num_stages)]


@dataclass(frozen=True, slots=True)
class EagerOneForwardOneBackward(Schedule):
    """Stage s runs 2(p − 1 − s) forward tasks ahead, then one forward and one backward task in turn."""

    name = "eager-1f1b"

    def tasks(self, num_stages: int, micro_batches: int) -> Sequence[TaskList]:
        return [_forwards_ahead(s, micro_batches, 2 * (num_stages - 1 - s)) for s in range(num_stages)]


def _forwards_ahead(stage: int, micro_batches: int, ahead: int) -> TaskList:
    return forward_backward(stage, *alternating(micro_batches, min(micro_batches, ahead)))
