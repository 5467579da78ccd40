"""Index of the largest or smallest element along one dimension.

Other dimensions are cut first. A long dimension that is reduced is cut too: each tile then finds its own best value and
where it is, and a second compute set picks among these pairs. The first of equal values wins and NaN beats all, in each
stage and so in all, as in `lax.argmax`.

The cost is twice that of the reduction to the value (assumed: value and index advance together).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from math import isqrt, prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ipujax.lowering.popops.blocks import along, mapped_variable, place, placed_axes
from ipujax.lowering.popops.elementwise_cycles import total_elements
from ipujax.lowering.popops.reduce_cycles import reduce_cycles
from ipujax.lowering.poputil.mapping import map_linearly
from ipujax.runtime.codelet import BlockShapes, Codelet, Field
from ipujax.runtime.graph import Graph
from ipujax.runtime.mapping import Blocked, Flat, even_cuts, frozen
from ipujax.runtime.program import Execute
from ipujax.runtime.program import Sequence as ProgramSequence
from ipujax.runtime.target import Target
from ipujax.runtime.tensor import Tensor
from ipujax.runtime.variable import dtype_name, element_bytes
from ipujax.runtime.vertices import Access, Axis, VertexGroup, block, element

# A shorter reduced dimension is not worth a second compute set (assumed: an exchange, a sync, a vertex start).
_MIN_CUT_EXTENT = 512
_PASSES = 2  # assumed, see above

# The search, the reduction to the value, and the monoid whose cost that is.
_Row = tuple[Callable[..., jax.Array], Callable[..., jax.Array], str]
_REDUCERS: dict[str, _Row] = {
    "argmax": (lax.argmax, lax.reduce_max, "max"),
    "argmin": (lax.argmin, lax.reduce_min, "min"),
}


def arg_reduce(
    graph: Graph, x: Tensor, axis: int, monoid: str, index_dtype: Any, prog: ProgramSequence, name: str
) -> Tensor:
    """Finds where the extreme element along one dimension is.

    Args:
        graph: graph to add to.
        x: tensor with at least one element.
        axis: the dimension searched.
        monoid: "argmax" or "argmin".
        index_dtype: dtype of the result.
        prog: program the compute sets are added to.
        name: debug name.

    Returns:
        A new tensor of the shape without `axis`.
    """
    map_linearly(graph, x)
    kept = [d for d in range(x.ndim) if d != axis]
    order = [*kept, axis] if x.shape[axis] >= _MIN_CUT_EXTENT else kept
    # As many blocks as elements in each: both stages then go through as much.
    most = ((axis, isqrt(x.shape[axis])),)
    placement = place(graph, x.shape, order, element_bytes(x.dtype), [(x, range(x.ndim))], most)
    axes = placed_axes(placement)
    axes[axis] = Axis(axes[axis].name, axes[axis].cuts, "reduce")
    shape, slots = tuple(x.shape[d] for d in kept), axes[axis].blocks
    if slots == 1:
        out = mapped_variable(graph, shape, index_dtype, name, kept, placement)
        codelet = _search_codelet(monoid, x.dtype, axis, index_dtype)
        _add(graph, codelet, axes, (along(x, range(x.ndim)), along(out, kept)), placement.tile, (), prog, name)
        return out
    values, indices = (
        _partials(graph, shape, slots, dtype, monoid, kept, axis, placement, name) for dtype in (x.dtype, index_dtype)
    )
    dims = (block(axis), *map(element, kept))
    accesses = (along(x, range(x.ndim)), Access(values, dims), Access(indices, dims))
    codelet = _pair_codelet(monoid, x.dtype, axis, index_dtype)
    _add(graph, codelet, axes, accesses, placement.tile, (axes[axis].name,), prog, name)
    return _pick(graph, values, indices, monoid, prog, name)


def _partials(
    graph: Graph,
    shape: tuple[int, ...],
    slots: int,
    dtype: Any,
    monoid: str,
    kept: list[int],
    axis: int,
    placement: Blocked,
    name: str,
) -> Tensor:
    """A variable with one result for each block of the reduced dimension, on the tile that computes it."""
    cuts = (frozen(np.arange(slots + 1), np.int64), *(placement.cuts[d] for d in kept))
    tile = frozen(np.transpose(placement.tile, [axis, *kept]), np.int32)
    return graph.add_variable((slots, *shape), dtype, f"{name}/partials", Blocked(cuts, tile), monoid)


def _pick(graph: Graph, values: Tensor, indices: Tensor, monoid: str, prog: ProgramSequence, name: str) -> Tensor:
    """Chooses among the slots of pairs."""
    slots, *shape = values.shape
    size = prod(shape)
    cuts = even_cuts(size, graph.target.tiles_per_ipu)
    tiles = frozen(np.arange(len(cuts) - 1), np.int32)
    out = graph.add_variable(shape, indices.dtype, name, Flat(size, cuts[:-1], tiles))
    axes = [Axis("slot", frozen([0, slots], np.int64), "reduce"), Axis("element", cuts)]
    pairs = (along(t.reshape((slots, size)), (0, 1)) for t in (values, indices))
    codelet = _pick_codelet(monoid, values.dtype, indices.dtype)
    _add(graph, codelet, axes, (*pairs, along(out.flatten(), (1,))), tiles[None], (), prog, f"{name}/pick")
    return out


def _add(
    graph: Graph,
    codelet: Codelet,
    axes: list[Axis],
    accesses: tuple[Access, ...],
    tile: np.ndarray,
    origins: tuple[str, ...],
    prog: ProgramSequence,
    name: str,
) -> None:
    compute_set = graph.add_compute_set(name)
    graph.add_vertices(compute_set, VertexGroup(codelet, tuple(axes), accesses, tile, origins, graph.origin))
    prog.add(Execute(compute_set))


def _search_cycles(monoid: str, dtype: Any, axis: int, shapes: BlockShapes, target: Target) -> np.ndarray:
    lengths = shapes[0]
    outputs = total_elements([n for d, n in enumerate(lengths) if d != axis])
    return _PASSES * reduce_cycles(_REDUCERS[monoid][2], dtype, outputs, lengths[axis], target)


@lru_cache(maxsize=256)
def _search_codelet(monoid: str, dtype: Any, axis: int, index_dtype: Any) -> Codelet:
    search = _REDUCERS[monoid][0]

    def compute(x: jax.Array) -> jax.Array:
        return search(x, axis, index_dtype)

    def cycles(shapes: BlockShapes, target: Target) -> np.ndarray:
        return _search_cycles(monoid, dtype, axis, shapes, target)

    fields = (Field("in", "in", dtype), Field("index", "out", index_dtype))
    return Codelet(f"popops::{monoid.title()}<{dtype_name(dtype)}>", fields, compute, cycles, 24, 500)


@lru_cache(maxsize=256)
def _pair_codelet(monoid: str, dtype: Any, axis: int, index_dtype: Any) -> Codelet:
    search, reducer, _ = _REDUCERS[monoid]

    def compute(x: jax.Array, origins: tuple[Any, ...]) -> tuple[jax.Array, jax.Array]:
        index = search(x, axis, index_dtype)
        return reducer(x, axes=(axis,)), index + jnp.asarray(origins[0], index_dtype)

    def cycles(shapes: BlockShapes, target: Target) -> np.ndarray:
        return _search_cycles(monoid, dtype, axis, shapes, target)

    fields = (Field("in", "in", dtype), Field("value", "out", dtype), Field("index", "out", index_dtype))
    title = f"popops::{monoid.title()}Partials<{dtype_name(dtype)}>"
    return Codelet(title, fields, compute, cycles, 28, 500, takes=("origins",))


@lru_cache(maxsize=256)
def _pick_codelet(monoid: str, dtype: Any, index_dtype: Any) -> Codelet:
    search = _REDUCERS[monoid][0]

    def compute(values: jax.Array, indices: jax.Array) -> jax.Array:
        if values.shape[0] == 1:
            return indices[0]
        slot = search(values, 0, np.dtype(np.int32))
        return jnp.take_along_axis(indices, slot[None], 0)[0]

    def cycles(shapes: BlockShapes, target: Target) -> np.ndarray:
        return _search_cycles(monoid, dtype, 0, shapes, target)

    fields = (Field("values", "in", dtype), Field("indices", "in", index_dtype), Field("index", "out", index_dtype))
    return Codelet(f"popops::{monoid.title()}Pick<{dtype_name(dtype)}>", fields, compute, cycles, 28, 500)
