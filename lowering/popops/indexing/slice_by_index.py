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
from ipujax.lowering.popops.indexing.table_order import gather_as_kept, scatter_as_kept
from ipujax.lowering.popops.maps.elementwise import elementwise
from ipujax.lowering.popops.vertices.kernel import Op
from ipujax.runtime.cache import remembered
from ipujax.runtime.graph import Builder, Copy
from ipujax.runtime.tensor import Tensor, concat


def look_up_slice(
    builder: Builder, x: Tensor, starts: Sequence[Tensor], sizes: Sequence[int], dims: Sequence[int]
) -> Tensor:
    """Slices a tensor at dynamic indices; arguments and result as `dynamic_slice`, `dims` rising."""
    numbers = lax.GatherDimensionNumbers(_other_dims(x, dims), tuple(dims), tuple(dims))
    slices = tuple(1 if d in dims else n for d, n in enumerate(x.shape))
    spec = GatherSpec(numbers, slices, Mode.CLIP, None, True, True, x.shape, x.ndim)
    indices = _index_vectors(builder, x, starts, sizes, dims)
    return gather_as_kept(builder, x, indices, tuple(sizes), spec)


def write_slice_in_place(
    builder: Builder, buffer: Tensor, update: Tensor, starts: Sequence[Tensor], dims: Sequence[int]
) -> Tensor:
    """Overwrites a slice of a buffer and returns it; arguments as `dynamic_update_slice_in_place`, `dims` rising."""
    graph = builder.graph
    indices = _index_vectors(builder, buffer, starts, update.shape, dims)
    numbers = lax.ScatterDimensionNumbers(_other_dims(buffer, dims), tuple(dims), tuple(dims))
    spec = ScatterSpec("scatter", numbers, Mode.CLIP, True, True, buffer.shape, update.shape, buffer.dtype)
    spec, table, updates, _ = scatter_as_kept(spec, buffer, update)
    plan = plan_scatter(graph, table, indices, updates, spec, builder.name, in_place=True)
    if plan.has_too_many_updates:
        plan = plan_in_steps(graph, table, indices, updates, spec, builder.name, in_place=True)
    plan.add(builder)
    return buffer


def write_slice(builder: Builder, x: Tensor, update: Tensor, starts: Sequence[Tensor], dims: Sequence[int]) -> Tensor:
    """Copies `x` with a slice overwritten; arguments as the function in place."""
    graph = builder.graph
    out = add_like(graph, x, builder.name) if graph.is_mapped(x) else graph.add_variable(x.shape, x.dtype, builder.name)
    builder.prog.add(Copy(x, out, f"{builder.name}/copy", graph.origin))
    write_slice_in_place(builder, out, update, starts, dims)
    map_like(graph, x, out)
    return out


def _other_dims(x: Tensor, dims: Sequence[int]) -> tuple[int, ...]:
    return tuple(d for d in range(x.ndim) if d not in dims)


def _index_vectors(
    builder: Builder, x: Tensor, starts: Sequence[Tensor], sizes: Sequence[int], dims: Sequence[int]
) -> Tensor:
    """Index vectors of a slice within `x`, [*sizes of dims, len(dims)]."""
    sizes_of_dims = tuple(sizes[d] for d in dims)
    if set(sizes_of_dims) == {1}:  # gather and scatter clamp an index
        vector = concat([start.reshape((1,)) for start in starts], 0)
        return vector.reshape((*sizes_of_dims, len(dims)))
    columns = []
    for n, (d, start) in enumerate(zip(dims, starts, strict=True)):
        offsets = builder.graph.add_constant(np.arange(sizes[d], dtype=np.int32), "offsets")
        rows = elementwise(builder.named("rows"), _rows(x.shape[d], sizes[d], start.dtype), [start, offsets])
        columns.append(rows.broadcast_in_dim(sizes_of_dims, (n,)).reshape((*sizes_of_dims, 1)))
    return concat(columns, len(sizes_of_dims))


@remembered
def _rows(extent: int, size: int, dtype: np.dtype) -> Op:
    """Operation from a start and offsets to indices; the start is clamped so that `size` rows are within `extent`."""

    def rows(start: jax.Array, offset: jax.Array) -> jax.Array:
        start = signed(start)
        limit = np.asarray(extent - size, start.dtype)
        return lax.clamp(np.zeros((), start.dtype), start, limit) + offset.astype(start.dtype)

    index = np.dtype(np.int64 if dtype.itemsize == 8 else np.int32)
    return Op("clamp", rows, index, ("rows", extent, size))
