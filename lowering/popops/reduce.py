"""Reductions by a monoid over some dimensions: each tile reduces what it holds, then partial results are combined.

The first stage runs where the data lies when that is spread well, else on a grid planned by cost. Partials are combined
in one to three stages. Source of the stage counts: poplibs `poplin/ConvReducePlan.cpp` (reference machine.md §1.2).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from math import prod
from typing import Any

import jax
import numpy as np
from jax import lax

from ipujax.lowering.popops.reduce_cycles import reduce_cycles
from ipujax.lowering.poputil.mapping import map_linearly, mapping_like
from ipujax.runtime.codelet import BlockShapes, Codelet, Field
from ipujax.runtime.graph import Graph
from ipujax.runtime.mapping import Blocked, Flat, TileMapping, blocked_mapping, even_cuts, flat_mapping, frozen
from ipujax.runtime.program import Execute
from ipujax.runtime.program import Sequence as ProgramSequence
from ipujax.runtime.target import Target
from ipujax.runtime.tensor import Tensor
from ipujax.runtime.variable import dtype_name, element_bytes
from ipujax.runtime.vertices import Access, Axis, Dim, Term, VertexGroup, element

REDUCERS: dict[str, Callable[..., jax.Array]] = {
    "add": lax.reduce_sum,
    "mul": lax.reduce_prod,
    "max": lax.reduce_max,
    "min": lax.reduce_min,
    "and": lax.reduce_and,
    "or": lax.reduce_or,
    "xor": lax.reduce_xor,
}

# Most partials of one output a tile combines in one stage: 1 stage below 16 partials, 2 below 125, then 3.
_STAGES = ((16, 1), (125, 2))
_MAX_STAGES = 3
_MIN_BOX_BYTES = 128  # assumed: as the linear mapping's least
_MIN_RECEIVED_BYTES = 256  # assumed: a tile that receives less is not worth its exchange code


def reduce(graph: Graph, x: Tensor, axes: Sequence[int], monoid: str, prog: ProgramSequence, name: str) -> Tensor:
    """Reduces a tensor over some of its dimensions.

    Args:
        graph: graph to add to.
        x: tensor of any shape.
        axes: dimensions to reduce.
        monoid: key of `REDUCERS`.
        prog: program the compute sets are added to.
        name: debug name.

    Returns:
        A new tensor of the shape without `axes`, same dtype.
    """
    map_linearly(graph, x)
    axes = tuple(sorted(axes))
    out_shape = tuple(n for d, n in enumerate(x.shape) if d not in axes)
    if not x.size:
        return graph.add_constant(_neutral(monoid, x.dtype), name).broadcast_in_dim(out_shape, ())
    x, reduced, mapping = _first_stage(graph, x, axes)
    split = [d for d in reduced if len(mapping.cuts[d]) > 2]
    kept = [d for d in range(x.ndim) if d not in reduced]
    slots = prod(len(mapping.cuts[d]) - 1 for d in split)
    kept_shape = tuple(x.shape[d] for d in kept)
    boxes = np.transpose(mapping.tile, [*split, *kept, *(d for d in reduced if d not in split)])
    boxes = boxes.reshape([slots, *(len(mapping.cuts[d]) - 1 for d in kept)])
    out_cuts = tuple(mapping.cuts[d] for d in kept)
    if split:
        slot_cuts = even_cuts(slots, slots)
        placed = blocked_mapping((slot_cuts, *out_cuts), boxes)
        out = graph.add_variable((slots, *kept_shape), x.dtype, f"{name}/partials", placed, monoid)
    else:
        placed = blocked_mapping(out_cuts, boxes[0])
        out = graph.add_variable(kept_shape, x.dtype, name, placed)
    _add_stage(graph, x, reduced, split, kept, mapping, out, monoid, prog, name)
    result = reduce_partials(graph, out, prog, name) if split else out
    return result.reshape(out_shape)


def _neutral(monoid: str, dtype: Any) -> np.ndarray:
    """What the reduction of nothing gives."""
    with jax.ensure_compile_time_eval():  # lowering runs while JAX traces
        return np.asarray(REDUCERS[monoid](lax.full((0,), 0, dtype), axes=(0,)))


def _add_stage(
    graph: Graph,
    x: Tensor,
    reduced: Sequence[int],
    split: Sequence[int],
    kept: Sequence[int],
    mapping: Blocked,
    out: Tensor,
    monoid: str,
    prog: ProgramSequence,
    name: str,
) -> None:
    axes = tuple(Axis(f"d{d}", cut, "reduce" if d in reduced else "map") for d, cut in enumerate(mapping.cuts))
    weights = [prod(len(mapping.cuts[d]) - 1 for d in split[i + 1 :]) for i in range(len(split))]
    slot = (Dim(tuple(Term(d, w, "block") for d, w in zip(split, weights, strict=True))),) if split else ()
    accesses = (
        Access(x, tuple(map(element, range(x.ndim)))),
        Access(out, (*slot, *map(element, kept))),
    )
    compute_set = graph.add_compute_set(name)
    codelet = reduce_codelet(monoid, x.dtype, tuple(reduced))
    graph.add_vertices(compute_set, VertexGroup(codelet, axes, accesses, mapping.tile, origin=graph.origin))
    prog.add(Execute(compute_set))


@lru_cache(maxsize=1024)
def reduce_codelet(monoid: str, dtype: Any, axes: tuple[int, ...]) -> Codelet:
    """The codelet that reduces dimensions `axes` of its block by `monoid`."""

    def cycles(shapes: BlockShapes, target: Target) -> np.ndarray:
        ones = np.ones((), np.int64)
        outputs = partial_product(shapes[0], [d for d in range(len(shapes[0])) if d not in axes], ones)
        return reduce_cycles(monoid, dtype, outputs, partial_product(shapes[0], axes, ones), target)

    title = f"popops::Reduce{monoid.title()}<{dtype_name(dtype)}>"
    fields = (Field("partials", "in", dtype), Field("out", "out", dtype))
    return Codelet(title, fields, partial(REDUCERS[monoid], axes=axes), cycles, state_bytes=24, code_bytes=600)


def partial_product(lengths: Sequence[np.ndarray], dims: Sequence[int], start: np.ndarray) -> np.ndarray:
    """Product of some dimensions' lengths, over the grid."""
    for d in dims:
        start = start * lengths[d]
    return start


def reduce_partials(
    graph: Graph, partials: Tensor, prog: ProgramSequence, name: str, most_tiles: int | None = None
) -> Tensor:
    """Combines dimension 0 of a tensor of partial results by its variable's monoid, in one to three stages.

    Args:
        graph: graph to add to.
        partials: [slots, …], all of a variable with a monoid.
        prog: program the compute sets are added to.
        name: debug name.
        most_tiles: how many tiles may combine, default those of one IPU.

    Returns:
        A new tensor of shape `partials.shape[1:]`.
    """
    (variable,) = partials.variables()
    assert variable.monoid is not None, "partials carry their monoid"
    slots, shape = partials.shape[0], partials.shape[1:]
    flat, tiles = partials.reshape((slots, prod(shape))), most_tiles or graph.target.tiles_per_ipu
    for keep in _kept_slots(slots):
        flat = _combine(graph, flat, keep, tiles, variable.monoid, shape if keep == 1 else None, prog, name)
    return flat


def _kept_slots(slots: int) -> list[int]:
    """How many partials of one output each stage leaves; 1 after the last."""
    stages = next((n for bound, n in _STAGES if slots < bound), _MAX_STAGES)
    kept, left = [], slots
    for stage in range(stages - 1, 0, -1):
        left = max(2, round(left ** (stage / (stage + 1))))
        kept.append(left)
    return [*kept, 1]


def _combine(
    graph: Graph,
    partials: Tensor,
    keep: int,
    tiles: int,
    monoid: str,
    shape: tuple[int, ...] | None,
    prog: ProgramSequence,
    name: str,
) -> Tensor:
    slots, size = partials.shape
    slot_cuts = even_cuts(slots, keep)
    keep = len(slot_cuts) - 1
    cuts = _spread_outputs(size, slots, keep, partials.dtype, tiles)
    tile = frozen(np.arange(keep * (len(cuts) - 1)).reshape(keep, -1) % tiles, np.int32)
    if shape is None:
        placed: TileMapping = blocked_mapping((even_cuts(keep, keep), cuts), tile)
        out = graph.add_variable((keep, size), partials.dtype, f"{name}/partials", placed, monoid)
        access = Access(out, (Dim((Term(0, 1, "block"),)), element(1)))
    else:
        out = graph.add_variable(shape, partials.dtype, name, flat_mapping(size, cuts[:-1], tile[0]))
        access = Access(out.flatten(), (element(1),))
    axes = (Axis("slot", slot_cuts, "reduce"), Axis("element", cuts))
    group = VertexGroup(
        reduce_codelet(monoid, partials.dtype, (0,)),
        axes,
        (Access(partials, (element(0), element(1))), access),
        tile,
        origin=graph.origin,
    )
    compute_set = graph.add_compute_set(f"{name}/reduce")
    graph.add_vertices(compute_set, group)
    prog.add(Execute(compute_set))
    return out


def _spread_outputs(size: int, slots: int, keep: int, dtype: Any, tiles: int) -> np.ndarray:
    """Cuts of `size` outputs for a stage that combines `slots` partials of each into `keep`, on at most `tiles`."""
    width_bytes = element_bytes(dtype)
    grain = max(1, 8 // width_bytes)
    per_tile = max(grain, -(-_MIN_RECEIVED_BYTES // (width_bytes * (slots // keep))))
    return even_cuts(size, max(1, min(tiles // keep, -(-size // per_tile))), grain)


def _first_stage(graph: Graph, x: Tensor, axes: tuple[int, ...]) -> tuple[Tensor, tuple[int, ...], Blocked]:
    """The view to reduce, its reduced dimensions, and where its boxes are reduced."""
    mapping = mapping_like(graph, x)
    local: tuple[Tensor, tuple[int, ...], Blocked] | None = None
    if isinstance(mapping, Blocked):
        local = (x, axes, mapping)
    elif isinstance(mapping, Flat) and len(axes) == x.ndim:
        bounds = np.append(mapping.starts, mapping.size) if mapping.size else np.zeros(1, np.int64)
        local = (x.flatten(), (0,), blocked_mapping((bounds,), mapping.tiles))
    view, reduced = _collapsed(x, axes)
    planned, planned_cycles = _planned(view.shape, reduced, x.dtype, graph.target)
    if local is None or _cost_cycles(local[2], local[1], x.dtype, graph.target, moved=False) > planned_cycles:
        return view, reduced, planned
    return local


def _collapsed(x: Tensor, axes: tuple[int, ...]) -> tuple[Tensor, tuple[int, ...]]:
    """Joins neighbouring dimensions that are reduced alike."""
    sizes: list[int] = []
    kinds: list[bool] = []
    for d, size in enumerate(x.shape):
        if kinds and kinds[-1] == (d in axes):
            sizes[-1] *= size
        else:
            sizes.append(size)
            kinds.append(d in axes)
    return x.reshape(tuple(sizes)), tuple(d for d, kind in enumerate(kinds) if kind)


@lru_cache(maxsize=4096)
def _planned(shape: tuple[int, ...], reduced: tuple[int, ...], dtype: Any, target: Target) -> tuple[Blocked, float]:
    """The cheapest grid, and its cycles, of those that cut what is reduced in 1, 2, 4, … and outputs as often as fits.

    One more cuts outputs first, and what is reduced as often as fits.
    """
    budget = max(1, min(target.tiles_per_ipu, prod(shape) * element_bytes(dtype) // _MIN_BOX_BYTES))
    outputs = prod(n for d, n in enumerate(shape) if d not in reduced)
    rest = budget // min(budget, max(1, outputs))
    grids = [_grid(shape, reduced, n, budget) for n in (rest, *(1 << power for power in range(budget.bit_length())))]
    costs = [_cost_cycles(grid, reduced, dtype, target) for grid in grids]
    best = int(np.argmin(costs))
    return grids[best], costs[best]


def _grid(shape: tuple[int, ...], reduced: tuple[int, ...], reduced_blocks: int, budget: int) -> Blocked:
    """At most `budget` boxes, at most `reduced_blocks` along what is reduced."""
    blocks = [1] * len(shape)
    for d, size in enumerate(shape):
        taken = prod(blocks[e] for e in range(d) if (e in reduced) == (d in reduced))
        blocks[d] = max(1, min(size, (reduced_blocks if d in reduced else budget // reduced_blocks) // taken))
    cuts = tuple(even_cuts(n, b) for n, b in zip(shape, blocks, strict=True))
    counts = [len(c) - 1 for c in cuts]
    return blocked_mapping(cuts, frozen(np.arange(prod(counts)).reshape(counts), np.int32))


def _cost_cycles(mapping: Blocked, reduced: tuple[int, ...], dtype: Any, target: Target, moved: bool = True) -> float:
    """Estimated cycles of a first stage on the boxes of a mapping and of the combination of its partials."""
    worst = [int(np.diff(c).max(initial=0)) for c in mapping.cuts]
    outputs = prod(n for d, n in enumerate(worst) if d not in reduced)
    depth = prod(n for d, n in enumerate(worst) if d in reduced)
    slots = prod(len(mapping.cuts[d]) - 1 for d in reduced)
    size = prod(n for d, n in enumerate(mapping.shape) if d not in reduced)
    cycles = _stage_cycles(outputs, depth, dtype, target, moved)
    for keep in _kept_slots(slots) if slots > 1 else ():
        depth = -(-slots // keep)
        received = int(np.diff(_spread_outputs(size, slots, keep, dtype, target.tiles_per_ipu)).max(initial=0))
        cycles += _stage_cycles(received, depth, dtype, target, moved=True)
        slots = keep
    return cycles


def _stage_cycles(outputs: int, depth: int, dtype: Any, target: Target, moved: bool) -> float:
    """One compute set on the worst tile, with the exchange of its operand if that is on other tiles."""
    compute = float(reduce_cycles("add", dtype, np.array(outputs), np.array(depth), target))
    received_bytes = outputs * depth * element_bytes(dtype) if moved else 0
    exchange = target.exchange_startup_cycles + received_bytes / target.exchange_bytes_per_cycle if moved else 0.0
    return compute + exchange + target.internal_sync_cycles
