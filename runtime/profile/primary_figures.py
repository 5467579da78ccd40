"""Figures of one run of a program: time, memory, and their division among operations, lines, layers and stages.

Input: an `Executable`, and the recording of a run's data-dependent control, if there is one; or the data of a saved
profile. Output: `Figures`, frozen; each figure is computed, or read from the data, when it is first read. Those marked
`figure`, `run_figure` and `section` are saved: their annotations are the schema of files.
Source: section names of `graph()` and `execution()`: Poplar & PopLibs user guide, "Profiling".
Limits: a saved profile has neither the executable nor the steps of the timeline, which hold the program. Memory is
that of one replica. A static profile takes the costlier branch of each decision.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, Any, Self, TypeVar

from ipujax.runtime.causes import AdviceRow, Bound, Cause, bound_of_run, causes_of_run
from ipujax.runtime.compile import Executable, Identity
from ipujax.runtime.cost import ComputeSetCost
from ipujax.runtime.errors import ProfileError
from ipujax.runtime.files import runs_of
from ipujax.runtime.files.figure_kinds import LARGE, Large, Row
from ipujax.runtime.files.figure_records import FigureRecord, Length, figure, section
from ipujax.runtime.files.kinds import Integer, Map, Record, Text
from ipujax.runtime.graph import ComputedAgain, PaddedRows, Program, UnmetBound
from ipujax.runtime.host import HostData
from ipujax.runtime.memory import Attempt, MemoryReport, ways_to_fit
from ipujax.runtime.profile.attribution import Attribution, label
from ipujax.runtime.profile.execution_trace import TRACE_PHASES, ExecutionTrace, TaskTrace, execution_trace, task_trace
from ipujax.runtime.profile.handed_values import HandedValues, handed_values
from ipujax.runtime.profile.operation_warnings import (
    Emulated,
    Fallback,
    SlowOperation,
    Unpriced,
    emulated,
    fallbacks,
    slow_operations,
    unpriced,
    unpriced_section,
)
from ipujax.runtime.profile.program_costs import PROGRAM_TREE, EquationKind, ProgramNode, program_costs
from ipujax.runtime.profile.stage_figures import PipelineCost, StageCost, pipeline_costs, stage_costs
from ipujax.runtime.profile.step_costs import StepCost, StepRows, step_costs
from ipujax.runtime.profile.streamed_loops import StreamedLoop, streamed_loops
from ipujax.runtime.sections.execution import execution_report, tile_balance, tile_cycles, vertex_type_cycles
from ipujax.runtime.sections.graph_report import (
    graph_counts,
    graph_report,
    optimization_info,
    saved_languages,
    saved_vertex_bytes,
    saved_vertices,
    vertex_type_bytes,
    with_lists,
)
from ipujax.runtime.sections.ids import Json, Numbering
from ipujax.runtime.sections.live_variables import liveness_section
from ipujax.runtime.sections.programs import active_cycles, numbering
from ipujax.runtime.sections.section_fields import EXECUTION, GRAPH, HOST, TARGET, TILE_CYCLES
from ipujax.runtime.sources import source_texts
from ipujax.runtime.target import Target
from ipujax.runtime.tensor import Origin
from ipujax.runtime.timeline import Recording, Spans, TaskSpans, Timeline, TimelineStep

T = TypeVar("T")

RUN = "run"  # part of the data that depends on trip counts
_PhaseCycles = Annotated[dict[str, int], Record(dict.fromkeys(TRACE_PHASES, Integer()))]
_TileCycles = Annotated[dict[str, int], TILE_CYCLES]
_OfVertices = Annotated[dict[str, tuple[int, int]], Map(Row((LARGE, LARGE)))]


class run_figure(figure[T]):
    """A figure that depends on trip counts; reading it raises a `ProfileError` where one is data, see `timeline`."""

    part = RUN


class run_section(section[T]):
    """A section that depends on trip counts."""

    part = RUN


@dataclass(frozen=True, eq=False)
class PrimaryFigures(FigureRecord):
    """The figures of one run of an executable, computed from it or read from a file.

    Args:
        compiled: the compiled program; None where it is not at hand.
        recording: choices of its data-dependent control in a run; None for the static profile.
        ran: program of the run, of the executable's steps; the executable's program when None.
        data: the figures as a file has them, see `runtime.schema`.
        compile_again: returns the compiled program of figures from a cache.
        list_equations: returns the equations after each pass in order; None where there are no passes, and once saved.
    """

    compiled: Executable | None = None
    recording: Recording | None = None
    ran: Program | None = None
    data: Json | None = None
    compile_again: Callable[[], Executable] | None = None
    list_equations: Callable[[], Mapping[str, Sequence[tuple[EquationKind, int]]]] | None = None

    @classmethod
    def from_data(cls, data: Json, compile_again: Callable[[], Executable] | None = None) -> Self:
        """Return the figures of `schema.saved_data`."""
        return cls(data=data, compile_again=compile_again)

    def part_of_data(self, part: str) -> Json | None:
        """Return the data of the figures of a part.

        Raises:
            ProfileError: as the original, if they are of a run whose trip counts are data.
        """
        if self.data is None or not part:
            return self.data
        run: Json = self.data[RUN]
        if "unknown" in run:
            raise ProfileError(**run["unknown"])
        return run

    def _program(self, figure: str) -> Executable:
        """Return the compiled program; refuse a figure that is not saved where there is none."""
        if self.compiled is not None:
            return self.compiled
        if self.compile_again is None:
            hint = "the profile that was saved has it, before it is saved"
            raise ProfileError(f"a saved profile has no {figure}", hint=hint)
        return self.compile_again()

    @property
    def executable(self) -> Executable:
        """The compiled program.

        Raises:
            ProfileError: a saved profile has none.
        """
        return self._program("executable")

    @property
    def _saved_graph(self) -> Json | None:
        """The graph profile of a file, of which some figures are parts."""
        return None if self.data is None else self.data["graph"]

    @figure
    def identity(self) -> Identity:
        """Function, file, label and date of the program."""
        return self.executable.identity

    @figure
    def host(self) -> Annotated[HostData, HOST] | None:
        """Time of the host for the batches of calls; None where that was not measured."""
        return None

    @figure
    def advice(self) -> tuple[AdviceRow, ...]:
        """Changes that `ipu.advise` has compiled, best first; empty where it was not asked."""
        return ()

    @cached_property
    def timeline(self) -> Timeline:
        """Start and end of each step on each IPU.

        Raises:
            ProfileError: a loop whose trip count is data, is in no option and was not recorded.
        """
        return self._ran("timeline").timeline_of(self.recording)

    def _ran(self, figure: str) -> Executable:
        """Return the executable with the program of the run, for a figure."""
        executable = self._program(figure)
        return executable if self.ran is None else replace(executable, program=self.ran)

    @property
    def _ran_program(self) -> Program:
        return self.executable.program if self.ran is None else self.ran

    @figure
    def target(self) -> Annotated[Target, TARGET]:
        """The machine of one replica."""
        return self.executable.target

    @figure
    def replicas(self) -> Annotated[int, Integer(1)]:
        """Number of replicas that run the program."""
        return self.executable.graph.replication_factor

    @figure
    def mesh(self) -> Annotated[dict[str, int], Map(Integer(1), Text())]:
        """Size of each axis of the mesh whose devices the replicas are, by name; empty for other replicas."""
        return dict(self.executable.graph.replica_axes)

    @run_figure
    def cycles(self) -> int:
        """Length of one run in cycles of the tile clock."""
        return self.timeline.cycles

    @run_figure
    def causes(self) -> tuple[Cause, ...]:
        """Causes of `cycles`, each with the cycles that vanish without it; those of the waterfall add up to `cycles`.

        Raises:
            ProfileError: as `timeline`.
        """
        executable = self._program("causes")
        runs = self.timeline.executions
        return causes_of_run(executable, self._ran_program, self.recording, runs, self.bound)

    @run_figure
    def bound(self) -> Bound:
        """Least cycles of any plan of the function on this machine, and of the program's own supersteps.

        Raises:
            ProfileError: as `timeline`.
        """
        executable = self._program("bound")
        return bound_of_run(executable, self._ran_program, self.recording, self.timeline.executions)

    @figure
    def attempts(self) -> tuple[Attempt, ...]:
        """The plans that were compiled until one fitted the tiles; empty where the first does."""
        return self.executable.attempts

    @property
    def byte_costs(self) -> tuple[float, ...]:
        """Costs per byte on the fullest tile, in cycles, at which the program was planned until it fitted."""
        graph = self._saved_graph
        return self.executable.byte_costs if graph is None else tuple(graph["byteCost"]["tried"])

    @property
    def _byte_cost_added_cycles(self) -> int | None:
        graph = self._saved_graph
        return self.executable.byte_cost_added_cycles if graph is None else graph["byteCost"].get("addedCycles")

    @property
    def streaming_memory_bytes(self) -> int:
        """Bytes of one replica in streaming memory."""
        graph = self._saved_graph
        return self.executable.streaming_memory_bytes if graph is None else int(graph["streamingMemory"]["bytes"])

    @run_figure
    def overlapped_cycles(self) -> int:
        """Cycles of transfers on I/O tiles of the limiting IPU, beside the work of its other tiles."""
        return int(self.timeline.overlapped[self.limiting_ipu])

    @run_figure
    def ipu_phase_cycles(self) -> Annotated[tuple[_PhaseCycles, ...], Length("IPUs")]:
        """Cycles of each phase of every IPU of one replica; with `idle` those of each add up to `cycles`."""
        return tuple(map(self.timeline.phase_cycles, range(self.target.num_ipus)))

    @property
    def limiting_ipu(self) -> int:
        """The IPU with most busy cycles, in all phases but idle; the first of equal ones."""
        idle = [phases["idle"] for phases in self.ipu_phase_cycles]
        return idle.index(min(idle))

    @run_figure
    def total_worker_cycles(self) -> Large:
        """Cycles in which workers of any tile issue instructions or rearrange operands, in one run."""
        costs = self.executable.costs
        runs = self.timeline.executions
        return sum(
            int(active_cycles(cost).sum()) * runs.get(leaf, 0)
            for leaf, cost in costs.items()
            if isinstance(cost, ComputeSetCost)
        )

    @cached_property
    def memory(self) -> MemoryReport:
        """Memory of every tile; of a saved profile only the fullest tile has all of its items."""
        data = self.data
        return self.executable.memory if data is None else MemoryReport.from_data(self.target, data["memory"])

    @figure
    def ways_to_fit(self) -> tuple[str, ...]:
        """Suggestions to make the program fit its tiles; empty where it fits."""
        return ways_to_fit(self.memory)

    @figure
    def fallbacks(self) -> tuple[Fallback, ...]:
        """Operations that run as one vertex, in program order; then those that all IPUs of a mesh compute whole."""
        return fallbacks(self.executable, {item.name: item.num_tiles for item in self.memory.borrowed})

    @figure
    def streamed_loops(self) -> tuple[StreamedLoop, ...]:
        """Loops that move rows between the host's memory and the tiles in each iteration, in program order."""
        return streamed_loops(self.executable)

    @figure
    def unpriced(self) -> tuple[Unpriced, ...]:
        """Operations that `cycles` does not count, as calls of Python or of foreign code, in program order."""
        try:
            runs = self.timeline.executions
        except ProfileError:  # a trip count is data
            runs = None
        return unpriced(self.executable, runs)

    @figure
    def emulated(self) -> tuple[Emulated, ...]:
        """Arithmetic in dtypes that the machine lacks, by line of source, in program order."""
        return emulated(self.executable)

    @figure
    def slow_paths(self) -> tuple[SlowOperation, ...]:
        """Operations whose code or copies take a slower form, with the reason, most cycles first."""
        return slow_operations(self.executable)

    @figure
    def padded_rows(self) -> tuple[PaddedRows, ...]:
        """Rows that are padded to whole vectors, as `Options.pad_rows` allows, most slow cycles first."""
        return tuple(self.executable.graph.notes.padded_rows)

    @figure
    def unmet_bounds(self) -> tuple[UnmetBound, ...]:
        """Operations whose plans exceed the planners' bound of a tile's memory, in the order they were added."""
        return tuple(self.executable.graph.notes.unmet_bounds)

    @figure
    def computed_again(self) -> tuple[ComputedAgain, ...]:
        """Equal operations that are computed several times on purpose: for recomputation, memory, stages, phases."""
        return tuple(self.executable.graph.notes.computed_again)

    @cached_property
    def numbering(self) -> Numbering:
        """The ids of programs, compute sets and exchanges in `graph()` and `execution()`."""
        return numbering(self._program("numbering"))

    @property
    def graph_counts(self) -> dict[str, int]:
        """Numbers of compute sets, edges, variables and vertices, under the names of `graph()`."""
        graph = self._saved_graph
        return graph_counts(self.executable, self.numbering) if graph is None else dict(graph["graph"])

    @property
    def optimization_info(self) -> dict[str, float]:
        """Times and counts of the compilation, under the names of `graph()`."""
        graph = self._saved_graph
        return optimization_info(self.executable) if graph is None else dict(graph["optimizationInfo"])

    @property
    def vertex_type_bytes(self) -> dict[str, int]:
        """Bytes of state and code of each vertex type, on all tiles together."""
        graph = self._saved_graph
        return vertex_type_bytes(self.executable, self.numbering) if graph is None else saved_vertex_bytes(graph)

    @run_figure
    def vertex_type_cycles(self) -> _OfVertices:
        """Number of runs of vertices of each type, and their active cycles, most cycles first."""
        return vertex_type_cycles(self.numbering, self.timeline)

    @property
    def vertex_type_languages(self) -> dict[str, str]:
        """Language of the code that each vertex type stands for: "assembly" or "C++"."""
        graph = self._saved_graph
        return self.numbering.vertex_type_languages() if graph is None else saved_languages(graph)

    @property
    def compute_set_vertices(self) -> list[dict[str, tuple[int, int]]]:
        """Number and active cycles of the vertices of each type, for each compute set, in the order of ids."""
        if (graph := self._saved_graph) is not None:
            return saved_vertices(graph)
        rows = self.numbering.compute_sets
        return [{name: (n, row.active_by_type.get(name, 0)) for name, n in row.vertices.items()} for row in rows]

    @run_figure
    def tile_cycles(self) -> _TileCycles:
        """Cycles of all tiles together by activity, under the names of `execution()`."""
        return tile_cycles(self.executable, self.numbering, self.timeline)

    @run_figure
    def tile_balance(self) -> float:
        """Mean share of compute phases in which a tile of the IPUs taking part computes; 1 is best."""
        return tile_balance(self.executable, self.timeline)

    @run_figure
    def step_costs(self) -> Annotated[tuple[StepCost, ...], Length("operations")]:
        """Costs and variables of each operation of each line and layer, in program order; other views sum these."""
        return step_costs(self.executable, self._attribution, self.numbering, self.timeline, self.limiting_ipu)

    @cached_property
    def _attribution(self) -> Attribution:
        return Attribution(self.executable, self._ran_program)

    @cached_property
    def liveness(self) -> dict[str, Any]:
        """Live variables at every step, JSON-able, as in `graph()`."""
        graph = self._saved_graph
        if graph is not None:
            return copy.deepcopy(graph["memory"]["liveness"])
        return liveness_section(self.executable, self.numbering)

    @cached_property
    def _step_rows(self) -> StepRows:
        return StepRows(self._attribution, self.step_costs)

    @run_figure
    def handed_values(self) -> HandedValues:
        """Bytes that operations, rows of `step_costs`, read of what others have written: the program as a graph."""
        return handed_values(self.executable, self._ran_program, self._step_rows, len(self.step_costs))

    @run_figure
    def execution_trace(self) -> ExecutionTrace:
        """Spans of the steps on each IPU, as columns; charts of time are drawn from them."""
        spans = self._ran("execution_trace").spans_of(self.recording)
        rows = list(map(self._step_rows.of_members, spans.members))
        return execution_trace(self.executable, spans, self.timeline.clocks, rows)

    def single_steps(self, max_steps: int) -> Spans:
        """Return the spans of all steps of the run, each by itself, those of all iterations of loops too.

        Raises:
            ProfileError: as `timeline`; or a run of more than `max_steps` steps, or a saved profile.
        """
        num_steps = sum(self.timeline.executions.values())
        if num_steps > max_steps:
            raise ProfileError(
                "the run has too many steps to list each of them",
                expected=f"at most max_steps={max_steps:,}",
                got=f"{num_steps:,} steps",
                hint=f"max_steps={num_steps}, or fewer micro-batches or iterations of loops",
            )
        # Twice as many: iterations are folded where a bound is reached.
        return self._ran("list of all steps").spans_of(self.recording, 2 * num_steps + 1)

    @cached_property
    def _task_spans(self) -> TaskSpans:
        return self._ran("execution_trace").task_spans_of(self.recording)

    @run_figure
    def tasks(self) -> TaskTrace:
        """Spans of the tasks of each pipeline, as columns; without rows where no pipeline has stages.

        Raises:
            ProfileError: as `timeline`.
        """
        return task_trace(self._task_spans)

    @run_figure
    def stages(self) -> tuple[StageCost, ...]:
        """Costs of each stage of each pipeline; the phases of the stages of an IPU add up to `cycles`."""
        executable = self.executable
        if not self._task_spans.pipelines:
            return ()
        works = {node: step.work for node, step in executable.steps.items()}
        is_buffered = self.target.global_exchange == "buffered"
        return stage_costs(
            self._task_spans, self.tasks, self.timeline, self._attribution.own_shares, works, is_buffered
        )

    @run_figure
    def pipelines(self) -> Annotated[tuple[PipelineCost, ...], Length("pipelines")]:
        """Cycles of each pipeline with stages, and the waits of its IPUs."""
        return pipeline_costs(self._task_spans, self.tasks, self.stages)

    @run_figure
    def program_costs(self) -> Annotated[ProgramNode, PROGRAM_TREE]:
        """The program tree with the cycles of each node."""
        return program_costs(self.executable, self._ran_program, self.numbering, self.timeline)

    @figure
    def sources(self) -> dict[str, list[str]]:
        """The lines of the source files of the program, by path; of a saved profile, as they were then."""
        origins = [label(node).origin for node in self.executable.steps]
        return source_texts([*origins, *(variable.origin for variable in self.executable.graph.variables)])

    def graph(self) -> dict[str, Any]:
        """Return the graph profile, JSON-able, in the sections of Poplar's: target, graph, programs, memory…"""
        graph = self._saved_graph
        return graph_report(self.executable, self.numbering) if graph is None else with_lists(self.graph_section)

    @section
    def graph_section(self) -> Annotated[Json, GRAPH]:
        """`graph()` with runs of equal numbers in place of lists by tile, see `runtime.files.figure_kinds`."""
        return graph_report(self.executable, self.numbering, runs_of)

    def _origin_of(self, step: TimelineStep) -> Origin:
        """Return the line, layer and part of the training step of a step's largest share."""
        return self.step_costs[self._step_rows.of(step.program, step.caller)[0]].origin

    def execution(self) -> dict[str, Any]:
        """Return the execution profile, JSON-able: profilerMode, programTrace, simulation, hostData if measured,
        and unpriced, the operations that its cycles do not count, if there are any.

        Raises:
            ProfileError: a loop whose trip count is data, is in no option and was not recorded.
        """
        return self.execution_section | ({} if self.host is None else {"hostData": self.host.to_data()})

    @run_section
    def execution_section(self) -> Annotated[Json, EXECUTION]:
        """`execution()` without the data of the host."""
        report = execution_report(
            self.executable, self.numbering, self._ran_program, self.recording, self.timeline, self._origin_of
        )
        return report | unpriced_section(self.unpriced)
