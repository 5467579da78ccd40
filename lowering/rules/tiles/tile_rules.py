"""Rules of tile-level JAX: rows placed on tiles, a vertex for each row of a mapped function, barriers, cycle counters.

The vertex of a mapped function has the cycles and the memory of that function on one tile, see `one_tile`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ipujax.lowering.jax_compat import ClosedJaxpr, jaxpr_as_fun
from ipujax.lowering.layout import map_linearly
from ipujax.lowering.rules.base.context import Context, Rule
from ipujax.lowering.rules.flow.codelet_calls import rows_group
from ipujax.lowering.rules.tiles.one_tile import TileCost, tile_cost
from ipujax.lowering.rules.tiles.placing_primitives import COUNT_WORDS
from ipujax.lowering.rules.tiles.row_tiles import UNKNOWN, add_rows, place_rows, tile_of_rows, tiles_in_range
from ipujax.runtime.graph import Codelet, Copy, Execute, Field, Sync
from ipujax.runtime.tensor import Tensor, concat

_STATE_BYTES = 4  # a pointer for each field: assumed, as of a user's codelet
_COUNT_CYCLES = 12  # assumed: two reads of the counter's words, two stores, entry and exit


def tile_put_rule(ctx: Context, x: Tensor, *, rows: tuple[int, ...], tiles: tuple[int, ...]) -> list[Tensor]:
    """Copies rows to their tiles; a row that is on its tile stays where it is."""
    graph = ctx.graph
    tile = tiles_in_range(graph, tiles, "tile_put")
    if rows == tuple(range(x.shape[0])) and not graph.is_mapped(x):
        place_rows(graph, x, tile)
    map_linearly(graph, x)
    is_there = tile_of_rows(graph, x)[list(rows)] == tile
    steps = np.diff(rows)
    # A part is rows in a row, or one row several times.
    is_cut = np.diff(is_there) | (steps != 1) & (steps != 0)
    is_cut[1:] |= np.diff(steps) != 0
    starts = [0, *(np.flatnonzero(is_cut) + 1).tolist(), len(rows)]
    parts = [(is_there[a], _part(x, rows[a:b]), tile[a:b]) for a, b in pairwise(starts)]
    moving = [(part, on) for stays, part, on in parts if not stays]
    if not moving:
        return [concat([part for _, part, _ in parts], 0)]
    moving_tile = np.concatenate([on for _, on in moving])
    arrived = add_rows(graph, (len(moving_tile), *x.shape[1:]), x.dtype, ctx.name, moving_tile)
    ctx.prog.add(Copy(concat([part for part, _ in moving], 0), arrived, ctx.name, graph.origin))
    results = []
    position = 0
    for stays, part, on in parts:
        results.append(part if stays else arrived[position : position + len(on)])
        position += 0 if stays else len(on)
    return [concat(results, 0) if len(results) > 1 else results[0]]


def _part(x: Tensor, rows: tuple[int, ...]) -> Tensor:
    first = x[rows[0] : rows[-1] + 1]
    return first.broadcast(len(rows)) if rows[0] == rows[-1] else first


def tile_map_rule(
    ctx: Context,
    *operands: Tensor,
    body: ClosedJaxpr,
    stacked: tuple[bool, ...],
    num_tiles: int,
    tiles: tuple[int, ...] | None,
    name: str,
) -> list[Tensor]:
    """Adds a vertex for each tile, connected to its row of each operand and of each result."""
    graph = ctx.graph
    tile = _tiles(ctx, operands, stacked, num_tiles, tiles)
    for x, rows in zip(operands, stacked, strict=True):
        if rows and not graph.is_mapped(x):
            place_rows(graph, x, tile)
        map_linearly(graph, x)
    cost = tile_cost(ctx.lower_alone, body, graph.target)
    outs = [add_rows(graph, aval.shape, aval.dtype, f"{ctx.name}/out{n}", tile) for n, aval in enumerate(ctx.out_avals)]
    connected = [*zip(operands, stacked, strict=True), *((out, True) for out in outs)]
    compute_set = graph.add_compute_set(ctx.name)
    graph.add_vertices(compute_set, rows_group(ctx, _codelet(body, name, cost), connected, tile))
    ctx.prog.add(Execute(compute_set))
    return outs


def _tiles(
    ctx: Context, operands: Sequence[Tensor], stacked: Sequence[bool], num_tiles: int, tiles: tuple[int, ...] | None
) -> np.ndarray:
    """The user's tiles; else those of the rows of the first operand that has each row on a tile of its own."""
    graph = ctx.graph
    if tiles is not None:
        return tiles_in_range(graph, tiles, "tile_map")
    for x, rows in zip(operands, stacked, strict=True):
        candidates = tile_of_rows(graph, x) if rows else np.zeros(0, np.int32)
        if len(set(candidates.tolist()) - {UNKNOWN}) == num_tiles:
            return candidates
    return tiles_in_range(graph, range(num_tiles), "tile_map")


def _codelet(body: ClosedJaxpr, name: str, cost: TileCost) -> Codelet:
    """Codelet of a function of rows; block shapes are those of its jaxpr, so its cost is one number."""
    run = jaxpr_as_fun(body)

    def compute(*rows: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(run(*rows))

    fields = [Field(f"in{n}", "in", aval.dtype) for n, aval in enumerate(body.in_avals)]
    fields += [Field(f"out{n}", "out", aval.dtype) for n, aval in enumerate(body.out_avals)]
    return Codelet(
        f"ipujax::TileMap<{name}>",
        tuple(fields),
        compute,
        lambda shapes, target: cost.cycles(target),
        state_bytes=_STATE_BYTES * len(fields) + cost.scratch_bytes,
        code_bytes=cost.code_bytes,
        is_priced=cost.is_priced,
        costed_by=cost.costed_by,
        compares="equality",
    )


def tile_barrier_rule(ctx: Context, *operands: Tensor) -> list[Tensor]:
    """Adds a sync of all tiles, which no step passes."""
    ctx.prog.add(Sync("internal", ctx.graph.origin))
    return list(operands)


def cycle_count_rule(ctx: Context, *operands: Tensor, num_tiles: int) -> list[Tensor]:
    """Adds a vertex on the tile of each row of the first operand that reads the counter."""
    graph = ctx.graph
    for x in operands:
        map_linearly(graph, x)
    tile = _tiles(ctx, operands[:1], [True], num_tiles, None)
    count = add_rows(graph, (num_tiles, COUNT_WORDS), np.dtype(np.uint32), f"{ctx.name}/count", tile)
    compute_set = graph.add_compute_set(ctx.name)
    graph.add_vertices(compute_set, rows_group(ctx, _CYCLE_COUNTER, [(count, True)], tile))
    ctx.prog.add(Execute(compute_set))
    return [*operands, count]


def _read_counter(*, clock: Any = None) -> jax.Array:
    return jnp.zeros(COUNT_WORDS, jnp.uint32) if clock is None else clock


_CYCLE_COUNTER = Codelet(
    "poplar::CycleCount",
    (Field("count", "out", np.dtype(np.uint32)),),
    _read_counter,
    lambda shapes, target: np.asarray(_COUNT_CYCLES, np.int64),
    reads_clock=True,
)

RULES: dict[str, Rule] = {
    "tile_put": tile_put_rule,
    "tile_map": tile_map_rule,
    "tile_barrier": tile_barrier_rule,
    "cycle_count": cycle_count_rule,
}

# A tile runs a mapped function alone, so none of these may be in it; a codelet is a vertex, and has a tile of its own.
TILE_PRIMITIVES = frozenset((*RULES, "codelet_call"))
