"""Start and end of each task of a pipeline, as a timeline drawing shows them.

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
    """When a task runs.

    Args:
        stage: its stage.
        kind: "forward", "backward", "backward_input" or "backward_weight".
        micro_batch: its micro-batch.
        ipu: where it runs.
        start: cycle at which it begins, from the first task's.
        end: cycle at which it ends.
    """

    stage: int
    kind: str
    micro_batch: int
    ipu: int
    start: int
    end: int


def pipeline_tasks(compiled: Compiled) -> tuple[TaskTime, ...]:
    """When each task of a function's only pipeline runs, in the order of the program.

    Args:
        compiled: what `ipu.jit(fun).lower(*args).compile()` returned.

    Raises:
        ArgumentError: for a function with no pipeline, or several.
    """
    if len(compiled.pipelines) != 1:
        what = "pipeline_tasks needs a function with one pipeline with stages"
        raise ArgumentError(what, got=f"{len(compiled.pipelines)} pipelines")
    (run,) = compiled.pipelines
    steps = tuple(_unrolled(run.program))
    line = iter(Profile(compiled.executable, None, Sequence(*steps)).timeline.steps)
    lengths: dict[Function, int] = {}
    counts: dict[tuple[int, str], int] = {}
    found = []
    for step in steps:
        if not isinstance(step, Call):
            next(line)
            continue
        function = step.function
        if function not in lengths:
            lengths[function] = len(Profile(compiled.executable, None, function.body).timeline.steps)
        parts = [next(line) for _ in range(lengths[function])]
        if function not in run.tasks:
            continue
        stage, kind = run.tasks[function]
        number = counts[stage, kind.name] = counts.get((stage, kind.name), -1) + 1
        start, end = min(min(part.starts) for part in parts), max(max(part.ends) for part in parts)
        found.append(TaskTime(stage, kind.name.lower(), number, run.ipus[stage], start, end))
    first = min(task.start for task in found)
    return tuple(TaskTime(t.stage, t.kind, t.micro_batch, t.ipu, t.start - first, t.end - first) for t in found)


def _unrolled(program: Program) -> Iterator[Program]:
    """The steps of a program as often as they run, calls whole."""
    for child in program.children():
        if isinstance(child, Repeat):
            for _ in range(child.count):
                yield from _unrolled(child)
        elif isinstance(child, Sequence):
            yield from _unrolled(child)
        else:
            yield child
