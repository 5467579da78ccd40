"""Lowering of a traced function: memories of its arguments, the passes over its jaxpr, graph and program.

Input: a traced function, the target, the user's options, and the `Choice` of a plan. Output: `Lowered`.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.sharding import Mesh

from ipujax.arguments import FunctionName
from ipujax.calls import Signature, may_be_offloaded
from ipujax.distributed.instance import Spread
from ipujax.fit import Choice
from ipujax.lowering.dumps import TRACE, DumpRequest, Dumps
from ipujax.lowering.jax_compat import ClosedJaxpr, host_constants_as_inputs, is_on_host, without_float0
from ipujax.lowering.jaxpr import check_values, primitive_names
from ipujax.lowering.lower import donated_aliases, lower
from ipujax.lowering.offload import (
    BATCH_BYTES,
    IoTiles,
    Offloading,
    Streams,
    batch_arguments,
    check_asked_memories,
    is_streamed,
    memory_spaces,
)
from ipujax.lowering.partition import Notes, Shardings, partition
from ipujax.lowering.passes import PASSES, run_passes
from ipujax.lowering.passes.inline import inline
from ipujax.lowering.passes.shard_map import shard_map
from ipujax.lowering.recomputation import ChainTrade
from ipujax.lowering.refs import with_state
from ipujax.lowering.replicas import unwrapped
from ipujax.runtime.compile import STEPS as COMPILE_STEPS
from ipujax.runtime.errors import ArgumentError
from ipujax.runtime.graph import BYTE_COST_CYCLES
from ipujax.runtime.logs import Log, step
from ipujax.runtime.options import Options
from ipujax.runtime.target import Target
from ipujax.runtime.tensor import element_bytes
from ipujax.sharding import NO_SHARDINGS, CallShardings, Partitioning, mesh_of_constraints, without_splits
from ipujax.stages import Lowered, Traced

STEPS = (TRACE, *(name for name, _ in PASSES), "lower", *COMPILE_STEPS)
_LOG = Log("lowering")
_MAX_BATCH_SHARE = 1 / 64  # assumed: of a chip's memory, for one batch of loads, at the first cost per byte


def _with_static_products(jaxpr: ClosedJaxpr) -> ClosedJaxpr:
    """Return a jaxpr with block-sparse products in place of those of sparse arrays with constant indices."""
    # The library is imported for programs that need it alone.
    if not any(name.startswith(("bcoo_dot", "bcsr_dot")) for name in primitive_names(jaxpr.jaxpr)):
        return jaxpr
    from ipujax.popsparse.jax_arrays import with_static_products

    return with_static_products(jaxpr)


@dataclass(frozen=True, slots=True)
class _InputMemories:
    """Memory of each input of a program.

    Args:
        donated: True for inputs whose buffer may be reused.
        aliases: for each result the donated input whose place it takes, or None.
        on_host: True for inputs whose type has the host's memory.
        offloaded: True for inputs in streaming memory.
        streamed: True for inputs that are loaded from the host's memory.
        batches: number of micro-batches in which pipelines load an input; None for one that stays whole.
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


@dataclass(frozen=True, eq=False, slots=True)
class LoweringPlan:
    """A traced function with all that is equal in every plan of it.

    Args:
        name: name of the function.
        signature: signature of the trace.
        jaxpr: the traced jaxpr, with values in place of Refs and without float0.
        positions: for each input of the jaxpr the number of its leaf; Refs are numbered after the arguments.
        refs: Refs that the function closes over and changes.
        line: origin of equations that have no line of the user's.
        target: target of all replicas.
        options: options of the user.
        spread: distribution of replicas over instances.
        timings: seconds of steps before.
        constants: arrays on the host that the function closes over: the last inputs of the jaxpr.
        shardings: shardings of the inputs and results of the jaxpr.
        mesh: devices that results are put on; None for one device.
        call: shardings of the call.
        result_settings: sharding that the user wants of each leaf of the results.
    """

    name: FunctionName
    signature: Signature
    jaxpr: ClosedJaxpr
    positions: Sequence[int]
    refs: Sequence[jax.Ref]
    line: str
    target: Target
    options: Options
    spread: Spread | None
    timings: Mapping[str, float]
    constants: tuple[Any, ...] = ()
    shardings: Shardings = Shardings()
    mesh: Mesh | None = None
    call: CallShardings = NO_SHARDINGS
    result_settings: tuple[Any, ...] = ()

    @staticmethod
    def of(
        name: FunctionName, traced: Traced, line: str, target: Target, options: Options, spread: Spread | None
    ) -> LoweringPlan:
        """Return the lowering plan of a traced function; refuse values other than arrays, and unsupported memories."""
        # A copy, as lowered programs are cached by weak references to the traced jaxpr, and must not refer to it.
        copy = ClosedJaxpr(traced.jaxpr.jaxpr, list(map(without_splits, traced.jaxpr.consts)))
        check_values(copy, name, traced.signature.leaf_names)
        check_asked_memories(name, copy)
        jaxpr, positions = without_float0(copy)
        jaxpr, refs = with_state(_with_static_products(jaxpr))
        num_arguments = len(traced.signature.in_avals)
        inputs = tuple(traced.shardings.inputs[n] for n in positions) if traced.shardings.inputs else ()
        outputs = () if refs or traced.shardings.outputs is None else traced.result_shardings
        shardings = Shardings(inputs, outputs, target)
        positions += range(num_arguments, num_arguments + len(refs))
        return LoweringPlan(
            name,
            traced.signature,
            jaxpr,
            positions,
            refs,
            line,
            target,
            options,
            spread,
            traced.timings,
            shardings=shardings,
            mesh=traced.shardings.mesh or mesh_of_constraints(copy),
            call=traced.shardings,
            result_settings=traced.result_shardings,
        )

    def lowered(self, choice: Choice) -> Lowered:
        """Run all passes on the jaxpr and lower it with the parameters of a plan."""
        jaxpr, constants = host_constants_as_inputs(self.jaxpr)
        if constants:
            return replace(self, jaxpr=jaxpr, constants=constants).lowered(choice)
        timings = dict(self.timings)
        trades: list[ChainTrade] = []
        notes = Notes()
        memories = self._input_memories()
        names = [self._program_signature.leaf_names[n] for n in self.positions]
        names += [f"closed over: array {n}" for n in range(len(self.constants))]
        streams = Streams(memories.batches, tuple(alias is None for alias in memories.aliases))
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
                )
        dumps.lowered(program.graph, program.program)
        program.graph.gathered.extend(notes.gathered)
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
        on_chip = (
            aval
            for aval, number, count in zip(self.jaxpr.in_avals, self.positions, self._batches(), strict=True)
            if count is None and not signature.offloaded[number] and not is_on_host(aval)
        )
        return sum(aval.size * element_bytes(aval.dtype) for aval in on_chip) / self.target.num_tiles

    @property
    def _program_signature(self) -> Signature:
        return self.signature.with_state(self.refs)

    @property
    def _has_values_on_host(self) -> bool:
        return any(map(is_on_host, (*self.jaxpr.in_avals, *self.jaxpr.out_avals)))

    def _input_memories(self) -> _InputMemories:
        signature = self._program_signature
        batches = self._batches()
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

    def _batches(self) -> tuple[int | None, ...]:
        """Return for each argument the micro-batches in which pipelines load it, None for one that stays whole."""
        counts = batch_arguments(self.jaxpr)
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
