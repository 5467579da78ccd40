"""Compile: from a graph and a program to an `Executable` that knows what running it costs.

    graph, program ── verify ── costs ── memory ──▶ Executable ── timeline, profile (when asked for)

Compile is pure: it reads the graph and keeps a copy of its tables, so a graph may grow afterwards. Each pass is timed
by name.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any

import jax

from ipujax.runtime.analysis import EffectsOf
from ipujax.runtime.cache import keep_recent
from ipujax.runtime.cost import (
    ComputeSetCost,
    CopyCost,
    StreamCost,
    SyncCost,
    WaitCost,
    compute_set_cost,
    copy_cost,
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
from ipujax.runtime.graph.graph_counts import graph_counts
from ipujax.runtime.logs import DEBUG, TRACE, Log, compilation_name, step, watch_compilation
from ipujax.runtime.memory import MemoryReport, check_memory, memory_report
from ipujax.runtime.memory.fullest_tiles import fullest_tiles
from ipujax.runtime.options import Options
from ipujax.runtime.target import Target, nearest
from ipujax.runtime.tensor import Tensor, Variable, element_bytes
from ipujax.runtime.timeline import MAX_STEPS, ClockStep, Recording, Spans, TaskSpans, Timeline
from ipujax.runtime.timeline.clock_steps import clock_steps
from ipujax.runtime.timeline.spans import spans_of
from ipujax.runtime.timeline.task_spans import task_spans
from ipujax.runtime.timeline.timeline import timeline
from ipujax.runtime.verify import verify

Cost = ComputeSetCost | CopyCost | StreamCost | SyncCost | WaitCost
STEPS = ("verify", "cost", "memory", "clocks")
_LOG = Log("compile")
_SHOWN_TILES = 16  # of the fullest, in the log


@dataclass(frozen=True, slots=True)
class Identity:
    """What a program is called and when it was compiled, for titles; each is empty where it is not known.

    Args:
        function: the name of its function.
        file: the name of the file or cell that the function is in, else of the one that compiles it.
        label: what the user calls it, `Options.label` or `profile.labelled(…)`.
        date: the day it was compiled, "2026-11-25".
    """

    function: str = ""
    file: str = ""
    label: str = ""
    date: str = ""

    @property
    def name(self) -> str:
        """Label, function and file: `wide: train_step (train.py)`."""
        name = f"{self.function} ({self.file})" if self.function and self.file else self.function or self.file
        return ": ".join(filter(None, (self.label, name)))

    @property
    def day(self) -> str:
        """The date as people write it: 25 Nov 2026."""
        return f"{(day := datetime.date.fromisoformat(self.date)).day} {day:%b %Y}" if self.date else ""


def today() -> str:
    """The day of a compilation, "2026-11-25", in local time."""
    return datetime.date.today().isoformat()


@dataclass(frozen=True, eq=False)
class Executable:
    """A compiled program.

    Args:
        graph: variables, mappings and vertices; a copy, which nobody changes.
        program: the control tree.
        options: the choices it was compiled with.
        costs: what one run of each leaf costs.
        memory: what every tile needs.
        steps: what each leaf and decision does to the clocks of IPUs.
        slots: rows of the clock state that are slots of buffered exchanges.
        timings: seconds of each step from tracing on, by name; of a Poplar program those of this compilation.
        byte_costs: costs per byte at which it was planned, until it fitted; the last is that of the graph.
        byte_cost_added_cycles: cycles of one run beyond those at the first of them; None where trip counts are data.
        identity: what it is called, and when it was compiled.
    """

    graph: Graph
    program: Program
    options: Options
    costs: Mapping[Leaf, Cost] = field(repr=False)
    memory: MemoryReport = field(repr=False)
    steps: Mapping[Program, ClockStep] = field(repr=False)
    slots: int
    timings: Mapping[str, float]
    byte_costs: tuple[float, ...]
    byte_cost_added_cycles: int | None = 0
    identity: Identity = Identity()

    def named(self, function: str, file: str, timings: Mapping[str, float] = MappingProxyType({})) -> Executable:
        """The same program with what it was made from.

        Args:
            function: the name of its function; empty when there is none.
            file: the name of the file, see `Identity`.
            timings: seconds of each step before compilation, by name.
        """
        identity = replace(self.identity, function=str(function), file=file)
        return replace(self, identity=identity, timings=MappingProxyType({**timings, **self.timings}))

    @property
    def target(self) -> Target:
        """The machine it was compiled for."""
        return self.graph.target

    @cached_property
    def streaming_memory_bytes(self) -> int:
        """What remote buffers take of streaming memory, those of the host's own memory apart."""
        return sum(_streaming_bytes(self.graph, self.program).values())

    @cached_property
    def function(self) -> Callable[[Mapping[HostStream, Any]], dict[HostStream, jax.Array]]:
        """The function that runs it, from the values of host streams to those it writes; `jax.jit` can trace it."""
        return engine_function(self.graph, self.program, exact_splits=self.options.exact_splits)

    def timeline_of(self, recording: Recording | None) -> Timeline:
        """The timeline of a recorded run; the static one without a recording.

        Args:
            recording: what data-dependent control did, see `timeline.Recording`.

        Raises:
            ProfileError: a loop whose trip count is data and not in `Options.trip_counts`, or a recording that is too
                short.
        """
        num_ipus, trip_counts = self.target.num_ipus, self.options.trip_counts
        return timeline(self.program, self.steps, num_ipus, self.slots, trip_counts, recording)

    def spans_of(self, recording: Recording | None, max_steps: int = MAX_STEPS) -> Spans:
        """What each IPU does when in a recorded run, or the static one, iterations of loops shown where they fit.

        Args:
            recording: as of `timeline_of`.
            max_steps: approximate upper bound of the steps of spans.

        Raises:
            ProfileError: as `timeline_of`.
        """
        num_ipus, trip_counts = self.target.num_ipus, self.options.trip_counts
        return spans_of(self.program, self.steps, num_ipus, self.slots, trip_counts, recording, max_steps)

    def task_spans_of(self, recording: Recording | None) -> TaskSpans:
        """When each task of each pipeline runs in a recorded run, or the static one.

        Args:
            recording: as of `timeline_of`.

        Raises:
            ProfileError: as `timeline_of`.
        """
        num_ipus, trip_counts = self.target.num_ipus, self.options.trip_counts
        return task_spans(self.program, self.steps, num_ipus, self.slots, trip_counts, recording)


def compile(
    graph: Graph,
    program: Program,
    *,
    options: Options | None = None,
    check: Callable[[MemoryReport], object] = check_memory,
) -> Executable:
    """Compiles a program: checks it, and finds what every leaf of it costs and how much memory every tile needs.

    Args:
        graph: variables, mappings and vertices, for one target.
        program: the control tree; not to be changed afterwards.
        options: choices; the defaults when None.
        check: looks at what every tile needs, unless the options allow any of it.

    Raises:
        VerifyError: a program that breaks a rule.
        TileMemoryError: a program that overflows a tile, unless the options allow it.
        StreamingMemoryError: remote buffers that streaming memory has no room for.
        ArgumentError: a trip count for a loop that the program does not have.
    """
    options = options or Options()
    with watch_compilation("program", STEPS, options.progress):
        return _compiled(graph, program, options, check)


def _compiled(graph: Graph, program: Program, options: Options, check: Callable[[MemoryReport], object]) -> Executable:
    timings = dict[str, float]()
    graph, effects = _copied(graph), EffectsOf(graph)
    _check_trip_counts(program, options)
    _check_streaming_memory(graph, program)
    if _LOG.is_on(DEBUG):
        for line in graph_counts(graph):
            _LOG.debug("%s: %s", compilation_name(), line)
    with step(_LOG, "verify", timings):
        verify(graph, program, effects, without=() if options.verify_undefined else ("undefined-read",))
    with step(_LOG, "cost", timings):
        costs = leaf_costs(graph, program)
    with step(_LOG, "memory", timings):
        memory = memory_report(graph, program, effects, costs)
        if _LOG.is_on(TRACE):
            for line in fullest_tiles(memory, _SHOWN_TILES):
                _LOG.trace("%s: %s", compilation_name(), line)
        if not options.allow_out_of_memory:
            check(memory)
    with step(_LOG, "clocks", timings):
        steps, slots = clock_steps(program, costs, effects, graph.target)
    keep_recent()
    frozen = MappingProxyType
    byte_costs = (graph.byte_cost_cycles,)
    identity = Identity(label=options.label, date=today())
    clocks = frozen(steps), slots
    return Executable(
        graph, program, options, frozen(costs), memory, *clocks, frozen(timings), byte_costs, identity=identity
    )


def leaf_costs(graph: Graph, program: Program) -> dict[Leaf, Cost]:
    """What one run of each leaf of a program costs; a compute set that is executed in several places is costed once."""
    known: dict[ComputeSet, ComputeSetCost] = {}
    costs: dict[Leaf, Cost] = {}
    joining = joining_streams(program)

    def transfer_cost(leaf: Leaf, channel: HostStream | RemoteBuffer, tensor: Tensor) -> StreamCost:
        before = costs.get(joining[leaf]) if leaf in joining else None
        return stream_cost(graph, channel, tensor, after=before if isinstance(before, StreamCost) else None)

    for leaf in leaves(program):
        match leaf:
            case Execute(compute_set):
                if compute_set not in known:
                    known[compute_set] = compute_set_cost(graph, compute_set)
                costs[leaf] = known[compute_set]
            case Copy():
                costs[leaf] = copy_cost(graph, leaf)
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
    """Cycles of one run of a program that is not compiled; loops whose trip count is data run once.

    Args:
        graph: variables, mappings and vertices.
        program: the control tree.
        part: the part of it that runs; all of it when None.
        costs: the costs of its leaves, if they were computed already.
        effects: the effects of its nodes, if some were computed already.
    """
    costs, effects = leaf_costs(graph, program) if costs is None else costs, effects or EffectsOf(graph)
    steps, slots = clock_steps(program, costs, effects, graph.target)
    trips = {name: 1 for names in while_names(program).values() for name in names}
    return timeline(part or program, steps, graph.target.num_ipus, slots, trips).cycles


def _copied(graph: Graph) -> Graph:
    copy = Graph(graph.target, graph.replication_factor, graph.byte_cost_cycles, graph.io_tiles)
    copy.variables, copy.mappings = list(graph.variables), dict(graph.mappings)
    copy.groups = {compute_set: list(groups) for compute_set, groups in graph.groups.items()}
    copy.fallbacks, copy.unmet_bounds = dict(graph.fallbacks), list(graph.unmet_bounds)
    copy.off_chip, copy.roles = dict(graph.off_chip), dict(graph.roles)
    return copy


def _check_streaming_memory(graph: Graph, program: Program) -> None:
    there = graph.target.streaming_memory_bytes * graph.target.num_ipus
    needed = _streaming_bytes(graph, program)
    if sum(needed.values()) > there:
        largest = max(needed, key=lambda memory: (needed[memory], memory.name))
        raise StreamingMemoryError(
            "what is kept in streaming memory exceeds it",
            where=largest.origin,
            expected=f"at most {there:,} bytes, those of {graph.target.num_ipus} IPUs",
            got=f"{sum(needed.values()):,} bytes, of which {largest.name} has {needed[largest]:,}",
            hint="more IPUs for each replica, or a share of the optimiser's state for each replica: ipu.optim.shard",
        )


def _streaming_bytes(graph: Graph, program: Program) -> dict[Variable, int]:
    """Bytes in streaming memory, by the memory of each remote buffer."""
    memories = {*graph.off_chip, *remote_memories(program)}
    memories -= {memory for memory, buffer in graph.off_chip.items() if buffer.on_host}
    return {memory: memory.size * element_bytes(memory.dtype) for memory in memories}


def _check_trip_counts(program: Program, options: Options) -> None:
    names = [name for loop in while_names(program).values() for name in loop]
    for name in options.trip_counts:
        if name not in names:
            raise ArgumentError(
                f"Options.trip_counts names no loop of this program: {name!r}",
                expected=f"one of {names}" if names else "nothing: every trip count is known",
                got=repr(name),
                hint=nearest(name, names) if names else "leave trip_counts out",
            )
