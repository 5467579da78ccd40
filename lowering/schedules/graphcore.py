"""Graphcore's two pipeline schedules: the orders of eager-1f1b and 1f1b, on grids of their own.

    grouped       in a slot every busy IPU runs a forward task, in the next one every IPU a backward task
    interleaved   in a slot half of the IPUs run forward tasks and the others backward tasks

A grid matters where all IPUs sync at every copy between stages: grouped slots last as long as a forward or a backward
task, interleaved ones as long as the longer of the two. The stash of stage s holds 2(p − 1 − s) + 1 micro-batches with
grouped, p − s with interleaved.

Source: PopART, docs/notes/transforms/pipelining.md and willow/src/transforms/pipeline.cpp (stash sizes, at least as
many micro-batches as its 2p − 1 pipeline stages); TF-IPU, pipelining_ops.py and keras.rst (interleaved, whose number of
micro-batches is a multiple of the rotations of the IPUs, p).
Limits: TF-IPU counts 2p pipeline stages and requires a multiple of them of grouped pipelines, because it unrolls its
loop so often; this loop is not unrolled, so PopART's bound holds. TF-IPU refuses two stages on one IPU when it trains
interleaved.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ipujax.lowering.schedules.schedule import Domain, Schedule, TaskList, forward_backward


@dataclass(frozen=True, slots=True)
class Grouped(Schedule):
    """All IPUs run forward tasks together, then all run backward tasks together."""

    name = "grouped"

    def domain(self, num_stages: int, training: bool) -> Domain:
        fill = 2 * num_stages - 1 if training else num_stages
        why = f"that many fill its {fill} pipeline stages"
        if training:
            why += f" ({num_stages} forward and {num_stages} backward, of which the last forward is the first backward)"
        return Domain(least=fill, why=why)

    def tasks(self, num_stages: int, micro_batches: int) -> Sequence[TaskList]:
        start = 2 * np.arange(micro_batches)
        last = 4 * num_stages - 3
        return [forward_backward(s, start + 2 * s, start + last - 2 * s, as_slots=True) for s in range(num_stages)]


@dataclass(frozen=True, slots=True)
class Interleaved(Schedule):
    """Neighbouring IPUs run a forward and a backward task at the same time, and then the other way round."""

    name = "interleaved"

    def domain(self, num_stages: int, training: bool) -> Domain:
        return Domain(
            least=num_stages,
            multiple=num_stages,
            why=f"they go round the {num_stages} IPUs together, as TF-IPU has it",
        )

    def tasks(self, num_stages: int, micro_batches: int) -> Sequence[TaskList]:
        start = 2 * np.arange(micro_batches)
        last = 2 * num_stages - 1
        return [forward_backward(s, start + s, start + last - s, as_slots=True) for s in range(num_stages)]
