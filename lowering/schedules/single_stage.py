"""Schedules with one stage on one IPU: those of every pipeline library, and Graphcore's.

    sequential    one task at a time, on one IPU after the other
    gpipe         all forward tasks, then all backward tasks
    1f1b          as few forward tasks ahead as keep all IPUs busy, then one forward, one backward
    eager-1f1b    the same with twice as many ahead, which hides the time of copies between IPUs
    zb-h1         1f1b with gradients of parameters delayed to times when an IPU would idle
    grouped       in a slot every busy IPU runs a forward task, in the next one every IPU a backward task
    interleaved   in a slot half of the IPUs run forward tasks and the others backward tasks

With p stages, m micro-batches and equal stages that take T_F and T_B, free copies and enough buffers, gpipe and both
kinds of 1f1b idle for (p − 1)(T_F + T_B) on every IPU; the stash of stage s holds m, min(m, p − s) and min(m, 2(p − 1 −
s) + 1) micro-batches. Backward tasks run first in, first out in all schedules, also in GPipe, so that all add up
gradients in the same order and give the same bits.

Under ZB-H1 stage s runs 1F1B with backward tasks that compute only the gradients of inputs; each parameter gradient
follows s micro-batches later. The first stage sends no gradients, so its backward tasks stay unsplit. With equal stages
that take T_F, T_B and T_W, where T_W ≤ T_F and T_W ≤ T_B, every IPU idles for (p − 1)(T_F + T_B − T_W); the stash of
stage s holds p − s micro-batches until their backward task, and operands of parameter gradients for s more.

Grouped and interleaved are the orders of eager-1f1b and 1f1b on grids of their own, with the same stashes. A grid
matters where all IPUs sync at every copy between stages: grouped slots last as long as a forward or a backward task,
interleaved ones as long as the longer of the two.

Source: GPipe (arXiv 1811.06965), PipeDream-flush (arXiv 2006.09503) for 1F1B, JaxPP for eager 1F1B; Qi et al., Zero
Bubble Pipeline Parallelism (arXiv 2401.10241), the handcrafted schedule H1; PopART,
docs/notes/transforms/pipelining.md and willow/src/transforms/pipeline.cpp (stash sizes, at least as many micro-batches
as its 2p − 1 pipeline stages); TF-IPU, pipelining_ops.py and keras.rst (interleaved, whose number of micro-batches is a
multiple of the rotations of the IPUs, p).
Limits: TF-IPU counts 2p pipeline stages and requires a multiple of them of grouped pipelines, because it unrolls its
loop so often; this loop is not unrolled, so PopART's bound holds. TF-IPU refuses two stages on one IPU when it trains
interleaved.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ipujax.lowering.schedules.schedule import (
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    Domain,
    Schedule,
    TaskList,
    Times,
    alternating,
    forward_backward,
    in_order,
)


@dataclass(frozen=True, slots=True)
class ZeroBubbleH1(Schedule):
    """1F1B whose parameter gradients come s micro-batches after those of the inputs, on stage s."""

    name = "zb-h1"

    def domain(self, num_stages: int, training: bool) -> Domain:
        why = f"stage {num_stages - 1} puts off {num_stages - 1} of its parameter gradients to where it would idle"
        return Domain(least=num_stages, why=why) if training else Domain()

    def tasks(self, num_stages: int, micro_batches: int) -> Sequence[TaskList]:
        return [self._of_stage(s, num_stages, micro_batches) for s in range(num_stages)]

    def _of_stage(self, stage: int, num_stages: int, micro_batches: int) -> TaskList:
        """Tasks of one stage, in order: 1F1B, with the gradients of parameters put off by `stage` micro-batches.

        Each follows the gradient of the inputs of a micro-batch that is `stage` later; the last ones come at the end.
        """
        # Times of the tasks of each micro-batch, which only order them.
        forward, backward = alternating(micro_batches, num_stages - 1 - stage)
        if stage == 0:  # nothing is put off: backward tasks stay unsplit
            return forward_backward(0, forward, backward)
        # The backward task that each parameter gradient follows; those without one come last. Times are doubled: a
        # parameter gradient is between two tasks.
        predecessor = np.arange(micro_batches) + stage
        next_time = 2 * backward[np.minimum(predecessor, micro_batches - 1)] + 1
        weight = np.where(predecessor < micro_batches, next_time, 2 * predecessor + 2 * micro_batches)
        return in_order(
            (
                Times(stage, FORWARD, 2 * forward),
                Times(stage, BACKWARD_INPUT, 2 * backward),
                Times(stage, BACKWARD_WEIGHT, weight),
            )
        )


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
