"""Schedules with several stages on each IPU, far apart in the model: looped ones, and halves of bidirectional ones.

    looped-1f1b  IPU d of p has the stages d, d + p, d + 2p, …: v of them, its chunks
    dualpipev    IPU d has the stages d and 2p − 1 − d; two directions, one forward and one backward in turn; parameter
                 gradients fill the ramps
    chimera      the same stages; units of p micro-batches, one forward and one backward in turn

Under looped 1F1B micro-batches go through the chunks in groups of p, and the pipeline fills sooner. With p IPUs and
chunks that take t_F and t_B each, every IPU idles for (p − 1)(t_F + t_B), a v-th of 1F1B with stages v times as long,
and its stashes hold (v − 1)p + 2(p − 1 − d) + 1 chunks at most.

A bidirectional pipeline (Chimera, DualPipe) has 2p IPUs for 2p stages and two copies of the weights of each: half of
the micro-batches pass the IPUs downwards, half upwards. Its upper half does what its lower half does, mirrored. Cut in
half, a micro-batch passes p IPUs downwards through the stages 0 to p − 1 and back through p to 2p − 1: as many stages
on an IPU, but one copy of the weights, and no sum of gradients of two copies. The schedules here are such halves; their
bubble is that of the whole on twice as many IPUs.

With equal stages that take T_F, T_I for gradients of inputs, T_W for those of parameters and T_B = T_I + T_W, IPUs idle
for

    dualpipev    (p − 1)(T_F + T_I − T_W) if T_W ≤ T_F = T_I; where each forward and backward task that the source
                 overlaps end together, (p − 1)(T_F + 2 T_I − T_W): (PP/2 − 1)(F&B + B − 3W) of PP = 2p, as published
    chimera      2(p − 1)(max(T_F, T_B) + (k − 1)|T_B − T_F|) in k full units: of one unit, the published share
                 (PP − 2)/(2N + PP − 2) if T_F = T_B, and (PP − 2)/(3N/2 + PP − 2) if T_B = 2 T_F, with N = PP = 2p

Source: Megatron-LM's interleaved 1F1B (arXiv 2104.04473) for looped 1F1B; Graphcore's "interleaved" is another
schedule. DualPipe and DualPipeV, github.com/deepseek-ai/DualPipe, and the technical report of DeepSeek-V3 (arXiv
2412.19437); "cut in half", Sea AI Lab, hackmd.io/@ufotalent/r1lVXsa9Jg; Li and Hoefler, Chimera (arXiv 2107.06925).
Limits: micro-batches of looped 1F1B are a multiple of the IPUs, and stages a multiple of the chunks. An IPU does not
overlap two tasks; an unsplit backward task of DualPipeV is its two halves, one after the other; Chimera's doubling of
forward and halving of backward tasks are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ipujax.lowering.schedules.schedule import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    Domain,
    Kind,
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


class Turn(NamedTuple):
    """What an IPU does next: which of its two stages, 0 downwards and 1 back, and a kind of work."""

    direction: int
    kind: Kind


_WEIGHT = Turn(0, BACKWARD_WEIGHT)  # of the stage, in either direction, whose input gradient has waited longest


@dataclass(frozen=True, slots=True)
class DualPipeV(Schedule):
    """Both directions in turn, one forward and one backward; parameter gradients are delayed in the ramps."""

    name = "dualpipev"

    def domain(self, num_stages: int, training: bool) -> Domain:
        ipus = _num_ipus(self.name, num_stages)
        return Domain(least=2 * ipus, why=f"that many fill its {2 * ipus} stages in both directions")

    def tasks(self, num_stages: int, micro_batches: int) -> Sequence[TaskList]:
        num_ipus = num_stages // 2
        return [self._of_ipu(ipu, num_ipus, micro_batches) for ipu in range(num_ipus)]

    def _of_ipu(self, ipu: int, num_ipus: int, micro_batches: int) -> TaskList:
        """Tasks of one IPU, in order: the eight steps of DualPipeV's source, each a pattern that repeats.

        The IPU has a stage that micro-batches pass on the way down and one on their way back; backward tasks are in
        two halves, gradients of inputs and of parameters (weights).
        """
        below = num_ipus - 1 - ipu  # IPUs further down
        down, back = [Turn(0, FORWARD)], [Turn(1, FORWARD)]
        weight = [_WEIGHT]
        down_input, back_input = [Turn(0, BACKWARD_INPUT)], [Turn(1, BACKWARD_INPUT)]
        down_gradient, back_gradient = down_input + weight, back_input + weight
        # Step 6: gradients back and downwards in turn; parameter gradients of the second half wait for steps 7 and 8.
        last_pairs = [(back_input, down_input)[n % 2] + weight * (n <= ipu) for n in range(2 * ipu + 2)]
        steps: list[tuple[list[Turn], int]] = [
            (down, 2 * below),  # until the first micro-batch is back
            (down + back, ipu + 1),  # until the first gradient arrives
            (back_input + weight + back, below),
            (down + back_gradient + back + down_gradient, micro_batches - 2 * num_ipus + ipu + 1),  # all in turn
            (back_gradient + back + down_gradient, below),  # no micro-batch is left for the way down
            ([turn for pair in last_pairs for turn in pair], 1),
            (weight + down_input, below),
            (weight, ipu + 1),
        ]
        return _task_list([turn for pattern, count in steps for turn in pattern * count], (ipu, 2 * num_ipus - 1 - ipu))


def _task_list(turns: Sequence[Turn], stages: tuple[int, int]) -> TaskList:
    """Turns an order of work into the tasks of one IPU, which need a stage and a micro-batch each.

    The tasks of a kind and direction take the micro-batches in order; a gradient of parameters is of the stage and
    micro-batch whose gradient of inputs has waited longest.

    Args:
        turns: direction and kind of each task, in order.
        stages: the IPU's stage downwards, and that on the way back.
    """
    rows = np.array([(direction, int(kind)) for direction, kind in turns], np.int64).reshape(-1, 2)
    directions, kinds = rows.T.copy()
    is_weight = kinds == BACKWARD_WEIGHT
    micro_batches = np.zeros(len(rows), np.int64)
    is_input = kinds == BACKWARD_INPUT
    for direction in (0, 1):
        for is_kind in (kinds == FORWARD, is_input):
            places = np.flatnonzero((directions == direction) & is_kind)
            micro_batches[places] = np.arange(len(places))
    directions[is_weight] = directions[is_input]
    micro_batches[is_weight] = micro_batches[is_input]
    numbers = np.array(stages)[directions]
    # The first stage sends no gradients: its backward tasks, whose halves follow one another, stay unsplit.
    kinds[is_weight & (numbers == 0)] = BACKWARD
    remains = ~is_input | (numbers > 0)
    return TaskList(numbers[remains], micro_batches[remains], kinds[remains])


@dataclass(frozen=True, slots=True)
class Chimera(Schedule):
    """Units of p micro-batches, each of which takes turns with itself on its way back, and with the next unit."""

    name = "chimera"

    def domain(self, num_stages: int, training: bool) -> Domain:
        _num_ipus(self.name, num_stages)
        return Domain()

    def tasks(self, num_stages: int, micro_batches: int) -> Sequence[TaskList]:
        """Tasks of each IPU, ordered by times in units of a task, at which no two tasks of an IPU meet.

        Micro-batches go in units of p, the number of IPUs; a unit starts 4p times after the one before.
        """
        num_ipus = _num_ipus(self.name, num_stages)
        units, places = np.divmod(np.arange(micro_batches), num_ipus)
        start = 4 * num_ipus * units + 2 * places
        last = 2 * num_stages - 1
        return [
            in_order(
                [
                    part
                    for stage in (ipu, num_stages - 1 - ipu)
                    for part in (Times(stage, FORWARD, start + stage), Times(stage, BACKWARD, start + last - stage))
                ]
            )
            for ipu in range(num_ipus)
        ]


def _num_ipus(name: str, num_stages: int) -> int:
    """Number of IPUs of a schedule that puts two stages on each; refuses an odd number of stages."""
    if num_stages % 2:
        raise ScheduleError(
            f"the schedule {name!r} puts two stages on every IPU, one for each direction",
            expected="an even number of stages",
            got=f"{num_stages} stages",
            hint=f"{num_stages + 1} stages on {(num_stages + 1) // 2} IPUs",
        )
    return num_stages // 2
