"""Start and end of each task of a pipeline, in cycles.

Input: a compiled function with a pipeline. Output: a `TaskTime` for each task, from the timeline of its program.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ipujax.runtime.errors import ArgumentError
from ipujax.runtime.graph import Call, Function, Program, Repeat, Sequence
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
    timeline_steps = iter(Profile(compiled.executable, None, Sequence(*steps)).timeline.steps)
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
        elif isinstance(child, Sequence):
            yield from _unrolled(child)
        else:
            yield child
