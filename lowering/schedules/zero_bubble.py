"""1F1B with gradients of parameters delayed to times when an IPU would idle: ZB-H1.

Stage s runs 1F1B with backward tasks that compute only the gradients of inputs; each parameter gradient follows s
micro-batches later. The first stage sends no gradients, so its backward tasks stay unsplit. With equal stages that take
T_F, T_B and T_W, where T_W ≤ T_F and T_W ≤ T_B, every IPU idles for (p − 1)(T_F + T_B − T_W); the stash of stage s
holds p − s micro-batches until their backward task, and operands of parameter gradients for s more.

Source: Qi et al., Zero Bubble Pipeline Parallelism (arXiv 2401.10241), the handcrafted schedule H1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ipujax.lowering.schedules.schedule import Domain, Schedule, Times, alternating, forward_backward, in_order
from ipujax.lowering.schedules.tasks import BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, TaskList


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
        """1F1B, in which a gradient of parameters follows the gradient of inputs `stage` micro-batches later."""
        forward, backward = alternating(micro_batches, num_stages - 1 - stage)
        if stage == 0:
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
