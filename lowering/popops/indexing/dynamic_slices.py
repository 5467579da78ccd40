"""Slices at dynamic indices: read, and written in place.

A sliced dimension is uncut in every vertex, and the others are cut, so that each tile slices its own elements and
nothing moves if the tensor is mapped that way: `map_for_slicing` does so. A tensor of another mapping is exchanged
first. A slice has the memory order of the tensor.

All workers of a tile share a slice, or each has slices of its own where a tile has several at one index: to the machine
they are one slice of the tensors joined, of several regions. A tile's blocks need not be contiguous: vertices connect a
list of vectors.

Source of layout and forms: poplibs `popops/DynamicSlice.cpp` and its codelet `DynamicSlice2d`; of the cost:
`indexing_cycles`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
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
from ipujax.lowering.popops.indexing.indexing_cycles import region_slice_cycles, slice_cycles, vectors
from ipujax.lowering.popops.vertices.add_vertices import add_vertices
from ipujax.runtime.cache import remembered
from ipujax.runtime.graph import BYTE_COST_CYCLES, BlockShapes, Builder, Codelet, Copy, Field, Graph
from ipujax.runtime.target import Target, issue_round_cycles
from ipujax.runtime.tensor import Blocked, Tensor, dtype_name, element_bytes


def dynamic_slice(
    builder: Builder,
    x: Tensor,
    starts: Sequence[Tensor],
    sizes: Sequence[int],
    dims: Sequence[int] | None = None,
    *,
    slices_of_tile: int = 1,
) -> Tensor:
    """Slices a tensor at dynamic indices, as `lax.dynamic_slice`; returns the tensor itself if the slice is all of it.

    Args:
        x: tensor with at least one element.
        starts: integer scalars of one dtype, the first index in each of `dims`; clamped so that the slice fits.
        sizes: size of the slice in every dimension of `x`, at least 1.
        dims: dimensions of `starts`, all when None; in the others the slice is as large as `x`.
        slices_of_tile: most slices that a tile of `x` has at these starts, those of other tensors included.
    """
    graph = builder.graph
    starts, dims = _in_sliced_dims(x, starts, sizes, dims)
    if not dims:
        return x
    order = _order_to_slice_in(x, dims)
    if order is not None:  # a view: the same slice of its variable, in memory order
        slice_order = order.with_shape(sizes)
        variable_dims = [order.view_dims.index(d) for d in dims]
        own_x, own_sizes = order.of_variable(x), slice_order.variable_shape
        part = dynamic_slice(builder, own_x, starts, own_sizes, variable_dims, slices_of_tile=slices_of_tile)
        return slice_order.of_view(part)
    map_for_slicing(graph, x, dims)
    placement = _placement(graph, x, dims)
    # The slice is cut as the tensor is, but not along the sliced dimensions.
    out_dims = [None if d in dims else d for d in range(x.ndim)]
    out = mapped_variable(graph, tuple(sizes), x.dtype, builder.name, out_dims, placement)
    form = _form(graph, out, dims, placement, slices_of_tile)
    codelet = _slice_codelet(x.dtype, _sliced_in_order(x.ndim, dims), starts[0].dtype, form)
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
    slices_of_tile: int = 1,
) -> None:
    """Overwrites a slice of a buffer at dynamic indices, as `lax.dynamic_update_slice` without a copy of the buffer.

    Args:
        builder: graph and program to add to, and the debug name.
        buffer: writable tensor, changed.
        update: new value of the slice, of the buffer's rank and dtype, nowhere larger than it.
        starts: integer scalars of one dtype, the first index in each of `dims`; clamped so that the slice fits.
        dims: dimensions of `starts`, all when None; in the others `update` is as large as the buffer.
        may_read_buffer: False where `update` is never computed from values of the buffer.
        slices_of_tile: most slices that a tile of the buffer has at these starts, those of other tensors included.
    """
    graph = builder.graph
    starts, dims = _in_sliced_dims(buffer, starts, update.shape, dims)
    if not dims:  # the update is as large as the buffer: a copy
        map_linearly(graph, update)
        map_linearly(graph, buffer)
        builder.prog.add(Copy(update, buffer, builder.name, graph.origin))
        return
    order = _order_to_slice_in(buffer, dims)
    if order is not None:  # a view: the same slice of its variable is overwritten, in memory order
        update = order.with_shape(update.shape).of_variable(update)
        variable_dims = [order.view_dims.index(d) for d in dims]
        own_buffer = order.of_variable(buffer)
        dynamic_update_slice_in_place(
            *(builder, own_buffer, update, starts, variable_dims),
            may_read_buffer=may_read_buffer,
            slices_of_tile=slices_of_tile,
        )
        return
    map_for_slicing(graph, buffer, dims)
    placement = _placement(graph, buffer, dims)
    update_dims = [None if d in dims else d for d in range(buffer.ndim)]
    place_operand(graph, update, spans(update.shape, update_dims), placement)
    sliced = _sliced_in_order(buffer.ndim, dims)
    form = _form(graph, update, dims, placement, slices_of_tile)
    codelet = _update_codelet(buffer.dtype, sliced, starts[0].dtype, form, may_read_buffer=may_read_buffer)
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


def slices_of_tiles(graph: Graph, tensors: Sequence[Tensor], dims: Sequence[int]) -> list[int]:
    """Return for each mapped tensor the most slices along `dims` that one of its tiles has, of all tensors."""
    tiles = [_placement(graph, x, dims).tile.ravel() if x.size else np.zeros(0, np.int64) for x in tensors]
    count = np.bincount(np.concatenate([*tiles, np.zeros(0, np.int64)]))
    return [int(count[of_tensor].max(initial=0)) for of_tensor in tiles]


def map_for_slicing(graph: Graph, tensor: Tensor, dims: Sequence[int]) -> None:
    """Maps an unmapped tensor without cuts of `dims`, so that slices along them need no exchange.

    One with its columns in groups is cut in its variable: no mapping has blocks of its columns of any other size.
    """
    if not graph.is_mapped(tensor) and tensor.size:
        order = _order_to_slice_in(tensor, dims)
        if order is not None:
            tensor = order.of_variable(tensor)
            dims = [order.view_dims.index(d) for d in dims]
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
        tensor: the tensor that is sliced or updated; placements do not cut it along `dims`.
        part: the slice that is read out of it, or the new value of the slice.
        starts: first index of the slice along each of `dims`.
        dims: dimensions along which the part is shorter.
        placement: blocks of the tensor, and their tiles.
    """
    for start in starts:
        map_linearly(builder.graph, start)
    # An axis for each dimension of the tensor, and another one for each along which the part is shorter.
    axes = placed_axes(placement) + [whole_axis(f"part{d}", part.shape[d]) for d in dims]
    part_dims = [tensor.ndim + dims.index(d) if d in dims else d for d in range(tensor.ndim)]
    accesses = (along(tensor, range(tensor.ndim)), along(part, part_dims), *map(scalar, starts))
    tile = tile_grid(placement, len(dims))
    add_vertices(builder, codelet, axes, accesses, tile)


def _all_starts(starts: Sequence[jax.Array], dims: tuple[int, ...], rank: int) -> list[jax.Array]:
    """Start along every dimension, 0 along those that are not in `dims`."""
    start_of = dict(zip(dims, starts, strict=True))
    return [start_of.get(d, lax.full((), 0, starts[0].dtype)) for d in range(rank)]


_Form = Literal["1d", "2d"]  # a slice that all workers of a tile share, and one of a single worker
_MOST_TIMES_SHARED = 1.25  # assumed: a slice by one worker may take so many times as long as one that all share


def _form(graph: Graph, part: Tensor, dims: tuple[int, ...], placement: Blocked, slices_of_tile: int) -> _Form:
    """Return the faster form of slices of which a tile has several; a single one is shared.

    In form "1d" all workers share the rows of a slice, in form "2d" a worker copies a whole slice. So those of form
    "2d" run at once, if their compute sets are merged. A program that does not fit is lowered again at a higher cost
    per byte than the first (`BYTE_COST_CYCLES`), and then compute sets may stay apart, as merged ones need more memory:
    none may be much slower alone.
    """
    target = graph.target
    if slices_of_tile <= 1:
        return "1d"
    longest = [n if d in dims else int(np.diff(placement.cuts[d]).max()) for d, n in enumerate(part.shape)]
    lengths = tuple(map(np.asarray, longest))
    shared, worker = (_slice_cycles(form, dims, part.dtype, (lengths, lengths), target) for form in ("1d", "2d"))
    single = issue_round_cycles(target) * worker
    rounds = -(-slices_of_tile // target.worker_contexts)
    by_workers = target.supervisor_overhead_cycles + rounds * single
    is_short = target.supervisor_overhead_cycles + single <= _MOST_TIMES_SHARED * shared
    may_be_alone = graph.byte_cost_cycles > BYTE_COST_CYCLES
    return "2d" if by_workers < slices_of_tile * shared and (is_short or not may_be_alone) else "1d"


def _slice_cycles(form: _Form, dims: tuple[int, ...], dtype: Any, shapes: BlockShapes, target: Target) -> np.ndarray:
    """Cycles of copying the slice, field 1; a row is contiguous after the last sliced dimension."""
    lengths = shapes[1]
    row_dim = max(dims) + 1
    cycles = slice_cycles if form == "1d" else region_slice_cycles
    return cycles(total_elements(lengths[:row_dim]), total_elements(lengths[row_dim:]), dtype, target)


def _row_vectors(dims: tuple[int, ...], dtype: Any, shapes: BlockShapes, target: Target) -> np.ndarray:
    """Vectors of a row of the slice: workers share each row."""
    return vectors(total_elements(shapes[1][max(dims) + 1 :]), dtype, target)


@dataclass(frozen=True, slots=True)
class _SlicedDims:
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

    def with_axes(self, sources: Sequence[Sequence[int]]) -> _SlicedDims | None:
        """Return the sliced dimensions for vertices on other axes, see `Codelet.with_axes`.

        Axes are numbered so: those of the tensor's dimensions, then one of the part for each sliced dimension.
        `sources` has for each new axis the old ones that it joins; the dimensions of the tensor, and of the part, are
        in the order of the new axes. None where a sliced dimension would be joined with another: a slice of the joint
        dimension is not one piece.
        """
        rank = len(self.part_dims)
        if any(len(axes) > 1 and not set(axes).isdisjoint(self.ordered_axes) for axes in sources):
            return None
        # The first old axis of each new axis of the tensor, and of each new axis of the part: these two share those of
        # dimensions that are not sliced, in the same order.
        tensor_axes = [axes[0] for axes in sources if axes[0] < rank]
        part_axes = [axes[0] for axes in sources if axes[0] not in self.dims]
        unsliced = iter([number for number, axis in enumerate(part_axes) if axis < rank])
        part_dims = (
            part_axes.index(rank + self.dims.index(axis)) if axis in self.dims else next(unsliced)
            for axis in tensor_axes
        )
        return _SlicedDims(tuple(map(tensor_axes.index, self.dims)), tuple(part_dims))


def _sliced_in_order(rank: int, dims: tuple[int, ...]) -> _SlicedDims:
    """Sliced dimensions of a tensor whose part has its dimensions in the same order."""
    return _SlicedDims(dims, tuple(range(rank)))


@remembered
def _slice_codelet(dtype: Any, sliced: _SlicedDims, index_dtype: Any, form: _Form) -> Codelet:
    """Codelet that copies a slice out of a block, at starts that are operands.

    Args:
        dtype: dtype of the block.
        sliced: dimensions of the block that are sliced, one start for each; along the others the slice is all of it.
        index_dtype: dtype of the starts.
        form: division of the slice among workers.
    """
    dims = sliced.dims

    def compute(x: jax.Array, *starts: jax.Array, shapes: tuple[tuple[int, ...], ...]) -> jax.Array:
        sizes = [shapes[0][d] for d in sliced.part_dims]
        # A negative start is clamped: tracing has already resolved those that count from the end.
        part = lax.dynamic_slice(x, _all_starts(starts, dims, x.ndim), sizes, allow_negative_indices=False)
        return sliced.as_part(part)

    scalars = [Field(f"start{d}", "in", index_dtype) for d in dims]
    fields = (Field("x", "in", dtype, in_pieces=True), Field("out", "out", dtype, in_pieces=True), *scalars)
    codelet = _moving_codelet("DynamicSlice", dtype, dims, form, fields, compute)
    with_axes = partial(_codelet_with_axes, sliced, lambda new: _slice_codelet(dtype, new, index_dtype, form))
    return replace(codelet, takes=("shapes",), with_axes=with_axes, ordered_axes=sliced.ordered_axes)


def _moving_codelet(
    name: str, dtype: Any, dims: tuple[int, ...], form: _Form, fields: tuple[Field, ...], compute: Callable[..., Any]
) -> Codelet:
    """Codelet that reads or overwrites a slice.

    Args:
        name: its name in reports, without form and dtype.
        dtype: dtype of the slice.
        dims: dimensions that are sliced, of field 1, which is the slice.
        form: whether one vertex is run by all workers of its tile, or by one (`2d`).
        fields: the vertex's fields.
        compute: computes results from the values of fields.
    """
    title = f"popops::{name}{'2d' if form == '2d' else ''}<{dtype_name(dtype)}>"
    cycles = partial(_slice_cycles, form, dims, dtype)
    codelet = Codelet(title, fields, compute, cycles, state_bytes=32, code_bytes=300, moves=True)
    if form == "2d":
        return replace(codelet, supervisor=False)
    return replace(codelet, parts=partial(_row_vectors, dims, dtype))


def _codelet_with_axes(
    sliced: _SlicedDims, codelet: Callable[[_SlicedDims], Codelet], sources: Sequence[Sequence[int]]
) -> Codelet | None:
    """The codelet on other axes, see `Codelet.with_axes`; `codelet` makes it from its dimensions."""
    new = sliced.with_axes(sources)
    return None if new is None else codelet(new)


@remembered
def _update_codelet(
    dtype: Any, sliced: _SlicedDims, index_dtype: Any, form: _Form, *, may_read_buffer: bool
) -> Codelet:
    """Codelet that overwrites a slice of a block in place, at starts that are operands.

    Args:
        dtype: dtype of the block.
        sliced: dimensions of the block that are sliced, one start for each; along the others the slice is all of it.
        index_dtype: dtype of the starts.
        form: division of the slice among workers.
        may_read_buffer: whether the update may be computed from the block, and must be so before it is overwritten.
    """
    dims = sliced.dims

    def compute(buffer: jax.Array, update: jax.Array, *starts: jax.Array) -> jax.Array:
        if may_read_buffer:
            update = computed_before_writing(update)
        first = _all_starts(starts, dims, buffer.ndim)
        return lax.dynamic_update_slice(buffer, sliced.as_tensor(update), first, allow_negative_indices=False)

    scalars = [Field(f"start{d}", "in", index_dtype) for d in dims]
    fields = (Field("buffer", "inout", dtype, in_pieces=True), Field("update", "in", dtype, in_pieces=True), *scalars)
    codelet = _moving_codelet("DynamicUpdateSlice", dtype, dims, form, fields, compute)

    def on_dims(new: _SlicedDims) -> Codelet:
        return _update_codelet(dtype, new, index_dtype, form, may_read_buffer=may_read_buffer)

    return replace(codelet, with_axes=partial(_codelet_with_axes, sliced, on_dims), ordered_axes=sliced.ordered_axes)


def computed_before_writing(update: jax.Array) -> jax.Array:
    """Return an update that XLA computes before the operation that writes it; takes 0.1 µs, and a copy of it."""
    # XLA for CPU (jaxlib 0.10.2) fuses an update with the operation that writes it in place. It refuses to where the
    # update reads the array that is written, but misses that array behind a reshape: then elements are read that have
    # been overwritten, as in `expand_dims(dynamic_update_slice_in_dim(p, p[:, :8] * 2, i, 1), 1)`. It fuses
    # nothing into a branch, and does not know which one is taken until it has simplified everything.
    is_taken = jax.lax.optimization_barrier(jnp.asarray(True))
    return jax.lax.cond(is_taken, lambda value: value, jnp.zeros_like, update)
