"""Index of the largest or smallest element along one dimension.

Where the dimension that is searched is cut, each tile finds the best value of its block and the index of that, and a
second compute set picks among these pairs. The first of equal values wins and NaN beats all, in each stage and so in
all, as in `lax.argmax`. The partition is the one of least cost of both.

Source of the cycles: poplibs `popnn/popnnCycleEstimators.cpp`, `ReduceMaxClassGather`, whose workers share a row, and
`ReduceMaxClassSparse`, which picks among pairs, a row a worker.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ipujax.lowering.layout import Grids, mapping_like, total_elements
from ipujax.lowering.layout.choose import choose, source_of
from ipujax.lowering.layout.grid_cost import FieldUse, Work, spans
from ipujax.lowering.layout.place import along, mapped_variable, place_operand, placed_axes
from ipujax.lowering.popops.vertices.add_vertices import add_vertices
from ipujax.lowering.popops.vertices.emulation import emulation
from ipujax.runtime.cache import remembered
from ipujax.runtime.exchange import receive_cycles, superstep
from ipujax.runtime.graph import Access, Axis, BlockShapes, Builder, Codelet, Field, block, element
from ipujax.runtime.target import Target, issue_round_cycles
from ipujax.runtime.tensor import Blocked, Tensor, blocked_mapping, dtype_name, element_bytes, even_cuts


class _Search(NamedTuple):
    """Cycles of a worker that searches.

    Args:
        element: of an element.
        shared_row: beside the loop, of workers that share a row.
        own_row: beside the loop, of a worker with a row of its own.
    """

    element: int
    shared_row: int
    own_row: int


_IN_ASSEMBLY, _COMPILED = _Search(3, 30, 27), _Search(6, 53, 29)  # of floats of up to 32 bits, and of other dtypes
_SUPERVISOR_CYCLES = 9  # of a row
_LEAST_SHARE = 32  # elements of a worker (`popnn/Loss.cpp`, `argMinMaxSplitFirstReduction`)


class _Extreme(NamedTuple):
    """Functions of a primitive.

    Args:
        search: index of the extreme element.
        reduce: the element itself.
    """

    search: Callable[..., jax.Array]
    reduce: Callable[..., jax.Array]


_EXTREMES = {
    "argmax": _Extreme(lax.argmax, lax.reduce_max),
    "argmin": _Extreme(lax.argmin, lax.reduce_min),
}


def arg_reduce(builder: Builder, x: Tensor, axis: int, kind: str, index_dtype: Any) -> Tensor:
    """Finds the index of the extreme element along one dimension; returns a new tensor without that dimension.

    Chooses the partition of `x` over tiles that costs least, and adds vertices by it.

    Args:
        builder: graph and program to add to, and the debug name.
        x: tensor with at least one element.
        axis: the dimension.
        kind: "argmax" or "argmin".
        index_dtype: dtype of the result.
    """
    result_dims = [d for d in range(x.ndim) if d != axis]
    # The work of a vertex, for the estimate of candidate partitions: what it reads and writes of a block of `x`.
    read = spans(x.shape, range(x.ndim))
    codelet = _search_codelet(kind, x.dtype, axis, index_dtype)
    written = tuple(read[d] for d in result_dims)
    work = Work(codelet, (FieldUse(read, source_of(builder.graph, x)), FieldUse(written)))

    pick_cost = _PickCost(axis, x.dtype, index_dtype)
    placement = choose(builder.graph, x.shape, range(x.ndim), work, [x], cost_after=pick_cost)
    place_operand(builder.graph, x, read, placement)
    return _add_search(builder, x, axis, placement, kind, index_dtype)


def _add_search(builder: Builder, x: Tensor, axis: int, placement: Blocked, kind: str, index_dtype: Any) -> Tensor:
    """Adds the vertices of an arg-reduction along `axis`, on blocks of `x` as `placement` cuts and maps them.

    Where `axis` is cut, each block gives a pair, its extreme element and the index of that; then the best pair of each
    result is picked. `kind` is "argmax" or "argmin". Returns the indices.
    """
    result_dims = [d for d in range(x.ndim) if d != axis]
    axes = placed_axes(placement)
    # Along an axis of kind "reduce" the engine may search all blocks at once: for the numbers the cuts do not count.
    axes[axis] = Axis(axes[axis].name, axes[axis].cuts, "reduce")
    shape = tuple(x.shape[d] for d in result_dims)
    blocks = axes[axis].blocks
    if blocks == 1:
        out = mapped_variable(builder.graph, shape, index_dtype, builder.name, result_dims, placement)
        codelet = _search_codelet(kind, x.dtype, axis, index_dtype)
        accesses = (along(x, range(x.ndim)), along(out, result_dims))
        add_vertices(builder, codelet, axes, accesses, placement.tile)
        return out
    # A pair for each block of the searched dimension, outermost, on the tile that computes it.
    cuts = (even_cuts(blocks, blocks), *(placement.cuts[d] for d in result_dims))
    mapping = blocked_mapping(cuts, np.transpose(placement.tile, [axis, *result_dims]))
    # With a monoid the engine may search all blocks at once and store one slot, see `Variable.monoid`.
    values, indices = (
        builder.graph.add_variable((blocks, *shape), dtype, f"{builder.name}/partials", mapping, kind)
        for dtype in (x.dtype, index_dtype)
    )
    dims = (block(axis), *map(element, result_dims))  # a pair's indices: number of its block, elements of the others
    pair_accesses = (along(x, range(x.ndim)), Access(values, dims), Access(indices, dims))
    codelet = _pair_codelet(kind, x.dtype, axis, index_dtype)
    add_vertices(builder, codelet, axes, pair_accesses, placement.tile, [axes[axis].name])
    return _add_pick(builder, values, indices, kind)


def _add_pick(builder: Builder, values: Tensor, indices: Tensor, kind: str) -> Tensor:
    """Adds vertices that pick the index of the best pair of each result, on the tile that has the first of its pairs.

    Args:
        builder: graph and program to add to, and the debug name.
        values: extreme element of each block, [blocks, *shape of the result], mapped with one block a tile.
        indices: index of each of them, likewise.
        kind: "argmax" or "argmin".

    Returns:
        The indices of the best values, without the dimension of blocks.
    """
    mapping = mapping_like(builder.graph, values)
    assert isinstance(mapping, Blocked), "partials are mapped in blocks"
    num_pairs, *shape = values.shape
    cuts = mapping.cuts[1:]
    tile = mapping.tile[:1]
    out = builder.graph.add_variable(shape, indices.dtype, builder.name, blocked_mapping(cuts, tile[0]))
    axes = [Axis("slot", even_cuts(num_pairs, 1), "reduce"), *(Axis(f"d{d}", cut) for d, cut in enumerate(cuts))]
    pairs = (along(t, range(t.ndim)) for t in (values, indices))
    codelet = _pick_codelet(kind, values.dtype, indices.dtype)
    add_vertices(builder.named("pick"), codelet, axes, (*pairs, along(out, range(1, values.ndim))), tile)
    return out


@dataclass(frozen=True, slots=True)
class _PickCost:
    """Cycles of the second stage of an arg-reduction, which picks among the blocks' pairs, for each candidate grid."""

    axis: int
    dtype: Any
    index_dtype: Any

    def __call__(self, grids: Grids, target: Target, cycles_per_byte: float) -> np.ndarray:
        """Cycles that a candidate grid adds by cutting the searched dimension; 0 where it does not.

        The tile that picks receives a pair (element, index) of each result from the tile of each other block, copies
        its own beside them, and goes through all.

        Args:
            grids: candidate grids of vertices over the operand.
            target: the machine.
            cycles_per_byte: cost of a byte, which this cost has none of.
        """
        blocks = grids.blocks[self.axis]
        # Results of the largest block.
        size = np.prod(np.delete(grids.lengths, self.axis, 0), axis=0, dtype=np.int64)
        widths = [element_bytes(dtype) for dtype in (self.dtype, self.index_dtype)]
        compute = _rows_search_cycles(self.dtype, size, blocks, target, rows_of_workers=True)
        # The first pair of each result is on the tile already; no two tiles receive the same pairs.
        payload = sum(
            receive_cycles((blocks - 1) * size * width, shared_bytes=0, receives=blocks - 1, target=target)
            for width in widths
        )
        step = superstep(
            target,
            receiving_cycles=payload,
            copied_bytes=size * sum(widths),
            copied_fragments=len(widths),
            compute_cycles=compute,
        )
        return np.where(blocks > 1, step.total_cycles, 0.0)


def _search_cycles(
    dtype: Any, axis: int, shapes: BlockShapes, target: Target, *, rows_of_workers: bool = False
) -> np.ndarray:
    lengths = shapes[0]
    outputs = total_elements([n for d, n in enumerate(lengths) if d != axis])
    return _rows_search_cycles(dtype, outputs, lengths[axis], target, rows_of_workers=rows_of_workers)


def _rows_search_cycles(
    dtype: Any, rows: np.ndarray, length: np.ndarray, target: Target, *, rows_of_workers: bool
) -> np.ndarray:
    """Tile cycles to search rows of a length for their largest or smallest element.

    With `rows_of_workers` each worker has rows of its own, else all workers share one row after another.
    """
    emulated = emulation(dtype, "add", target)
    search = _IN_ASSEMBLY if emulated.width in ("float", "half") else _COMPILED
    element = search.element * emulated.factor + emulated.cast_cycles
    round_cycles = issue_round_cycles(target)
    if rows_of_workers:
        worker = -(-rows // target.worker_contexts) * (search.own_row + element * np.maximum(length - 1, 0))
        return np.asanyarray(target.supervisor_overhead_cycles + round_cycles * worker)
    share = _share(length, target)
    row = _SUPERVISOR_CYCLES + round_cycles * (search.shared_row + element * np.maximum(share - 1, 0))
    return np.asanyarray(target.supervisor_overhead_cycles + rows * row)


def _share(length: np.ndarray, target: Target) -> np.ndarray:
    """Elements of a worker of those that share a row."""
    return np.minimum(length, np.maximum(_LEAST_SHARE, -(-length // target.worker_contexts)))


def _search_parts(axis: int, shapes: BlockShapes, target: Target, *, rows_of_workers: bool = False) -> np.ndarray:
    """Work that workers share, for reports: rows of a block, or vectors of one row if all share one after another."""
    lengths = shapes[0]
    if rows_of_workers:
        return total_elements([n for d, n in enumerate(lengths) if d != axis])
    return np.asarray(-(-lengths[axis] // np.maximum(1, _share(lengths[axis], target))))


@remembered
def _search_codelet(kind: str, dtype: Any, axis: int, index_dtype: Any) -> Codelet:
    """Codelet of a search in one stage, for an uncut dimension `axis`: the index of its extreme element.

    `kind` is "argmax" or "argmin", `dtype` that of the elements, `index_dtype` that of the result.
    """
    search = _EXTREMES[kind].search

    def compute(x: jax.Array) -> jax.Array:
        return search(x, axis, index_dtype)

    cycles = partial(_search_cycles, dtype, axis)
    parts = partial(_search_parts, axis)
    fields = (Field("in", "in", dtype), Field("index", "out", index_dtype))
    title = f"popops::{kind.title()}<{dtype_name(dtype)}>"
    return Codelet(title, fields, compute, cycles, state_bytes=24, code_bytes=500, compares="order", parts=parts)


@remembered
def _pair_codelet(kind: str, dtype: Any, axis: int, index_dtype: Any) -> Codelet:
    """Codelet of the first of two stages, for a dimension `axis` that is cut: the extreme element and its index.

    The index is that in the whole tensor: the block's first index along `axis`, its origin, is added. `kind` is
    "argmax" or "argmin", `index_dtype` the dtype of indices.
    """
    extreme = _EXTREMES[kind]

    def compute(x: jax.Array, origins: tuple[Any, ...]) -> tuple[jax.Array, jax.Array]:
        index = extreme.search(x, axis, index_dtype)
        return extreme.reduce(x, axes=(axis,)), index + jnp.asarray(origins[0], index_dtype)

    cycles = partial(_search_cycles, dtype, axis)
    parts = partial(_search_parts, axis)
    fields = (Field("in", "in", dtype), Field("value", "out", dtype), Field("index", "out", index_dtype))
    title = f"popops::{kind.title()}Partials<{dtype_name(dtype)}>"
    return Codelet(
        title,
        fields,
        compute,
        cycles,
        state_bytes=28,
        code_bytes=500,
        takes=("origins",),
        compares="order",
        parts=parts,
    )


@remembered
def _pick_codelet(kind: str, dtype: Any, index_dtype: Any) -> Codelet:
    """Codelet of the second of two stages: of pairs (value, index), a row for each block, the index of the best value.

    `kind` is "argmax" or "argmin", `dtype` that of the values.
    """
    search = _EXTREMES[kind].search

    def compute(values: jax.Array, indices: jax.Array) -> jax.Array:
        if values.shape[0] == 1:
            return indices[0]
        best = search(values, 0, np.dtype(np.int32))  # number of the block
        return jnp.take_along_axis(indices, best[None], 0)[0]

    cycles = partial(_search_cycles, dtype, 0, rows_of_workers=True)  # each worker has results of its own
    parts = partial(_search_parts, 0, rows_of_workers=True)
    fields = (Field("values", "in", dtype), Field("indices", "in", index_dtype), Field("index", "out", index_dtype))
    title = f"popops::{kind.title()}Pick<{dtype_name(dtype)}>"
    return Codelet(title, fields, compute, cycles, state_bytes=28, code_bytes=500, compares="order", parts=parts)
