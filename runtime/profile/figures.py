"""The figures of one run of a program: time, memory, and where both go.

Input: an `Executable`, and for a run that was recorded what its data-dependent control did. Output: `Figures`, which
computes what it is asked for and never changes.
Source: section names of `graph()` and `execution()`: Poplar & PopLibs user guide, "Profiling".
Limits: memory is that of one replica. A static profile takes the costlier branch of each decision.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from numbers import Integral
from typing import Any

import numpy as np

from ipujax.runtime.compile import Executable, Identity
from ipujax.runtime.cost import ComputeSetCost
from ipujax.runtime.deprecated_names import renamed_property
from ipujax.runtime.errors import ArgumentValueError, ProfileError
from ipujax.runtime.graph import Execute, Program, UnmetBound, of_replicas
from ipujax.runtime.host import HostData
from ipujax.runtime.memory import MemoryReport, ways_to_fit
from ipujax.runtime.profile.attribution import Attribution, place
from ipujax.runtime.profile.breakdown import LayerCost, Operation, layer_costs, line_costs
from ipujax.runtime.profile.emulated import Emulated, emulated
from ipujax.runtime.profile.execution_trace import ExecutionTrace, execution_trace
from ipujax.runtime.profile.program_costs import ProgramNode, program_costs
from ipujax.runtime.profile.stage_figures import PipelineCost, StageCost, pipeline_costs, stage_costs
from ipujax.runtime.profile.step_costs import StepCost, step_costs
from ipujax.runtime.profile.step_rows import StepRows
from ipujax.runtime.profile.task_trace import TaskTrace, task_trace
from ipujax.runtime.profile.text import duration, size
from ipujax.runtime.sections.execution import execution_report, tile_balance, tile_cycles, vertex_type_cycles
from ipujax.runtime.sections.graph_report import graph_counts, graph_report, optimization_info
from ipujax.runtime.sections.ids import Numbering
from ipujax.runtime.sections.liveness import liveness_section
from ipujax.runtime.sections.memory import region_bytes, vertex_type_bytes
from ipujax.runtime.sections.programs import active_cycles, numbering
from ipujax.runtime.sections.trace import program_trace
from ipujax.runtime.sources import source_texts
from ipujax.runtime.target import Target
from ipujax.runtime.tensor import Origin
from ipujax.runtime.timeline import Recording, TaskSpans, Timeline, TimelineStep

LINES = ("user", "library")  # whose lines of source


@dataclass(frozen=True, slots=True)
class Fallback:
    """An operation without a tile-parallel rule, which runs as one vertex.

    Args:
        operation: its name.
        name: its compute set.
        cycles: cycles of one run of its slowest tile.
        borrowed_tiles: tiles whose memory it needs, 1 when it fits its own.
        origin: where it comes from.
    """

    operation: str
    name: str
    cycles: int
    borrowed_tiles: int
    origin: Origin


@dataclass(frozen=True, eq=False)
class Figures:
    """What one run of an executable costs.

    Args:
        executable: what runs.
        recording: what its data-dependent control did in a run; None for the static profile.
        ran: what ran, of the executable's steps; its program once when None.
        host: what the host took for the batches of calls; None where that was not measured.
        renamed: what the program is called instead of what it was compiled as; None for that.
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
        """What was profiled, on how many IPUs, and when it was compiled, in a line."""
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
        """When each IPU does what.

        Raises:
            ProfileError: a loop whose trip count is data, is in no option and was not recorded.
        """
        return self._ran.timeline_of(self.recording)

    @property
    def _ran(self) -> Executable:
        """The executable, of the part that ran."""
        return self.executable if self.ran is None else replace(self.executable, program=self.ran)

    @property
    def target(self) -> Target:
        """The machine of one replica."""
        return self.executable.target

    @property
    def replicas(self) -> int:
        """How many replicas run the program."""
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
        """Whether the host takes longer for the batches of a call than IPUs for its program; see `host`.

        Raises:
            ProfileError: if the host was not measured, or a trip count is not known.
        """
        if self.host is None:
            what, hint = "this profile knows nothing of the host", "profile.with_host(batches.host), see ipu.prefetch"
            raise ProfileError(what, hint=hint)
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

    byte_price = renamed_property("profile", "byte_price", "byte_cost")
    byte_prices = renamed_property("profile", "byte_prices", "byte_costs")
    byte_price_cost_cycles = renamed_property("profile", "byte_price_cost_cycles", "byte_cost_added_cycles")
    critical_ipu = renamed_property("profile", "critical_ipu", "limiting_ipu")

    @property
    def streaming_memory_bytes(self) -> int:
        """What lies in streaming memory, of one replica."""
        return self.executable.streaming_memory_bytes

    @property
    def overlapped_cycles(self) -> int:
        """Cycles that I/O tiles of the limiting IPU moved data while its other tiles went on."""
        return int(self.timeline.overlapped[self.limiting_ipu])

    @property
    def ipu_phase_cycles(self) -> tuple[dict[str, int], ...]:
        """Cycles of each phase of every IPU of one replica; with `idle` those of each add up to `cycles`."""
        return tuple(map(self.timeline.phase_cycles, range(self.target.num_ipus)))

    @property
    def limiting_ipu(self) -> int:
        """The IPU that is busy for most cycles, in all phases but idle; the first of them if there are several."""
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
        costs, runs = self.executable.costs, self.timeline.executions
        return sum(
            int(active_cycles(cost).sum()) * runs.get(leaf, 0)
            for leaf, cost in costs.items()
            if isinstance(cost, ComputeSetCost)
        )

    @property
    def memory(self) -> MemoryReport:
        """What every tile needs."""
        return self.executable.memory

    @cached_property
    def ways_to_fit(self) -> tuple[str, ...]:
        """What would make the program fit its tiles; nothing where it does."""
        return ways_to_fit(self.memory)

    @property
    def brief(self) -> str:
        """The cycles, the fullest tile and the machine, in a line."""
        memory, target = self.memory, of_replicas(self.target, self.replicas)
        try:
            time = f"{self.cycles:,} cycles, {duration(self.seconds).strip()}"
        except ProfileError:  # a loop runs as often as its data says
            time = "cycles depend on trip counts"
        bytes_of_tile = f"{size(memory.max_tile_bytes)} of {size(target.bytes_per_tile)}"
        return f"{time}, fullest tile {memory.worst_tile} with {bytes_of_tile}, {target.num_ipus} × {target.name}"

    @cached_property
    def fallbacks(self) -> tuple[Fallback, ...]:
        """Operations that run as one vertex, in program order."""
        graph, found = self.executable.graph, {}
        borrowed = {item.name: item.num_tiles for item in self.memory.borrowed}
        for leaf, cost in self.executable.costs.items():
            if isinstance(leaf, Execute) and isinstance(cost, ComputeSetCost) and leaf.compute_set in graph.fallbacks:
                name, origin = leaf.compute_set.name, leaf.compute_set.origin
                cycles, tiles = int(cost.compute_cycles.max()), borrowed.get(name, 1)
                found[leaf.compute_set] = Fallback(graph.fallbacks[leaf.compute_set], name, cycles, tiles, origin)
        return tuple(found.values())

    @cached_property
    def emulated(self) -> tuple[Emulated, ...]:
        """Arithmetic in dtypes that the machine lacks, by line of source, in program order."""
        return emulated(self.executable)

    @property
    def unmet_bounds(self) -> tuple[UnmetBound, ...]:
        """Operations whose plans take more of a tile's memory than planners may use, in the order they were added."""
        return tuple(self.executable.graph.unmet_bounds)

    def operations(self, n: int | None = None, *, lines: str = "user") -> tuple[Operation, ...]:
        """The most expensive lines of source, most expensive first; those that take no time are left out.

        Args:
            n: how many; all of them when None.
            lines: "user" for lines of the user's own source; "library" for the innermost line outside JAX and ipujax,
                so that one line that calls a library becomes several lines of that library. Inside a library's own
                `jax.jit` no line is known: that work belongs to the line that calls it.

        Raises:
            ArgumentValueError: for other lines, or a number of lines below 0.
        """
        if n is not None and (not isinstance(n, Integral) or isinstance(n, bool) or n < 0):
            expected = "a whole number from 0, or None"
            raise ArgumentValueError("operations of a profile: how many", expected=expected, got=repr(n))
        if lines not in LINES:
            expected = " or ".join(map(repr, LINES))
            raise ArgumentValueError("there are no such lines of a profile", expected=expected, got=repr(lines))
        return self._operations(lines)[:n]

    def _operations(self, lines: str) -> tuple[Operation, ...]:
        """All of them."""
        return line_costs(self.step_costs, of_libraries=lines == "library")

    @cached_property
    def numbering(self) -> Numbering:
        """The ids of programs, compute sets and exchanges in `graph()` and `execution()`."""
        return numbering(self.executable)

    @property
    def graph_counts(self) -> dict[str, int]:
        """How many compute sets, edges, variables and vertices there are, under the names of `graph()`."""
        return graph_counts(self.executable, self.numbering)

    @property
    def region_bytes(self) -> dict[str, np.ndarray]:
        """Bytes of each tile in each memory region, gaps included, int64[num_tiles], under the names of `graph()`."""
        return region_bytes(self.memory, including_gaps=True)

    @property
    def optimization_info(self) -> dict[str, float]:
        """What compilation measured of itself, under the names of `graph()`."""
        return optimization_info(self.executable)

    @property
    def vertex_type_bytes(self) -> dict[str, int]:
        """Bytes of state and code of each vertex type, on all tiles together."""
        return vertex_type_bytes(self.executable, self.numbering)

    @property
    def vertex_type_cycles(self) -> dict[str, tuple[int, int]]:
        """How many vertices of each type ran, and their active cycles, most cycles first."""
        return vertex_type_cycles(self.numbering, self.timeline)

    @property
    def compute_set_vertices(self) -> list[dict[str, tuple[int, int]]]:
        """How many vertices of each type each compute set has, by its id, and their active cycles."""
        rows = self.numbering.compute_sets
        return [{name: (n, row.active_by_type.get(name, 0)) for name, n in row.vertices.items()} for row in rows]

    @property
    def tile_cycles(self) -> dict[str, int]:
        """Cycles of all tiles together, by what they do, under the names of `execution()`."""
        return tile_cycles(self.executable, self.numbering, self.timeline)

    @property
    def tile_balance(self) -> float:
        """Mean share of compute phases in which a tile of the IPUs taking part computes; 1 is best."""
        return tile_balance(self.executable, self.timeline)

    @cached_property
    def step_costs(self) -> tuple[StepCost, ...]:
        """What each operation of each line and layer costs and holds, in program order; other views add these up."""
        return step_costs(self.executable, self._ran.program, self.numbering, self.timeline, self.limiting_ipu)

    @cached_property
    def layers(self) -> tuple[LayerCost, ...]:
        """What each layer costs in each part of training, in program order.

        Raises:
            ProfileError: as `timeline`; or a profile that was saved by a version that knew no layers.
        """
        return layer_costs(self.step_costs)

    @cached_property
    def liveness(self) -> dict[str, Any]:
        """What is live at every step, JSON-able, as in `graph()`."""
        return liveness_section(self.executable, self.numbering)

    @cached_property
    def _step_rows(self) -> StepRows:
        return StepRows(self.executable, self._ran.program, self.step_costs)

    @cached_property
    def execution_trace(self) -> ExecutionTrace:
        """When each IPU does what, as columns; what timelines are made from.

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
        """When each task of each pipeline runs, as columns; without rows where there is no pipeline with stages.

        Raises:
            ProfileError: as `timeline`; or a profile that was saved by a version that knew no tasks.
        """
        return task_trace(self._task_spans)

    @cached_property
    def stages(self) -> tuple[StageCost, ...]:
        """What each stage of each pipeline costs; the phases of the stages of an IPU add up to `cycles`.

        Raises:
            ProfileError: as `tasks`.
        """
        executable = self.executable
        if not self._task_spans.pipelines:
            return ()
        attribution = Attribution(executable, self._ran.program)
        works = {node: step.work for node, step in executable.steps.items()}
        is_buffered = self.target.global_exchange == "buffered"
        return stage_costs(self._task_spans, self.tasks, self.timeline, attribution.inside, works, is_buffered)

    @cached_property
    def pipelines(self) -> tuple[PipelineCost, ...]:
        """What each pipeline with stages takes, and how long its IPUs wait.

        Raises:
            ProfileError: as `tasks`.
        """
        return pipeline_costs(self._task_spans, self.tasks, self.stages)

    @cached_property
    def program_costs(self) -> ProgramNode:
        """The program tree with the cycles of each part.

        Raises:
            ProfileError: as `timeline`.
        """
        return program_costs(self.executable, self._ran.program, self.numbering, self.timeline)

    @cached_property
    def sources(self) -> Mapping[str, list[str]]:
        """The lines of the source files that the program comes from, by path."""
        places = [place(node)[0] for node in self.executable.steps]
        return source_texts([*places, *(variable.origin for variable in self.executable.graph.variables)])

    def graph(self) -> dict[str, Any]:
        """The graph profile, JSON-able, in the sections of Poplar's: target, graph, programs, memory…"""
        return graph_report(self.executable, self.numbering)

    @property
    def _host_report(self) -> dict[str, Any]:
        return {} if self.host is None else {"hostData": self.host.to_data()}

    def _origin_of(self, step: TimelineStep) -> Origin:
        """The line, layer and part of training of most of a step."""
        return self.step_costs[self._step_rows.of(step.program, step.caller)[0]].origin

    def execution(self) -> dict[str, Any]:
        """The execution profile, JSON-able: profilerMode, programTrace, simulation, and hostData if it was measured.

        Raises:
            ProfileError: a loop whose trip count is data, is in no option and was not recorded.
        """
        trip_counts = self.executable.options.trip_counts
        trace, length = program_trace(self._ran.program, self.numbering, self.timeline, trip_counts, self.recording)
        report = execution_report(self.executable, self.numbering, self.timeline, trace, length, self._origin_of)
        return report | self._host_report
