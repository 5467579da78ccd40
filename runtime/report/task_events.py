"""The tasks of pipelines in a trace for Perfetto: slices around the steps of each, and arrows between IPUs.

Input: `ExecutionTrace` and `TaskTrace`. Output: events. A task is the parent of its steps on the thread of the compute
tiles; where steps are folded across tasks, which then would not nest, tasks have a thread of their own. An arrow goes
from the end of a task that hands a value on to the start of the one on another IPU that reads it first.
Source: Google, "Trace Event Format": flow events, of which "s" and "f" with one id make an arrow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ipujax.runtime.profile import ExecutionTrace, TaskTrace

Event = dict[str, Any]
Slice = Callable[..., Event]  # (name, kind, process, thread, start, cycles, facts)
TASKS = 3  # thread id of tasks that do not nest
_INSIDE = 0.25  # of a task that an arrow begins before its end, or ends after its start, in cycles: it is bound there


def thread_of_tasks(trace: ExecutionTrace, tasks: TaskTrace, compute_tiles: int) -> int:
    """The thread of tasks: that of compute tiles if every step is in one task or in none.

    Args:
        trace: the steps.
        tasks: the tasks.
        compute_tiles: that thread.
    """
    worked = trace.work.any(1)
    for ipu in np.unique(tasks.ipu).tolist():
        mine = tasks.ipu == ipu
        starts, ends = tasks.start[mine], tasks.end[mine]
        rows = worked & (trace.ipu == ipu)
        first, last = trace.start[rows], trace.end[rows]
        place = np.searchsorted(starts, first, "right") - 1  # the last task that begins no later
        is_after = (place < 0) | (first >= ends[np.maximum(place, 0)])
        following = np.append(starts, np.iinfo(np.int64).max)[place + 1]
        fits = np.where(is_after, last <= following, last <= ends[np.maximum(place, 0)])
        if not fits.all():
            return TASKS
    return compute_tiles


def task_slices(tasks: TaskTrace, thread: int, make: Slice) -> Iterator[Event]:
    """A slice a task.

    Args:
        tasks: of a run.
        thread: of the slices.
        make: makes one.
    """
    columns = (tasks.ipu, tasks.stage, tasks.micro_batch, tasks.start, tasks.end, tasks.busy, tasks.waited)
    for n, row in enumerate(zip(*(column.tolist() for column in columns), strict=True)):
        ipu, stage, micro_batch, start, end, busy, waited = row
        facts = {"stage": stage, "work": tasks.kind_name(n), "micro_batch": micro_batch}
        facts |= {"busy_cycles": busy, "waited_cycles": waited}
        yield make(tasks.label(n), "task", ipu + 1, thread, start, end - start, **facts)


def task_arrows(tasks: TaskTrace, thread: int, microseconds: float) -> Iterator[Event]:
    """Two events for each value that goes from a task to one on another IPU.

    Args:
        tasks: of a run.
        thread: of their slices.
        microseconds: of a cycle.
    """
    ipus = tasks.ipu
    for number, (writer, reader) in enumerate(tasks.links().tolist(), 1):
        leaves, arrives = int(tasks.end[writer]) - _INSIDE, int(tasks.start[reader]) + _INSIDE
        about: Event = {"name": f"from stage {tasks.stage[writer]} to stage {tasks.stage[reader]}", "cat": "handed on"}
        about |= {"id": number, "tid": thread}
        yield {"ph": "s", **about, "pid": int(ipus[writer]) + 1, "ts": leaves * microseconds}
        yield {"ph": "f", "bp": "e", **about, "pid": int(ipus[reader]) + 1, "ts": arrives * microseconds}
