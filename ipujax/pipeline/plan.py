"""`ipu.pipeline_plan`: the cost of a pipeline for each schedule and number of micro-batches.

Input: a function with stages and the shapes of its arguments. Output: `PipelinePlan`, a table: nothing is run.

    schedule      micro-batches        cycles   bubble   worst tile
    1f1b                     16     1,234,567   17.2 %    412.3 KiB
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ipujax.device import IPUModel, check_device, current_device
from ipujax.jit import jit
from ipujax.lowering.schedules import SCHEDULES, Schedule, as_schedule
from ipujax.pipeline import pipeline
from ipujax.runtime.errors import ArgumentError, IpuError
from ipujax.runtime.options import Options
from ipujax.runtime.report import Profile
from ipujax.stages import Compiled


@dataclass(frozen=True, slots=True)
class PlanRow:
    """One way to run a pipeline.

    Args:
        schedule: name of its schedule.
        micro_batches: how many micro-batches the batch is split into.
        stages: how many stages there are; 0 if it was refused.
        cycles: length of one call, all arguments moved from the host included.
        pipeline_cycles: from the start of the first task to the end of the last.
        bubble_share: of the cycles of all IPUs in that time the share in which they wait, 0 to 1.
        worst_tile_bytes: memory of the fullest tile.
        fits: whether all tiles hold what they need.
        refused: why this cannot be run; None if it can.
    """

    schedule: str
    micro_batches: int
    stages: int = 0
    cycles: int = 0
    pipeline_cycles: int = 0
    bubble_share: float = 0.0
    worst_tile_bytes: int = 0
    fits: bool = False
    refused: str | None = None


@dataclass(frozen=True, slots=True)
class PipelinePlan:
    """A comparison of ways to run a pipeline; printed, it is a table.

    Args:
        rows: the ways, in the order they were asked for.
    """

    rows: tuple[PlanRow, ...]

    def best(self) -> PlanRow:
        """The row of fewest cycles that fits.

        Raises:
            ArgumentError: if none does.
        """
        fitting = [row for row in self.rows if row.fits]
        if not fitting:
            what = "no way to run this pipeline fits the machine"
            raise ArgumentError(what, hint="more stages, smaller micro-batches, or jax.checkpoint inside stages")
        return min(fitting, key=lambda row: row.cycles)

    def __iter__(self) -> Iterator[PlanRow]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __str__(self) -> str:
        width = max(len(row.schedule) for row in self.rows)
        lines = [f"{'schedule':<{width}}  micro-batches  stages           cycles   bubble  worst tile"]
        for row in self.rows:
            start = f"{row.schedule:<{width}}  {row.micro_batches:>13}"
            if row.refused is not None:
                lines.append(f"{start}  {row.refused}")
                continue
            memory = f"{row.worst_tile_bytes / 1024:,.1f} KiB{'' if row.fits else ', does not fit'}"
            lines.append(f"{start}  {row.stages:>6}  {row.cycles:>15,}  {row.bubble_share:>6.1%}  {memory}")
        return "\n".join(lines)


def pipeline_plan(
    fun: Callable[..., Any],
    *args: Any,
    micro_batches: int | Sequence[int],
    schedules: str | Schedule | Sequence[str | Schedule] = tuple(SCHEDULES),
    stages: int | str | Sequence[int | str] | None = None,
    device: IPUModel | None = None,
    show: bool = True,
    **settings: Any,
) -> PipelinePlan:
    """Compares ways to run a pipeline, and prints the comparison.

    Args:
        fun: function of one micro-batch, with stages, as for `ipu.pipeline`.
        args: whole arguments, or their shapes; the batch is the same for all rows.
        micro_batches: into how many micro-batches to split it.
        schedules: which schedules to compare.
        stages: into how many stages to cut it, as for `ipu.pipeline`; those it has when None.
        device: the machine; the default device when None.
        show: whether to print.
        settings: further settings of `ipu.pipeline`.

    Returns:
        A row for each combination; one that cannot be run says why.

    Raises:
        ArgumentError: for settings that make no sense, or a function without stages.
    """
    device = current_device() if device is None else device  # type: ignore[assignment]
    check_device(device, "ipu.pipeline_plan")
    if not isinstance(device, IPUModel):
        raise ArgumentError("ipu.pipeline_plan compares cycles", expected="device=ipu.IPUModel(...)", got=device)
    numbers = (micro_batches,) if isinstance(micro_batches, int) else tuple(micro_batches)
    names = (schedules,) if isinstance(schedules, str | Schedule) else tuple(schedules)
    orders = [as_schedule(each) for each in names]
    cuts = (stages,) if stages is None or isinstance(stages, int | str) else tuple(stages)
    errors = list[IpuError]()
    rows = [
        _row(fun, args, order, count, device, {**settings, "stages": cut}, errors)
        for cut in cuts
        for count in numbers
        for order in orders
    ]
    if len(errors) == len(rows):
        raise _none_runs(errors)
    plan = PipelinePlan(tuple(rows))
    if show:
        print(plan)
    return plan


def _none_runs(errors: Sequence[IpuError]) -> ArgumentError:
    """Says why each pipeline is refused, and what helps there."""
    first = errors[0]
    if len({error.what for error in errors}) == 1:
        what = f"no pipeline can be run: {first.what}"
        return ArgumentError(what, where=first.where, expected=first.expected, got=first.got, hint=first.hint)
    return ArgumentError(
        "none of these pipelines can be run",
        expected="stages, micro-batches and IPUs that one of the schedules takes",
        got="; ".join(sorted({error.what for error in errors})),
        hint="\n    or: ".join(dict.fromkeys(error.hint for error in errors if error.hint)) or None,
    )


def _row(
    fun: Callable[..., Any],
    args: tuple[Any, ...],
    schedule: Schedule,
    count: int,
    device: IPUModel,
    settings: dict[str, Any],
    errors: list[IpuError],
) -> PlanRow:
    """The row of one pipeline; why it is refused, if it is, goes to `errors`."""
    pipelined = pipeline(fun, micro_batches=count, schedule=schedule, **settings)
    try:
        lowered = jit(pipelined, device=device, options=Options(allow_out_of_memory=True)).lower(*args)
    except IpuError as error:
        errors.append(error)
        return PlanRow(schedule.name, count, refused=error.what)
    if not lowered.pipelines:
        what = "ipu.pipeline_plan compares pipelines with stages"
        raise ArgumentError(what, got="a function without", hint="with ipu.stage(i): around the parts of the model")
    compiled = lowered.compile()
    (run,) = lowered.pipelines
    cycles, share = pipeline_time(compiled)
    memory = compiled.profile.memory
    fits = memory.max_tile_bytes <= device.target.bytes_per_tile
    return PlanRow(
        schedule.name,
        count,
        run.plan.num_stages,
        compiled.profile.cycles,
        cycles,
        share,
        int(memory.max_tile_bytes),
        bool(fits),
    )


def pipeline_time(compiled: Compiled) -> tuple[int, float]:
    """How long the only pipeline of a function takes, and the share of its IPUs' time in which they wait.

    Args:
        compiled: a function with one pipeline.

    Returns:
        Cycles from the start of the first task to the end of the last, and the share, 0 to 1.
    """
    (run,) = compiled.pipelines
    timeline = Profile(compiled.executable, None, run.program).timeline
    ipus = sorted(set(run.ipus))
    busy = np.asarray(timeline.work)[ipus].sum()
    return timeline.cycles, float(1 - busy / (timeline.cycles * len(ipus)))
