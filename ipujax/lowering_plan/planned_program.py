"""Lowering of a traced function: memories of its inputs, the passes over its jaxpr, graph and program.

Input: a lowering plan, and the `Choice` of parameters of a plan. Output: `ProgramInputs`, with the results that take
the places of donated inputs; `PlannedProgram`, and the same for another machine, which costs the same graph and program
again.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from ipujax.calls import may_be_offloaded
from ipujax.device import Device, IPUModel
from ipujax.fit import TILE_BYTES, Untried, first_choice
from ipujax.lowering.choice import Choice
from ipujax.lowering.dumps import TRACE, DumpRequest, Dumps
from ipujax.lowering.jax_compat import ClosedJaxpr, host_constants_as_inputs, is_on_host
from ipujax.lowering.jaxpr import equations
from ipujax.lowering.least_work import least_work
from ipujax.lowering.lower import LoweredProgram, for_planners, lower
from ipujax.lowering.offload import (
    BATCH_BYTES,
    IoTiles,
    Offloading,
    Streams,
    batch_arguments,
    could_stream_loops,
    is_streamed,
    memory_spaces,
)
from ipujax.lowering.partition import partition
from ipujax.lowering.passes import PassNotes, PassSettings, computed_again, run_passes
from ipujax.lowering.passes.count_loops import count_loops
from ipujax.lowering.passes.inline import inline
from ipujax.lowering.passes.shard_map import shard_map
from ipujax.lowering.passes.sink_rows import sink_rows
from ipujax.lowering.program_inputs import ProgramInputs, donated_aliases
from ipujax.lowering.recomputation import ChainTrade, Recomputation, may_store_less, modes
from ipujax.lowering.replicas import unwrapped
from ipujax.lowering.rules import Probes
from ipujax.lowering_plan.traced_plan import LoweringPlan
from ipujax.runtime.compile import Executable
from ipujax.runtime.errors import ArgumentError, TargetError
from ipujax.runtime.graph import BYTE_COST_CYCLES, Graph, Program, StreamOut, distinct
from ipujax.runtime.host import CallStream, HostCalls
from ipujax.runtime.logs import Log, step
from ipujax.runtime.target import Target, program_changes
from ipujax.runtime.tensor import element_bytes
from ipujax.sharding import Partitioning


def program_inputs(plan: LoweringPlan, stream_loops: bool) -> ProgramInputs:
    """Return name and memories of each input of the jaxpr; the last ones are constants on the host.

    Args:
        plan: the traced function.
        stream_loops: whether rows of loops stay in the host's memory.
    """
    signature = plan.program_signature
    batches = _batches(plan, stream_loops)
    num_constants = len(plan.constants)
    of_constants = [False] * num_constants
    names = [signature.leaf_names[n] for n in plan.positions]
    names += [f"closed over: array {n}" for n in range(num_constants)]
    # A donated batch leaves its place in the host's memory to no result: rows of both are in use at once.
    by_user = [*(signature.donated[n] for n in plan.positions), *of_constants]
    donated = tuple(flag and count is None for flag, count in zip(by_user, batches, strict=True))
    offloaded_by_user = [*(signature.offloaded[n] for n in plan.positions), *of_constants]
    offloaded = tuple(map(operator.or_, offloaded_by_user, map(is_streamed, plan.jaxpr.in_avals)))
    aliases = _aliases(plan, donated, any(offloaded))
    return ProgramInputs(names, donated, aliases, offloaded, _streamed(plan, offloaded, aliases, batches), batches)


def argument_bytes_per_tile(plan: LoweringPlan) -> float:
    """Return the mean bytes on a tile of the arguments that are on the chip during the whole call."""
    offloaded = plan.program_signature.offloaded
    batches = _batches(plan, plan.settings.options.stream_loops is True)
    on_chip = (
        aval
        for aval, number, count in zip(plan.jaxpr.in_avals, plan.positions, batches, strict=True)
        if count is None and not offloaded[number] and not is_on_host(aval)
    )
    return sum(aval.size * element_bytes(aval.dtype) for aval in on_chip) / plan.settings.target.num_tiles


def whole_on_host(plan: LoweringPlan, batches: Sequence[int | None]) -> tuple[bool, ...]:
    """Return for each input whether its type has the host's memory, and it stays whole."""
    return tuple(is_streamed(aval) and count is None for aval, count in zip(plan.jaxpr.in_avals, batches, strict=True))


def _aliases(plan: LoweringPlan, donated: Sequence[bool], streams: bool) -> tuple[int | None, ...]:
    """Return for each result the donated argument whose place it takes; if one streams, both are split alike."""
    replicated = unwrapped(plan.jaxpr)
    if streams:
        # A shard_map decides the split of arguments and results that each replica loads by itself.
        partitioned = partition(memory_spaces(inline(plan.jaxpr)), plan.shardings.of_values)
        sharded = unwrapped(shard_map(partitioned))
        replicated = replace(replicated, in_dims=sharded.in_dims, out_dims=sharded.out_dims)
    return donated_aliases(replicated, donated)


def _batches(plan: LoweringPlan, stream_loops: bool) -> tuple[int | None, ...]:
    """Return for each argument the number of rows in which it is loaded, None for one that stays whole."""
    # Loops read rows by functions of JAX too, as `dynamic_index_in_dim`; some are found only once they are counted.
    jaxpr = sink_rows(count_loops(inline(plan.jaxpr)), of_loops=True) if stream_loops else plan.jaxpr
    counts = batch_arguments(jaxpr, stream_loops)
    return tuple(
        counts.get(number) if may_be_offloaded(aval) else None for number, aval in enumerate(plan.jaxpr.in_avals)
    )


def _streamed(
    plan: LoweringPlan,
    offloaded: Sequence[bool],
    aliases: Sequence[int | None],
    batches: Sequence[int | None],
) -> tuple[bool, ...]:
    """Return for each argument whether it is loaded from the host's memory: not one that is donated or offloaded.

    These are batches of pipelines, rows of loops that stream, and all others if I/O tiles load them.
    """
    has_io_tiles = plan.settings.options.io_tiles > 0
    return tuple(
        not is_offloaded and (count is not None or (has_io_tiles and number not in aliases and may_be_offloaded(aval)))
        for number, (is_offloaded, count, aval) in enumerate(zip(offloaded, batches, plan.jaxpr.in_avals, strict=True))
    )


_LOG = Log("lowering")
_MAX_BATCH_SHARE = 1 / 64  # assumed: of a chip's memory, for one batch of loads, at the first cost per byte


@dataclass(frozen=True, eq=False, slots=True)
class PlannedProgram:
    """A function as graph and program, planned with one choice of parameters.

    Args:
        plan: what was lowered, with arrays on the host as inputs.
        choice: cost per byte, recomputation, and the cuts that were found.
        inputs: memories of the inputs.
        jaxprs: the jaxpr as traced, and after each pass, by name.
        lowered: graph, program and streams.
        trades: bytes and cycles of recomputation in each gradient, where it is "auto".
        partitioning: how shardings partition the program; None if they do not.
        timings: seconds of tracing, of each pass and of lowering.
    """

    plan: LoweringPlan
    choice: Choice
    inputs: ProgramInputs
    jaxprs: Mapping[str, ClosedJaxpr]
    lowered: LoweredProgram
    trades: tuple[ChainTrade, ...]
    partitioning: Partitioning | None
    timings: Mapping[str, float]

    @property
    def graph(self) -> Graph:
        """Variables, tile mappings and vertices."""
        return self.lowered.graph

    @property
    def program(self) -> Program:
        """Control program of one call."""
        return self.lowered.program

    @property
    def jaxpr(self) -> ClosedJaxpr:
        """The jaxpr after all passes."""
        return list(self.jaxprs.values())[-1]

    @property
    def counts(self) -> list[tuple[str, object]]:
        """Rows of a table: the machine, and how many equations, variables, vertices… the program has."""
        graph = self.graph
        vertices = sum(group.num_vertices for groups in graph.groups.values() for group in groups)
        return [
            ("Machine", f"{graph.target.num_ipus:,} × {graph.target.name}, {graph.replication_factor:,} replicas"),
            ("Equations", len(self.jaxpr.eqns)),
            ("Variables", len(graph.variables)),
            ("Compute sets", len(graph.groups)),
            ("Vertices", vertices),
            ("Pipelines", len(self.lowered.pipelines)),
            ("Texts, by as_text(after=…)", f"{len(self.jaxprs)}: {', '.join(self.jaxprs)}"),
        ]

    def list_equations(self) -> dict[str, list[tuple[tuple[str, str, str], int]]]:
        """List the equations of the trace and after each pass, in order, for the profile's page.

        Each is primitive, types and line, and the number of equations that it is inside. A pass that changes nothing
        has the list before it.
        """
        from ipujax.lowering.dumps import EquationKinds

        kinds = EquationKinds()
        lists: dict[str, list[tuple[tuple[str, str, str], int]]] = {}
        jaxpr_before = None
        for name, jaxpr in self.jaxprs.items():
            lists[name] = list(lists.values())[-1] if jaxpr is jaxpr_before else kinds.of(jaxpr)
            jaxpr_before = jaxpr
        return lists

    def host_calls(self) -> HostCalls | None:
        """Return a caller of the Python functions that the program calls; None if it has none."""
        streams = (node.stream for node in distinct(self.program) if isinstance(node, StreamOut))
        return HostCalls(guarded=True) if any(isinstance(stream, CallStream) for stream in streams) else None

    @property
    def untried(self) -> Untried:
        """Options that could make the program smaller, and are not set."""
        options = self.plan.settings.options
        jaxpr = self.jaxprs["dce"]
        eqns = list(equations(jaxpr.jaxpr))
        with_auto = modes(eqns, Recomputation("auto"))
        recompute = modes(eqns, Recomputation(options.recompute)) != with_auto and may_store_less(jaxpr)
        pipelines = bool(with_auto - {"auto"})
        return Untried(recompute, pipelines, self._may_offload, options.io_tiles, self.may_stream_loops)

    @property
    def may_stream_loops(self) -> bool:
        """Whether it has loops whose rows could stay in the host's memory, and are on the chip."""
        return not self.choice.stream_loops and self.has_rows_to_stream

    @property
    def has_rows_to_stream(self) -> bool:
        """Whether it has loops whose rows could stay in the host's memory, or do."""
        return could_stream_loops(sink_rows(self.jaxprs["count_loops"], of_loops=True), self.jaxprs["fuse"])

    @property
    def _may_offload(self) -> bool:
        """Whether `offload_argnums` could offload an argument that is on the chip now."""
        signature = self.plan.program_signature
        positional, _ = signature.in_tree.children()
        inputs = self.inputs
        return any(
            n < positional.num_leaves and signature.used[n] and may_be_offloaded(signature.in_avals[n])
            for n, is_offloaded, is_streamed_in in zip(
                self.plan.positions, inputs.offloaded, inputs.streamed, strict=False
            )
            if not is_offloaded and not is_streamed_in
        )


def planned_program(plan: LoweringPlan, choice: Choice | None = None, probes: Probes | None = None) -> PlannedProgram:
    """Run all passes on the jaxpr and lower it.

    Args:
        plan: the traced function.
        choice: parameters; those that are tried first when None.
        probes: adds probes of all values to the program; None for a program without.
    """
    if choice is None:
        choice = first_choice(plan.settings.options, argument_bytes_per_tile(plan))
    jaxpr, constants = host_constants_as_inputs(plan.jaxpr)
    if constants:
        plan = replace(plan, jaxpr=jaxpr, constants=constants)
    settings = plan.settings
    timings = dict(plan.timings)
    notes = PassNotes()
    inputs = program_inputs(plan, choice.stream_loops)
    # Past the first cost per byte memory is short: equal layers that share code then save more than recomputing only
    # some parts of each.
    recomputation = replace(choice.recomputation, whole_layers=choice.byte_cost > BYTE_COST_CYCLES)
    dumps = Dumps(settings.name, DumpRequest.from_environment())
    dumps.passed(TRACE, plan.jaxpr)
    with dumps.writing_on_failure():
        run_passes(plan.jaxpr, _pass_settings(plan, inputs, choice, recomputation), timings, dumps.passed, notes)
        with step(_LOG, "lower", timings):
            last = list(dumps.jaxprs.values())[-1]
            if not plan.has_values_on_host:
                inputs = replace(inputs, aliases=None)
            of_pipelines = replace(choice, recomputation=recomputation)
            program = lower(last, settings.target, inputs, of_pipelines, settings.options, settings.line, probes)
    dumps.lowered(program.graph, program.program)
    # Computed on demand: only profiles ask for it.
    least = partial(least_work, dumps.jaxprs["shard_map"])
    program.graph.notes = replace(program.graph.notes, least_work=least)
    program.graph.notes.gathered.extend(notes.partition.gathered)
    program.graph.notes.computed_again.extend(computed_again(last, notes.kept_apart))
    partitioning = Partitioning.of(
        dumps.jaxprs, notes.partition, plan.positions, len(plan.signature.in_avals), plan.shardings
    )
    trades = (*notes.trades, *program.trades)
    choice = replace(choice, cuts=program.cuts)
    return PlannedProgram(plan, choice, inputs, dict(dumps.jaxprs), program, trades, partitioning, timings)


def _pass_settings(
    plan: LoweringPlan, inputs: ProgramInputs, choice: Choice, recomputation: Recomputation
) -> PassSettings:
    """Return the settings of the passes; batches of loads shrink in proportion to the cost per byte."""
    assert inputs.aliases is not None
    target = plan.settings.target
    num_ipus = target.num_ipus // unwrapped(plan.jaxpr).replicas
    chip_bytes = target.tiles_per_ipu * choice.tile_bytes
    scale = BYTE_COST_CYCLES / max(choice.byte_cost, BYTE_COST_CYCLES)
    io_tiles = _io_tiles(plan, choice)
    batch_bytes = int(scale * min(BATCH_BYTES, _MAX_BATCH_SHARE * chip_bytes))
    if io_tiles is not None:
        batch_bytes = min(batch_bytes, io_tiles.room_bytes)
    aliases = inputs.aliases
    offloading = Offloading(
        inputs.whole_off_chip, aliases, num_ipus, batch_bytes, io_tiles, whole_on_host(plan, inputs.batches)
    )
    streams = Streams(tuple(inputs.batches), tuple(alias is None for alias in aliases), choice.stream_loops)
    shardings = plan.shardings.of_values
    return PassSettings(
        choice.byte_cost,
        recomputation,
        offloading,
        streams,
        shardings,
        num_tiles=target.tiles_per_ipu,
        operation_bytes=for_planners(target, choice, plan.settings.options).operation_bytes,
        is_memory_short=choice.tile_bytes < TILE_BYTES[0],
    )


def _io_tiles(plan: LoweringPlan, choice: Choice) -> IoTiles | None:
    """Return the I/O tiles, None without any; refuses as many as an IPU has."""
    options = plan.settings.options
    target = plan.settings.target
    if not options.io_tiles:
        return None
    if options.io_tiles >= target.tiles_per_ipu:
        raise ArgumentError(
            f"Options.io_tiles leaves {plan.settings.name} no tiles that compute",
            expected=f"fewer than the {target.tiles_per_ipu:,} tiles of an IPU",
            got=options.io_tiles,
        )
    most_bytes = min(target.bytes_per_tile, TILE_BYTES[0])
    return IoTiles(options.io_tiles, min(choice.tile_bytes, TILE_BYTES[0]), most_bytes, options.prefetch_depth)


def held_on(planned: PlannedProgram, executable: Executable, device: Device) -> tuple[PlannedProgram, Executable]:
    """Return a program and its executable on another device, of the same tiles; see `Compiled.on` for errors."""
    plan = planned.plan
    if not isinstance(device, IPUModel):
        expected = "ipu.IPUModel(...)"
        raise ArgumentError(f"{plan.settings.name} is costed on a machine", expected=expected, got=repr(device))
    _check_held(plan.settings.target, device.target, plan.settings.name)
    costed = executable.on(device.target)
    plan = replace(plan, settings=replace(plan.settings, target=device.target))
    return replace(planned, plan=plan, lowered=replace(planned.lowered, graph=costed.graph)), costed


def _check_held(before: Target, after: Target, name: str) -> None:
    """Refuse a machine on which a function, compiled for another one, would be another program."""
    if changed := program_changes(before, after):
        values = [", ".join(f"{each}={getattr(target, each)!r}" for each in changed) for target in (before, after)]
        raise TargetError(
            f"{name} depends on {', '.join(changed)} of its machine: its program cannot be held",
            expected=values[0],
            got=values[1],
            hint="compile again: fun.with_options(device=device).lower(*args).compile()",
        )
