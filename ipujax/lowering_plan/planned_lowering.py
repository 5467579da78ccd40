"""Lowering of a traced function: memories of its arguments, the passes over its jaxpr, graph and program.

Input: a lowering plan, and the `Choice` of a plan. Output: `Lowered`.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from ipujax.calls import Signature, may_be_offloaded
from ipujax.fit import Choice, first_choice
from ipujax.lowering.dumps import TRACE, DumpRequest, Dumps
from ipujax.lowering.jax_compat import host_constants_as_inputs, is_on_host
from ipujax.lowering.lower import donated_aliases, lower
from ipujax.lowering.offload import (
    BATCH_BYTES,
    IoTiles,
    Offloading,
    Streams,
    batch_arguments,
    is_streamed,
    memory_spaces,
)
from ipujax.lowering.partition import Notes, partition
from ipujax.lowering.passes import run_passes
from ipujax.lowering.passes.inline import inline
from ipujax.lowering.passes.shard_map import shard_map
from ipujax.lowering.recomputation import ChainTrade
from ipujax.lowering.replicas import unwrapped
from ipujax.lowering.rules import Probes
from ipujax.lowering_plan import LoweringPlan
from ipujax.runtime.errors import ArgumentError
from ipujax.runtime.graph import BYTE_COST_CYCLES
from ipujax.runtime.logs import Log, step
from ipujax.runtime.tensor import element_bytes
from ipujax.sharding import Partitioning
from ipujax.stages import Lowered

_LOG = Log("lowering")
_MAX_BATCH_SHARE = 1 / 64  # assumed: of a chip's memory, for one batch of loads, at the first cost per byte


@dataclass(frozen=True, slots=True)
class _InputMemories:
    """Memory of each input of a program.

    Args:
        donated: True for inputs whose buffer may be reused.
        aliases: for each result the donated input whose place it takes, or None.
        on_host: True for inputs whose type has the host's memory.
        offloaded: True for inputs in streaming memory.
        streamed: True for inputs that are loaded from the host's memory.
        batches: number of rows in which pipelines, or loops that stream, load an input; None for one that stays whole.
    """

    donated: tuple[bool, ...]
    aliases: tuple[int | None, ...]
    on_host: tuple[bool, ...]
    offloaded: tuple[bool, ...]
    streamed: tuple[bool, ...]
    batches: tuple[int | None, ...]

    @property
    def whole_off_chip(self) -> tuple[bool, ...]:
        """True for inputs that are off chip and stay whole."""
        flags = zip(self.offloaded, self.streamed, self.batches, strict=True)
        return tuple((is_offloaded or is_streamed) and count is None for is_offloaded, is_streamed, count in flags)

    @property
    def whole_on_host(self) -> tuple[bool, ...]:
        """True for inputs whose type has the host's memory, and that stay whole."""
        return tuple(flag and count is None for flag, count in zip(self.on_host, self.batches, strict=True))


def lower_plan(plan: LoweringPlan) -> Lowered:
    """Lower a plan with the parameters that are tried first."""
    lowering = PlannedLowering.of_plan(plan)
    return lowering.lowered(first_choice(plan.options, lowering.argument_bytes_per_tile))


@dataclass(frozen=True, eq=False, slots=True)
class PlannedLowering(LoweringPlan):
    """A lowering plan with the lowering itself."""

    @staticmethod
    def of_plan(plan: LoweringPlan) -> PlannedLowering:
        """Return the lowering of a plan."""
        return PlannedLowering(*(getattr(plan, each.name) for each in fields(plan)))

    def lowered(self, choice: Choice, probes: Probes | None = None) -> Lowered:
        """Run all passes on the jaxpr and lower it with the parameters of a plan, and with probes if there are any."""
        jaxpr, constants = host_constants_as_inputs(self.jaxpr)
        if constants:
            return replace(self, jaxpr=jaxpr, constants=constants).lowered(choice, probes)
        timings = dict(self.timings)
        trades: list[ChainTrade] = []
        notes = Notes()
        memories = self._input_memories(choice.stream_loops)
        names = [self._program_signature.leaf_names[n] for n in self.positions]
        names += [f"closed over: array {n}" for n in range(len(self.constants))]
        is_free = tuple(alias is None for alias in memories.aliases)
        streams = Streams(memories.batches, is_free, choice.stream_loops)
        offloading = self._offloading(memories.whole_off_chip, memories.aliases, memories.whole_on_host, choice)
        # Past the first cost per byte memory is short: equal layers that share code then save more than recomputing
        # only some parts of each.
        recomputation = replace(choice.recomputation, whole_layers=choice.byte_cost > BYTE_COST_CYCLES)
        dumps = Dumps(self.name, DumpRequest.from_environment())
        dumps.passed(TRACE, self.jaxpr)
        with dumps.writing_on_failure():
            run_passes(
                self.jaxpr,
                timings,
                choice.byte_cost,
                recomputation,
                trades,
                offloading,
                streams,
                dumps.passed,
                self.shardings,
                notes,
            )
            with step(_LOG, "lower", timings):
                program = lower(
                    list(dumps.jaxprs.values())[-1],
                    self.target,
                    donated=memories.donated,
                    aliases=memories.aliases if self._has_values_on_host else None,
                    offloaded=memories.offloaded,
                    streamed=memories.streamed,
                    batches=memories.batches,
                    names=names,
                    line=self.line,
                    options=replace(self.options, byte_cost=choice.byte_cost),
                    recomputation=recomputation,
                    cuts=choice.cuts,
                    planned_tile_bytes=choice.tile_bytes,
                    probes=probes,
                )
        dumps.lowered(program.graph, program.program)
        program.graph.notes.gathered.extend(notes.gathered)
        choice = replace(choice, cuts=program.cuts)
        trades += program.trades
        return Lowered(
            self.name,
            self.signature,
            dumps.jaxprs,
            program,
            self.options,
            timings,
            choice,
            trades,
            self.lowered,
            self.spread,
            refs=self.refs,
            constants=self.constants,
            may_offload=self._may_offload(memories.offloaded, memories.streamed),
            partitioning=Partitioning.of(
                dumps.jaxprs,
                notes,
                self.positions,
                len(self.signature.in_avals),
                self.call,
                self.result_settings,
                self.mesh,
            ),
        )

    @property
    def argument_bytes_per_tile(self) -> float:
        """Mean bytes on a tile of the arguments that are on the chip during the whole call."""
        signature = self._program_signature
        batches = self._batches(self.options.stream_loops is True)
        on_chip = (
            aval
            for aval, number, count in zip(self.jaxpr.in_avals, self.positions, batches, strict=True)
            if count is None and not signature.offloaded[number] and not is_on_host(aval)
        )
        return sum(aval.size * element_bytes(aval.dtype) for aval in on_chip) / self.target.num_tiles

    @property
    def _program_signature(self) -> Signature:
        return self.signature.with_state(self.refs)

    @property
    def _has_values_on_host(self) -> bool:
        return any(map(is_on_host, (*self.jaxpr.in_avals, *self.jaxpr.out_avals)))

    def _input_memories(self, stream_loops: bool) -> _InputMemories:
        signature = self._program_signature
        batches = self._batches(stream_loops)
        of_constants = [False] * len(self.constants)
        # A donated batch leaves its place in the host's memory to no result: rows of both are in use at once.
        by_user = [*(signature.donated[n] for n in self.positions), *of_constants]
        donated = tuple(flag and count is None for flag, count in zip(by_user, batches, strict=True))
        on_host = tuple(map(is_streamed, self.jaxpr.in_avals))
        offloaded_by_user = [*(signature.offloaded[n] for n in self.positions), *of_constants]
        offloaded = tuple(map(operator.or_, offloaded_by_user, on_host))
        aliases = self._aliases(donated, any(offloaded))
        streamed = self._streamed(offloaded, aliases, batches)
        return _InputMemories(donated, aliases, on_host, offloaded, streamed, batches)

    def _aliases(self, donated: Sequence[bool], streams: bool) -> tuple[int | None, ...]:
        """Return for each result the donated argument whose place it takes; if one streams, both are split alike."""
        replicated = unwrapped(self.jaxpr)
        if streams:
            # A shard_map decides the split of arguments and results that each replica loads by itself.
            sharded = unwrapped(shard_map(partition(memory_spaces(inline(self.jaxpr)), self.shardings)))
            replicated = replace(replicated, in_dims=sharded.in_dims, out_dims=sharded.out_dims)
        return donated_aliases(replicated, donated)

    def _batches(self, stream_loops: bool) -> tuple[int | None, ...]:
        """Return for each argument the number of rows in which it is loaded, None for one that stays whole."""
        counts = batch_arguments(self.jaxpr, stream_loops)
        return tuple(
            counts.get(number) if may_be_offloaded(aval) else None for number, aval in enumerate(self.jaxpr.in_avals)
        )

    def _streamed(
        self, offloaded: Sequence[bool], aliases: Sequence[int | None], batches: Sequence[int | None]
    ) -> tuple[bool, ...]:
        """Return for each argument whether it is loaded from the host's memory: not one that is donated or offloaded.

        These are batches of pipelines, and all others if I/O tiles load them.
        """
        return tuple(
            not is_offloaded
            and (count is not None or (self.options.io_tiles > 0 and number not in aliases and may_be_offloaded(aval)))
            for number, (is_offloaded, count, aval) in enumerate(
                zip(offloaded, batches, self.jaxpr.in_avals, strict=True)
            )
        )

    def _may_offload(self, offloaded: Sequence[bool], streamed: Sequence[bool]) -> bool:
        """Return whether `offload_argnums` could offload an argument that is on the chip now."""
        signature = self._program_signature
        positional, _ = signature.in_tree.children()
        return any(
            n < positional.num_leaves and signature.used[n] and may_be_offloaded(signature.in_avals[n])
            for n, is_offloaded, is_streamed_in in zip(self.positions, offloaded, streamed, strict=False)
            if not is_offloaded and not is_streamed_in
        )

    def _offloading(
        self, inputs: tuple[bool, ...], aliases: tuple[int | None, ...], on_host: tuple[bool, ...], choice: Choice
    ) -> Offloading:
        """Return the values off chip; batches of loads shrink in proportion to the cost per byte."""
        num_ipus = self.target.num_ipus // unwrapped(self.jaxpr).replicas
        chip_bytes = self.target.tiles_per_ipu * choice.tile_bytes
        scale = BYTE_COST_CYCLES / max(choice.byte_cost, BYTE_COST_CYCLES)
        batch_bytes = int(scale * min(BATCH_BYTES, _MAX_BATCH_SHARE * chip_bytes))
        return Offloading(inputs, aliases, num_ipus, batch_bytes, self._io_tiles(choice), on_host)

    def _io_tiles(self, choice: Choice) -> IoTiles | None:
        """Return the I/O tiles, None without any; refuses as many as an IPU has."""
        options = self.options
        target = self.target
        if not options.io_tiles:
            return None
        if options.io_tiles >= target.tiles_per_ipu:
            raise ArgumentError(
                f"Options.io_tiles leaves {self.name} no tiles that compute",
                expected=f"fewer than the {target.tiles_per_ipu:,} tiles of an IPU",
                got=options.io_tiles,
            )
        io_bytes = options.io_tiles * choice.tile_bytes
        # assumed: the batch in use and those ahead share the memory, and a value may fill half of a batch's share.
        return IoTiles(options.prefetch_depth, io_bytes // (2 * (options.prefetch_depth + 1)))
