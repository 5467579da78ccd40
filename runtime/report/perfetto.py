"""A profile as a trace for Perfetto and Chrome: what each IPU does when.

Input: `Figures`. Output: data of the trace event format. Every IPU is a process whose threads are its compute tiles
and, where they move something, its I/O tiles; the host is a process with a thread for each IPU; live bytes are a
counter. On compute tiles a step is a slice, and its phases are slices inside it; idle time is a slice between steps.
Around the steps of a task of a pipeline is a slice of the task, and arrows go between tasks (`task_events`).
Steps and their phases have the line, the layer and the part of training of most of the step among their arguments, and
a step of several layers has all of them in `layers`.
Times are microseconds, as the format wants; the cycles of every slice are among its arguments, and those of the phases
of an IPU add up to the profile's. Iterations of loops beyond the first few are one slice, as its name says.
Source: Google, "Trace Event Format"; https://ui.perfetto.dev opens such files.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ipujax.runtime.errors import ProfileError
from ipujax.runtime.profile import (
    NO_TASKS,
    TRACE_PHASES,
    ExecutionTrace,
    Figures,
    TaskTrace,
    phase_cycles_of_ipus,
    slices,
)
from ipujax.runtime.report.task_events import TASKS, task_arrows, task_slices, thread_of_tasks
from ipujax.runtime.tensor import Origin

Event = dict[str, Any]
COMPUTE_TILES, IO_TILES = 1, 2  # thread ids of an IPU
_LAYERS = 20  # that a step names, at most
_DIGITS = 6  # of microseconds: a thousandth of a cycle
_HOST_EXCHANGE, _IDLE = TRACE_PHASES.index("host_exchange"), TRACE_PHASES.index("idle")
FOLDED = (
    "What is called 'n iterations of …, folded' or '…, most of n steps, folded' is several things as one slice; in it"
    " each phase is one slice for all of them, in no order of time."
)


def perfetto(profile: Figures) -> dict[str, Any]:
    """The trace of a run.

    Args:
        profile: of the run.

    Raises:
        ProfileError: a loop whose trip count is unknown, or a profile saved by a version that kept no timeline.
    """
    trace, target = profile.execution_trace, profile.target
    try:
        tasks = profile.tasks
    except ProfileError:  # saved by a version that knew none; its trace has the steps alone
        tasks = NO_TASKS
    writer = _Writer(trace, tasks, _places(profile), 1e6 / target.clock_hz)
    about = {
        "machine": f"{target.num_ipus} × {target.name}",
        "replicas": profile.replicas,
        "cycles": profile.cycles,
        "clock_hz": target.clock_hz,
        "phase_cycles": {f"IPU {ipu}": phases for ipu, phases in enumerate(phase_cycles_of_ipus(trace))},
        "note": FOLDED if trace.is_folded.any() else "every step of the run is a slice of its own",
    }
    return {"traceEvents": list(writer.events()), "displayTimeUnit": "ns", "otherData": about}


@dataclass(frozen=True, slots=True)
class _Place:
    """Arguments of slices of one step: `common` of all of them, `more` of the slice of the step itself."""

    common: dict[str, str]
    more: dict[str, Any]


def _places(profile: Figures) -> list[_Place]:
    """The arguments of the slices of each step."""
    trace, rows = profile.execution_trace, profile.step_costs
    sets = [_place([rows[number].origin for number in numbers]) for numbers in trace.row_sets]
    places = []
    for line, number in zip(trace.line.tolist(), trace.rows.tolist(), strict=True):
        place = sets[number]
        places.append(place if place.common else _Place({"line": trace.lines[line]}, {}))
    return places


def _place(origins: Sequence[Origin]) -> _Place:
    if not origins:
        return _Place({}, {})
    facts = {"line": str(origins[0]), "layer": origins[0].layer, "part": origins[0].part}
    layers = list(dict.fromkeys(origin.layer for origin in origins if origin.layer))
    return _Place(
        {name: fact for name, fact in facts.items() if fact}, {"layers": layers[:_LAYERS]} if len(layers) > 1 else {}
    )


class _Writer:
    """Makes the events of one trace."""

    def __init__(self, trace: ExecutionTrace, tasks: TaskTrace, places: list[_Place], microseconds: float) -> None:
        self.places = places
        self.tasks, self.task_thread = tasks, thread_of_tasks(trace, tasks, COMPUTE_TILES)
        self.trace, self.microseconds, self.cut = trace, microseconds, slices(trace)
        self.num_ipus, self.end = len(trace.clocks), int(trace.clocks.max(initial=0))
        self.host, self.memory = self.num_ipus + 1, self.num_ipus + 2  # process ids; those of IPUs begin at 1

    def events(self) -> Iterator[Event]:
        """All of them; parents before what is inside them."""
        yield from self.tracks()
        yield from task_slices(self.tasks, self.task_thread, self.slice)
        yield from task_arrows(self.tasks, self.task_thread, self.microseconds)
        yield from self.steps()
        yield from self.phases()
        yield from self.transfers()
        yield from self.live_bytes()

    def tracks(self) -> Iterator[Event]:
        trace = self.trace
        for ipu in range(self.num_ipus):
            yield _meta("process_name", ipu + 1, 0, f"IPU {ipu}")
            yield _meta("thread_name", ipu + 1, COMPUTE_TILES, "compute tiles")
            if self.task_thread == TASKS and (self.tasks.ipu == ipu).any():
                yield _meta("thread_name", ipu + 1, TASKS, "tasks of pipelines")
            if trace.moved[trace.ipu == ipu].any():
                yield _meta("thread_name", ipu + 1, IO_TILES, "I/O tiles")
        yield _meta("process_name", self.host, 0, "Host")
        for ipu in np.unique(self.cut.ipu[self.cut.phase == _HOST_EXCHANGE]).tolist():
            yield _meta("thread_name", self.host, ipu + 1, f"transfers with IPU {ipu}")
        yield _meta("process_name", self.memory, 0, "Memory of all tiles")

    def slice(self, name: str, kind: str, pid: int, tid: int, start: int, cycles: int, **facts: Any) -> Event:
        """One slice; its end is that of the next one's start, to the last digit."""
        begin, end = (round(time * self.microseconds, _DIGITS) for time in (start, start + cycles))
        place = {"pid": pid, "tid": tid, "ts": begin, "dur": round(end - begin, _DIGITS)}
        return {"ph": "X", "name": name, "cat": kind, **place, "args": {"cycles": cycles, **facts}}

    def steps(self) -> Iterator[Event]:
        trace = self.trace
        for row in np.flatnonzero(trace.work.any(1)).tolist():
            step, start, end = int(trace.step[row]), int(trace.start[row]), int(trace.end[row])
            facts: dict[str, Any] = self.places[step].common | self.places[step].more
            facts |= {"iterations": int(trace.iterations[step])} if trace.iterations[step] > 1 else {}
            ipu = int(trace.ipu[row]) + 1
            yield self.slice(trace.label(step), "step", ipu, COMPUTE_TILES, start, end - start, **facts)

    def phases(self) -> Iterator[Event]:
        columns = (getattr(self.cut, name).tolist() for name in ("ipu", "start", "cycles", "phase", "span"))
        for ipu, start, cycles, phase, span in zip(*columns, strict=True):
            step = int(self.trace.step[span])
            name, label = TRACE_PHASES[phase], self.trace.label(step)
            facts = {"before": label} if phase == _IDLE else self.places[step].common
            yield self.slice(name.replace("_", " "), name, ipu + 1, COMPUTE_TILES, start, cycles, **facts)
            if phase == _HOST_EXCHANGE:
                yield self.slice(label, "host", self.host, ipu + 1, start, cycles, **facts)
        for ipu in np.flatnonzero(self.trace.clocks < self.end).tolist():
            clock = int(self.trace.clocks[ipu])
            yield self.slice(
                "idle", "idle", ipu + 1, COMPUTE_TILES, clock, self.end - clock, before="the end of the run"
            )

    def transfers(self) -> Iterator[Event]:
        """What I/O tiles move while the others go on; inside what is folded it is not known when."""
        trace = self.trace
        for row in np.flatnonzero(trace.moved).tolist():
            step, ipu, start = int(trace.step[row]), int(trace.ipu[row]) + 1, int(trace.start[row])
            moved = int(trace.moved[row])
            length = min(moved, int(trace.end[row]) - start)
            event = self.slice(trace.label(step), "io_transfer", ipu, IO_TILES, start, length)
            yield event | {"args": {"cycles": moved, **self.places[step].common}}

    def live_bytes(self) -> Iterator[Event]:
        trace = self.trace
        first = np.full(len(trace.name), np.iinfo(np.int64).max)
        np.minimum.at(first, trace.step, trace.start)
        known = np.flatnonzero(trace.live_bytes >= 0)
        for step in known[np.argsort(first[known], kind="stable")].tolist():
            time = round(int(first[step]) * self.microseconds, _DIGITS)
            value = {"bytes": int(trace.live_bytes[step])}
            yield {"ph": "C", "name": "live bytes", "pid": self.memory, "tid": 0, "ts": time, "args": value}


def _meta(kind: str, pid: int, tid: int, name: str) -> Event:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}
