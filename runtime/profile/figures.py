"""Figures of one run of a program: time, memory, and their division among operations, lines, layers and stages.

Input: an `Executable`, and the recording of a run's data-dependent control, if there is one. Output: `Figures`, frozen;
each figure is computed when it is first read.
Source: section names of `graph()` and `execution()`: Poplar & PopLibs user guide, "Profiling".
Limits: memory is that of one replica. A static profile takes the costlier branch of each decision.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from numbers import Integral
from typing import Any, Literal, get_args

import numpy as np

from ipujax.runtime.compile import Executable, Identity
from ipujax.runtime.cost import ComputeSetCost
from ipujax.runtime.errors import ArgumentValueError, ProfileError
from ipujax.runtime.files import runs_of
from ipujax.runtime.graph import ComputeSet, Execute, Program, UnmetBound, of_replicas
from ipujax.runtime.host import HostData
from ipujax.runtime.memory import MemoryReport, ways_to_fit
from ipujax.runtime.profile.attribution import Attribution, label
from ipujax.runtime.profile.breakdown import LayerCost, Operation, layer_costs, line_costs
from ipujax.runtime.profile.emulated import Emulated, emulated
from ipujax.runtime.profile.execution_trace import ExecutionTrace, execution_trace
from ipujax.runtime.profile.program_costs import ProgramNode, program_costs
from ipujax.runtime.profile.stage_figures import PipelineCost, StageCost, pipeline_costs, stage_costs
from ipujax.runtime.profile.step_costs import StepCost, step_costs
from ipujax.runtime.profile.step_rows import StepRows
from ipujax.runtime.profile.task_trace import TaskTrace, task_trace
from ipujax.runtime.profile.text import duration, size
from ipujax.runtime.profile.unpriced import Unpriced, unpriced, unpriced_section
from ipujax.runtime.sections.execution import execution_report, tile_balance, tile_cycles, vertex_type_cycles
from ipujax.runtime.sections.graph_report import graph_counts, graph_report, optimization_info
from ipujax.runtime.sections.ids import Numbering
from ipujax.runtime.sections.live_variables import liveness_section
from ipujax.runtime.sections.memory import region_bytes, vertex_type_bytes
from ipujax.runtime.sections.programs import active_cycles, numbering
from ipujax.runtime.sections.trace import program_trace
from ipujax.runtime.sources import source_texts
from ipujax.runtime.target import Target
from ipujax.runtime.tensor import Origin
from ipujax.runtime.timeline import Recording, TaskSpans, Timeline, TimelineStep

Lines = Literal["user", "library"]
LINES: tuple[Lines, ...] = get_args(Lines)  # owners of the lines of source that `Figures.operations` lists


@dataclass(frozen=True, slots=True)
class Fallback:
    """An operation without a tile-parallel rule, which runs as one vertex.

    Args:
        operation: its name.
        name: its compute set.
        cycles: cycles of one run of its slowest tile.
        borrowed_tiles: tiles over which its buffers are spread, 1 when they fit its own.
        origin: origin of the compute set.
    """

    operation: str
    name: str
    cycles: int
    borrowed_tiles: int
    origin: Origin


_GATHERED = "gathered: no partition rule, every IPU of the mesh computes it whole"


@dataclass(frozen=True, eq=False)
class Figures:
    """The figures of one run of an executable.

    Args:
        executable: the compiled program.
        recording: choices of its data-dependent control in a run; None for the static profile.
        ran: program of the run, of the executable's steps; the executable's program when None.
        host: time of the host for the batches of calls; None where that was not measured.
        renamed: identity that replaces the one of the compilation; None for the latter.
    """

    executable: Executable
    recording: Recording | None = None
    ran: Program | None = None
    host: HostData | None = None
    renamed: Identity | None = None

    @property
    def identity(self) -> Identity:
        """Function, file, label and date of the program."""
        return self.renamed or self.executable.identity

    @property
    def title(self) -> str:
        """Name of the program, number of IPUs and date of the compilation, in a line."""
        identity = self.identity
        subject = f"{identity.name} on " if identity.name else "Profile: "
        return f"{subject}{self.device}" + (f", {identity.day}" if identity.day else "")

    @property
    def device(self) -> str:
        """The IPUs of all replicas, as `16 × mk2`."""
        machine = of_replicas(self.target, self.replicas)
        return f"{machine.num_ipus:,} × {machine.name}"

    @cached_property
    def timeline(self) -> Timeline:
        """Start and end of each step on each IPU.

        Raises:
            ProfileError: a loop whose trip count is data, is in no option and was not recorded.
        """
        return self._ran.timeline_of(self.recording)

    @property
    def _ran(self) -> Executable:
        """The executable with the program of the run."""
        return self.executable if self.ran is None else replace(self.executable, program=self.ran)

    @property
    def target(self) -> Target:
        """The machine of one replica."""
        return self.executable.target

    @property
    def replicas(self) -> int:
        """Number of replicas that run the program."""
        return self.executable.graph.replication_factor

    @property
    def cycles(self) -> int:
        """Length of one run in cycles of the tile clock."""
        return self.timeline.cycles

    @property
    def seconds(self) -> float:
        """Estimated time of one run, in seconds."""
        return float(self.target.seconds(self.cycles))

    @property
    def is_host_bound(self) -> bool:
        """True if the host takes longer for the batches of a call than IPUs for its program; see `host`.

        Raises:
            ProfileError: if the host was not measured, or a trip count is not known.
        """
        if self.host is None:
            hint = "profile.with_host(batches.host), see ipu.prefetch"
            raise ProfileError("this profile has no figures of the host", hint=hint)
        return self.host.is_slower_than(self.seconds)

    @property
    def byte_costs(self) -> tuple[float, ...]:
        """Costs per byte on the fullest tile, in cycles, at which the program was planned until it fitted."""
        return self.executable.byte_costs

    @property
    def byte_cost(self) -> float:
        """Cost per byte at which the program is planned, in cycles: the last of `byte_costs`."""
        return self.byte_costs[-1]

    @property
    def byte_cost_added_cycles(self) -> int:
        """Cycles of a run beyond those at the first of `byte_costs`.

        Raises:
            ProfileError: a loop whose trip count is data and is in no option.
        """
        cost = self._byte_cost_added_cycles
        if cost is None:
            what = "the cycles that the cost per byte adds depend on trip counts that are data"
            raise ProfileError(what, hint="ipu.Options(trip_counts={name: iterations}), see profile.cycles")
        return cost

    @property
    def _byte_cost_added_cycles(self) -> int | None:
        return self.executable.byte_cost_added_cycles

    @property
    def streaming_memory_bytes(self) -> int:
        """Bytes of one replica in streaming memory."""
        return self.executable.streaming_memory_bytes

    @property
    def overlapped_cycles(self) -> int:
        """Cycles of transfers on I/O tiles of the limiting IPU, beside the work of its other tiles."""
        return int(self.timeline.overlapped[self.limiting_ipu])

    @property
    def ipu_phase_cycles(self) -> tuple[dict[str, int], ...]:
        """Cycles of each phase of every IPU of one replica; with `idle` those of each add up to `cycles`."""
        return tuple(map(self.timeline.phase_cycles, range(self.target.num_ipus)))

    @property
    def limiting_ipu(self) -> int:
        """The IPU with most busy cycles, in all phases but idle; the first of equal ones."""
        idle = [phases["idle"] for phases in self.ipu_phase_cycles]
        return idle.index(min(idle))

    @property
    def phase_cycles(self) -> dict[str, int]:
        """Cycles of each phase of the limiting IPU; they add up to `cycles`."""
        return self.ipu_phase_cycles[self.limiting_ipu]

    @property
    def busy_cycles(self) -> int:
        """Cycles of all phases but idle, of all IPUs of one replica together."""
        return sum(self.cycles - phases["idle"] for phases in self.ipu_phase_cycles)

    @property
    def total_worker_cycles(self) -> int:
        """Cycles in which workers of any tile issue instructions or rearrange operands, in one run."""
        costs = self.executable.costs
        runs = self.timeline.executions
        return sum(
            int(active_cycles(cost).sum()) * runs.get(leaf, 0)
            for leaf, cost in costs.items()
            if isinstance(cost, ComputeSetCost)
        )

    @property
    def memory(self) -> MemoryReport:
        """Memory of every tile."""
        return self.executable.memory

    @cached_property
    def ways_to_fit(self) -> tuple[str, ...]:
        """Suggestions to make the program fit its tiles; empty where it fits."""
        return ways_to_fit(self.memory)

    @property
    def brief(self) -> str:
        """The cycles, the fullest tile and the machine, in a line."""
        memory = self.memory
        target = of_replicas(self.target, self.replicas)
        try:
            note = f" {self.cycles_note}" if self.cycles_note else ""
            time = f"{self.cycles:,} cycles{note}, {duration(self.seconds).strip()}"
        except ProfileError:  # a loop runs as often as its data says
            time = "cycles depend on trip counts"
        bytes_of_tile = f"{size(memory.max_tile_bytes)} of {size(target.bytes_per_tile)}"
        return f"{time}, fullest tile {memory.worst_tile} with {bytes_of_tile}, {target.num_ipus} × {target.name}"

    @cached_property
    def fallbacks(self) -> tuple[Fallback, ...]:
        """Operations that run as one vertex, in program order; then those that all IPUs of a mesh compute whole."""
        notes = self.executable.graph.notes
        rows: dict[ComputeSet, Fallback] = {}  # by compute set: one that runs at several places is one row
        borrowed = {item.name: item.num_tiles for item in self.memory.borrowed}
        for leaf, cost in self.executable.costs.items():
            if isinstance(leaf, Execute) and isinstance(cost, ComputeSetCost) and leaf.compute_set in notes.fallbacks:
                name = leaf.compute_set.name
                cycles = int(cost.compute_cycles.max())
                operation = notes.fallbacks[leaf.compute_set]
                origin = leaf.compute_set.origin
                rows[leaf.compute_set] = Fallback(operation, name, cycles, borrowed.get(name, 1), origin)
        gathered = [Fallback(operation, _GATHERED, 0, 1, Origin(line=line)) for operation, line in notes.gathered]
        return (*rows.values(), *gathered)

    @cached_property
    def unpriced(self) -> tuple[Unpriced, ...]:
        """Operations that `cycles` does not count, as calls of Python or of foreign code, in program order."""
        try:
            runs = self.timeline.executions
        except ProfileError:  # a trip count is data
            runs = None
        return unpriced(self.executable, runs)

    @property
    def cycles_note(self) -> str:
        """Words beside the cycles of a run that say what they leave out; "" if nothing."""
        count = len(self.unpriced)
        return f"without {count} unpriced operation{'s' if count > 1 else ''}" if count else ""

    @cached_property
    def emulated(self) -> tuple[Emulated, ...]:
        """Arithmetic in dtypes that the machine lacks, by line of source, in program order."""
        return emulated(self.executable)

    @property
    def unmet_bounds(self) -> tuple[UnmetBound, ...]:
        """Operations whose plans exceed the planners' bound of a tile's memory, in the order they were added."""
        return tuple(self.executable.graph.notes.unmet_bounds)

    def operations(self, n: int | None = None, *, lines: Lines = "user") -> tuple[Operation, ...]:
        """Return the costliest lines of source, costliest first; lines without cycles are left out.

        Args:
            n: number of lines; all of them when None.
            lines: "user" for lines of the user's own source; "library" for the innermost line outside JAX and ipujax,
                so that one line that calls a library becomes several lines of that library. Inside a library's own
                `jax.jit` no line is known: that work belongs to the line that calls it.

        Raises:
            ArgumentValueError: other lines, or a number of lines below 0.
        """
        if n is not None and (not isinstance(n, Integral) or isinstance(n, bool) or n < 0):
            expected = "a whole number from 0, or None"
            raise ArgumentValueError("n must be the number of operations to list", expected=expected, got=repr(n))
        if lines not in LINES:
            expected = " or ".join(map(repr, LINES))
            raise ArgumentValueError("unknown kind of lines of a profile", expected=expected, got=repr(lines))
        return self._operations(lines)[:n]

    def _operations(self, lines: str) -> tuple[Operation, ...]:
        return line_costs(self.step_costs, of_libraries=lines == "library")

    @cached_property
    def numbering(self) -> Numbering:
        """The ids of programs, compute sets and exchanges in `graph()` and `execution()`."""
        return numbering(self.executable)

    @property
    def graph_counts(self) -> dict[str, int]:
        """Numbers of compute sets, edges, variables and vertices, under the names of `graph()`."""
        return graph_counts(self.executable, self.numbering)

    @property
    def region_bytes(self) -> dict[str, np.ndarray]:
        """Bytes of each tile in each memory region, gaps included, int64[num_tiles], under the names of `graph()`."""
        return region_bytes(self.memory, including_gaps=True)

    @property
    def optimization_info(self) -> dict[str, float]:
        """Times and counts of the compilation, under the names of `graph()`."""
        return optimization_info(self.executable)

    @property
    def vertex_type_bytes(self) -> dict[str, int]:
        """Bytes of state and code of each vertex type, on all tiles together."""
        return vertex_type_bytes(self.executable, self.numbering)

    @property
    def vertex_type_cycles(self) -> dict[str, tuple[int, int]]:
        """Number of runs of vertices of each type, and their active cycles, most cycles first."""
        return vertex_type_cycles(self.numbering, self.timeline)

    @property
    def vertex_type_languages(self) -> dict[str, str]:
        """Language of the code that each vertex type stands for: "assembly" or "C++"."""
        return self.numbering.vertex_type_languages()

    @property
    def language_cycles(self) -> dict[str, int]:
        """Active cycles of vertices by the language of their code, on all tiles together, most cycles first."""
        languages = self.vertex_type_languages
        cycles = Counter[str]()
        for name, (_, active) in self.vertex_type_cycles.items():
            if name in languages:
                cycles[languages[name]] += active
        return dict(cycles.most_common())

    @property
    def compute_set_vertices(self) -> list[dict[str, tuple[int, int]]]:
        """Number and active cycles of the vertices of each type, for each compute set, in the order of ids."""
        rows = self.numbering.compute_sets
        return [{name: (n, row.active_by_type.get(name, 0)) for name, n in row.vertices.items()} for row in rows]

    @property
    def tile_cycles(self) -> dict[str, int]:
        """Cycles of all tiles together by activity, under the names of `execution()`."""
        return tile_cycles(self.executable, self.numbering, self.timeline)

    @property
    def tile_balance(self) -> float:
        """Mean share of compute phases in which a tile of the IPUs taking part computes; 1 is best."""
        return tile_balance(self.executable, self.timeline)

    @cached_property
    def step_costs(self) -> tuple[StepCost, ...]:
        """Costs and variables of each operation of each line and layer, in program order; other views sum these."""
        return step_costs(self.executable, self._ran.program, self.numbering, self.timeline, self.limiting_ipu)

    @cached_property
    def layers(self) -> tuple[LayerCost, ...]:
        """Costs of each layer in each part of the training step, in program order.

        Raises:
            ProfileError: as `timeline`.
        """
        return layer_costs(self.step_costs)

    @cached_property
    def liveness(self) -> dict[str, Any]:
        """Live variables at every step, JSON-able, as in `graph()`."""
        return liveness_section(self.executable, self.numbering)

    @cached_property
    def _step_rows(self) -> StepRows:
        return StepRows(self.executable, self._ran.program, self.step_costs)

    @cached_property
    def execution_trace(self) -> ExecutionTrace:
        """Spans of the steps on each IPU, as columns; charts of time are drawn from them.

        Raises:
            ProfileError: as `timeline`.
        """
        spans = self._ran.spans_of(self.recording)
        rows = list(map(self._step_rows.of_members, spans.members))
        return execution_trace(self.executable, spans, self.timeline.clocks, rows)

    @cached_property
    def _task_spans(self) -> TaskSpans:
        return self._ran.task_spans_of(self.recording)

    @cached_property
    def tasks(self) -> TaskTrace:
        """Spans of the tasks of each pipeline, as columns; without rows where no pipeline has stages.

        Raises:
            ProfileError: as `timeline`.
        """
        return task_trace(self._task_spans)

    @cached_property
    def stages(self) -> tuple[StageCost, ...]:
        """Costs of each stage of each pipeline; the phases of the stages of an IPU add up to `cycles`.

        Raises:
            ProfileError: as `tasks`.
        """
        executable = self.executable
        if not self._task_spans.pipelines:
            return ()
        attribution = Attribution(executable, self._ran.program)
        works = {node: step.work for node, step in executable.steps.items()}
        is_buffered = self.target.global_exchange == "buffered"
        return stage_costs(self._task_spans, self.tasks, self.timeline, attribution.own_shares, works, is_buffered)

    @cached_property
    def pipelines(self) -> tuple[PipelineCost, ...]:
        """Cycles of each pipeline with stages, and the waits of its IPUs.

        Raises:
            ProfileError: as `tasks`.
        """
        return pipeline_costs(self._task_spans, self.tasks, self.stages)

    @cached_property
    def program_costs(self) -> ProgramNode:
        """The program tree with the cycles of each node.

        Raises:
            ProfileError: as `timeline`.
        """
        return program_costs(self.executable, self._ran.program, self.numbering, self.timeline)

    @cached_property
    def sources(self) -> Mapping[str, list[str]]:
        """The lines of the source files of the program, by path."""
        origins = [label(node)[0] for node in self.executable.steps]
        return source_texts([*origins, *(variable.origin for variable in self.executable.graph.variables)])

    def graph(self) -> dict[str, Any]:
        """Return the graph profile, JSON-able, in the sections of Poplar's: target, graph, programs, memory…"""
        return graph_report(self.executable, self.numbering)

    def graph_of_runs(self) -> dict[str, Any]:
        """Return `graph()` with runs of equal numbers in place of lists by tile, see `runtime.files.figure_kinds`."""
        return graph_report(self.executable, self.numbering, runs_of)

    @property
    def _host_report(self) -> dict[str, Any]:
        return {} if self.host is None else {"hostData": self.host.to_data()}

    def _origin_of(self, step: TimelineStep) -> Origin:
        """Return the line, layer and part of the training step of a step's largest share."""
        return self.step_costs[self._step_rows.of(step.program, step.caller)[0]].origin

    def execution(self) -> dict[str, Any]:
        """Return the execution profile, JSON-able: profilerMode, programTrace, simulation, hostData if measured,
        and unpriced, the operations that its cycles do not count, if there are any.

        Raises:
            ProfileError: a loop whose trip count is data, is in no option and was not recorded.
        """
        trip_counts = self.executable.options.trip_counts
        trace, length = program_trace(self._ran.program, self.numbering, self.timeline, trip_counts, self.recording)
        report = execution_report(self.executable, self.numbering, self.timeline, trace, length, self._origin_of)
        return report | unpriced_section(self.unpriced) | self._host_report
