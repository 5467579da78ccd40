"""Look-ups of rows of a table by computed indices, as `lax.gather`.

Every vertex reads a static block of the table, whole along indexed dimensions, and static blocks of the indices.
Batching dimensions and those that a look-up copies whole are cut first, since that divides the table as well. Then
either the look-ups are cut, each tile needing a whole table, or the rows: every tile then goes through all look-ups,
answers those that fall in its rows and gives zeros for the others, and the answers are added up. The cheaper by
estimate is taken.

Source: poplibs `popops/EmbeddingPlan.cpp` splits the same three ways; cycles from `indexing_cycles`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ipujax.lowering.popops.blocks import (
    along,
    map_like_blocks,
    mapped_variable,
    place,
    placed_axes,
    whole_axis,
)
from ipujax.lowering.popops.elementwise_cycles import total_elements
from ipujax.lowering.popops.indexing_cycles import gather_cycles
from ipujax.lowering.popops.reduce import reduce_partials
from ipujax.lowering.poputil.mapping import map_linearly
from ipujax.runtime.codelet import BlockShapes, Codelet, Field
from ipujax.runtime.graph import Graph
from ipujax.runtime.mapping import Blocked, even_cuts, frozen
from ipujax.runtime.program import Execute
from ipujax.runtime.program import Sequence as ProgramSequence
from ipujax.runtime.target import Target
from ipujax.runtime.tensor import Tensor
from ipujax.runtime.variable import dtype_name, element_bytes, is_key_dtype
from ipujax.runtime.vertices import Access, Axis, VertexGroup, block, element

Mode = lax.GatherScatterMode
_INDEX_BYTES = 4


@dataclass(frozen=True, slots=True)
class GatherSpec:
    """What to look up; the parameters of `lax.gather`, with slices whole along dimensions that are not indexed."""

    numbers: lax.GatherDimensionNumbers
    slice_sizes: tuple[int, ...]
    mode: Mode
    fill_value: Any
    indices_are_sorted: bool
    unique_indices: bool
    table_shape: tuple[int, ...]
    out_rank: int

    @property
    def indexed(self) -> tuple[int, ...]:
        """Dimensions of the table that indices point into."""
        return tuple(self.numbers.start_index_map)

    def out_dims(self) -> tuple[tuple[int | None, ...], tuple[int, ...]]:
        """For each dimension of the table its dimension of the result or None, and the same for the indices."""
        numbers = self.numbers
        rank = len(self.table_shape)
        window = [d for d in range(rank) if d not in numbers.collapsed_slice_dims + numbers.operand_batching_dims]
        of_table: list[int | None] = [None] * rank
        for d, out in zip(window, numbers.offset_dims, strict=True):
            of_table[d] = None if d in self.indexed else out
        of_indices = [d for d in range(self.out_rank) if d not in numbers.offset_dims]
        for d, index_dim in zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True):
            of_table[d] = of_indices[index_dim]
        return tuple(of_table), tuple(of_indices)

    def row_dim(self) -> int | None:
        """The longest indexed dimension of which a look-up takes one index: the one whose rows may be cut."""
        rows = [d for d in self.indexed if self.slice_sizes[d] == 1]
        return max(rows, key=lambda d: self.table_shape[d], default=None)


def gather(
    graph: Graph,
    table: Tensor,
    indices: Tensor,
    out_shape: Sequence[int],
    spec: GatherSpec,
    prog: ProgramSequence,
    name: str,
) -> Tensor:
    """Looks up slices of a table.

    Args:
        graph: graph to add to.
        table: tensor of shape `spec.table_shape` with at least one element.
        indices: integer tensor, index vectors in its last dimension.
        out_shape: shape of the result, with at least one element.
        spec: which indices point where.
        prog: program the compute sets are added to.
        name: debug name.

    Returns:
        A new tensor of shape `out_shape` and the table's dtype.
    """
    table_dims, index_dims = spec.out_dims()
    placement, cut_tile = _plan(graph, table, indices, tuple(out_shape), spec)
    row_dim, tile = (None, placement.tile) if cut_tile is None else (spec.row_dim(), cut_tile)
    rows = 1 if cut_tile is None else cut_tile.shape[-1]
    axes, table_axes = _axes(table.shape, table_dims, indices.shape[-1], placement, row_dim, rows)
    map_like_blocks(graph, indices, [*index_dims, None], placement)
    map_linearly(graph, indices)
    _map_table(graph, table, table_dims, row_dim, placement, tile)
    out, out_access = _result(graph, tuple(out_shape), table.dtype, placement, tile, row_dim, table_axes, name)
    accesses = (along(table, table_axes), along(indices, [*index_dims, len(axes) - 1]), out_access)
    codelet = _codelet(table.dtype, indices.dtype, spec, row_dim)
    origins = () if row_dim is None else (axes[table_axes[row_dim]].name,)
    grid = tile.reshape([axis.blocks for axis in axes])
    compute_set = graph.add_compute_set(name)
    graph.add_vertices(compute_set, VertexGroup(codelet, tuple(axes), accesses, grid, origins, graph.origin))
    prog.add(Execute(compute_set))
    return out if row_dim is None else reduce_partials(graph, out, prog, name)


def _axes(
    table_shape: Sequence[int],
    table_dims: Sequence[int | None],
    index_length: int,
    placement: Blocked,
    row_dim: int | None,
    rows: int,
) -> tuple[list[Axis], list[int]]:
    """The axes: those of the result, table dimensions it lacks, index vectors. And the axis of each table dimension."""
    axes, table_axes = placed_axes(placement), []
    for d, (n, dim) in enumerate(zip(table_shape, table_dims, strict=True)):
        table_axes.append(len(axes) if dim is None else dim)
        if dim is None:
            name = f"table{d}"
            axes.append(Axis(name, even_cuts(n, rows), "reduce") if d == row_dim else whole_axis(name, n))
    axes.append(whole_axis("index", index_length))
    return axes, table_axes


def _result(
    graph: Graph,
    shape: tuple[int, ...],
    dtype: Any,
    placement: Blocked,
    tile: np.ndarray,
    row_dim: int | None,
    table_axes: Sequence[int],
    name: str,
) -> tuple[Tensor, Access]:
    """The result, or partial results for each block of rows, and how vertices write it."""
    rank = len(shape)
    if row_dim is None:
        out = mapped_variable(graph, shape, dtype, name, range(rank), placement)
        return out, along(out, range(rank))
    slots = tile.shape[-1]
    mapping = Blocked((even_cuts(slots, slots), *placement.cuts), frozen(np.moveaxis(tile, -1, 0), np.int32))
    monoid = "or" if dtype == np.bool_ else "add"
    out = graph.add_variable((slots, *shape), dtype, f"{name}/partials", mapping, monoid)
    return out, Access(out, (block(table_axes[row_dim]), *map(element, range(rank))))


def _map_table(
    graph: Graph,
    table: Tensor,
    dims: Sequence[int | None],
    row_dim: int | None,
    placement: Blocked,
    tile: np.ndarray,
) -> None:
    """Maps an unmapped table so that each vertex finds its block at home."""
    if row_dim is not None:
        rows = even_cuts(table.shape[row_dim], tile.shape[-1])
        dims = [len(placement.cuts) if d == row_dim else dim for d, dim in enumerate(dims)]
        placement = Blocked((*placement.cuts, rows), tile)
    map_like_blocks(graph, table, dims, placement)
    map_linearly(graph, table)


# --- planning ---------------------------------------------------------------------------------------------------------


def _plan(
    graph: Graph, table: Tensor, indices: Tensor, out_shape: tuple[int, ...], spec: GatherSpec
) -> tuple[Blocked, np.ndarray | None]:
    """Where boxes of the result are looked up; if rows are cut also the tile of each box and block of rows."""
    table_dims, index_dims = spec.out_dims()
    width, target = element_bytes(table.dtype), graph.target
    shared = [d for d in index_dims if d in table_dims]
    offsets = [d for d in table_dims if d is not None and d not in index_dims]
    lookups = [d for d in index_dims if d not in table_dims]
    weight = max(width, -(-table.size * width // prod(out_shape)))  # a point of the result has its share of the table
    mapped = [(x, dims) for x, dims in ((indices, [*index_dims, None]), (table, table_dims)) if graph.is_mapped(x)]
    by_lookup = place(graph, out_shape, shared + offsets + lookups, weight, mapped)
    row_dim = None if is_key_dtype(table.dtype) else spec.row_dim()
    if row_dim is None:
        return by_lookup, None
    order = [*map(table_dims.index, shared + offsets), row_dim]
    held = place(graph, table.shape, order, width, [(table, range(table.ndim))] if graph.is_mapped(table) else [])
    if len(held.cuts[row_dim]) <= 2:
        return by_lookup, None
    by_row, tile = _as_result(held, table_dims, row_dim, out_shape)
    costs = _lookup_cost(by_lookup, table, spec, lookups, target), _row_cost(by_row, tile, table, spec, target)
    return (by_lookup, None) if costs[0] <= costs[1] else (by_row, tile)


def _as_result(
    held: Blocked, table_dims: Sequence[int | None], row_dim: int, out_shape: tuple[int, ...]
) -> tuple[Blocked, np.ndarray]:
    """A placement of the table as one of the result, and with the tile of each block of rows in a last dimension."""
    cuts = [even_cuts(n, 1) for n in out_shape]
    for d, out in enumerate(table_dims):
        if out is not None:
            cuts[out] = held.cuts[d]
    kept = sorted((out, d) for d, out in enumerate(table_dims) if out is not None)
    rest = [d for d, out in enumerate(table_dims) if out is None and d != row_dim]
    tile = np.transpose(held.tile, [*(d for _, d in kept), *rest, row_dim])
    tile = tile.reshape([*(len(cut) - 1 for cut in cuts), held.tile.shape[row_dim]])
    return Blocked(tuple(cuts), frozen(tile[..., 0], np.int32)), frozen(tile, np.int32)


def _largest(placement: Blocked, dims: Sequence[int]) -> int:
    return prod(int(np.diff(placement.cuts[d]).max()) for d in dims)


def _lookup_cost(placement: Blocked, table: Tensor, spec: GatherSpec, lookups: Sequence[int], target: Target) -> float:
    """Estimated cycles when look-ups are cut; infinite if a tile would hold more of the table than planners may use."""
    table_dims, index_dims = spec.out_dims()
    block = _largest(placement, [d for d in table_dims if d is not None])
    rows = prod(n for n, d in zip(table.shape, table_dims, strict=True) if d is None)
    part_bytes = block * rows * element_bytes(table.dtype)
    if part_bytes > target.available_memory_proportion * target.bytes_per_tile:
        return np.inf
    # Cutting the look-ups sends the table to all parts; in one part it stays where it is.
    received = part_bytes if any(len(placement.cuts[d]) > 2 for d in lookups) else 0
    count, row = _largest(placement, index_dims), _row_elements(placement, spec)
    compute = gather_cycles(np.asarray(count), np.asarray(1.0), np.asarray(row), table.dtype, target)
    return received / target.exchange_bytes_per_cycle + float(compute)


def _row_cost(placement: Blocked, tile: np.ndarray, table: Tensor, spec: GatherSpec, target: Target) -> float:
    """Estimated cycles when rows are cut: every tile sees all look-ups, and partial results are added up."""
    _, index_dims = spec.out_dims()
    rows, shape = tile.shape[-1], placement.shape
    count, row = _largest(placement, index_dims), _row_elements(placement, spec)
    partial_bytes = prod(shape) * element_bytes(table.dtype) * rows / target.tiles_per_ipu
    received = (_INDEX_BYTES * count + partial_bytes) / target.exchange_bytes_per_cycle
    fixed = target.exchange_startup_cycles + target.internal_sync_cycles + target.supervisor_overhead_cycles
    adding = partial_bytes / target.vector_width_bytes
    compute = gather_cycles(np.asarray(count), np.asarray(1.0 / rows), np.asarray(row), table.dtype, target)
    return received + fixed + adding + float(compute)


def _row_elements(placement: Blocked, spec: GatherSpec) -> int:
    """Elements one look-up copies on one tile."""
    return _largest(placement, spec.numbers.offset_dims)


# --- codelet ----------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1024)
def _codelet(dtype: Any, index_dtype: Any, spec: GatherSpec, row_dim: int | None) -> Codelet:
    def compute(table: jax.Array, indices: jax.Array, origins: tuple[Any, ...] = ()) -> jax.Array:
        sizes = _slice_sizes(spec, table.shape)
        if row_dim is None or table.shape[row_dim] == spec.table_shape[row_dim]:
            return _lookup(table, indices, spec, sizes, spec.mode, spec.unique_indices)
        return _masked_lookup(table, indices, spec, sizes, row_dim, origins[0])

    def cycles(shapes: BlockShapes, target: Target) -> np.ndarray:
        table, out = shapes[0], shapes[-1]
        rows = np.ones((), np.int64)
        for d, size in enumerate(_slice_sizes(spec, [None] * len(table))):
            rows = rows * (table[d] if size is None else size)
        share = np.ones(()) if row_dim is None else table[row_dim] / spec.table_shape[row_dim]
        return gather_cycles(-(-total_elements(out) // np.maximum(rows, 1)), share, rows, dtype, target)

    fields = (Field("table", "in", dtype), Field("indices", "in", index_dtype), Field("out", "out", dtype))
    title = f"popops::MultiSlice<{dtype_name(dtype)}>"
    return Codelet(title, fields, compute, cycles, 36, 500, takes=() if row_dim is None else ("origins",))


def _slice_sizes(spec: GatherSpec, shape: Sequence[Any]) -> list[Any]:
    """Slice sizes for a block of the table of `shape`: as given where indexed or batched, else all of the block."""
    fixed = {*spec.indexed, *spec.numbers.operand_batching_dims}
    return [size if d in fixed else n for d, (size, n) in enumerate(zip(spec.slice_sizes, shape, strict=True))]


def _lookup(
    table: jax.Array, indices: jax.Array, spec: GatherSpec, sizes: Sequence[int], mode: Mode, unique: bool
) -> jax.Array:
    return lax.gather(
        table,
        indices,
        spec.numbers,
        tuple(sizes),
        indices_are_sorted=spec.indices_are_sorted and unique == spec.unique_indices,
        unique_indices=unique,
        mode=mode,
        fill_value=spec.fill_value,
    )


def _masked_lookup(
    table: jax.Array, indices: jax.Array, spec: GatherSpec, sizes: Sequence[int], row_dim: int, origin: Any
) -> jax.Array:
    """The look-ups that fall in the rows of a block; zeros for the others."""
    column, extent, rows = spec.indexed.index(row_dim), spec.table_shape[row_dim], table.shape[row_dim]
    indices = signed(indices)
    row = indices[..., column]
    wanted = row if spec.mode is Mode.FILL_OR_DROP else jnp.clip(row, 0, extent - 1)
    local = wanted - jnp.asarray(origin, wanted.dtype)
    near = indices.at[..., column].set(jnp.clip(local, 0, rows - 1))
    found = _lookup(table, near, spec, sizes, spec.mode, False)
    result = jnp.where(_like_result((local >= 0) & (local < rows), spec), found, jnp.zeros((), found.dtype))
    if spec.mode is not Mode.FILL_OR_DROP:
        return result
    # An index beyond the table falls in no block: the first block answers it.
    astray = ((wanted < 0) | (wanted >= extent)) & (jnp.asarray(origin) == 0)
    return jnp.where(_like_result(astray, spec), fill_of(spec.fill_value, found.dtype), result)


def _like_result(mask: jax.Array, spec: GatherSpec) -> jax.Array:
    """A mask over look-ups, ready to broadcast against the result."""
    return jnp.expand_dims(mask, spec.numbers.offset_dims)


def signed(indices: jax.Array) -> jax.Array:
    """Indices in a signed type of at least 32 bits; those beyond it become its largest number."""
    wide = jnp.int64 if indices.dtype.itemsize == 8 else jnp.int32
    if jnp.issubdtype(indices.dtype, jnp.unsignedinteger) and indices.dtype.itemsize >= 4:
        indices = jnp.minimum(indices, jnp.asarray(jnp.iinfo(wide).max, indices.dtype))
    return indices.astype(wide)


def fill_of(value: Any, dtype: Any) -> jax.Array:
    """What `lax.gather` gives for an index beyond the table: `value`, or NaN, the lowest or the highest number."""
    if value is None:
        if jnp.issubdtype(dtype, jnp.inexact):
            value = np.nan
        elif dtype == np.bool_:
            value = True
        else:
            info = jnp.iinfo(dtype)
            value = info.max if info.min == 0 else info.min
    return jnp.asarray(value, dtype)
