"""Tasks of pipelines in a trace for Perfetto: slices around their steps, and arrows between IPUs.

Input: `ExecutionTrace` and `TaskTrace`. Output: events. A task is the parent of its steps on the thread of the compute
tiles; where steps are folded across tasks, which then would not nest, tasks have another thread. An arrow goes from the
end of a task to the start of the task on another IPU that reads its result first.
Source: Google, "Trace Event Format": flow events, of which "s" and "f" with one id make an arrow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ipujax.runtime.profile import ExecutionTrace, TaskTrace

Event = dict[str, Any]
Slice = Callable[..., Event]  # (name, kind, process, thread, start, cycles, args)
TASKS = 3  # thread id of tasks that do not nest
_INSET = 0.25  # cycles by which an arrow's ends are inside their tasks: a viewer binds it to the slice at that time


def thread_of_tasks(trace: ExecutionTrace, tasks: TaskTrace, compute_tiles: int) -> int:
    """Return the thread for tasks: `compute_tiles`, the thread of steps, if each step nests in one task or in none."""
    is_busy = trace.work.any(1)
    for ipu in np.unique(tasks.ipu).tolist():
        is_on_ipu = tasks.ipu == ipu
        task_start = tasks.start[is_on_ipu]  # ascending: tasks of one IPU run one after the other
        task_end = tasks.end[is_on_ipu]
        rows = is_busy & (trace.ipu == ipu)
        step_start, step_end = trace.start[rows], trace.end[rows]
        task = np.searchsorted(task_start, step_start, "right") - 1  # the last that begins no later; −1 before all
        is_between = (task < 0) | (step_start >= task_end[np.maximum(task, 0)])
        next_start = np.append(task_start, np.iinfo(np.int64).max)[task + 1]
        if (step_end > np.where(is_between, next_start, task_end[np.maximum(task, 0)])).any():
            return TASKS
    return compute_tiles


def task_slices(tasks: TaskTrace, thread: int, make: Slice) -> Iterator[Event]:
    """Yield a slice for each task on a thread of its IPU, each by a call of `make`."""
    columns = (tasks.ipu, tasks.stage, tasks.micro_batch, tasks.start, tasks.end, tasks.busy, tasks.waited)
    for n, row in enumerate(zip(*(column.tolist() for column in columns), strict=True)):
        ipu, stage, micro_batch, start, end, busy, waited = row
        args = {"stage": stage, "work": tasks.kind_name(n), "micro_batch": micro_batch}
        args |= {"busy_cycles": busy, "waited_cycles": waited}
        yield make(tasks.label(n), "task", ipu + 1, thread, start, end - start, **args)


def task_arrows(tasks: TaskTrace, thread: int, microseconds: float) -> Iterator[Event]:
    """Yield the two events of an arrow for each value that a task on another IPU reads, at `microseconds` per cycle."""
    ipus = tasks.ipu
    for number, (writer, reader) in enumerate(tasks.links().tolist(), 1):
        tail = int(tasks.end[writer]) - _INSET  # in cycles
        head = int(tasks.start[reader]) + _INSET
        arrow: Event = {"name": f"from stage {tasks.stage[writer]} to stage {tasks.stage[reader]}", "cat": "handed on"}
        arrow |= {"id": number, "tid": thread}
        yield {"ph": "s", **arrow, "pid": int(ipus[writer]) + 1, "ts": tail * microseconds}
        yield {"ph": "f", "bp": "e", **arrow, "pid": int(ipus[reader]) + 1, "ts": head * microseconds}
