"""Traces of a run as plain columns: spans of the steps on each IPU, from which charts of time are drawn, and of tasks.

Input: an `Executable`, the spans of a run, and the live bytes of each step; `TaskSpans`. Output: `ExecutionTrace`, of
arrays and texts, whose `slices` cut its spans into phases; `TaskTrace`.
Limits: those of `timeline.timeline` and `timeline.task_spans`. Bytes are those of all tiles; a step that several
callers run has their maximum. Tasks have no rows where there are too many.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np

from ipujax.runtime.compile import Executable
from ipujax.runtime.cost import ComputeSetCost
from ipujax.runtime.files.figure_kinds import Row
from ipujax.runtime.files.figure_records import Length
from ipujax.runtime.files.kinds import Integer, List, Record, Text
from ipujax.runtime.graph import TASK_KINDS, Branch, Leaf, Loop, PipelineLayout, Program
from ipujax.runtime.profile.attribution import label
from ipujax.runtime.sections.live_variables import liveness_tree
from ipujax.runtime.tensor import Origin, readable_name
from ipujax.runtime.timeline import PHASES, Spans, TaskSpans
from ipujax.runtime.timeline.clocks import EXCHANGE, SYNC

TRACE_PHASES = (*PHASES, "idle")
IDLE = len(PHASES)
_NO_BYTES = -1
# Names of lengths: of lists of these lengths.
_NAMES = "names of the trace"
_LINES = "lines of the trace"
_STEPS = "steps of the trace"
_SPANS = "spans of the trace"
_SETS = "sets of rows"


@dataclass(frozen=True, slots=True, eq=False)
class ExecutionTrace:
    """Spans of steps on IPUs, in cycles since the start of the run.

    Args:
        names: debug names.
        lines: lines of source.
        clocks: cycle at which each IPU ends, int64[ipus].
        name: index in `names` of each step, int64[steps].
        line: index in `lines` of each step, int64[steps].
        iterations: iterations of a loop in each step, else 1, int64[steps].
        joined: steps of the program in each step, int64[steps].
        row_sets: distinct lists of rows of operations, numbers in `Figures.step_costs`.
        rows: index in `row_sets` of each step, int64[steps]; rows of the member with most cycles first. The list is
            empty for folded iterations.
        live_bytes: live bytes at each step, always live ones included, −1 if unknown; int64[steps].
        step: step of each span, int64[spans]; spans are sorted by IPU, then by time.
        ipu: IPU of each span, int64[spans].
        start: cycle at which it begins, int64[spans].
        end: cycle at which it ends, int64[spans].
        work: cycles of each of `timeline.PHASES`, int64[spans, 5].
        after: cycles of sync and of exchange after compute, int64[spans, 2]; part of `work`.
        moved: cycles of transfers on the IPU's I/O tiles, int64[spans].
    """

    names: Annotated[tuple[str, ...], Length(_NAMES)]
    lines: Annotated[tuple[str, ...], Length(_LINES)]
    clocks: Annotated[np.ndarray, List(Integer(), "IPUs")]
    name: Annotated[np.ndarray, List(Integer(below=_NAMES), _STEPS)]
    line: Annotated[np.ndarray, List(Integer(below=_LINES), _STEPS)]
    iterations: Annotated[np.ndarray, List(Integer(1), _STEPS)]
    joined: Annotated[np.ndarray, List(Integer(1), _STEPS)]
    row_sets: Annotated[tuple[tuple[Annotated[int, Integer(below="operations")], ...], ...], Length(_SETS)]
    rows: Annotated[np.ndarray, List(Integer(below=_SETS), _STEPS)]
    live_bytes: Annotated[np.ndarray, List(Integer(_NO_BYTES), _STEPS)]
    step: Annotated[np.ndarray, List(Integer(below=_STEPS), _SPANS)]
    ipu: Annotated[np.ndarray, List(Integer(below="IPUs"), _SPANS)]
    start: Annotated[np.ndarray, List(Integer(), _SPANS)]
    end: Annotated[np.ndarray, List(Integer(), _SPANS)]
    work: Annotated[np.ndarray, List(Row((Integer(),) * len(PHASES)), _SPANS)]
    after: Annotated[np.ndarray, List(Row((Integer(), Integer())), _SPANS)]
    moved: Annotated[np.ndarray, List(Integer(), _SPANS)]

    @property
    def is_folded(self) -> np.ndarray:
        """True for spans of several iterations or steps, bool[spans]."""
        return np.asarray((self.iterations > 1) | (self.joined > 1))[self.step]

    @property
    def labels(self) -> tuple[str, ...]:
        """The label of each step, in order."""
        return tuple(map(self.label, range(len(self.name))))

    def label(self, step: int) -> str:
        """Return the name of a step by its number, with the number of its iterations or steps if it has several."""
        name = readable_name(self.names[self.name[step]])
        iterations = int(self.iterations[step])
        program_steps = int(self.joined[step])
        if iterations > 1:
            return f"{name}, {iterations:,} iterations, folded"
        return f"{name}, most of {program_steps:,} steps, folded" if program_steps > 1 else name


@dataclass(frozen=True, slots=True, eq=False)
class Slices:
    """Phases of IPUs in order of IPU and time; all members int64[slices].

    Args:
        ipu: number of the IPU.
        start: cycle at which it begins.
        cycles: its length, at least 1.
        phase: index of its phase in `TRACE_PHASES`.
        span: span that it is part of; of idle time, the next span of the IPU.
    """

    ipu: np.ndarray
    start: np.ndarray
    cycles: np.ndarray
    phase: np.ndarray
    span: np.ndarray


# Phases of a span in order of time: sync and exchange come twice, before compute and after it (`after`).
_ORDER = ("sync", "host_exchange", "global_exchange", "exchange", "compute", "sync", "exchange", "idle")


def slices(trace: ExecutionTrace) -> Slices:
    """Cut spans into phases, and add the idle time before each; the slices of an IPU add up to its clock."""
    # In a span of several iterations or steps each phase is one slice, for all of them.
    spans = np.flatnonzero(trace.work.any(1))  # transfers on I/O tiles overlap with these, so they are not slices
    work, after, ipu = (column[spans] for column in (trace.work, trace.after, trace.ipu))
    cycles = np.stack([work[:, PHASES.index(name)] if name != "idle" else 0 * ipu for name in _ORDER], 1)
    # Columns as in `_ORDER`: sync and exchange after compute (5, 6) are part of the counts of those before it (0, 3).
    cycles[:, 0] -= after[:, 0]
    cycles[:, 3] -= after[:, 1]
    cycles[:, 5:7] = after
    start = trace.start[spans]
    end = trace.end[spans]
    cycles[:, 7] = end - start - cycles.sum(1)  # waits inside folded spans
    # End of the span before on the same IPU, 0 for its first.
    before = np.where(np.append(-1, ipu[:-1]) == ipu, np.append(0, end[:-1]), 0)
    gaps = np.stack([start - before, *cycles.T], 1)
    starts = before[:, None] + np.cumsum(gaps, 1) - gaps
    phases = np.array([IDLE, *map(TRACE_PHASES.index, _ORDER)])
    row, column = np.nonzero(gaps)
    return Slices(ipu[row], starts[row, column], gaps[row, column], phases[column], spans[row])


def phase_cycles_of_ipus(trace: ExecutionTrace) -> tuple[dict[str, int], ...]:
    """Return the cycles of each of `TRACE_PHASES` of every IPU, idle time up to the end of the run included."""
    cut = slices(trace)
    end = int(trace.clocks.max(initial=0))
    ipus = len(trace.clocks)
    cycles = np.zeros((ipus, len(TRACE_PHASES)), np.int64)
    np.add.at(cycles, (cut.ipu, cut.phase), cut.cycles)
    cycles[:, IDLE] += end - trace.clocks
    return tuple(dict(zip(TRACE_PHASES, row, strict=True)) for row in cycles.tolist())


def execution_trace(
    executable: Executable, spans: Spans, clocks: np.ndarray, rows: Sequence[tuple[int, ...]] = ()
) -> ExecutionTrace:
    """Return the trace of a run.

    Args:
        executable: the compiled program.
        spans: when each IPU runs each step.
        clocks: cycle at which each IPU ends.
        rows: numbers of the operations of each step in `Figures.step_costs`; none by default.
    """
    row_sets: dict[tuple[int, ...], int] = {}
    row_set = [row_sets.setdefault(numbers, len(row_sets)) for numbers in rows or [()] * len(spans.nodes)]
    names: dict[str, int] = {}
    lines: dict[str, int] = {}
    labels = [_name_and_line(node) for node in spans.nodes]
    name = [names.setdefault(text, len(names)) for text, _ in labels]
    line = [lines.setdefault(text, len(lines)) for _, text in labels]
    live = _live_bytes(executable)
    after_of_node = {node: _after_compute(executable, node) for node in set(spans.nodes)}
    after = np.array([after_of_node[node] for node in spans.nodes], np.int64).reshape(-1, executable.target.num_ipus, 2)
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
        np.where(folded[spans.step, None], 0, after[spans.step, spans.ipu]),
        spans.transfer_cycles,
    )


def _name_and_line(node: Program) -> tuple[str, str]:
    if isinstance(node, Leaf | Branch):
        origin, name = label(node)
        return name, str(origin)
    assert isinstance(node, Loop)
    # Charts show the beginning of a name that is too wide.
    place, _, function = str(node.origin).partition(" (")
    if node.origin == Origin():
        return "loop", str(node.origin)
    return f"loop in {function[:-1]} ({place})" if function else f"loop of {place}", str(node.origin)


def _after_compute(executable: Executable, node: Program) -> np.ndarray:
    """Return the cycles of sync and of exchange after compute of one run of a step, int64[ipus, 2]."""
    target = executable.target
    after = np.zeros((target.num_ipus, 2), np.int64)
    cost = executable.costs.get(node) if isinstance(node, Leaf) else None
    if isinstance(cost, ComputeSetCost) and cost.after.cycles.any():
        slowest = cost.after.cycles.reshape(-1, target.tiles_per_ipu).max(1)
        ipus = slice(cost.first_ipu, cost.first_ipu + len(slowest))
        after[ipus, 0] = target.internal_sync_cycles * (slowest > 0)
        after[ipus, 1] = slowest
        assert (after <= executable.steps[node].work[:, [SYNC, EXCHANGE]]).all()
    return after


def _live_bytes(executable: Executable) -> dict[Program, int]:
    """Return the live bytes at each step, the maximum over its calls."""
    tree = executable.once(liveness_tree)
    always_bytes = tree.always_bytes
    live: dict[Program, int] = {}
    for node in tree.root.walk():
        if node.live_bytes is not None:
            live[node.program] = max(live.get(node.program, 0), always_bytes + node.live_bytes)
    return live


_TASK = Row((Integer(), Text(TASK_KINDS)))
_PIPELINE = Record(
    {"name": Text(), "schedule": Text(), "ipus": List(Integer(below="IPUs"), minimum=1), "micro_batches": Integer(1)}
    | {"tasks": List(_TASK), "links": List(Row((_TASK, _TASK)))}
)
_OF_PIPELINES = List(Integer(), "pipelines")
_OF_TASKS = List(Integer(), "tasks")


@dataclass(frozen=True, slots=True, eq=False)
class TaskTrace:
    """The tasks of all pipelines in program order; those of one IPU are sorted by time.

    Args:
        pipelines: layout of each pipeline.
        pipeline_start: cycle at which the first task of each begins, int64[pipelines].
        pipeline_end: cycle at which its last task ends, int64[pipelines]; 0, as its start, if it has no tasks here.
        pipeline: the pipeline of each task, int64[tasks].
        stage: its stage, int64[tasks].
        kind: index of its kind in `TASK_KINDS`, int64[tasks].
        micro_batch: its micro-batch, int64[tasks].
        start: cycle at which its work begins, after its waits, int64[tasks].
        end: cycle at which it ends, int64[tasks].
        busy: busy cycles of its IPU from `start` to `end`, int64[tasks].
        waited: idle cycles of its IPU since its task before, or the start of the pipeline, int64[tasks].
    """

    pipelines: Annotated[tuple[PipelineLayout, ...], List(_PIPELINE, "pipelines")]
    pipeline_start: Annotated[np.ndarray, _OF_PIPELINES]
    pipeline_end: Annotated[np.ndarray, _OF_PIPELINES]
    pipeline: Annotated[np.ndarray, List(Integer(below="pipelines"), "tasks")]
    stage: Annotated[np.ndarray, _OF_TASKS]
    kind: Annotated[np.ndarray, List(Integer(maximum=len(TASK_KINDS) - 1), "tasks")]
    micro_batch: Annotated[np.ndarray, _OF_TASKS]
    start: Annotated[np.ndarray, _OF_TASKS]
    end: Annotated[np.ndarray, _OF_TASKS]
    busy: Annotated[np.ndarray, _OF_TASKS]
    waited: Annotated[np.ndarray, _OF_TASKS]

    def __len__(self) -> int:
        return len(self.pipeline)

    @property
    def ipu(self) -> np.ndarray:
        """The IPU of each task, int64[tasks]."""
        ipus = [np.array(layout.ipus, np.int64) for layout in self.pipelines]
        first = np.cumsum([0, *(len(each) for each in ipus)])
        return np.concatenate([*ipus, np.zeros(0, np.int64)])[first[self.pipeline] + self.stage]

    def label(self, task: int) -> str:
        """Return stage, kind and micro-batch of a task by its number, and its pipeline where there are several."""
        kind = self.kind_name(task).replace("_", " of ")
        text = f"stage {self.stage[task]}, {kind}, micro-batch {self.micro_batch[task]}"
        return text if len(self.pipelines) == 1 else f"{text} of {self.pipelines[self.pipeline[task]].name}"

    def kind_name(self, task: int) -> str:
        """Return the kind of a task by its number, one of `TASK_KINDS`."""
        return TASK_KINDS[self.kind[task]]

    def links(self, between_ipus: bool = True) -> np.ndarray:
        """Return the pairs of tasks of which the first sends a value to the second, int64[pairs, 2]."""
        keys = (self.pipeline, self.stage, self.kind, self.micro_batch)
        number_of = {key: n for n, key in enumerate(zip(*(column.tolist() for column in keys), strict=True))}
        pairs: list[tuple[int, int]] = []
        for number, layout in enumerate(self.pipelines):
            for (writer, wrote), (reader, read) in layout.links:
                if between_ipus and layout.ipus[writer] == layout.ipus[reader]:
                    continue
                a, b = (TASK_KINDS.index(name) for name in (wrote, read))
                for micro_batch in range(layout.micro_batches):
                    sender = number_of.get((number, writer, a, micro_batch))
                    receiver = number_of.get((number, reader, b, micro_batch))
                    if sender is not None and receiver is not None:
                        pairs.append((sender, receiver))
        return np.array(pairs, np.int64).reshape(-1, 2)


def task_trace(spans: TaskSpans) -> TaskTrace:
    """Return the trace of the spans of a run."""
    layouts = tuple(span.layout for span in spans.pipelines)
    starts, ends = (np.array([getattr(span, name) for span in spans.pipelines], np.int64) for name in ("start", "end"))
    stages = np.array([total.task.stage for total in spans.totals], np.int64)
    kinds = np.array([TASK_KINDS.index(total.task.kind) for total in spans.totals], np.int64)
    pipeline, task, micro_batch, start, end, busy, waited = spans.rows.T
    return TaskTrace(layouts, starts, ends, pipeline, stages[task], kinds[task], micro_batch, start, end, busy, waited)
