"""What each IPU does from when to when, as plain columns: what timelines are drawn and written from.

Input: an `Executable`, the spans of a run, and what is live at each step. Output: `ExecutionTrace`, of arrays and texts
alone, which also makes JSON-able data and is made of it; `slices` cuts its spans into phases.
Limits: those of `timeline.spans`. Bytes are those of all tiles; a step that several callers run has the most of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from ipujax.runtime.compile import Executable
from ipujax.runtime.cost import ComputeSetCost
from ipujax.runtime.graph import Branch, Leaf, Loop, Program
from ipujax.runtime.profile.attribution import label
from ipujax.runtime.sections.ids import Json
from ipujax.runtime.sections.liveness import liveness_tree
from ipujax.runtime.tensor import Origin, readable_name
from ipujax.runtime.timeline import PHASES, Spans
from ipujax.runtime.timeline.clocks import EXCHANGE, SYNC

TRACE_PHASES = (*PHASES, "idle")
IDLE = len(PHASES)
_NO_BYTES = -1


@dataclass(frozen=True, slots=True, eq=False)
class ExecutionTrace:
    """When each IPU does what, in cycles since the start of the run.

    Args:
        names: debug names.
        lines: lines of source.
        clocks: cycle at which each IPU ends, int64[ipus].
        name: the name of each step, as its number, int64[steps]; so is `line` the line.
        line: see `name`.
        iterations: iterations of a loop that each step holds, int64[steps].
        joined: steps of the program that each step holds, int64[steps].
        row_sets: distinct lists of rows of operations, numbers in `Figures.step_costs`.
        rows: the number in `row_sets` of the rows that each step belongs to, int64[steps]; by member, that with most
            cycles first. The list is empty for folded iterations, and in profiles that were saved without.
        live_bytes: bytes live at each step, what is always live included, −1 where that is not known; int64[steps].
        step: the step of each span of time of an IPU, int64[spans]; in order of IPU, then of time.
        ipu: the IPU of each span, int64[spans].
        start: when it begins, int64[spans].
        end: when it ends, int64[spans].
        work: cycles of each of `timeline.PHASES`, int64[spans, 5].
        after: cycles of sync and of exchange that come after computing, int64[spans, 2]; part of `work`.
        moved: cycles in which the IPU's I/O tiles moved data, int64[spans].
    """

    names: tuple[str, ...]
    lines: tuple[str, ...]
    clocks: np.ndarray
    name: np.ndarray
    line: np.ndarray
    iterations: np.ndarray
    joined: np.ndarray
    row_sets: tuple[tuple[int, ...], ...]
    rows: np.ndarray
    live_bytes: np.ndarray
    step: np.ndarray
    ipu: np.ndarray
    start: np.ndarray
    end: np.ndarray
    work: np.ndarray
    after: np.ndarray
    moved: np.ndarray

    @property
    def is_folded(self) -> np.ndarray:
        """Whether each span holds several iterations or steps, bool[spans]."""
        return np.asarray((self.iterations > 1) | (self.joined > 1))[self.step]

    def label(self, step: int) -> str:
        """The name of a step, and what it holds if that is several.

        Args:
            step: its number.
        """
        name, times = readable_name(self.names[self.name[step]]), int(self.iterations[step])
        joined = int(self.joined[step])
        if times > 1:
            return f"{times:,} iterations of {name}, folded"
        return f"{name}, most of {joined:,} steps, folded" if joined > 1 else name

    def rows_of(self, step: int) -> tuple[int, ...]:
        """The rows of operations of a step, see `rows`.

        Args:
            step: its number.
        """
        return self.row_sets[self.rows[step]]

    def data(self) -> Json:
        """The columns as JSON-able data."""
        columns = {item.name: getattr(self, item.name) for item in fields(self)}
        return {name: x.tolist() if isinstance(x, np.ndarray) else list(x) for name, x in columns.items()}

    @classmethod
    def of_data(cls, data: Mapping[str, Any]) -> ExecutionTrace:
        """The trace of such data.

        Args:
            data: as `data` makes it.

        Raises:
            KeyError, TypeError, ValueError: data of something else.
        """
        names, lines = tuple(data["names"]), tuple(data["lines"])
        row_sets = tuple(map(tuple, data.get("row_sets", [()])))
        columns = {"rows": [0] * len(data["name"])} | dict(data)
        numbers = {name: np.array(columns[name], np.int64) for name in _COLUMNS}
        for name, width in _WIDTHS.items():
            numbers[name] = numbers[name].reshape(-1, width)
        trace = cls(names, lines, row_sets=row_sets, **numbers)
        sizes = {len(getattr(trace, name)) for name in ("step", "ipu", "start", "end", "work", "after", "moved")}
        if len(sizes) > 1 or (len(trace.step) and trace.step.max() >= len(trace.name)):
            raise ValueError("columns of a trace differ in length")
        return trace


_COLUMNS = tuple(item.name for item in fields(ExecutionTrace) if item.name not in ("names", "lines", "row_sets"))
_WIDTHS = {"work": len(PHASES), "after": 2}


@dataclass(frozen=True, slots=True, eq=False)
class Slices:
    """Phases of IPUs in order of IPU and time; all members int64[slices].

    Args:
        ipu: whose.
        start: cycle at which it begins.
        cycles: how long it lasts, at least 1.
        phase: number of its phase in `TRACE_PHASES`.
        span: the span it is part of; of idle time, the span that was waited for.
    """

    ipu: np.ndarray
    start: np.ndarray
    cycles: np.ndarray
    phase: np.ndarray
    span: np.ndarray


# Phases of a span in the order in which they pass: of the cycles of each, those that come after computing are last.
_ORDER = ("sync", "host_exchange", "global_exchange", "exchange", "compute", "sync", "exchange", "idle")


def slices(trace: ExecutionTrace) -> Slices:
    """Cuts spans into phases, and adds the idle time before each; by IPU they add up to its clock.

    Args:
        trace: of a run. In a span of several iterations or steps each phase is one slice, for all of them.
    """
    own = np.flatnonzero(trace.work.any(1))  # what I/O tiles do alone is on their own track
    work, after, ipu = trace.work[own], trace.after[own], trace.ipu[own]
    cycles = np.stack([work[:, PHASES.index(name)] if name != "idle" else 0 * ipu for name in _ORDER], 1)
    cycles[:, 0] -= after[:, 0]
    cycles[:, 3] -= after[:, 1]
    cycles[:, 5:7] = after
    start, end = trace.start[own], trace.end[own]
    cycles[:, 7] = end - start - cycles.sum(1)  # waits inside what is folded
    before = np.where(np.append(-1, ipu[:-1]) == ipu, np.append(0, end[:-1]), 0)
    gaps = np.stack([start - before, *cycles.T], 1)
    starts = before[:, None] + np.cumsum(gaps, 1) - gaps
    phases = np.array([IDLE, *map(TRACE_PHASES.index, _ORDER)])
    row, column = np.nonzero(gaps)
    return Slices(ipu[row], starts[row, column], gaps[row, column], phases[column], own[row])


def phase_cycles_of_ipus(trace: ExecutionTrace) -> tuple[dict[str, int], ...]:
    """Cycles of each of `TRACE_PHASES` of every IPU, idle time up to the end of the run included.

    Args:
        trace: of a run.
    """
    cut, end = slices(trace), int(trace.clocks.max(initial=0))
    ipus = len(trace.clocks)
    cycles = np.zeros((ipus, len(TRACE_PHASES)), np.int64)
    np.add.at(cycles, (cut.ipu, cut.phase), cut.cycles)
    cycles[:, IDLE] += end - trace.clocks
    return tuple(dict(zip(TRACE_PHASES, row, strict=True)) for row in cycles.tolist())


def execution_trace(
    executable: Executable, spans: Spans, clocks: np.ndarray, rows: Sequence[tuple[int, ...]] = ()
) -> ExecutionTrace:
    """The columns of a run.

    Args:
        executable: what ran.
        spans: of the run.
        clocks: cycle at which each IPU ends, int64[ipus].
        rows: numbers of the rows of operations of each step; none are known when empty.
    """
    row_sets: dict[tuple[int, ...], int] = {}
    row_set = [row_sets.setdefault(numbers, len(row_sets)) for numbers in rows or [()] * len(spans.nodes)]
    names: dict[str, int] = {}
    lines: dict[str, int] = {}
    places = [_place(node) for node in spans.nodes]
    name = [names.setdefault(text, len(names)) for text, _ in places]
    line = [lines.setdefault(text, len(lines)) for _, text in places]
    live, after = _live_bytes(executable), {node: _after(executable, node) for node in set(spans.nodes)}
    each_after = np.array([after[node] for node in spans.nodes], np.int64).reshape(-1, executable.target.num_ipus, 2)
    folded = (spans.iterations > 1) | (spans.merged_steps > 1)
    return ExecutionTrace(
        tuple(names),
        tuple(lines),
        np.asarray(clocks, np.int64),
        np.array(name, np.int64),
        np.array(line, np.int64),
        spans.iterations,
        spans.merged_steps,
        tuple(row_sets),
        np.array(row_set, np.int64),
        np.array([live.get(node, _NO_BYTES) for node in spans.nodes], np.int64),
        spans.step,
        spans.ipu,
        spans.start,
        spans.end,
        spans.work,
        np.where(folded[spans.step, None], 0, each_after[spans.step, spans.ipu]),
        spans.transfer_cycles,
    )


def _place(node: Program) -> tuple[str, str]:
    """Name and line of a step."""
    if isinstance(node, Leaf | Branch):
        origin, name = label(node)
        return name, str(origin)
    assert isinstance(node, Loop)
    return (f"the loop of {node.origin}" if node.origin != Origin() else "a loop"), str(node.origin)


def _after(executable: Executable, node: Program) -> np.ndarray:
    """Cycles of sync and of exchange after computing, int64[ipus, 2]."""
    after, target = np.zeros((executable.target.num_ipus, 2), np.int64), executable.target
    cost = executable.costs.get(node) if isinstance(node, Leaf) else None
    if isinstance(cost, ComputeSetCost) and cost.after.cycles.any():
        slowest = cost.after.cycles.reshape(-1, target.tiles_per_ipu).max(1)
        there = slice(cost.first_ipu, cost.first_ipu + len(slowest))
        after[there, 0], after[there, 1] = target.internal_sync_cycles * (slowest > 0), slowest
        assert (after <= executable.steps[node].work[:, [SYNC, EXCHANGE]]).all()
    return after


def _live_bytes(executable: Executable) -> dict[Program, int]:
    """Bytes live at each step, the most of all its calls."""
    tree = liveness_tree(executable)
    live: dict[Program, int] = {}
    for node in tree.root.walk():
        if node.live_bytes is not None:
            live[node.program] = max(live.get(node.program, 0), tree.always_bytes + node.live_bytes)
    return live
