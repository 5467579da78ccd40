"""Cost of a pipeline for each schedule (`ipu.pipeline_plan`), and the time of each of its tasks.

Input: a function with stages and the shapes of its arguments. Output: `PipelinePlan`, a table: nothing is run.

    schedule      micro-batches        cycles   bubble   worst tile
    1f1b                     16     1,234,567   17.2 %    412.3 KiB

The timeline of a compiled function with a pipeline gives start and end of each task, in cycles: a `TaskTime`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from ipujax.device import IPUModel, check_device, current_device
from ipujax.jit import IpuFunction, jit, jitted
from ipujax.lowering.schedules import SCHEDULE_NAMES, Schedule, ScheduleName, as_schedule
from ipujax.pipeline import pipeline
from ipujax.runtime.errors import ArgumentError, IpuError
from ipujax.runtime.graph import Call, Function, Program, Repeat, Sequence as ProgramSequence
from ipujax.runtime.report import Profile
from ipujax.stages import Compiled


@dataclass(frozen=True, slots=True)
class TaskTime:
    """Time of a task.

    Args:
        stage: number of its stage.
        kind: "forward", "backward", "backward_input" or "backward_weight".
        micro_batch: number of its micro-batch.
        ipu: IPU of the stage.
        start: first cycle, counted from the start of the first task.
        end: cycle after the last.
    """

    stage: int
    kind: str
    micro_batch: int
    ipu: int
    start: int
    end: int


def pipeline_tasks(compiled: Compiled) -> tuple[TaskTime, ...]:
    """Return the time of each task of a function's only pipeline, in the order of the program.

    Args:
        compiled: result of `ipu.jit(fun).lower(*args).compile()`.

    Raises:
        ArgumentError: a function without a pipeline, or with several.
    """
    if len(compiled.pipelines) != 1:
        problem = "pipeline_tasks needs a function with one pipeline with stages"
        raise ArgumentError(problem, got=f"{len(compiled.pipelines)} pipelines")
    (run,) = compiled.pipelines
    # Micro-batches are counted by the calls of a task's function, so each iteration of a loop has to be a step.
    steps = tuple(_unrolled(run.program))
    # The timeline lists the steps inside a call one by one, the program the call alone.
    timeline_steps = iter(Profile(compiled.executable, None, ProgramSequence(*steps)).timeline.steps)
    lengths: dict[Function, int] = {}
    counts: dict[tuple[int, str], int] = {}
    tasks = []
    for step in steps:
        if not isinstance(step, Call):
            next(timeline_steps)
            continue
        function = step.function
        if function not in lengths:
            lengths[function] = len(Profile(compiled.executable, None, function.body).timeline.steps)
        parts = [next(timeline_steps) for _ in range(lengths[function])]
        if function not in run.tasks:
            continue
        stage, kind = run.tasks[function]
        number = counts[stage, kind.name] = counts.get((stage, kind.name), -1) + 1
        # Steps have a start and an end on each IPU that takes part: a task spans all of them.
        start = min(min(part.starts) for part in parts)
        end = max(max(part.ends) for part in parts)
        tasks.append(TaskTime(stage, kind.name.lower(), number, run.ipus[stage], start, end))
    first = min(task.start for task in tasks)
    return tuple(TaskTime(t.stage, t.kind, t.micro_batch, t.ipu, t.start - first, t.end - first) for t in tasks)


def _unrolled(program: Program) -> Iterator[Program]:
    """Yield the steps of a program in the order they run, repeated ones again, without entering calls."""
    for child in program.children():
        if isinstance(child, Repeat):
            for _ in range(child.count):
                yield from _unrolled(child)
        elif isinstance(child, ProgramSequence):
            yield from _unrolled(child)
        else:
            yield child


@dataclass(frozen=True, slots=True)
class PlanRow:
    """Cost of a pipeline with one schedule, number of micro-batches and number of stages.

    Args:
        schedule: name of the schedule.
        micro_batches: number of micro-batches.
        stages: number of stages; 0 if it was refused.
        cycles: cycles of one call, with all arguments moved from the host.
        pipeline_cycles: cycles from the start of the first task to the end of the last.
        bubble_share: share of these cycles, over all IPUs, in which an IPU waits, 0 to 1.
        worst_tile_bytes: memory of the fullest tile.
        fits: whether the program fits all tiles.
        refused: text of the error if it cannot be run, else None.
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
    """Costs of a pipeline with several settings; its text is a table.

    Args:
        rows: a row for each combination of settings, in their order.
    """

    rows: tuple[PlanRow, ...]

    def best(self) -> PlanRow:
        """Return the row of fewest cycles that fits.

        Raises:
            ArgumentError: if none does.
        """
        fitting = [row for row in self.rows if row.fits]
        if not fitting:
            hint = "more stages, smaller micro-batches, or jax.checkpoint inside stages"
            raise ArgumentError("no setting of this pipeline fits the machine", hint=hint)
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
    schedules: ScheduleName | Schedule | Sequence[ScheduleName | Schedule] = SCHEDULE_NAMES,
    stages: int | Literal["auto"] | Sequence[int | Literal["auto"]] | None = None,
    device: IPUModel | None = None,
    show: bool = True,
    **settings: Any,
) -> PipelinePlan:
    """Compile a pipeline with several schedules, numbers of micro-batches and of stages, and compare the costs.

    Args:
        fun: function of one micro-batch, with stages, as for `ipu.pipeline`; one of `ipu.jit` with its options.
        args: arguments of the whole batch, or their shapes; equal for all rows.
        micro_batches: numbers of micro-batches.
        schedules: names of schedules, or `Schedule` objects.
        stages: numbers of stages, as for `ipu.pipeline`; the function's own when None.
        device: the machine; that of `fun`, or the default device, when None.
        show: whether to print the table.
        settings: further settings of `ipu.pipeline`.

    Returns:
        A row for each combination, with the error of those that cannot be run.

    Raises:
        ArgumentError: invalid settings, a function without stages, or of `ipu.jit` with more than device and options,
            or no combination that can be run.
    """
    function, args = jitted(fun, args)
    function.check_kept("ipu.pipeline_plan")
    machine = device or function.device or current_device()
    check_device(machine, "ipu.pipeline_plan")
    if not isinstance(machine, IPUModel):
        raise ArgumentError("ipu.pipeline_plan compares cycles", expected="device=ipu.IPUModel(...)", got=machine)
    numbers = (micro_batches,) if isinstance(micro_batches, int) else tuple(micro_batches)
    names = (schedules,) if isinstance(schedules, str | Schedule) else tuple(schedules)
    orders = [as_schedule(each) for each in names]
    cuts = (stages,) if stages is None or isinstance(stages, int | str) else tuple(stages)
    errors = list[IpuError]()
    rows = [
        _row(function, args, order, count, machine, {**settings, "stages": cut}, errors)
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
    """Return the error of all refused pipelines, with each distinct reason and hint."""
    first = errors[0]
    if len({error.what for error in errors}) == 1:
        problem = f"no pipeline can be run: {first.what}"
        return ArgumentError(problem, where=first.where, expected=first.expected, got=first.got, hint=first.hint)
    return ArgumentError(
        "none of these pipelines can be run",
        expected="stages, micro-batches and IPUs that one of the schedules takes",
        got="; ".join(sorted({error.what for error in errors})),
        hint="\n    or: ".join(dict.fromkeys(error.hint for error in errors if error.hint)) or None,
    )


def _row(
    fun: IpuFunction[..., Any],
    args: tuple[Any, ...],
    schedule: Schedule,
    count: int,
    device: IPUModel,
    settings: dict[str, Any],
    errors: list[IpuError],
) -> PlanRow:
    """Return the row of one pipeline; appends the error to `errors` if it is refused."""
    # Settings that are wrong for every row raise here; those that depend on the machine are refused below.
    pipelined = pipeline(fun.fun, micro_batches=count, schedule=schedule, **settings)
    options = replace(fun.options, allow_out_of_memory=True)
    try:
        lowered = jit(pipelined, device=device, options=options).lower(*args)
    except IpuError as error:
        errors.append(error)  # a refused setting is a row; only if all are refused is it an error
        return PlanRow(schedule.name, count, refused=error.what)
    if not lowered.pipelines:
        problem = "ipu.pipeline_plan compares pipelines with stages"
        raise ArgumentError(
            problem, got="a function without stages", hint="with ipu.stage(i): around the parts of the model"
        )
    compiled = lowered.compile()
    (run,) = lowered.pipelines
    cycles, share = pipeline_time(compiled)
    memory = compiled.profile.memory
    return PlanRow(
        schedule.name,
        count,
        run.plan.num_stages,
        compiled.profile.cycles,
        cycles,
        share,
        int(memory.max_tile_bytes),
        not memory.lacking(),
    )


def pipeline_time(compiled: Compiled) -> tuple[int, float]:
    """Return cycles of a function's only pipeline, and the share of them, 0 to 1, in which IPUs of its stages wait."""
    (run,) = compiled.pipelines
    # Of the pipeline alone: arguments from the host and the update of the weights are no bubble.
    alone = Profile(compiled.executable, None, run.program)
    (pipeline,) = alone.pipelines
    if pipeline.is_traced:
        return pipeline.cycles, pipeline.bubble_share
    timeline = alone.timeline
    ipus = sorted(set(run.ipus))
    # IPUs without a stage, as those of a larger partition, do not count.
    busy_cycles = np.asarray(timeline.work)[ipus].sum()
    return timeline.cycles, float(1 - busy_cycles / (timeline.cycles * len(ipus)))
