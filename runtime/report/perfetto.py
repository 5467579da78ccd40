"""Trace of a profile for Perfetto and Chrome: the steps and phases of each IPU over time.

Input: `Figures`. Output: data of the trace event format. Every IPU is a process whose threads are its compute tiles
and, where they move data, its I/O tiles; the host is a process with a thread for each IPU; live bytes are a
counter. On compute tiles a step is a slice, and its phases are slices inside it; idle time is a slice between steps.
Around the steps of a task of a pipeline is a slice of the task, on the thread of the compute tiles; where steps are
folded across tasks, which then would not nest, tasks have another thread. An arrow goes from the end of a task to the
start of the task on another IPU that reads its result first.
Steps and their phases have the line, the layer and the part of training of most of the step among their arguments, and
a step of several layers has all of them in `layers`.
Times are microseconds, as the format wants; the cycles of every slice are among its arguments, and those of the phases
of an IPU add up to the profile's. Iterations of loops beyond the first few are one slice, as its name says.
Source: Google, "Trace Event Format": flow events, of which "s" and "f" with one id make an arrow;
https://ui.perfetto.dev opens such files.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ipujax.runtime.profile import TRACE_PHASES, ExecutionTrace, Figures, TaskTrace, phase_cycles_of_ipus, slices
from ipujax.runtime.tensor import Origin

Event = dict[str, Any]
COMPUTE_TILES = 1  # thread ids of an IPU
IO_TILES = 2
TASKS = 3  # of tasks that do not nest
_MAX_LAYERS = 20  # that a step lists
_DIGITS = 6  # of microseconds: about a thousandth of a cycle
_INSET = 0.25  # cycles by which an arrow's ends are inside their tasks: a viewer binds it to the slice at that time
_HOST_EXCHANGE = TRACE_PHASES.index("host_exchange")
_IDLE = TRACE_PHASES.index("idle")
FOLDED = (
    "What is called '…, n iterations, folded' or '…, most of n steps, folded' is several things as one slice; in it"
    " each phase is one slice for all of them, in no order of time."
)


def perfetto(profile: Figures) -> dict[str, Any]:
    """Return the trace of a run, times in microseconds; there must be a timeline."""
    trace = profile.execution_trace
    target = profile.target
    writer = _Writer(trace, profile.tasks, _arguments_of_steps(profile), 1e6 / target.clock_hz)
    metadata = {
        "machine": f"{target.num_ipus} × {target.name}",
        "replicas": profile.replicas,
        "cycles": profile.cycles,
        "clock_hz": target.clock_hz,
        "phase_cycles": {f"IPU {ipu}": phases for ipu, phases in enumerate(phase_cycles_of_ipus(trace))},
        "note": FOLDED if trace.is_folded.any() else "every step of the run is a slice of its own",
    }
    return {"traceEvents": list(writer.events()), "displayTimeUnit": "ns", "otherData": metadata}


@dataclass(frozen=True, slots=True)
class _StepArguments:
    """Arguments of the slices of a step: `all_slices` for the step and its phases, `step_slice` for the step alone."""

    all_slices: dict[str, str]
    step_slice: dict[str, Any]


def _arguments_of_steps(profile: Figures) -> list[_StepArguments]:
    """Return the arguments of each step of the trace."""
    trace = profile.execution_trace
    # Thousands of steps share few sets of rows: arguments are computed once a set.
    sets = [_step_arguments([profile.step_costs[number].origin for number in numbers]) for numbers in trace.row_sets]
    arguments = []
    for line, number in zip(trace.line.tolist(), trace.rows.tolist(), strict=True):
        with_origin = sets[number]
        arguments.append(with_origin if with_origin.all_slices else _StepArguments({"line": trace.lines[line]}, {}))
    return arguments


def _step_arguments(origins: Sequence[Origin]) -> _StepArguments:
    """Return the line, layer and part of the largest origin of a step, and all layers if it has several."""
    if not origins:
        return _StepArguments({}, {})
    largest = origins[0]  # origins are in the order of their share of the step
    fields = {"line": str(largest), "layer": largest.layer, "part": largest.part}
    layers = list(dict.fromkeys(origin.layer for origin in origins if origin.layer))
    return _StepArguments(
        {name: value for name, value in fields.items() if value},
        {"layers": layers[:_MAX_LAYERS]} if len(layers) > 1 else {},
    )


class _Writer:
    """Writer of the events of one trace."""

    def __init__(
        self, trace: ExecutionTrace, tasks: TaskTrace, arguments: list[_StepArguments], microseconds: float
    ) -> None:
        self.trace = trace
        self.tasks = tasks
        self.arguments = arguments  # by step
        self.microseconds = microseconds  # of a cycle
        self.task_thread = thread_of_tasks(trace, tasks)
        self.phase_slices = slices(trace)
        self.num_ipus = len(trace.clocks)
        self.end = int(trace.clocks.max(initial=0))
        self.host = self.num_ipus + 1  # process ids; those of IPUs begin at 1
        self.memory = self.num_ipus + 2

    def events(self) -> Iterator[Event]:
        """Yield all events; a viewer nests slices of equal times by their order, so parents come first."""
        yield from self.tracks()
        yield from self.task_slices()
        yield from self.task_arrows()
        yield from self.steps()
        yield from self.phases()
        yield from self.transfers()
        yield from self.live_bytes()

    def tracks(self) -> Iterator[Event]:
        """Yield the names of processes, one for each IPU, the host and memory, and of the threads in them."""
        trace = self.trace
        for ipu in range(self.num_ipus):
            yield _meta("process_name", ipu + 1, 0, f"IPU {ipu}")
            yield _meta("thread_name", ipu + 1, COMPUTE_TILES, "compute tiles")
            if self.task_thread == TASKS and (self.tasks.ipu == ipu).any():
                yield _meta("thread_name", ipu + 1, TASKS, "tasks of pipelines")
            if trace.moved[trace.ipu == ipu].any():
                yield _meta("thread_name", ipu + 1, IO_TILES, "I/O tiles")
        yield _meta("process_name", self.host, 0, "Host")
        for ipu in np.unique(self.phase_slices.ipu[self.phase_slices.phase == _HOST_EXCHANGE]).tolist():
            yield _meta("thread_name", self.host, ipu + 1, f"transfers with IPU {ipu}")
        yield _meta("process_name", self.memory, 0, "Memory of all tiles")

    def slice(self, name: str, kind: str, pid: int, tid: int, start: int, cycles: int, **args: Any) -> Event:
        """Return a slice of cycles [start, start + cycles)."""
        # Both ends are rounded, not the duration: else slices would overlap their successors by a digit.
        begin, end = (round(time * self.microseconds, _DIGITS) for time in (start, start + cycles))
        track = {"pid": pid, "tid": tid, "ts": begin, "dur": round(end - begin, _DIGITS)}
        return {"ph": "X", "name": name, "cat": kind, **track, "args": {"cycles": cycles, **args}}

    def task_slices(self) -> Iterator[Event]:
        """Yield a slice for each task on a thread of its IPU."""
        tasks = self.tasks
        columns = (tasks.ipu, tasks.stage, tasks.micro_batch, tasks.start, tasks.end, tasks.busy, tasks.waited)
        for n, row in enumerate(zip(*(column.tolist() for column in columns), strict=True)):
            ipu, stage, micro_batch, start, end, busy, waited = row
            args = {"stage": stage, "work": tasks.kind_name(n), "micro_batch": micro_batch}
            args |= {"busy_cycles": busy, "waited_cycles": waited}
            yield self.slice(tasks.label(n), "task", ipu + 1, self.task_thread, start, end - start, **args)

    def task_arrows(self) -> Iterator[Event]:
        """Yield the two events of an arrow for each value that a task on another IPU reads."""
        tasks = self.tasks
        for number, (writer, reader) in enumerate(tasks.links().tolist(), 1):
            tail = int(tasks.end[writer]) - _INSET  # in cycles
            head = int(tasks.start[reader]) + _INSET
            name = f"from stage {tasks.stage[writer]} to stage {tasks.stage[reader]}"
            arrow: Event = {"name": name, "cat": "handed on", "id": number, "tid": self.task_thread}
            yield {"ph": "s", **arrow, "pid": int(tasks.ipu[writer]) + 1, "ts": tail * self.microseconds}
            yield {"ph": "f", "bp": "e", **arrow, "pid": int(tasks.ipu[reader]) + 1, "ts": head * self.microseconds}

    def steps(self) -> Iterator[Event]:
        """Yield a slice for each step that an IPU works in."""
        trace = self.trace
        for row in np.flatnonzero(trace.work.any(1)).tolist():
            step = int(trace.step[row])
            start, end = int(trace.start[row]), int(trace.end[row])
            args: dict[str, Any] = self.arguments[step].all_slices | self.arguments[step].step_slice
            args |= {"iterations": int(trace.iterations[step])} if trace.iterations[step] > 1 else {}
            pid = int(trace.ipu[row]) + 1
            yield self.slice(trace.label(step), "step", pid, COMPUTE_TILES, start, end - start, **args)

    def phases(self) -> Iterator[Event]:
        """Yield a slice for each phase of a step and each wait, and on the host one for each transfer."""
        columns = (getattr(self.phase_slices, name).tolist() for name in ("ipu", "start", "cycles", "phase", "span"))
        for ipu, start, cycles, phase, span in zip(*columns, strict=True):
            step = int(self.trace.step[span])
            name = TRACE_PHASES[phase]
            label = self.trace.label(step)
            args = {"before": label} if phase == _IDLE else self.arguments[step].all_slices
            yield self.slice(name.replace("_", " "), name, ipu + 1, COMPUTE_TILES, start, cycles, **args)
            if phase == _HOST_EXCHANGE:
                yield self.slice(label, "host", self.host, ipu + 1, start, cycles, **args)
        # An IPU that ends early is idle up to the end of the run, so that the phases of each add up to its cycles.
        for ipu in np.flatnonzero(self.trace.clocks < self.end).tolist():
            clock = int(self.trace.clocks[ipu])
            yield self.slice(
                "idle", "idle", ipu + 1, COMPUTE_TILES, clock, self.end - clock, before="the end of the run"
            )

    def transfers(self) -> Iterator[Event]:
        """Yield the transfers of I/O tiles, which overlap with compute; in a folded step their times are unknown."""
        trace = self.trace
        for row in np.flatnonzero(trace.moved).tolist():
            step = int(trace.step[row])
            ipu = int(trace.ipu[row]) + 1
            start = int(trace.start[row])
            cycles = int(trace.moved[row])
            length = min(cycles, int(trace.end[row]) - start)  # a slice within its step; the argument has all cycles
            event = self.slice(trace.label(step), "io_transfer", ipu, IO_TILES, start, length)
            yield event | {"args": {"cycles": cycles, **self.arguments[step].all_slices}}

    def live_bytes(self) -> Iterator[Event]:
        """Yield the live bytes of all tiles as a counter, which changes where the first IPU begins a step."""
        trace = self.trace
        first_start = np.full(len(trace.name), np.iinfo(np.int64).max)  # in cycles, by step: that of its first IPU
        np.minimum.at(first_start, trace.step, trace.start)
        steps = np.flatnonzero(trace.live_bytes >= 0)  # −1 where they are unknown
        for step in steps[np.argsort(first_start[steps], kind="stable")].tolist():
            time = round(int(first_start[step]) * self.microseconds, _DIGITS)
            value = {"bytes": int(trace.live_bytes[step])}
            yield {"ph": "C", "name": "live bytes", "pid": self.memory, "tid": 0, "ts": time, "args": value}


def thread_of_tasks(trace: ExecutionTrace, tasks: TaskTrace) -> int:
    """Return the thread for tasks: that of steps, `COMPUTE_TILES`, if each step nests in one task or in none."""
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
    return COMPUTE_TILES


def _meta(kind: str, pid: int, tid: int, name: str) -> Event:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}
