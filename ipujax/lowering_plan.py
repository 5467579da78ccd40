"""What a traced function is lowered with: where its arguments lie, and the way down from its jaxpr to a program.

Input: a traced function, the machine, what the user chose, and a `Choice`. Output: `Lowered`.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from ipujax.calls import FunctionName, Signature, may_be_offloaded
from ipujax.distributed.instance import Spread
from ipujax.fit import Choice
from ipujax.lowering.dumps import TRACE, DumpRequest, Dumps
from ipujax.lowering.jax_compat import ClosedJaxpr, host_constants_as_inputs, is_on_host, without_float0
from ipujax.lowering.jaxpr import check_values
from ipujax.lowering.lower import donated_aliases, lower
from ipujax.lowering.offload import (
    BATCH_BYTES,
    IoTiles,
    Offloading,
    check_asked_memories,
    is_streamed,
    memory_spaces,
)
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
from ipujax.stages import Lowered, Traced

STEPS = (TRACE, *(name for name, _ in PASSES), "lower", *COMPILE_STEPS)
_LOG = Log("lowering")
_BATCH_SHARE = 1 / 64  # of the memory of a chip, what is loaded together at most at the first cost per byte


@dataclass(frozen=True, eq=False, slots=True)
class LoweringPlan:
    """What a traced function is lowered with, in one way or another.

    Args:
        name: of the function.
        signature: what it was traced with.
        jaxpr: without what is float0, of values in the place of Refs.
        moved: the leaves of the arguments that the jaxpr has, then those of `refs`.
        refs: what the function closes over and changes.
        line: line of equations whose own line is not the user's.
        target: the machine.
        options: what the user chose.
        spread: how replicas are spread over instances.
        timings: seconds spent before.
        constants: what the last inputs of the jaxpr are: arrays on the host that the function closes over.
    """

    name: FunctionName
    signature: Signature
    jaxpr: ClosedJaxpr
    moved: Sequence[int]
    refs: Sequence[jax.Ref]
    line: str
    target: Target
    options: Options
    spread: Spread | None
    timings: Mapping[str, float]
    constants: tuple[Any, ...] = ()

    @staticmethod
    def of(
        name: FunctionName, traced: Traced, line: str, target: Target, options: Options, spread: Spread | None
    ) -> LoweringPlan:
        """The plan of a traced function.

        Raises:
            ArgumentTypeError: for an argument or a result that is no array.
            ArgumentValueError: for a policy of `jax.checkpoint` that offloads to what is no streaming memory.
            GraphError: for a value inside that is none.
        """
        given = ClosedJaxpr(traced.jaxpr.jaxpr, traced.jaxpr.consts)  # a copy: the jaxpr is the key of what it becomes
        check_values(given, name, traced.signature.leaf_names)
        check_asked_memories(name, given)
        jaxpr, moved = without_float0(given)
        jaxpr, refs = with_state(jaxpr)
        arguments = len(traced.signature.in_avals)
        moved += range(arguments, arguments + len(refs))
        return LoweringPlan(name, traced.signature, jaxpr, moved, refs, line, target, options, spread, traced.timings)

    def lowered(self, choice: Choice) -> Lowered:
        """The function, planned in a way."""
        jaxpr, constants = host_constants_as_inputs(self.jaxpr)
        if constants:
            return replace(self, jaxpr=jaxpr, constants=constants).lowered(choice)
        signature, timings, trades = self._planned, dict(self.timings), list[ChainTrade]()
        donated = [*(signature.donated[n] for n in self.moved), *(False for _ in self.constants)]
        names = [signature.leaf_names[n] for n in self.moved]
        names += [f"closed over: array {n}" for n in range(len(self.constants))]
        hosted = tuple(map(is_streamed, self.jaxpr.in_avals))
        of_user = [*(signature.offloaded[n] for n in self.moved), *(False for _ in self.constants)]
        offloaded = tuple(map(operator.or_, of_user, hosted))
        aliases = self._aliases(donated, any(offloaded))
        streamed = self._streamed(offloaded, aliases)
        offloading = self._offloading(tuple(map(operator.or_, offloaded, streamed)), aliases, hosted, choice.byte_cost)
        # Code of layers that are alike is worth more than the cycles of some of their parts once memory lacks.
        recomputation = replace(choice.recomputation, whole_layers=choice.byte_cost > BYTE_COST_CYCLES)
        dumps = Dumps(self.name, DumpRequest.from_environment())
        dumps.passed(TRACE, self.jaxpr)
        with dumps.kept_if_failing():
            run_passes(self.jaxpr, timings, choice.byte_cost, recomputation, trades, offloading, dumps.passed)
            with step(_LOG, "lower", timings):
                program = lower(
                    list(dumps.jaxprs.values())[-1],
                    self.target,
                    donated=donated,
                    aliases=aliases if any(map(is_on_host, (*self.jaxpr.in_avals, *self.jaxpr.out_avals))) else None,
                    offloaded=offloaded,
                    streamed=streamed,
                    names=names,
                    line=self.line,
                    options=replace(self.options, byte_cost=choice.byte_cost),
                    recomputation=recomputation,
                    cuts=choice.cuts,
                )
        dumps.lowered(program.graph, program.program)
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
            may_offload=self._may_offload(offloaded, streamed),
        )

    @property
    def _planned(self) -> Signature:
        return self.signature.with_state(self.refs)

    def _aliases(self, donated: Sequence[bool], streams: bool) -> tuple[int | None, ...]:
        """For each result the donated argument whose place it takes; split alike, where something streams."""
        whole = unwrapped(self.jaxpr)
        if streams:
            ends = unwrapped(shard_map(memory_spaces(inline(self.jaxpr))))
            whole = replace(whole, in_dims=ends.in_dims, out_dims=ends.out_dims)
        return donated_aliases(whole, donated)

    def _streamed(self, offloaded: Sequence[bool], aliases: Sequence[int | None]) -> tuple[bool, ...]:
        """For each argument whether I/O tiles bring it from the host: it is neither on the chip nor off it already."""
        return tuple(
            self.options.io_tiles > 0 and not is_offloaded and number not in aliases and may_be_offloaded(aval)
            for number, (is_offloaded, aval) in enumerate(zip(offloaded, self.jaxpr.in_avals, strict=True))
        )

    def _may_offload(self, offloaded: Sequence[bool], streamed: Sequence[bool]) -> bool:
        """Whether arguments given by position lie on the chip that may lie in streaming memory."""
        signature = self._planned
        positional, _ = signature.in_tree.children()
        return any(
            n < positional.num_leaves and signature.used[n] and may_be_offloaded(signature.in_avals[n])
            for n, is_off_chip, comes_by_rows in zip(self.moved, offloaded, streamed, strict=False)
            if not is_off_chip and not comes_by_rows
        )

    def _offloading(
        self, inputs: tuple[bool, ...], aliases: tuple[int | None, ...], hosted: tuple[bool, ...], byte_cost: float
    ) -> Offloading:
        """What lies off chip; as the cost per byte climbs, less of it is loaded together."""
        num_ipus = self.target.num_ipus // unwrapped(self.jaxpr).replicas
        chip_bytes = self.target.tiles_per_ipu * self.target.bytes_per_tile
        cheapness = BYTE_COST_CYCLES / max(byte_cost, BYTE_COST_CYCLES)
        batch_bytes = int(cheapness * min(BATCH_BYTES, _BATCH_SHARE * chip_bytes))
        return Offloading(inputs, aliases, num_ipus, batch_bytes, self._io_tiles(), hosted)

    def _io_tiles(self) -> IoTiles | None:
        """The tiles that only move data.

        Raises:
            ArgumentError: if they leave none to compute.
        """
        options, target = self.options, self.target
        if not options.io_tiles:
            return None
        if options.io_tiles >= target.tiles_per_ipu:
            raise ArgumentError(
                f"Options.io_tiles leaves {self.name} no tiles that compute",
                expected=f"fewer than the {target.tiles_per_ipu:,} tiles of an IPU",
                got=options.io_tiles,
            )
        there = options.io_tiles * target.bytes_per_tile
        return IoTiles(options.prefetch_depth, there // (2 * (options.prefetch_depth + 1)))
