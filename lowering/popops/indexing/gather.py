"""Look-ups of rows of a table by computed indices, as `lax.gather`.

Every vertex reads a static block of the table, uncut along indexed dimensions, and static blocks of the indices. Cuts
of batching dimensions, and of those that a look-up copies in full, divide the table as well. Where look-ups, or their
slices of an indexed dimension, are cut, each tile needs all rows; where rows are cut, a tile goes through all look-ups,
writes the rows of its block and zero bits for the others, and these partial results are combined. The partition is the
one of least cost.

Source: poplibs `popops/EmbeddingPlan.cpp` splits the same three ways; cycles from `indexing_cycles`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ipujax.lowering.layout import Grids, total_elements
from ipujax.lowering.layout.choose import choose, source_of
from ipujax.lowering.layout.grid_cost import FieldUse, Work, spans
from ipujax.lowering.layout.place import along, place_operand, placed_axes, whole_axis
from ipujax.lowering.popops.indexing.indexing_cycles import gather_cycles
from ipujax.lowering.popops.reductions.partials import combining_cost, reduce_partials_in_place
from ipujax.lowering.popops.vertices.add_vertices import add_vertices
from ipujax.lowering.popops.vertices.kernel import Frozen, freeze, thawed
from ipujax.lowering.popops.vertices.reducers import zero_bits
from ipujax.runtime.cache import remembered
from ipujax.runtime.graph import Access, Axis, BlockShapes, Builder, Codelet, Extras, Field, Graph, block, element
from ipujax.runtime.target import Target
from ipujax.runtime.tensor import Blocked, Tensor, blocked_mapping, dtype_name, even_cuts, is_key_dtype

Mode = lax.GatherScatterMode


class WindowDim(NamedTuple):
    """Dimension of slices of a table: its number among the dimensions of the table, and among those of the result."""

    of_table: int
    of_result: int


@dataclass(frozen=True, slots=True)
class GatherSpec:
    """Parameters of a gather: those of `lax.gather`, with full slices along dimensions that are not indexed.

    Args:
        numbers: dimension numbers of `lax.gather`, as are the following parameters up to the table's shape.
        slice_sizes: size of a slice in each dimension of the table.
        mode: what happens for an index beyond the table.
        fill: value of a slice that is not within the table; None for that of `lax.gather`, see `fill_of`.
        indices_are_sorted: the user's promise.
        unique_indices: likewise.
        table_shape: shape of the whole table.
        out_rank: number of dimensions of the result.
        uncut: dimensions of the table that are never cut.
    """

    numbers: lax.GatherDimensionNumbers
    slice_sizes: tuple[int, ...]
    mode: Mode
    fill: Frozen | None
    indices_are_sorted: bool
    unique_indices: bool
    table_shape: tuple[int, ...]
    out_rank: int
    uncut: tuple[int, ...] = ()

    @property
    def indexed(self) -> tuple[int, ...]:
        """Dimensions of the table that indices point into."""
        return tuple(self.numbers.start_index_map)

    def out_dims(self) -> tuple[tuple[int | None, ...], tuple[int, ...]]:
        """Dimension of the result that is cut with each dimension of the table, and with each of the look-ups.

        None for an indexed dimension of the table, of which any look-up may read any element.
        """
        of_table = [None if d in self.indexed else out for d, out in enumerate(self.result_dims())]
        return tuple(of_table), self._lookup_dims()

    def result_dims(self) -> tuple[int | None, ...]:
        """Dimension of the result that each dimension of the table becomes; None for one that slices collapse."""
        numbers = self.numbers
        of_indices = self._lookup_dims()
        of_table: list[int | None] = [None] * len(self.table_shape)
        for d, out in self._window_dims():
            of_table[d] = out
        for d, index_dim in zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True):
            of_table[d] = of_indices[index_dim]
        return tuple(of_table)

    def _lookup_dims(self) -> tuple[int, ...]:
        """Dimensions of the result that are those of the index vectors, in their order."""
        return tuple(d for d in range(self.out_rank) if d not in self.numbers.offset_dims)

    def wide_dims(self) -> list[WindowDim]:
        """Indexed dimensions along which slices are longer than 1."""
        return [d for d in self._window_dims() if d.of_table in self.indexed and self.slice_sizes[d.of_table] > 1]

    def _window_dims(self) -> list[WindowDim]:
        """Dimensions that slices keep."""
        absent = self.numbers.collapsed_slice_dims + self.numbers.operand_batching_dims
        window_dims = [d for d in range(len(self.table_shape)) if d not in absent]
        return list(map(WindowDim, window_dims, self.numbers.offset_dims))

    def row_dim(self) -> int | None:
        """Longest indexed dimension along which slices have length 1, whose rows may be cut; None without one."""
        rows = [d for d in self.indexed if self.slice_sizes[d] == 1]
        return max(rows, key=lambda d: self.table_shape[d], default=None)


def gather(builder: Builder, table: Tensor, indices: Tensor, out_shape: Sequence[int], spec: GatherSpec) -> Tensor:
    """Looks up slices of a table, on the partition of least cost; returns a new tensor.

    Args:
        builder: graph and program to add to, and the debug name.
        table: tensor of shape `spec.table_shape` with at least one element.
        indices: integer tensor, index vectors in its last dimension.
        out_shape: shape of the result, which has elements.
        spec: parameters of the gather.
    """
    graph = builder.graph
    table_dims, index_dims = spec.out_dims()
    out_shape = tuple(out_shape)
    rank = len(out_shape)
    row_dim = None if is_key_dtype(table.dtype) else spec.row_dim()
    # Partitions cut the dimensions of the result and, last, the rows of the table: then each block of rows makes a
    # partial result, and these are combined.
    space = out_shape if row_dim is None else (*out_shape, table.shape[row_dim])
    # What a block of that space reads of the table and of the indices, for the estimate of partitions.
    table_spans = spans(table.shape, [rank if d == row_dim else dim for d, dim in enumerate(table_dims)])
    index_spans = spans(indices.shape, [*index_dims, None])
    codelet = _gather_codelet(table.dtype, indices.dtype, spec, row_dim)
    read = FieldUse(table_spans, source_of(graph, table)), FieldUse(index_spans, source_of(graph, indices))
    work = Work(codelet, (*read, FieldUse(spans(out_shape, range(rank)))))

    unmoved = [0] if has_few_lookups(graph, indices) else []  # operand 0, the table, is used where it is mapped
    uncut = {spec.result_dims()[d] for d in spec.uncut}
    order = [d for d in range(len(space)) if d not in uncut]  # dimensions that may be cut
    combination = _CombinationCost(table.dtype, rank)
    placement = choose(graph, space, order, work, [table, indices], cost_after=combination, unmoved_fields=unmoved)
    place_operand(builder.graph, table, table_spans, placement)
    place_operand(builder.graph, indices, index_spans, placement)
    return _add_lookups(builder, table, indices, spec, row_dim, placement)


def has_few_lookups(graph: Graph, indices: Tensor) -> bool:
    """True if the workers of a tile process all index vectors at once, so that moving a table gains nothing."""
    return prod(indices.shape[:-1]) <= graph.target.worker_contexts


def _add_lookups(
    builder: Builder, table: Tensor, indices: Tensor, spec: GatherSpec, row_dim: int | None, placement: Blocked
) -> Tensor:
    """Adds the vertices of a gather, each on a block of the result and of the rows of the table; returns the result.

    Args:
        builder: graph and program to add to, and the debug name.
        table: the table.
        indices: index vectors, in the last dimension.
        spec: parameters of the gather.
        row_dim: indexed dimension of the table whose rows may be cut; None if there is none.
        placement: blocks of the result's dimensions and, with `row_dim`, of the rows as a last dimension. Each block of
            rows gives a partial result, and these are combined.
    """
    table_dims, index_dims = spec.out_dims()
    rank = spec.out_rank
    axes = placed_axes(placement)
    # An axis for each dimension of the table: of the result's or of rows, else a new one that is not cut.
    table_axes: list[int] = []
    for d, (n, dim) in enumerate(zip(table.shape, table_dims, strict=True)):
        table_axes.append(rank if d == row_dim else len(axes) if dim is None else dim)
        if dim is None and d != row_dim:
            axes.append(whole_axis(f"table{d}", n))
    row_blocks = 1 if row_dim is None else axes[rank].blocks
    if row_dim is not None:
        axes[rank] = Axis(f"table{row_dim}", axes[rank].cuts, "reduce" if row_blocks > 1 else "map")
    axes.append(whole_axis("index", indices.shape[-1]))  # along an index vector
    out, out_access = _add_result(builder.graph, table.dtype, placement, rank, row_blocks, builder.name)
    accesses = (along(table, table_axes), along(indices, [*index_dims, len(axes) - 1]), out_access)
    # A vertex needs its first row to find its look-ups, and its first index within slices that are cut.
    origins = (*([axes[rank].name] if row_blocks > 1 else []), *(axes[dim.of_result].name for dim in spec.wide_dims()))
    codelet = _gather_codelet(table.dtype, indices.dtype, spec, row_dim if row_blocks > 1 else None)
    grid = placement.tile.reshape([axis.blocks for axis in axes])
    add_vertices(builder, codelet, axes, accesses, grid, origins)
    return out if row_blocks == 1 else reduce_partials_in_place(builder, out)


def _add_result(
    graph: Graph, dtype: Any, placement: Blocked, rank: int, row_blocks: int, name: str
) -> tuple[Tensor, Access]:
    """Adds the variable that vertices write: the result of a gather, or partial results if rows of the table are cut.

    Args:
        graph: graph to add to.
        dtype: dtype of the table.
        placement: blocks of the vertices: dimensions of the result, then that of rows if these may be cut.
        rank: number of dimensions of the result.
        row_blocks: number of blocks of rows; partial results have them as dimension 0.
        name: debug name.

    Returns:
        The variable, each block on the tile of its vertex, and the access that writes it.
    """
    cuts = placement.cuts[:rank]
    shape = placement.shape[:rank]
    tiles = placement.tile.reshape([*placement.tile.shape[:rank], row_blocks])
    if row_blocks == 1:
        out = graph.add_variable(shape, dtype, name, blocked_mapping(cuts, tiles[..., 0]))
        return out, along(out, range(rank))
    mapping = blocked_mapping((even_cuts(row_blocks, row_blocks), *cuts), np.moveaxis(tiles, -1, 0))
    # Monoid "only": of all partial results of a look-up one alone is not zero bits.
    out = graph.add_variable((row_blocks, *shape), dtype, f"{name}/partials", mapping, "only")
    return out, Access(out, (block(rank), *map(element, range(rank))))


@dataclass(frozen=True, slots=True)
class _CombinationCost:
    """Cycles of combining the look-ups of blocks of rows, for each candidate grid; `rank` is that of the result."""

    dtype: Any
    rank: int

    def __call__(self, grids: Grids, target: Target, cycles_per_byte: float) -> np.ndarray:
        row_blocks = np.prod(grids.blocks[self.rank :], axis=0, dtype=np.int64)
        lengths = grids.lengths[: self.rank]
        shape = grids.shape[: self.rank]
        return combining_cost(row_blocks, lengths, shape, self.dtype, "only", target, cycles_per_byte).cycles


@remembered
def _gather_codelet(dtype: Any, index_dtype: Any, spec: GatherSpec, row_dim: int | None) -> Codelet:
    """Codelet whose vertices look up slices in a block of a table by a block of index vectors.

    Args:
        dtype: dtype of the table.
        index_dtype: dtype of the indices.
        spec: parameters of the gather.
        row_dim: the indexed dimension of the table that is cut into blocks; None for uncut rows.
    """
    fields = (Field("table", "in", dtype), Field("indices", "in", index_dtype), Field("out", "out", dtype))
    # Keywords of `_look_up` beside the blocks. Along `wide_dims` slices are longer than 1 and may be cut: then a vertex
    # needs the shape of its part of the result, and where that begins. Of cut rows it needs the first one of its block.
    takes: tuple[Extras, ...] = ("origins", "shapes") if spec.wide_dims() else () if row_dim is None else ("origins",)
    return Codelet(
        f"popops::MultiSlice<{dtype_name(dtype)}>",
        fields,
        partial(_look_up, spec, row_dim),
        partial(_lookup_cycles, spec, row_dim, dtype),
        state_bytes=36,
        code_bytes=500,
        takes=takes,
        moves=True,
        is_lookup=True,
        parts=partial(_lookups_in_block, spec),  # the work that workers share, for reports
    )


def _look_up(
    spec: GatherSpec,
    row_dim: int | None,
    table: jax.Array,
    indices: jax.Array,
    origins: tuple[Any, ...] = (),
    shapes: tuple[tuple[int, ...], ...] = (),
) -> jax.Array:
    """Looks up slices in a block of a table: of cut slices a part, of cut rows those of the block.

    Args:
        spec: parameters of the gather.
        row_dim: the indexed dimension that is cut into blocks; None for uncut rows. Look-ups of other blocks are zero.
        table: block of the table.
        indices: index vectors into the whole table.
        origins: first row of the block, if rows are cut, and its first index in each of `GatherSpec.wide_dims`.
        shapes: shape of the block of the result.
    """
    wide = spec.wide_dims()  # indexed dimensions along which slices are longer than 1, so that they may be cut
    sizes = _slice_sizes(spec, table.shape)
    part_origins: dict[int, Any] = {}  # first index of the block within a slice, by dimension of the table
    for dim, origin in zip(wide, origins[len(origins) - len(wide) :], strict=True):
        part_size = shapes[0][dim.of_result]
        if part_size < sizes[dim.of_table]:
            sizes[dim.of_table] = part_size
            part_origins[dim.of_table] = origin
    if part_origins:
        indices = _part_indices(indices, spec, part_origins)
    if row_dim is None or table.shape[row_dim] == spec.table_shape[row_dim]:
        return _gather_block(table, indices, spec, sizes, are_changed=bool(part_origins))
    return _masked_lookup(table, indices, spec, sizes, row_dim, origins[0])


def _row_elements(spec: GatherSpec, shapes: BlockShapes) -> np.ndarray:
    """Elements that one look-up copies to a vertex's block of the result, from the lengths of its blocks."""
    table, _, out = shapes
    elements = np.ones((), np.int64)
    result_dim = {dim.of_table: dim.of_result for dim in spec.wide_dims()}  # along these a slice may be cut
    for d, size in enumerate(_slice_sizes(spec, [None] * len(table))):
        elements = elements * (table[d] if size is None else out[result_dim[d]] if d in result_dim else size)
    return elements


def _lookups_in_block(spec: GatherSpec, shapes: BlockShapes, _target: Target) -> np.ndarray:
    """Look-ups of a vertex, which its workers share."""
    return -(-total_elements(shapes[-1]) // np.maximum(_row_elements(spec, shapes), 1))


def _lookup_cycles(
    spec: GatherSpec, row_dim: int | None, dtype: Any, shapes: BlockShapes, target: Target
) -> np.ndarray:
    """Cycles of the look-ups of a block; of cut rows its share is copied, as expected of uniform indices."""
    share = np.ones(()) if row_dim is None else shapes[0][row_dim] / spec.table_shape[row_dim]
    return gather_cycles(_lookups_in_block(spec, shapes, target), share, _row_elements(spec, shapes), dtype, target)


def _slice_sizes(spec: GatherSpec, shape: Sequence[Any]) -> list[Any]:
    """Slice sizes in a block of the table of `shape`: those of the spec where indexed or batched, else the block's."""
    fixed = {*spec.indexed, *spec.numbers.operand_batching_dims}
    return [size if d in fixed else n for d, (size, n) in enumerate(zip(spec.slice_sizes, shape, strict=True))]


def _part_indices(indices: jax.Array, spec: GatherSpec, part_origins: Mapping[int, Any]) -> jax.Array:
    """Index vectors of the same part of each slice of a gather, from those of the whole slices.

    An index beyond the last full slice of the table is clamped first, as that of the whole slice would be; in the mode
    that fills such slices instead the result is −1, so that the part is filled too.

    Args:
        indices: index vectors, in the last dimension.
        spec: parameters of the gather.
        part_origins: first index of the part within a slice, by dimension of the table; 0 where there is none.
    """
    indices = signed(indices)
    limits = np.array([spec.table_shape[d] - spec.slice_sizes[d] for d in spec.indexed], indices.dtype)
    clamped = lax.clamp(jnp.zeros_like(indices), indices, jnp.broadcast_to(limits, indices.shape))
    shifted = clamped + jnp.stack([jnp.asarray(part_origins.get(d, 0), indices.dtype) for d in spec.indexed])
    if spec.mode is not Mode.FILL_OR_DROP:
        return shifted
    return jnp.where((clamped == indices).all(-1, keepdims=True), shifted, -1)


def _gather_block(
    table: jax.Array, indices: jax.Array, spec: GatherSpec, sizes: Sequence[int], *, are_changed: bool
) -> jax.Array:
    """JAX's gather of slices of `sizes` from a block of the table.

    `are_changed`: whether indices are not the user's own, so that a promise that they are sorted or unique is void.
    """
    return lax.gather(
        table,
        indices,
        spec.numbers,
        tuple(sizes),
        indices_are_sorted=spec.indices_are_sorted and not are_changed,
        unique_indices=spec.unique_indices and not are_changed,
        mode=spec.mode,
        fill_value=None if spec.fill is None else thawed(spec.fill)[()],
    )


def _masked_lookup(
    table: jax.Array, indices: jax.Array, spec: GatherSpec, sizes: Sequence[int], row_dim: int, origin: Any
) -> jax.Array:
    """Look-ups that fall in the rows of a block; zero bits for the others, which other blocks have.

    Args:
        table: block of the table.
        indices: index vectors into the whole table.
        spec: parameters of the gather.
        sizes: sizes of the slices in the block.
        row_dim: the indexed dimension that is cut into blocks.
        origin: first row of the block.
    """
    column = spec.indexed.index(row_dim)
    extent = spec.table_shape[row_dim]
    block_rows = table.shape[row_dim]
    indices = signed(indices)
    row = indices[..., column]  # of the whole table
    if spec.mode is not Mode.FILL_OR_DROP:
        row = jnp.clip(row, 0, extent - 1)
    local_row = row - jnp.asarray(origin, row.dtype)
    local_indices = indices.at[..., column].set(jnp.clip(local_row, 0, block_rows - 1))
    values = _gather_block(table, local_indices, spec, sizes, are_changed=True)
    is_in_block = (local_row >= 0) & (local_row < block_rows)
    result = jnp.where(_like_result(is_in_block, spec), values, zero_bits(values.dtype))
    if spec.mode is not Mode.FILL_OR_DROP:
        return result
    # An index beyond the table falls in no block: the first block fills it.
    is_filled = ((row < 0) | (row >= extent)) & (jnp.asarray(origin) == 0)
    return jnp.where(_like_result(is_filled, spec), fill_of(spec.fill, values.dtype), result)


def _like_result(mask: jax.Array, spec: GatherSpec) -> jax.Array:
    """Mask over look-ups, ready to broadcast against the result."""
    return jnp.expand_dims(mask, spec.numbers.offset_dims)


def signed(indices: jax.Array) -> jax.Array:
    """Converts indices to a signed dtype of at least 32 bits; larger values become its largest number."""
    wide = jnp.int64 if indices.dtype.itemsize == 8 else jnp.int32
    if jnp.issubdtype(indices.dtype, jnp.unsignedinteger) and indices.dtype.itemsize >= 4:
        indices = jnp.minimum(indices, jnp.asarray(jnp.iinfo(wide).max, indices.dtype))
    return indices.astype(wide)


def frozen_fill(value: Any, dtype: Any) -> Frozen | None:
    """A fill value, None for the default, in a dtype whose range it may exceed: as in JAX integers wrap around."""
    with np.errstate(all="ignore"):
        return None if value is None else freeze(np.asarray(value).astype(dtype))


def fill_of(fill: Frozen | None, dtype: Any) -> jax.Array:
    """Value for an index beyond the table: `fill`, or as in `lax.gather` NaN, the lowest or the highest number."""
    value: Any = None if fill is None else thawed(fill)
    if value is None:  # the default of JAX, by kind of dtype
        if jnp.issubdtype(dtype, jnp.inexact):
            value = np.nan
        elif dtype == np.bool_:
            value = True
        else:
            info = jnp.iinfo(dtype)
            value = info.max if info.min == 0 else info.min  # highest unsigned, lowest signed number
    return jnp.asarray(value, dtype)
