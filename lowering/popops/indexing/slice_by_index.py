"""Slices at dynamic indices, looked up and written index by index.

The functions of `dynamic_slices` need a sliced dimension uncut on every tile, and move a tensor that is cut along it.
Here the tensor stays: each tile looks up the indices in its rows, and the results are combined. A write changes the
rows on their own tiles.

Limits: each index of the slice is a look-up that every tile goes through, so this is for slices of few indices.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np
from jax import lax

from ipujax.lowering.layout import add_like, map_like
from ipujax.lowering.popops.indexing.gather import GatherSpec, Mode, signed
from ipujax.lowering.popops.indexing.scatter import ScatterSpec, plan_in_steps, plan_scatter
from ipujax.lowering.popops.indexing.table_order import gather_in_memory_order, scatter_in_memory_order
from ipujax.lowering.popops.maps.elementwise import elementwise
from ipujax.lowering.popops.vertices.kernel import Op
from ipujax.runtime.cache import remembered
from ipujax.runtime.graph import Builder, Copy
from ipujax.runtime.tensor import Tensor, concat


def look_up_slice(
    builder: Builder, x: Tensor, starts: Sequence[Tensor], sizes: Sequence[int], dims: Sequence[int]
) -> Tensor:
    """Slices a tensor at dynamic indices, by a gather of single indices; returns a new tensor.

    Args:
        x: tensor with at least one element.
        starts: integer scalars of one dtype, the first index in each of `dims`; clamped so that the slice fits.
        sizes: size of the slice in every dimension of `x`, at least 1.
        dims: dimensions of `starts`, rising; in the others the slice is as large as `x`.
    """
    spec = GatherSpec(
        numbers=lax.GatherDimensionNumbers(_other_dims(x, dims), tuple(dims), tuple(dims)),
        slice_sizes=tuple(1 if d in dims else n for d, n in enumerate(x.shape)),
        mode=Mode.CLIP,
        fill=None,
        indices_are_sorted=True,
        unique_indices=True,
        table_shape=x.shape,
        out_rank=x.ndim,  # a dimension of look-ups in the place of each sliced one
    )
    indices = _index_vectors(builder, x, starts, sizes, dims)
    return gather_in_memory_order(builder, x, indices, tuple(sizes), spec)


def write_slice_in_place(
    builder: Builder, buffer: Tensor, update: Tensor, starts: Sequence[Tensor], dims: Sequence[int]
) -> Tensor:
    """Overwrites a slice of a buffer, by a scatter to single indices; returns the buffer.

    Args:
        buffer: writable tensor, changed.
        update: new value of the slice, of the buffer's rank and dtype, nowhere larger than it.
        starts: integer scalars of one dtype, the first index in each of `dims`; clamped so that the slice fits.
        dims: dimensions of `starts`, rising; in the others `update` is as large as the buffer.
    """
    graph = builder.graph
    indices = _index_vectors(builder, buffer, starts, update.shape, dims)
    spec = ScatterSpec(
        kind="scatter",
        numbers=lax.ScatterDimensionNumbers(_other_dims(buffer, dims), tuple(dims), tuple(dims)),
        mode=Mode.CLIP,
        indices_are_sorted=True,
        unique_indices=True,
        table_shape=buffer.shape,
        update_shape=update.shape,
        dtype=buffer.dtype,
    )
    spec, table, updates, _ = scatter_in_memory_order(spec, buffer, update)
    plan = plan_scatter(graph, table, indices, updates, spec, builder.name, in_place=True)
    if plan.has_too_many_updates:
        plan = plan_in_steps(graph, table, indices, updates, spec, builder.name, in_place=True)
    plan.add(builder)
    return buffer


def write_slice(builder: Builder, x: Tensor, update: Tensor, starts: Sequence[Tensor], dims: Sequence[int]) -> Tensor:
    """Copies `x` with a slice overwritten, by a scatter to single indices; returns the new tensor.

    Args:
        x: tensor with at least one element.
        update: new value of the slice, of the rank and dtype of `x`, nowhere larger than it.
        starts: integer scalars of one dtype, the first index in each of `dims`; clamped so that the slice fits.
        dims: dimensions of `starts`, rising; in the others `update` is as large as `x`.
    """
    graph = builder.graph
    out = add_like(graph, x, builder.name) if graph.is_mapped(x) else graph.add_variable(x.shape, x.dtype, builder.name)
    builder.prog.add(Copy(x, out, f"{builder.name}/copy", graph.origin))
    write_slice_in_place(builder, out, update, starts, dims)
    map_like(graph, x, out)  # an unmapped tensor gets the mapping that its copy got by the write
    return out


def _other_dims(x: Tensor, dims: Sequence[int]) -> tuple[int, ...]:
    return tuple(d for d in range(x.ndim) if d not in dims)


def _index_vectors(
    builder: Builder, x: Tensor, starts: Sequence[Tensor], sizes: Sequence[int], dims: Sequence[int]
) -> Tensor:
    """Index vectors of the elements of a dynamic slice, for a gather or scatter of single indices.

    A start is clamped before offsets are added, so that the whole slice is within `x`.

    Args:
        builder: graph and program to add to, and the debug name.
        x: tensor that is sliced.
        starts: first index of the slice along each of `dims`, scalars.
        sizes: size of the slice in every dimension of `x`.
        dims: dimensions of `x` that indices point into.

    Returns:
        Tensor [*sizes of the slice along `dims`, len(dims)].
    """
    sizes_of_dims = tuple(sizes[d] for d in dims)
    if set(sizes_of_dims) == {1}:  # gather and scatter clamp a single index themselves
        vector = concat([start.reshape((1,)) for start in starts], 0)
        return vector.reshape((*sizes_of_dims, len(dims)))
    columns = []
    for n, (d, start) in enumerate(zip(dims, starts, strict=True)):
        offsets = builder.graph.add_constant(np.arange(sizes[d], dtype=np.int32), "offsets")
        op = _clamped_rows(x.shape[d], sizes[d], start.dtype)
        rows = elementwise(builder.named("rows"), op, [start, offsets])
        columns.append(rows.broadcast_in_dim(sizes_of_dims, (n,)).reshape((*sizes_of_dims, 1)))
    return concat(columns, len(sizes_of_dims))


@remembered
def _clamped_rows(extent: int, size: int, dtype: np.dtype) -> Op:
    """Elementwise operation (start, offset) → index of a slice of `size` rows along a dimension of `extent`.

    The start is clamped as JAX does, so that the whole slice is within the dimension. `dtype` is that of the start.
    """

    def rows(start: jax.Array, offset: jax.Array) -> jax.Array:
        start = signed(start)
        limit = np.asarray(extent - size, start.dtype)
        return lax.clamp(np.zeros((), start.dtype), start, limit) + offset.astype(start.dtype)

    index = np.dtype(np.int64 if dtype.itemsize == 8 else np.int32)
    return Op("clamp", rows, index, ("rows", extent, size))
