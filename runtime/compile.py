"""Compile: from a graph and a program to an `Executable` with the costs of its steps and the memory of every tile.

    graph, program ── verify ── cost ── memory ── clocks ──▶ Executable ── timeline, profile (on demand)

Compile is pure: it reads the graph and copies its tables, so a graph may grow afterwards. Each step is timed by name.
"""

from __future__ import annotations

import datetime
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any, TypeVar

import jax

from ipujax.runtime.analysis import EffectsOf
from ipujax.runtime.cache import keep_recent
from ipujax.runtime.cost import (
    ComputeSetCost,
    CopyCost,
    CopyCosts,
    StreamCost,
    SyncCost,
    WaitCost,
    choose_padded_rows,
    compute_set_cost,
    cross_replica_cost,
    stream_cost,
    wait_cost,
)
from ipujax.runtime.engine import engine_function, remote_memories
from ipujax.runtime.errors import ArgumentError, StreamingMemoryError
from ipujax.runtime.graph import (
    ComputeSet,
    Copy,
    CrossReplicaCopy,
    Execute,
    Graph,
    HostStream,
    Leaf,
    PaddedRows,
    Program,
    RemoteBuffer,
    RemoteIn,
    RemoteOut,
    StreamIn,
    StreamOut,
    Sync,
    Wait,
    joining_streams,
    leaves,
    while_names,
)
from ipujax.runtime.graph.listing import graph_counts
from ipujax.runtime.logs import DEBUG, TRACE, Log, compilation_name, step, watch_compilation
from ipujax.runtime.memory import Attempt, MemoryReport, check_memory, memory_report
from ipujax.runtime.memory.report import fullest_tiles
from ipujax.runtime.not_copied import ReadOnlyMapping, Shared
from ipujax.runtime.options import Options
from ipujax.runtime.target import Target, held_over, nearest
from ipujax.runtime.tensor import Tensor, Variable, element_bytes
from ipujax.runtime.timeline import MAX_STEPS, ClockStep, Recording, Spans, TaskSpans, Timeline, Walk
from ipujax.runtime.timeline.clock_steps import clock_steps
from ipujax.runtime.timeline.cycle_counter import CycleCounter, readings
from ipujax.runtime.timeline.task_spans import task_spans
from ipujax.runtime.timeline.timeline import spans_of, timeline
from ipujax.runtime.verify import verify

T = TypeVar("T")
Cost = ComputeSetCost | CopyCost | StreamCost | SyncCost | WaitCost
STEPS = ("verify", "cost", "memory", "clocks")
_LOG = Log("compile")
_LOGGED_TILES = 16  # the fullest ones, in the log


@dataclass(frozen=True, slots=True)
class Identity:
    """Names of a program and the day of its compilation, for titles; "" for each that is unknown.

    Args:
        function: name of its function.
        file: name of the file or cell of the function, else of the code that compiles it.
        label: the user's name for it, `Options.label` or `profile.labelled(…)`.
        date: day of compilation, "2026-11-25".
    """

    function: str = ""
    file: str = ""
    label: str = ""
    date: str = ""

    @property
    def name(self) -> str:
        """Label, function and file, `wide: train_step (train.py)`."""
        name = f"{self.function} ({self.file})" if self.function and self.file else self.function or self.file
        return ": ".join(filter(None, (self.label, name)))

    @property
    def day(self) -> str:
        """The date in words, `25 Nov 2026`."""
        return f"{(day := datetime.date.fromisoformat(self.date)).day} {day:%b %Y}" if self.date else ""


def today() -> str:
    """Return the date of today in local time, "2026-11-25"."""
    return datetime.date.today().isoformat()


@dataclass(frozen=True, eq=False)
class Executable(Shared):
    """A compiled program.

    Args:
        graph: variables, mappings and vertices; a copy, which never changes.
        program: the control tree.
        options: the options of the compilation.
        costs: cost of one run of each leaf.
        memory: bytes that every tile needs.
        steps: effect of each leaf and decision on the clocks of IPUs.
        slots: rows of the clock state that are slots of buffered exchanges.
        timings: seconds of each step from tracing on, by name; for a Poplar program those of this compilation.
        attempts: the plans that were compiled until one fitted, this one included; empty without a search.
        identity: its names, and the day of compilation.
    """

    COPY_HINT = "profile.save(path), and ipu.Profile.load(path); a profile itself can be pickled"

    graph: Graph
    program: Program
    options: Options
    costs: Mapping[Leaf, Cost] = field(repr=False)
    memory: MemoryReport = field(repr=False)
    steps: Mapping[Program, ClockStep] = field(repr=False)
    slots: int
    timings: Mapping[str, float]
    attempts: tuple[Attempt, ...] = ()
    identity: Identity = Identity()

    def named(self, function: str, file: str, timings: Mapping[str, float] = MappingProxyType({})) -> Executable:
        """Return a copy with names, see `Identity`, and seconds of steps before the compilation, by step."""
        identity = replace(self.identity, function=str(function), file=file)
        return replace(self, identity=identity, timings=ReadOnlyMapping({**timings, **self.timings}))

    def on(self, machine: Target) -> Executable:
        """Return the same program on another machine, costed again; whether it fits the tiles is not checked.

        Args:
            machine: has the constants over which programs are held, see `target.held_constants`; others are ignored.

        Raises:
            StreamingMemoryError: remote buffers do not fit in streaming memory.
        """
        graph = held_graph(self.graph, machine)
        _check_streaming_memory(graph, self.program)
        effects = EffectsOf(graph)
        costs = leaf_costs(graph, self.program)
        memory = memory_report(graph, self.program, effects, costs)
        steps, slots = clock_steps(self.program, costs, effects, graph.target)
        costed = (MappingProxyType(costs), memory, MappingProxyType(steps), slots)
        return Executable(graph, self.program, self.options, *costed, self.timings, identity=self.identity)

    @property
    def target(self) -> Target:
        """Target of the compilation."""
        return self.graph.target

    @property
    def byte_costs(self) -> tuple[float, ...]:
        """Costs per byte at which it was planned, until it fitted; the last is that of the graph."""
        byte_cost = self.graph.byte_cost_cycles
        other_costs = dict.fromkeys(each.byte_cost for each in self.attempts if each.byte_cost != byte_cost)
        return *other_costs, byte_cost

    @property
    def byte_cost_added_cycles(self) -> int | None:
        """Cycles of one run beyond those of the first attempt; None where trip counts are data."""
        cycles = [each.cycles for each in (*self.attempts[:1], *(x for x in self.attempts if x.is_used))]
        first, used = cycles or (0, 0)
        return None if first is None or used is None else used - first

    @cached_property
    def streaming_memory_bytes(self) -> int:
        """Bytes of remote buffers in streaming memory; those in the memory of the host do not count."""
        return sum(_streaming_bytes(self.graph, self.program).values())

    def once(self, function: Callable[[Executable], T]) -> T:
        """Return the value of a function of this executable, which is computed when it is first asked for."""
        if function not in self._values:
            self._values[function] = function(self)
        value: T = self._values[function]
        return value

    @cached_property
    def _values(self) -> dict[Callable[[Executable], Any], Any]:
        return {}

    @cached_property
    def function(self) -> Callable[[Mapping[HostStream, Any]], dict[HostStream, jax.Array]]:
        """The program as a function of values of host streams, see `engine_function`; `jax.jit` can trace it."""
        return engine_function(
            self.graph,
            self.program,
            exact_splits=self.options.exact_splits,
            clock=cycle_counter(self.graph, self.program),
        )

    def timeline_of(self, recording: Recording | None) -> Timeline:
        """Return the timeline of a recorded run, or the static one without a recording.

        Args:
            recording: outcomes of data-dependent control, see `timeline.Recording`.

        Raises:
            ProfileError: the trip count of a loop is data and not in `Options.trip_counts`, or the recording is too
                short.
        """
        return timeline(self._walk_of(recording))

    def _walk_of(self, recording: Recording | None) -> Walk:
        num_ipus = self.target.num_ipus
        return Walk.of(self.program, self.steps, num_ipus, self.slots, self.options.trip_counts, recording)

    def spans_of(self, recording: Recording | None, max_steps: int = MAX_STEPS) -> Spans:
        """Return start and end of the steps of each IPU, of a recorded run or the static one.

        Args:
            recording: as of `timeline_of`.
            max_steps: approximate upper bound of the number of steps; iterations of a loop are listed if they fit.

        Raises:
            ProfileError: as of `timeline_of`.
        """
        return spans_of(self._walk_of(recording), max_steps)

    def task_spans_of(self, recording: Recording | None) -> TaskSpans:
        """Return start and end of each task of each pipeline; argument and errors as of `timeline_of`."""
        return task_spans(self._walk_of(recording))


def compile(
    graph: Graph,
    program: Program,
    *,
    options: Options | None = None,
    check: Callable[[MemoryReport], object] = check_memory,
) -> Executable:
    """Compile a program: verify it, and compute the cost of every leaf and the memory of every tile.

    Args:
        graph: variables, mappings and vertices, for one target.
        program: the control tree; not to be changed afterwards.
        options: the options; the defaults when None.
        check: raises if the memory does not fit; not called with `allow_out_of_memory`.

    Raises:
        VerifyError: the program breaks a rule.
        TileMemoryError: the program overflows a tile, unless the options allow it.
        StreamingMemoryError: remote buffers do not fit in streaming memory.
        ArgumentError: `Options.trip_counts` names a loop that the program lacks.
    """
    options = options or Options()
    with watch_compilation("program", lambda: STEPS, options.progress):
        return _compile_checked(graph, program, options, check)


def _compile_checked(
    graph: Graph, program: Program, options: Options, check: Callable[[MemoryReport], object]
) -> Executable:
    """Verify and cost a program, pack its memory and list its clock steps, all timed and logged; see `compile`."""
    timings = dict[str, float]()
    graph = graph_on(graph, graph.target)
    effects = EffectsOf(graph)
    # Cheap checks first: the steps below may take minutes.
    _check_trip_counts(program, options)
    _check_streaming_memory(graph, program)
    if _LOG.is_on(DEBUG):
        for line in graph_counts(graph):
            _LOG.debug("%s: %s", compilation_name(), line)
    with step(_LOG, "verify", timings):
        verify(graph, program, effects, without=() if options.verify_undefined else ("undefined-read",))
    with step(_LOG, "cost", timings):
        costs = leaf_costs(graph, program)
        if options.pad_rows:
            graph.notes.padded_rows[:] = _padded_rows(graph, program, costs, effects)
            costs = leaf_costs(graph, program)
    with step(_LOG, "memory", timings):
        memory = memory_report(graph, program, effects, costs)
        if _LOG.is_on(TRACE):
            for line in fullest_tiles(memory, _LOGGED_TILES):
                _LOG.trace("%s: %s", compilation_name(), line)
        if not options.allow_out_of_memory:
            check(memory)
    with step(_LOG, "clocks", timings):
        steps, slots = clock_steps(program, costs, effects, graph.target)
    # Values for the next compilation; others would stay in memory while the program runs.
    keep_recent()
    frozen = MappingProxyType
    return Executable(
        graph,
        program,
        options,
        frozen(costs),
        memory,
        frozen(steps),
        slots,
        ReadOnlyMapping(timings),
        identity=Identity(label=options.label, date=today()),
    )


def _padded_rows(graph: Graph, program: Program, costs: Mapping[Leaf, Cost], effects: EffectsOf) -> list[PaddedRows]:
    """Return the rows that are worth padding, by the cycles of the whole program."""
    slow_cycles = Counter[tuple[int, int]]()
    for cost in costs.values():
        paths = cost.slow_paths if isinstance(cost, ComputeSetCost) else ()
        if isinstance(cost, CopyCost) and cost.slow_path is not None:
            paths = ((0, cost.slow_path, max(ipu.most_cycles[1] for ipu in cost.ipus)),)
        for _, reason, cycles in paths:
            slow_cycles[reason.row, reason.vector] += cycles

    def cycles_of(lengths: Mapping[int, int]) -> int:
        padded = graph_on(graph, graph.target)
        padded.notes.padded_rows[:] = [PaddedRows(length, longer, 0, 0) for length, longer in lengths.items()]
        return program_cycles(padded, program, effects=effects)

    return choose_padded_rows(graph, slow_cycles, cycles_of)


def leaf_costs(graph: Graph, program: Program) -> dict[Leaf, Cost]:
    """Return the cost of one run of each leaf of a program; a compute set is costed once for all its executions."""
    copies = CopyCosts(graph)
    set_costs: dict[ComputeSet, ComputeSetCost] = {}
    costs: dict[Leaf, Cost] = {}
    joining = joining_streams(program)  # transfers that share the host exchange of the one before them

    def transfer_cost(leaf: Leaf, channel: HostStream | RemoteBuffer, tensor: Tensor) -> StreamCost:
        before = costs.get(joining[leaf]) if leaf in joining else None
        return stream_cost(graph, channel, tensor, after=before if isinstance(before, StreamCost) else None)

    for leaf in leaves(program):
        match leaf:
            case Execute(compute_set):
                if compute_set not in set_costs:
                    set_costs[compute_set] = compute_set_cost(graph, compute_set)
                costs[leaf] = set_costs[compute_set]
            case Copy():
                costs[leaf] = copies.cost(leaf)
            case CrossReplicaCopy():
                costs[leaf] = cross_replica_cost(graph, leaf)
            case StreamIn(stream, tensor) | StreamOut(tensor, stream):
                costs[leaf] = transfer_cost(leaf, stream, tensor)
            case RemoteIn(buffer, tensor) | RemoteOut(tensor, buffer):
                costs[leaf] = transfer_cost(leaf, buffer, tensor)
            case Wait(tensor):
                costs[leaf] = wait_cost(graph, tensor)
            case Sync(kind):
                costs[leaf] = SyncCost(kind)
    return costs


def program_cycles(
    graph: Graph,
    program: Program,
    part: Program | None = None,
    *,
    costs: Mapping[Leaf, Cost] | None = None,
    effects: EffectsOf | None = None,
) -> int:
    """Return the cycles of one run of a program that is not compiled; loops whose trip count is data run once.

    Args:
        graph: variables, mappings and vertices.
        program: the control tree.
        part: the part of it that runs; all of it when None.
        costs: costs of its leaves, if already computed.
        effects: effects of its nodes, if already computed.
    """
    costs = leaf_costs(graph, program) if costs is None else costs
    effects = effects or EffectsOf(graph)
    steps, slots = clock_steps(program, costs, effects, graph.target)
    trips = {name: 1 for names in while_names(program).values() for name in names}
    return timeline(Walk.of(part or program, steps, graph.target.num_ipus, slots, trips)).cycles


def static_runs(graph: Graph, program: Program, costs: Mapping[Leaf, Cost]) -> Mapping[Program, int]:
    """Return how often each leaf runs in one run of a program.

    Args:
        graph: variables, mappings and vertices.
        program: the program; of its loops those whose trip count is data run once.
        costs: costs of its leaves.
    """
    steps, slots = clock_steps(program, costs, EffectsOf(graph), graph.target)
    trips = {name: 1 for names in while_names(program).values() for name in names}
    return timeline(Walk.of(program, steps, graph.target.num_ipus, slots, trips)).executions


def cycle_counter(graph: Graph, program: Program) -> CycleCounter | None:
    """Return the clocks that an engine traces with a program; None if no codelet reads them."""
    if not readings(graph):
        return None
    steps, slots = clock_steps(program, leaf_costs(graph, program), EffectsOf(graph), graph.target)
    return CycleCounter(graph, steps, slots)


def held_graph(graph: Graph, machine: Target) -> Graph:
    """Return a graph on another machine, whose constants it takes but for those that are part of its program."""
    return graph_on(graph, held_over(graph.target, machine))


def graph_on(graph: Graph, target: Target) -> Graph:
    """Return a copy of a graph with another target: to cost it elsewhere, or so that later changes do not reach it."""
    # Tables and lists are copied; variables, mappings and vertex groups are frozen, and shared.
    copy = Graph(target, graph.replication_factor, graph.byte_cost_cycles, graph.io_tiles, graph.planned_tile_bytes)
    copy.variables = list(graph.variables)
    copy.mappings = dict(graph.mappings)
    copy.elements_left_out = dict(graph.elements_left_out)
    copy.groups = {compute_set: list(groups) for compute_set, groups in graph.groups.items()}
    copy.notes = graph.notes.copied()
    copy.off_chip = dict(graph.off_chip)
    copy.replica_axes = graph.replica_axes
    return copy


def _check_streaming_memory(graph: Graph, program: Program) -> None:
    """Refuse a program whose remote buffers do not fit in the streaming memory of its IPUs."""
    available_bytes = graph.target.streaming_memory_bytes * graph.target.num_ipus
    needed = _streaming_bytes(graph, program)
    if sum(needed.values()) > available_bytes:
        largest = max(needed, key=lambda memory: (needed[memory], memory.name))
        raise StreamingMemoryError(
            "the program does not fit in streaming memory",
            where=largest.origin,
            expected=f"at most {available_bytes:,} bytes, those of {graph.target.num_ipus} IPUs",
            got=f"{sum(needed.values()):,} bytes, of which {largest.name} has {needed[largest]:,}",
            hint="more IPUs for each replica, or a share of the optimiser's state for each replica: ipu.optim.shard",
        )


def _streaming_bytes(graph: Graph, program: Program) -> dict[Variable, int]:
    """Return the bytes of each remote buffer in streaming memory, by its variable."""
    # Buffers of the graph take their memory even if no step moves them.
    memories = {*graph.off_chip, *remote_memories(program)}
    memories -= {memory for memory, buffer in graph.off_chip.items() if buffer.on_host}
    return {memory: memory.size * element_bytes(memory.dtype) for memory in memories}


def _check_trip_counts(program: Program, options: Options) -> None:
    """Refuse trip counts of loops that the program lacks: they would be ignored."""
    names = [name for loop in while_names(program).values() for name in loop]
    for name in options.trip_counts:
        if name not in names:
            raise ArgumentError(
                f"Options.trip_counts names an unknown loop: {name!r}",
                expected=f"one of {names}" if names else "nothing: every trip count is known",
                got=repr(name),
                hint=nearest(name, names) if names else "leave trip_counts out",
            )
