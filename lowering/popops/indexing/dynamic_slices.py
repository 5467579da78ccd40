"""Slices at dynamic indices: read, and written in place.

A sliced dimension is uncut in every vertex, and the others are cut, so that each tile slices its own elements and
nothing moves if the tensor is mapped that way: `map_for_slicing` does so. A tensor of another mapping is exchanged
first. A slice has the memory order of the tensor.

Source of the layout: poplibs `popops/DynamicSlice.cpp`; of the cost: `indexing_cycles`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import numpy as np
from jax import lax

from ipujax.lowering.layout import MemoryOrder, map_linearly, mapping_like, memory_order, total_elements
from ipujax.lowering.layout.grid_cost import spans
from ipujax.lowering.layout.place import (
    along,
    mapped_variable,
    place_operand,
    placed_axes,
    scalar,
    spread,
    tile_grid,
    unmoved_placement,
    whole_axis,
)
from ipujax.lowering.popops.indexing.before_writing import computed_before_writing
from ipujax.lowering.popops.indexing.indexing_cycles import slice_cycles, vectors
from ipujax.lowering.popops.vertices.add_vertices import add_vertices
from ipujax.runtime.cache import remembered
from ipujax.runtime.graph import (
    BlockShapes,
    Builder,
    Codelet,
    Copy,
    Field,
    Graph,
)
from ipujax.runtime.target import Target
from ipujax.runtime.tensor import Blocked, Tensor, dtype_name, element_bytes


def dynamic_slice(
    builder: Builder, x: Tensor, starts: Sequence[Tensor], sizes: Sequence[int], dims: Sequence[int] | None = None
) -> Tensor:
    """Slices a tensor at dynamic indices, as `lax.dynamic_slice`; returns the tensor itself if the slice is all of it.

    Args:
        x: tensor with at least one element.
        starts: integer scalars of one dtype, the first index in each of `dims`; clamped so that the slice fits.
        sizes: size of the slice in every dimension of `x`, at least 1.
        dims: dimensions of `starts`, all when None; in the others the slice is as large as `x`.
    """
    graph = builder.graph
    starts, dims = _in_sliced_dims(x, starts, sizes, dims)
    if not dims:
        return x
    order = _order_to_slice_in(x, dims)
    if order is not None:
        slice_order = order.with_shape(sizes)
        variable_dims = [order.view_dims.index(d) for d in dims]
        part = dynamic_slice(builder, order.of_variable(x), starts, slice_order.variable_shape, variable_dims)
        return slice_order.of_view(part)
    map_for_slicing(graph, x, dims)
    placement = _placement(graph, x, dims)
    out_dims = [None if d in dims else d for d in range(x.ndim)]
    out = mapped_variable(graph, tuple(sizes), x.dtype, builder.name, out_dims, placement)
    codelet = _slice_codelet(x.dtype, _sliced_in_order(x.ndim, dims), starts[0].dtype)
    _add_vertices(builder, codelet, x, out, starts, dims, placement)
    return out


def dynamic_update_slice_in_place(
    builder: Builder,
    buffer: Tensor,
    update: Tensor,
    starts: Sequence[Tensor],
    dims: Sequence[int] | None = None,
    *,
    may_read_buffer: bool = True,
) -> None:
    """Overwrites a slice of a buffer at dynamic indices.

    Args:
        buffer: writable tensor, changed.
        update: new value of the slice, of the buffer's rank and dtype, nowhere larger than it.
        starts: integer scalars of one dtype, the first index in each of `dims`; clamped so that the slice fits.
        dims: dimensions of `starts`, all when None; in the others `update` is as large as the buffer.
        may_read_buffer: False where `update` is never computed from values of the buffer.
    """
    graph = builder.graph
    starts, dims = _in_sliced_dims(buffer, starts, update.shape, dims)
    if not dims:
        map_linearly(graph, update)
        map_linearly(graph, buffer)
        builder.prog.add(Copy(update, buffer, builder.name, graph.origin))
        return
    order = _order_to_slice_in(buffer, dims)
    if order is not None:
        update = order.with_shape(update.shape).of_variable(update)
        variable_dims = [order.view_dims.index(d) for d in dims]
        own_buffer = order.of_variable(buffer)
        dynamic_update_slice_in_place(
            builder, own_buffer, update, starts, variable_dims, may_read_buffer=may_read_buffer
        )
        return
    map_for_slicing(graph, buffer, dims)
    placement = _placement(graph, buffer, dims)
    update_dims = [None if d in dims else d for d in range(buffer.ndim)]
    place_operand(graph, update, spans(update.shape, update_dims), placement)
    sliced = _sliced_in_order(buffer.ndim, dims)
    codelet = _update_codelet(buffer.dtype, sliced, starts[0].dtype, may_read_buffer=may_read_buffer)
    _add_vertices(builder, codelet, buffer, update, starts, dims, placement)


def dynamic_update_slice(
    builder: Builder, x: Tensor, update: Tensor, starts: Sequence[Tensor], dims: Sequence[int] | None = None
) -> Tensor:
    """Copies `x` with a slice overwritten, as `lax.dynamic_update_slice`; returns the new tensor.

    Args:
        x: tensor with at least one element.
        update: new value of the slice, of the rank and dtype of `x`, nowhere larger than it.
        starts: integer scalars of one dtype, the first index in each of `dims`; clamped so that the slice fits.
        dims: dimensions of `starts`, all when None; in the others `update` is as large as `x`.
    """
    graph = builder.graph
    # Along other dimensions the slice is all of `x`, whatever their starts.
    sliced_dims = [d for d, n in enumerate(x.shape) if n != update.shape[d]]
    map_for_slicing(graph, x, sliced_dims)
    out = graph.add_variable(
        x.shape, x.dtype, builder.name, mapping_like(graph, x) or _placement(graph, x, sliced_dims)
    )
    builder.prog.add(Copy(x, out, f"{builder.name}/copy", graph.origin))
    dynamic_update_slice_in_place(builder, out, update, starts, dims)
    return out


def map_for_slicing(graph: Graph, tensor: Tensor, dims: Sequence[int]) -> None:
    """Maps an unmapped tensor without cuts of `dims`, so that slices along them need no exchange."""
    if not graph.is_mapped(tensor) and tensor.size:
        full_spans = spans(tensor.shape, range(tensor.ndim))
        place_operand(graph, tensor, full_spans, _placement(graph, tensor, dims))
    map_linearly(graph, tensor)


def is_sliced_in_place(graph: Graph, x: Tensor, dims: Sequence[int]) -> bool:
    """True if a tensor is mapped so that slices along `dims` need no exchange of it."""
    order = _order_to_slice_in(x, dims)
    if order is not None:
        x = order.of_variable(x)
        dims = [order.view_dims.index(d) for d in dims]
    return graph.is_mapped(x) and _placement_in_place(graph, x, dims) is not None


def _order_to_slice_in(x: Tensor, dims: Sequence[int]) -> MemoryOrder | None:
    """Memory order of a tensor that is sliced over the dimensions of its variable; None where these are its own.

    None too where the variable has a sliced dimension in several pieces.
    """
    order = memory_order(x)
    if order is None or order.is_own or any(len(order.sizes[d]) > 1 for d in dims):
        return None
    return order


def _in_sliced_dims(
    x: Tensor, starts: Sequence[Tensor], sizes: Sequence[int], dims: Sequence[int] | None
) -> tuple[list[Tensor], tuple[int, ...]]:
    """Starts and dimensions without those along which the slice is all of the tensor, so that its start is 0."""
    dims = range(x.ndim) if dims is None else dims
    pairs = [(start, d) for start, d in zip(starts, dims, strict=True) if sizes[d] != x.shape[d]]
    return [start for start, _ in pairs], tuple(d for _, d in pairs)


def _placement_in_place(graph: Graph, x: Tensor, dims: Sequence[int]) -> Blocked | None:
    """Placement of vertices on the tiles of a mapped tensor; None if its mapping cuts `dims`."""
    order = tuple(d for d in range(x.ndim) if d not in dims)
    return unmoved_placement(graph, x, spans(x.shape, range(x.ndim)), x.shape, order)


def _placement(graph: Graph, x: Tensor, dims: Sequence[int]) -> Blocked:
    """Placement of vertices that slice along `dims`: on the tensor's own tiles if possible, else spread over all."""
    order = tuple(d for d in range(x.ndim) if d not in dims)
    # Its own tiles are used however uneven they are: to move the tensor costs more than any slice of it.
    in_place = _placement_in_place(graph, x, dims) if graph.is_mapped(x) else None
    spread_placement = spread(x.shape, order, element_bytes(x.dtype), graph.target.tiles_per_ipu)
    return in_place or on_opposite_tiles(graph, spread_placement)


def on_opposite_tiles(graph: Graph, placement: Blocked) -> Blocked:
    """The placement with the order of tiles reversed on each IPU.

    Most operations that leave tiles idle leave the last ones idle: slices are copied there beside them.
    """
    count = graph.target.tiles_per_ipu
    ipu, tile = np.divmod(placement.tile, count)
    return placement.on_tiles(ipu * count + (count - 1 - tile))


def _add_vertices(
    builder: Builder,
    codelet: Codelet,
    tensor: Tensor,
    part: Tensor,
    starts: Sequence[Tensor],
    dims: tuple[int, ...],
    placement: Blocked,
) -> None:
    """Add a vertex for each block of a tensor, which reads or writes the part of it at `starts` along `dims`.

    Args:
        builder: graph, program and name.
        codelet: of a slice or an update: fields for the block, the part and each start.
        tensor: the tensor; partitions do not cut it along `dims`.
        part: the slice that is read out of it, or the new value of the slice.
        starts: first index of the slice along each of `dims`.
        dims: dimensions along which the part is shorter.
        placement: blocks of the tensor, and their tiles.
    """
    for start in starts:
        map_linearly(builder.graph, start)
    axes = placed_axes(placement) + [whole_axis(f"part{d}", part.shape[d]) for d in dims]
    part_dims = [tensor.ndim + dims.index(d) if d in dims else d for d in range(tensor.ndim)]
    accesses = (along(tensor, range(tensor.ndim)), along(part, part_dims), *map(scalar, starts))
    tile = tile_grid(placement, len(dims))
    add_vertices(builder, codelet, axes, accesses, tile)


def _all_starts(starts: Sequence[jax.Array], dims: tuple[int, ...], rank: int) -> list[jax.Array]:
    """Start along every dimension, 0 along those that are not in `dims`."""
    start_of = dict(zip(dims, starts, strict=True))
    return [start_of.get(d, lax.full((), 0, starts[0].dtype)) for d in range(rank)]


def _slice_cycles(dims: tuple[int, ...], dtype: Any, shapes: BlockShapes, target: Target) -> np.ndarray:
    """Tile cycles of copying the slice, field 1; a row is contiguous after the last sliced dimension."""
    lengths = shapes[1]
    row_dim = max(dims) + 1
    return slice_cycles(total_elements(lengths[:row_dim]), total_elements(lengths[row_dim:]), dtype, target)


def _row_vectors(dims: tuple[int, ...], dtype: Any, shapes: BlockShapes, target: Target) -> np.ndarray:
    """Vectors of a row of the slice: workers share each row."""
    return vectors(total_elements(shapes[1][max(dims) + 1 :]), dtype, target)


@dataclass(frozen=True, slots=True)
class _Sliced:
    """Dimensions of a tensor of which a part is sliced.

    Args:
        dims: the sliced dimensions, in the order of their starts.
        part_dims: for each dimension of the tensor, that of the part.
    """

    dims: tuple[int, ...]
    part_dims: tuple[int, ...]

    def as_tensor(self, part: jax.Array) -> jax.Array:
        """Return a part with its dimensions in the order of the tensor's."""
        return lax.transpose(part, self.part_dims)

    def as_part(self, part: jax.Array) -> jax.Array:
        """Return a part with its own order of dimensions, from that of the tensor's."""
        return lax.transpose(part, tuple(map(self.part_dims.index, range(part.ndim))))

    @property
    def ordered_axes(self) -> tuple[int, ...]:
        """Axes of sliced dimensions, and of the part along them, which come after those of the tensor."""
        rank = len(self.part_dims)
        return (*self.dims, *range(rank, rank + len(self.dims)))

    def with_axes(self, sources: Sequence[Sequence[int]]) -> _Sliced | None:
        """Return the dimensions on other axes, those of the tensor in order; see `Codelet.with_axes`.

        `sources` has for each new axis the old ones that it joins. None where a sliced dimension would be
        joined with another: a slice of the joint dimension is not one piece.
        """
        rank = len(self.part_dims)
        if any(len(axes) > 1 and not set(axes).isdisjoint(self.ordered_axes) for axes in sources):
            return None
        tensor_axes = [axes[0] for axes in sources if axes[0] < rank]
        part_axes = [axes[0] for axes in sources if axes[0] not in self.dims]
        # Tensor and part have the axes that are not sliced in the same order.
        unsliced = iter([number for number, axis in enumerate(part_axes) if axis < rank])
        part_dims = (
            part_axes.index(rank + self.dims.index(axis)) if axis in self.dims else next(unsliced)
            for axis in tensor_axes
        )
        return _Sliced(tuple(map(tensor_axes.index, self.dims)), tuple(part_dims))


def _sliced_in_order(rank: int, dims: tuple[int, ...]) -> _Sliced:
    """Sliced dimensions of a tensor whose part has its dimensions in the same order."""
    return _Sliced(dims, tuple(range(rank)))


@remembered
def _slice_codelet(dtype: Any, sliced: _Sliced, index_dtype: Any) -> Codelet:
    """Codelet that copies a slice out of a block at starts known when it runs."""
    dims = sliced.dims

    def compute(x: jax.Array, *starts: jax.Array, shapes: tuple[tuple[int, ...], ...]) -> jax.Array:
        sizes = [shapes[0][d] for d in sliced.part_dims]
        # A negative start is clamped: tracing has already resolved those that count from the end.
        part = lax.dynamic_slice(x, _all_starts(starts, dims, x.ndim), sizes, allow_negative_indices=False)
        return sliced.as_part(part)

    cycles, parts = (partial(formula, dims, dtype) for formula in (_slice_cycles, _row_vectors))
    scalars = [Field(f"start{d}", "in", index_dtype) for d in dims]
    fields = (Field("x", "in", dtype), Field("out", "out", dtype), *scalars)
    title = f"popops::DynamicSlice<{dtype_name(dtype)}>"
    codelet = Codelet(
        title, fields, compute, cycles, state_bytes=32, code_bytes=300, takes=("shapes",), moves=True, parts=parts
    )
    with_axes = partial(_codelet_with_axes, sliced, lambda new: _slice_codelet(dtype, new, index_dtype))
    return replace(codelet, with_axes=with_axes, ordered_axes=sliced.ordered_axes)


def _codelet_with_axes(
    sliced: _Sliced, codelet: Callable[[_Sliced], Codelet], sources: Sequence[Sequence[int]]
) -> Codelet | None:
    """The codelet on other axes, see `Codelet.with_axes`; `codelet` makes it from its dimensions."""
    new = sliced.with_axes(sources)
    return None if new is None else codelet(new)


@remembered
def _update_codelet(dtype: Any, sliced: _Sliced, index_dtype: Any, *, may_read_buffer: bool) -> Codelet:
    """Codelet that overwrites a slice of a block in place; `may_read_buffer`: the update may be computed from it."""
    dims = sliced.dims

    def compute(buffer: jax.Array, update: jax.Array, *starts: jax.Array) -> jax.Array:
        if may_read_buffer:
            update = computed_before_writing(update)
        first = _all_starts(starts, dims, buffer.ndim)
        return lax.dynamic_update_slice(buffer, sliced.as_tensor(update), first, allow_negative_indices=False)

    cycles, parts = (partial(formula, dims, dtype) for formula in (_slice_cycles, _row_vectors))
    scalars = [Field(f"start{d}", "in", index_dtype) for d in dims]
    fields = (Field("buffer", "inout", dtype), Field("update", "in", dtype), *scalars)
    title = f"popops::DynamicUpdateSlice<{dtype_name(dtype)}>"
    codelet = Codelet(title, fields, compute, cycles, state_bytes=32, code_bytes=300, moves=True, parts=parts)

    def on_dims(new: _Sliced) -> Codelet:
        return _update_codelet(dtype, new, index_dtype, may_read_buffer=may_read_buffer)

    return replace(codelet, with_axes=partial(_codelet_with_axes, sliced, on_dims), ordered_axes=sliced.ordered_axes)
