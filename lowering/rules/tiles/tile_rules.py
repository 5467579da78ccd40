"""Rules of tile-level JAX: rows placed on tiles, a vertex for each row of a mapped function, barriers, cycle counters.

The vertex of a mapped function has the cycles and the memory of that function on one tile, with that for its
intermediates and its code. The function is lowered by the passes and rules of entire programs for a target of one tile,
so its primitives have the vertices that they have there, fused ones too, and all six workers. Its cycles are those of
the vertices and of copies on the tile; a vertex calls them one after the other, without syncs and exchanges.
Limits: a loop whose trip count is data runs once, and the function is unpriced; a branch is the costliest. A tile array
has a row for each tile along its first axis; of a view whose mapping has no closed form, such as a concatenation, the
tiles are unknown.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from math import prod
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ipujax.lowering.jax_compat import ClosedJaxpr, jaxpr_as_fun
from ipujax.lowering.layout import map_linearly, mapping_like
from ipujax.lowering.passes import traced
from ipujax.lowering.popops import place_operand, spans
from ipujax.lowering.rules.base.context import Context, LowerAlone, Rule
from ipujax.lowering.rules.flow.codelet_calls import rows_group
from ipujax.lowering.rules.tiles.tile_primitives import COUNT_WORDS
from ipujax.runtime.analysis import EffectsOf
from ipujax.runtime.cache import remembered
from ipujax.runtime.compile import Cost, leaf_costs, static_runs
from ipujax.runtime.cost import compute_set_counts, copying_counts
from ipujax.runtime.errors import ArgumentValueError
from ipujax.runtime.graph import Codelet, Copy, Execute, Field, Graph, Leaf, Program, Sync, data_loops
from ipujax.runtime.memory import memory_report
from ipujax.runtime.target import Target
from ipujax.runtime.tensor import Tensor, blocked_mapping, concat, element_bytes, even_cuts


@dataclass(frozen=True, slots=True)
class TileCost:
    """Cost of one run of a function on one tile.

    Args:
        cycles: tile cycles on a target, or on an array of machines.
        costed_by: see `Codelet`: "machine" where code of a user is among its vertices.
        scratch_bytes: bytes of intermediates at their peak.
        code_bytes: bytes of the code of its vertices.
        is_priced: whether `cycles` count all iterations: no trip count is data.
    """

    cycles: Callable[[Target], np.ndarray]
    scratch_bytes: int
    code_bytes: int
    is_priced: bool
    costed_by: Literal["arrays", "machine"]


@remembered
def tile_cost(lower_alone: LowerAlone, body: ClosedJaxpr, target: Target) -> TileCost:
    """Cost of a user's function as one vertex: that of its entire program on a machine of one such tile.

    Args:
        lower_alone: lowers a jaxpr for a target into a graph of its own.
        body: the function; the bytes of its operands and results are not counted as scratch.
        target: the machine.
    """
    alone = target.replace(num_ipus=1, tiles_per_ipu=1)
    jaxpr, _ = traced(jaxpr_as_fun(body), body.in_avals)
    graph, program = lower_alone(jaxpr, alone)
    effects = EffectsOf(graph)
    costs = leaf_costs(graph, program)
    # Vertices of one codelet share its code.
    codelets = {group.codelet: group.codelet.code_bytes for groups in graph.groups.values() for group in groups}
    memory = memory_report(graph, program, effects, costs)
    connected_bytes = sum(prod(x.shape) * element_bytes(x.dtype) for x in (*body.in_avals, *body.out_avals))
    live_bytes = int(memory.shared_bytes.max())
    return TileCost(
        cycles=partial(_cycles_of_steps, _step_costs(graph, program, costs)),
        scratch_bytes=max(0, live_bytes - connected_bytes),
        code_bytes=sum(codelets.values()),
        is_priced=not data_loops(program),  # trip counts that depend on data are not known
        # Whether cycles can be computed for arrays of machines at once, or for one machine after another.
        costed_by="arrays" if all(codelet.costed_by == "arrays" for codelet in codelets) else "machine",
    )


class _StepCost(NamedTuple):
    """Cost of a step of a program of one tile: how often it is run, and its cycles by tile on a target."""

    runs: int
    cycles: Callable[[Target], np.ndarray]


def _step_costs(graph: Graph, program: Program, costs: Mapping[Leaf, Cost]) -> list[_StepCost]:
    """Return how often each compute set and copy of a program runs, with its cycles as a function of the target.

    The program stands for the code of one vertex: its compute sets and copies are what the vertex computes and moves,
    one after the other. Its other steps, as syncs, are left out: there are none inside a vertex.

    Args:
        graph: graph of the program.
        program: the program.
        costs: cost of each of its leaves.
    """
    runs = static_runs(graph, program, costs)
    vertices = [
        _StepCost(runs.get(leaf, 0), compute_set_counts(graph, leaf.compute_set).compute_cycles)
        for leaf in costs
        if isinstance(leaf, Execute)
    ]
    copies = [
        _StepCost(runs.get(leaf, 0), copying_counts(graph, leaf).cycles) for leaf in costs if isinstance(leaf, Copy)
    ]
    return [*vertices, *copies]


def _cycles_of_steps(steps: Sequence[_StepCost], target: Target) -> np.ndarray:
    """Return the cycles of vertices and copies on the only tile, int64[machines]."""
    return sum((step.runs * step.cycles(target)[0] for step in steps), np.zeros(1, np.int64))


UNKNOWN = -1


def tile_of_rows(graph: Graph, tensor: Tensor) -> np.ndarray:
    """Tile that each row of a tensor, its first dimension, is mapped to, int32[rows].

    `UNKNOWN` for a row on several tiles, or without a mapping.
    """
    rows = tensor.shape[0]
    if not (graph.is_mapped(tensor) and tensor.size):
        return np.full(rows, UNKNOWN, np.int32)
    mapping = mapping_like(graph, tensor)
    if mapping is None:
        # Rows of a concatenation are parts of one variable each.
        return np.array([_tile_of(graph, tensor[row]) for row in range(rows)], np.int32)
    # Runs of elements that one tile has: the first element and the tile of each.
    starts, _, tiles = mapping.runs()
    row_elements = tensor.size // rows
    first_elements = np.arange(rows) * row_elements
    first_runs = np.searchsorted(starts, first_elements, "right") - 1
    last_runs = np.searchsorted(starts, first_elements + row_elements - 1, "right") - 1
    # Runs of one tile in a row have equal numbers of changes before them.
    changes = np.cumsum(np.diff(tiles, prepend=tiles[:1]) != 0)
    is_on_one = changes[first_runs] == changes[last_runs]
    return np.where(is_on_one, tiles[first_runs], UNKNOWN).astype(np.int32)


def _tile_of(graph: Graph, tensor: Tensor) -> int:
    """The only tile of a tensor, else `UNKNOWN`."""
    mapping = mapping_like(graph, tensor)
    tiles = set() if mapping is None else set(mapping.tiles.reshape(-1).tolist())
    return tiles.pop() if len(tiles) == 1 else UNKNOWN


def add_rows(graph: Graph, shape: Sequence[int], dtype: Any, name: str, tile: np.ndarray) -> Tensor:
    """Adds a variable with each row on its tile."""
    cuts = [even_cuts(n, n if dim == 0 else 1) for dim, n in enumerate(shape)]
    mapping = blocked_mapping(cuts, tile.reshape(-1, *(1 for _ in shape[1:])))
    return graph.add_variable(tuple(shape), dtype, name, mapping)


def place_rows(graph: Graph, tensor: Tensor, tile: np.ndarray) -> None:
    """Maps each row of an unmapped tensor to its tile."""
    rows = len(tile)
    placement = blocked_mapping([even_cuts(rows, rows)], tile)
    dims = (0, *(None for _ in tensor.shape[1:]))
    place_operand(graph, tensor, spans(tensor.shape, dims), placement)


def tiles_in_range(graph: Graph, tiles: Sequence[int], name: str) -> np.ndarray:
    """The tiles that a user has named, int32[tiles], once it is sure that the target has them.

    Args:
        graph: graph of the operation, for its target.
        tiles: numbers of the tiles.
        name: name of the user's function, for the error.

    Raises:
        ArgumentValueError: for tiles that the target lacks.
    """
    num_tiles = graph.target.num_tiles
    lacking = [tile for tile in tiles if tile >= num_tiles]
    if lacking:
        raise ArgumentValueError(
            f"{name}: tiles the device lacks",
            where=graph.origin,
            expected=f"tiles 0 … {num_tiles - 1:,}",
            got=f"tile {lacking[0]:,}" if len(lacking) == 1 else f"tiles {lacking[0]:,} … {lacking[-1]:,}",
            hint="fewer rows a device, or ipu.IPUModel with more tiles",
        )
    return np.array(tiles, np.int32)


_STATE_BYTES = 4  # a pointer for each field: assumed, as of a user's codelet
_COUNT_CYCLES = 12  # assumed: two reads of the counter's words, two stores, entry and exit


def tile_put_rule(ctx: Context, x: Tensor, *, rows: tuple[int, ...], tiles: tuple[int, ...]) -> list[Tensor]:
    """Copies rows to tiles that the user names; a row that is there stays. Returns one tensor, in a list.

    Args:
        ctx: the equation.
        x: the rows, along its first dimension.
        rows: for each row of the result the row of `x`.
        tiles: for each row of the result its tile.
    """
    graph = ctx.graph
    tile = tiles_in_range(graph, tiles, "tile_put")
    if rows == tuple(range(x.shape[0])) and not graph.is_mapped(x):
        place_rows(graph, x, tile)
    map_linearly(graph, x)
    is_there = tile_of_rows(graph, x)[list(rows)] == tile
    steps = np.diff(rows)
    # The result is joined of parts: each is consecutive rows, or one row several times, that all stay or all move.
    is_cut = np.diff(is_there) | (steps != 1) & (steps != 0)
    is_cut[1:] |= np.diff(steps) != 0
    starts = [0, *(np.flatnonzero(is_cut) + 1).tolist(), len(rows)]
    parts = [_RowPart(is_there[a], _view_of_rows(x, rows[a:b]), tile[a:b]) for a, b in pairwise(starts)]
    moving = [part for part in parts if not part.stays]
    if not moving:
        return [concat([part.view for part in parts], 0)]
    moving_tile = np.concatenate([part.tile for part in moving])
    arrived = add_rows(graph, (len(moving_tile), *x.shape[1:]), x.dtype, ctx.name, moving_tile)
    ctx.prog.add(Copy(concat([part.view for part in moving], 0), arrived, ctx.name, graph.origin))
    results = []
    position = 0
    for part in parts:
        count = 0 if part.stays else len(part.tile)
        results.append(part.view if part.stays else arrived[position : position + count])
        position += count
    return [concat(results, 0) if len(results) > 1 else results[0]]


class _RowPart(NamedTuple):
    """Rows of a result of `tile_put`: whether they are on their tiles, a view of them, and these tiles."""

    stays: bool
    view: Tensor
    tile: np.ndarray


def _view_of_rows(x: Tensor, rows: tuple[int, ...]) -> Tensor:
    """Consecutive rows of a tensor, or one row several times."""
    distinct = x[rows[0] : rows[-1] + 1]
    return distinct.broadcast(len(rows)) if rows[0] == rows[-1] else distinct


def tile_map_rule(
    ctx: Context,
    *operands: Tensor,
    body: ClosedJaxpr,
    stacked: tuple[bool, ...],
    num_tiles: int,
    tiles: tuple[int, ...] | None,
    name: str,
) -> list[Tensor]:
    """Runs a user's function on each of several tiles, as a vertex; returns the results, with a row for each tile.

    Args:
        ctx: the equation.
        operands: tensors that the function reads.
        body: the function, of rows.
        stacked: for each operand whether it has a row for each tile; else each vertex reads all of it.
        num_tiles: number of tiles.
        tiles: the user's tiles; None for those that have the operands' rows.
        name: name of the function.
    """
    graph = ctx.graph
    tile = _tile_of_vertices(ctx, operands, stacked, num_tiles, tiles)
    for x, rows in zip(operands, stacked, strict=True):
        if rows and not graph.is_mapped(x):
            place_rows(graph, x, tile)
        map_linearly(graph, x)
    cost = tile_cost(ctx.lower_alone, body, graph.target)
    outs = [add_rows(graph, aval.shape, aval.dtype, f"{ctx.name}/out{n}", tile) for n, aval in enumerate(ctx.out_avals)]
    connected = [*zip(operands, stacked, strict=True), *((out, True) for out in outs)]
    compute_set = graph.add_compute_set(ctx.name)
    graph.add_vertices(compute_set, rows_group(ctx, _tile_map_codelet(body, name, cost), connected, tile))
    ctx.prog.add(Execute(compute_set))
    return outs


def _tile_of_vertices(
    ctx: Context, operands: Sequence[Tensor], stacked: Sequence[bool], num_tiles: int, tiles: tuple[int, ...] | None
) -> np.ndarray:
    """Tile of each vertex, int32[num_tiles].

    They are the user's; else those of the rows of the first operand that has each row on a tile of its own; else the
    first tiles of the machine.

    Args:
        ctx: the equation.
        operands: tensors that vertices read.
        stacked: for each operand whether it has a row for each vertex.
        num_tiles: number of vertices.
        tiles: the user's tiles; None without.
    """
    graph = ctx.graph
    if tiles is not None:
        return tiles_in_range(graph, tiles, "tile_map")
    for x, rows in zip(operands, stacked, strict=True):
        candidates = tile_of_rows(graph, x) if rows else np.zeros(0, np.int32)
        if len(set(candidates.tolist()) - {UNKNOWN}) == num_tiles:
            return candidates
    return tiles_in_range(graph, range(num_tiles), "tile_map")


def _tile_map_codelet(body: ClosedJaxpr, name: str, cost: TileCost) -> Codelet:
    """Codelet whose vertex runs a user's function on one tile.

    Args:
        body: the function; vertices have blocks of exactly its shapes, so that its cost is one number.
        name: its name in reports.
        cost: its cost on a tile.
    """
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
        compares="equality",  # the user's function may: the engine computes operands once, see `Codelet.compares`
    )


def tile_barrier_rule(ctx: Context, *operands: Tensor) -> list[Tensor]:
    """Adds a sync of all tiles, which no step passes."""
    ctx.prog.add(Sync("internal", ctx.graph.origin))
    return list(operands)


def cycle_count_rule(ctx: Context, *operands: Tensor, num_tiles: int) -> list[Tensor]:
    """Adds a vertex on the tile of each row of the first operand, which reads the cycle counter of its tile.

    Returns the operands as they are, and the counters, [tiles, words].
    """
    graph = ctx.graph
    for x in operands:
        map_linearly(graph, x)
    tile = _tile_of_vertices(ctx, operands[:1], [True], num_tiles, tiles=None)
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
