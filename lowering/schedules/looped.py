"""Several stages on each IPU, far apart in the model, so that the pipeline fills sooner: looped 1F1B.

IPU d of p has the stages d, d + p, d + 2p, …: v of them, its chunks. Micro-batches go through the chunks in groups of
p. With p IPUs and chunks that take t_F and t_B each, every IPU idles for (p − 1)(t_F + t_B), a v-th of 1F1B with stages
v times as long, and its stashes hold (v − 1)p + 2(p − 1 − d) + 1 chunks at most.

Source: Megatron-LM's interleaved 1F1B (arXiv 2104.04473); Graphcore's "interleaved" is another schedule.
Limits: micro-batches are a multiple of the IPUs, and stages a multiple of the chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ipujax.lowering.schedules.schedule import (
    BACKWARD,
    FORWARD,
    Domain,
    Schedule,
    TaskList,
    Times,
    alternating,
    in_order,
)
from ipujax.runtime.errors import ScheduleError


@dataclass(frozen=True, slots=True)
class LoopedOneForwardOneBackward(Schedule):
    """1F1B over `chunks` stages an IPU, stage s on IPU s mod p.

    Args:
        chunks: stages on each IPU, at least 1.
    """

    chunks: int = 2

    def __post_init__(self) -> None:
        if self.chunks < 1:
            raise ScheduleError("a looped schedule needs at least one chunk on each IPU", got=self.chunks)

    name = "looped-1f1b"

    def domain(self, num_stages: int, training: bool) -> Domain:
        """Numbers of micro-batches that work: multiples of the number of IPUs, each of which has `chunks` stages.

        Raises if stages cannot be divided so.
        """
        if num_stages % self.chunks:
            raise ScheduleError(
                f"the schedule {self.name!r} puts {self.chunks} stages on every IPU",
                expected=f"a number of stages that {self.chunks} divides",
                got=f"{num_stages} stages",
                hint="LoopedOneForwardOneBackward(chunks=…)",
            )
        num_ipus = num_stages // self.chunks
        why = f"they go through the {self.chunks} chunks of each IPU in groups of {num_ipus}, one for each IPU"
        return Domain(least=num_ipus, multiple=num_ipus, why=why)

    def tasks(self, num_stages: int, micro_batches: int) -> Sequence[TaskList]:
        num_ipus = num_stages // self.chunks
        return [self._of_ipu(ipu, num_ipus, micro_batches) for ipu in range(num_ipus)]

    def _of_ipu(self, ipu: int, num_ipus: int, micro_batches: int) -> TaskList:
        """Tasks of one IPU, in order: 1F1B over its chunks, the stages `ipu`, `ipu + num_ipus`, and so on.

        As many forward tasks run ahead as it takes until the first gradient can have come back.
        """
        tasks = micro_batches * self.chunks  # forward tasks of the IPU; there are as many backward tasks
        ahead = min(tasks, 2 * (num_ipus - 1 - ipu) + (self.chunks - 1) * num_ipus)
        forward, backward = alternating(tasks, ahead)
        # Chunk of the k-th forward task: `num_ipus` micro-batches on one, then on the next. In backward tasks the order
        # of chunks is the opposite.
        chunk = np.arange(tasks) // num_ipus % self.chunks
        times = []
        for c in range(self.chunks):
            stage = c * num_ipus + ipu
            times.append(Times(stage, FORWARD, forward[chunk == c]))
            times.append(Times(stage, BACKWARD, backward[chunk == self.chunks - 1 - c]))
        return in_order(times)
