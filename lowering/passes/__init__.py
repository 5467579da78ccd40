"""Passes over jaxprs, in order, and the functions that run them.

Each pass is a pure function ClosedJaxpr → ClosedJaxpr that keeps the numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax

from ipujax.lowering.jax_compat import ClosedJaxpr, JaxprEqn, trace
from ipujax.lowering.jaxpr import equations
from ipujax.lowering.offload import (
    NO_STREAMS,
    ON_CHIP,
    Offloading,
    Streams,
    memory_spaces,
    offload,
    put_results as put_results,
    sent_rows as sent_rows,
    stream,
)
from ipujax.lowering.outlining import (
    CallCosts as CallCosts,
    Copied as Copied,
    function_call_p as function_call_p,
    gain_of as gain_of,
    last_uses as last_uses,
    outline,
    outline_placed as outline_placed,
    outliner as outliner,
)
from ipujax.lowering.partition import NONE, Notes, Shardings, partition
from ipujax.lowering.passes.channel_groups import grouped_inputs
from ipujax.lowering.passes.computed_again import computed_again as computed_again
from ipujax.lowering.passes.count_loops import count_loops
from ipujax.lowering.passes.cse import cse
from ipujax.lowering.passes.dce import dce
from ipujax.lowering.passes.fuse import (
    fuse,
    fuse_equations as fuse_equations,
    fuser as fuser,
    index_space as index_space,
    is_unit_view as is_unit_view,
)
from ipujax.lowering.passes.hoist_products import NUM_TILES, hoist_products
from ipujax.lowering.passes.inline import inline_and_name
from ipujax.lowering.passes.join_products import join_products
from ipujax.lowering.passes.merge_collectives import (
    MOST_BYTES as MOST_BYTES,
    all_reduce_p as all_reduce_p,
    merge_collectives,
)
from ipujax.lowering.passes.narrow import narrow
from ipujax.lowering.passes.shard_map import shard_map
from ipujax.lowering.passes.sink_rows import sink_rows
from ipujax.lowering.passes.split_maps import split_maps
from ipujax.lowering.passes.swap_products import swap_products
from ipujax.lowering.recomputation import KEEP_ALL, ChainTrade, Recomputation, recompute
from ipujax.lowering.refs import discharge
from ipujax.runtime.graph import BYTE_COST_CYCLES
from ipujax.runtime.logs import DEBUG, Log, compilation_name, step

_LOG = Log("passes")

Pass = Callable[[ClosedJaxpr], ClosedJaxpr]

PASSES: tuple[tuple[str, Pass], ...] = (
    ("discharge", discharge),
    ("inline", inline_and_name),
    ("count_loops", count_loops),
    # Before all passes that read where a value is computed: arguments are streamed as they are read behind this pass.
    ("sink_rows", sink_rows),
    ("memory_spaces", memory_spaces),
    ("partition", partition),
    ("shard_map", shard_map),
    # Before passes that compute again on purpose, and before sums over replicas are merged.
    ("cse", cse),
    ("merge_collectives", merge_collectives),
    ("narrow", narrow),
    ("dce", dce),
    ("recompute", recompute),
    # Behind `recompute`, which decides on products that gradients compute again.
    ("hoist_products", hoist_products),
    ("join_products", join_products),
    ("swap_products", swap_products),
    ("split_maps", split_maps),
    # Before `fuse`: a group that spans the boundary of a run would hide that the run is repeated.
    ("outline", outline),
    ("fuse", fuse),
    ("stream", stream),
    ("offload", offload),
)

# Passes over the whole model before it is cut into stages; the other passes run on each stage.
_BEFORE_CUT = (
    "discharge",
    "inline",
    "count_loops",
    "memory_spaces",
    "partition",
    "shard_map",
    "cse",
    "merge_collectives",
    "narrow",
    "dce",
    "swap_products",
)


@dataclass(frozen=True, slots=True)
class PassSettings:
    """Settings of the passes of a compilation.

    Args:
        byte_cost: cost per byte on the fullest tile, in cycles.
        recomputation: values that gradients compute again.
        offloading: arguments in streaming memory.
        streams: values that go between host and tiles by micro-batches.
        shardings: of arguments and results.
        is_micro_batch: whether the jaxpr is the micro-batch of a pipeline, which is cut into stages.
        num_tiles: tiles of an IPU.
        operation_bytes: bytes of a tile that one operation may take.
        is_memory_short: whether plans are for less memory than a tile has.
    """

    byte_cost: float = BYTE_COST_CYCLES
    recomputation: Recomputation = KEEP_ALL
    offloading: Offloading = ON_CHIP
    streams: Streams = NO_STREAMS
    shardings: Shardings = NONE
    is_micro_batch: bool = False
    num_tiles: int = NUM_TILES
    operation_bytes: float = CallCosts().operation_bytes
    is_memory_short: bool = False


_DEFAULTS = PassSettings()


@dataclass(frozen=True, slots=True)
class PassNotes:
    """Notes of passes beside their jaxprs.

    Args:
        trades: the trade-off curve of each gradient.
        partition: the collectives of partitioning.
        kept_apart: equal equations that are not joined, as their results would live too long.
    """

    trades: list[ChainTrade] = field(default_factory=list)
    partition: Notes = field(default_factory=Notes)
    kept_apart: list[JaxprEqn] = field(default_factory=list)


def _with_settings(settings: PassSettings, notes: PassNotes | None = None) -> list[tuple[str, Pass]]:
    """Name and function of each pass, in the order of `PASSES`, with the options that a compilation sets for it.

    Passes that have none of their own stay as they are. While they run, passes add what they note to `notes`, if given.
    """
    partition_notes = None if notes is None else notes.partition
    trades = None if notes is None else notes.trades
    kept_apart = None if notes is None else notes.kept_apart
    with_settings: dict[Pass, Pass] = {
        sink_rows: partial(sink_rows, of_loops=settings.streams.of_loops),
        inline_and_name: partial(inline_and_name, is_micro_batch=settings.is_micro_batch),
        partition: partial(partition, shardings=settings.shardings, notes=partition_notes),
        cse: partial(cse, byte_cost=settings.byte_cost, is_micro_batch=settings.is_micro_batch, kept_apart=kept_apart),
        hoist_products: partial(
            hoist_products,
            byte_cost=settings.byte_cost,
            num_tiles=settings.num_tiles,
            # Products of all rows at once would need all rows and all products on the chip.
            keeps_loops=settings.is_memory_short or _streams_rows(settings),
        ),
        join_products: partial(
            join_products,
            byte_cost=settings.byte_cost,
            num_tiles=settings.num_tiles,
            keeps_products=settings.is_memory_short,
        ),
        outline: partial(outline, costs=CallCosts(settings.byte_cost, settings.num_tiles, settings.operation_bytes)),
        recompute: partial(recompute, recomputation=settings.recomputation, trades=trades),
        stream: partial(stream, streams=settings.streams),
        offload: partial(offload, offloading=settings.offloading, in_groups=grouped_inputs),
    }
    return [(name, with_settings.get(run, run)) for name, run in PASSES]


def _streams_rows(settings: PassSettings) -> bool:
    """True if loops may read rows of arguments that are not on the chip as a whole."""
    streams = settings.streams
    has_batches = any(rows is not None for rows in streams.batches)
    return streams.of_loops or has_batches or any(settings.offloading.inputs)


def run_passes(
    jaxpr: ClosedJaxpr,
    settings: PassSettings = _DEFAULTS,
    timings: dict[str, float] | None = None,
    on_pass: Callable[[str, ClosedJaxpr], None] | None = None,
    notes: PassNotes | None = None,
) -> dict[str, ClosedJaxpr]:
    """Runs all passes of `PASSES` one after the other, each on the jaxpr of the one before.

    Args:
        jaxpr: traced function.
        settings: settings of the passes.
        timings: dictionary to fill with the seconds of each pass, by name.
        on_pass: callback with the name and the jaxpr of each pass as soon as it has run.
        notes: filled with what passes note.

    Returns:
        The jaxpr after each pass, by name; the last one is lowered.
    """
    jaxprs: dict[str, ClosedJaxpr] = {}
    for name, run in _with_settings(settings, notes):
        with step(_LOG, name, timings):
            jaxpr = jaxprs[name] = run(jaxpr)
        if on_pass is not None:
            on_pass(name, jaxpr)
        if _LOG.is_on(DEBUG):
            num_nested = len(list(equations(jaxpr.jaxpr)))
            _LOG.debug(
                "%s: after %s %d equations, %d with those inside", compilation_name(), name, len(jaxpr.eqns), num_nested
            )
    return jaxprs


def ready(jaxpr: ClosedJaxpr, *, is_cut: bool = False, byte_cost: float = BYTE_COST_CYCLES) -> ClosedJaxpr:
    """Jaxpr after all passes, or only after those of `_BEFORE_CUT` if it is going to be cut into stages."""
    for name, run in _with_settings(PassSettings(byte_cost, is_micro_batch=is_cut)):
        if not is_cut or name in _BEFORE_CUT:
            jaxpr = run(jaxpr)
    return jaxpr


def traced(
    fun: Callable[..., Any], arrays: Sequence[Any], name: str = "", byte_cost: float = BYTE_COST_CYCLES
) -> tuple[ClosedJaxpr, Any]:
    """Traces a function of arrays and runs all passes with default settings, for programs built without `ipu.jit`.

    Args:
        fun: function of arrays that returns a pytree of arrays.
        arrays: objects with the shape and dtype of each argument, such as tensors.
        name: scope of all its equations, none when empty.
        byte_cost: cost per byte on the fullest tile, in cycles.

    Returns:
        The jaxpr after all passes, and the tree of the results.
    """

    def named(*operands: jax.Array) -> Any:
        with jax.named_scope(name):
            return fun(*operands)

    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays]
    trace_result = trace(named if name else fun, shapes, {}, ())
    return ready(trace_result.jaxpr, byte_cost=byte_cost), trace_result.out_tree
