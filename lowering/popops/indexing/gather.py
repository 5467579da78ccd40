"""Look-ups of rows of a table by computed indices, as `lax.gather`.

Every vertex reads a static block of the table, whole along indexed dimensions, and static blocks of the indices.
Cutting batching dimensions and those that a look-up copies whole divides the table as well. Where look-ups, or what
they take of an indexed dimension, are cut, each tile needs all rows; where rows are cut, a tile goes through all
look-ups, answers those that fall in its rows and gives zero bits for the others, and the answers are put together. What
is cut, and how often, is chosen by the charge.

Source: poplibs `popops/EmbeddingPlan.cpp` splits the same three ways; cycles from `indexing_cycles`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ipujax.lowering.layout import Grids, total_elements
from ipujax.lowering.layout.box_charge import Work, spans
from ipujax.lowering.layout.choose import choose, source_of
from ipujax.lowering.layout.place import along, place_operand, placed_axes, whole_axis
from ipujax.lowering.popops.indexing.indexing_cycles import gather_cycles
from ipujax.lowering.popops.reductions.partials import reduce_partials_in_place
from ipujax.lowering.popops.reductions.partials_cost import combined
from ipujax.lowering.popops.vertices.add_vertices import add_vertices
from ipujax.lowering.popops.vertices.kernel import Frozen, thawed
from ipujax.lowering.popops.vertices.reducers import nothing
from ipujax.runtime.cache import remembered
from ipujax.runtime.graph import (
    Access,
    Axis,
    BlockShapes,
    Codelet,
    Extras,
    Field,
    Graph,
    Sequence as ProgramSequence,
    block,
    element,
)
from ipujax.runtime.target import Target
from ipujax.runtime.tensor import Blocked, Tensor, blocked_mapping, dtype_name, even_cuts, is_key_dtype

Mode = lax.GatherScatterMode


@dataclass(frozen=True, slots=True)
class GatherSpec:
    """Parameters of a gather: those of `lax.gather`, with slices whole along dimensions that are not indexed.

    `uncut` are dimensions of the table that are never cut.
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
        """For each dimension of the table that of the result that follows it or None, and the same for the indices."""
        of_table = [None if d in self.indexed else out for d, out in enumerate(self.kept_dims())]
        return tuple(of_table), self._lookup_dims()

    def kept_dims(self) -> tuple[int | None, ...]:
        """For each dimension of the table the dimension of the result where slices of it are, or None."""
        numbers, of_indices = self.numbers, self._lookup_dims()
        of_table: list[int | None] = [None] * len(self.table_shape)
        for d, out in self._window_dims():
            of_table[d] = out
        for d, index_dim in zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True):
            of_table[d] = of_indices[index_dim]
        return tuple(of_table)

    def _lookup_dims(self) -> tuple[int, ...]:
        """The dimensions of the result that are those of the indices."""
        return tuple(d for d in range(self.out_rank) if d not in self.numbers.offset_dims)

    def wide_dims(self) -> list[tuple[int, int]]:
        """Indexed dimensions along which slices are longer than 1, each with its dimension of the result."""
        return [(d, out) for d, out in self._window_dims() if d in self.indexed and self.slice_sizes[d] > 1]

    def _window_dims(self) -> list[tuple[int, int]]:
        """The dimensions of the table that slices keep, each with its dimension of the result."""
        gone = self.numbers.collapsed_slice_dims + self.numbers.operand_batching_dims
        kept = [d for d in range(len(self.table_shape)) if d not in gone]
        return list(zip(kept, self.numbers.offset_dims, strict=True))

    def row_dim(self) -> int | None:
        """The longest indexed dimension along which slices have length 1: its rows may be cut."""
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
    out_shape, rank = tuple(out_shape), len(out_shape)
    row_dim = None if is_key_dtype(table.dtype) else spec.row_dim()
    space = out_shape if row_dim is None else (*out_shape, table.shape[row_dim])
    table_spans = spans(table.shape, [rank if d == row_dim else dim for d, dim in enumerate(table_dims)])
    index_spans = spans(indices.shape, [*index_dims, None])
    codelet = _codelet(table.dtype, indices.dtype, spec, row_dim)
    fields = (table_spans, index_spans, spans(out_shape, range(rank)))
    work = Work(codelet, fields, (source_of(graph, table), source_of(graph, indices), "here"))

    def add(graph: Graph, prog: ProgramSequence, placement: Blocked) -> Tensor:
        place_operand(graph, table, table_spans, placement)
        place_operand(graph, indices, index_spans, placement)
        return _looked_up(graph, table, indices, spec, row_dim, placement, prog, name)

    taken = [0] if has_few_lookups(graph, indices) else []
    uncut = {spec.kept_dims()[d] for d in spec.uncut}
    after, order = _After(table.dtype, rank), [d for d in range(len(space)) if d not in uncut]
    return add(graph, prog, choose(graph, space, order, work, [table, indices], add, after, taken))


def has_few_lookups(graph: Graph, indices: Tensor) -> bool:
    """Whether the workers of a tile look all index vectors up at once, so that to move a table gains nothing."""
    return prod(indices.shape[:-1]) <= graph.target.worker_contexts


def _looked_up(
    graph: Graph,
    table: Tensor,
    indices: Tensor,
    spec: GatherSpec,
    row_dim: int | None,
    placement: Blocked,
    prog: ProgramSequence,
    name: str,
) -> Tensor:
    """Adds the vertices on a placement of the result's dimensions and, if rows may be cut, these behind them."""
    table_dims, index_dims = spec.out_dims()
    rank = spec.out_rank
    axes, table_axes = placed_axes(placement), list[int]()
    for d, (n, dim) in enumerate(zip(table.shape, table_dims, strict=True)):
        table_axes.append(rank if d == row_dim else len(axes) if dim is None else dim)
        if dim is None and d != row_dim:
            axes.append(whole_axis(f"table{d}", n))
    rows = 1 if row_dim is None else axes[rank].blocks
    if row_dim is not None:
        axes[rank] = Axis(f"table{row_dim}", axes[rank].cuts, "reduce" if rows > 1 else "map")
    axes.append(whole_axis("index", indices.shape[-1]))
    out, out_access = _result(graph, table.dtype, placement, rank, rows, name)
    accesses = (along(table, table_axes), along(indices, [*index_dims, len(axes) - 1]), out_access)
    origins = (*([axes[rank].name] if rows > 1 else []), *(axes[out].name for _, out in spec.wide_dims()))
    codelet = _codelet(table.dtype, indices.dtype, spec, row_dim if rows > 1 else None)
    grid = placement.tile.reshape([axis.blocks for axis in axes])
    add_vertices(graph, codelet, axes, accesses, grid, prog, name, origins)
    return out if rows == 1 else reduce_partials_in_place(graph, out, prog, name)


def _result(graph: Graph, dtype: Any, placement: Blocked, rank: int, rows: int, name: str) -> tuple[Tensor, Access]:
    """The result, or partial results for each block of rows, and how vertices write it."""
    cuts, shape = placement.cuts[:rank], placement.shape[:rank]
    boxes = placement.tile.reshape([*placement.tile.shape[:rank], rows])
    if rows == 1:
        out = graph.add_variable(shape, dtype, name, blocked_mapping(cuts, boxes[..., 0]))
        return out, along(out, range(rank))
    mapping = blocked_mapping((even_cuts(rows, rows), *cuts), np.moveaxis(boxes, -1, 0))
    out = graph.add_variable((rows, *shape), dtype, f"{name}/partials", mapping, "only")
    return out, Access(out, (block(rank), *map(element, range(rank))))


@dataclass(frozen=True, slots=True)
class _After:
    """Charge of combining the answers of blocks of rows, on each candidate grid."""

    dtype: Any
    rank: int

    def __call__(self, grids: Grids, target: Target, byte_price: float) -> np.ndarray:
        slots = np.prod(grids.blocks[self.rank :], axis=0, dtype=np.int64)
        return combined(slots, grids.lengths[: self.rank], self.dtype, "only", target, byte_price)[0]


# --- codelet ----------------------------------------------------------------------------------------------------------


@remembered
def _codelet(dtype: Any, index_dtype: Any, spec: GatherSpec, row_dim: int | None) -> Codelet:
    wide = spec.wide_dims()

    def compute(
        table: jax.Array,
        indices: jax.Array,
        origins: tuple[Any, ...] = (),
        shapes: tuple[tuple[int, ...], ...] = (),
    ) -> jax.Array:
        sizes, first = _slice_sizes(spec, table.shape), dict[int, Any]()
        for (d, out), origin in zip(wide, origins[len(origins) - len(wide) :], strict=True):
            if shapes[0][out] < sizes[d]:
                sizes[d], first[d] = shapes[0][out], origin
        if first:
            indices = _of_parts(indices, spec, first)
        if row_dim is None or table.shape[row_dim] == spec.table_shape[row_dim]:
            return _lookup(table, indices, spec, sizes, spec.mode, spec.unique_indices and not first)
        return _masked_lookup(table, indices, spec, sizes, row_dim, origins[0])

    def row_elements(shapes: BlockShapes) -> np.ndarray:
        table, out = shapes[0], shapes[-1]
        rows, of_wide = np.ones((), np.int64), dict(wide)
        for d, size in enumerate(_slice_sizes(spec, [None] * len(table))):
            rows = rows * (table[d] if size is None else out[of_wide[d]] if d in of_wide else size)
        return rows

    def lookups(shapes: BlockShapes, target: Target) -> np.ndarray:
        del target
        return -(-total_elements(shapes[-1]) // np.maximum(row_elements(shapes), 1))

    def cycles(shapes: BlockShapes, target: Target) -> np.ndarray:
        share = np.ones(()) if row_dim is None else shapes[0][row_dim] / spec.table_shape[row_dim]
        return gather_cycles(lookups(shapes, target), share, row_elements(shapes), dtype, target)

    fields = (Field("table", "in", dtype), Field("indices", "in", index_dtype), Field("out", "out", dtype))
    title = f"popops::MultiSlice<{dtype_name(dtype)}>"
    takes: tuple[Extras, ...] = ("origins", "shapes") if wide else () if row_dim is None else ("origins",)
    return Codelet(title, fields, compute, cycles, 36, 500, takes=takes, moves=True, parts=lookups)


def _slice_sizes(spec: GatherSpec, shape: Sequence[Any]) -> list[Any]:
    """Slice sizes for a block of the table of `shape`: as given where indexed or batched, else all of the block."""
    fixed = {*spec.indexed, *spec.numbers.operand_batching_dims}
    return [size if d in fixed else n for d, (size, n) in enumerate(zip(spec.slice_sizes, shape, strict=True))]


def _of_parts(indices: jax.Array, spec: GatherSpec, first: Mapping[int, Any]) -> jax.Array:
    """The index vectors of a part of each slice, where the slice itself lies within the table; else -1 or clamped."""
    indices = signed(indices)
    last = [spec.table_shape[d] - spec.slice_sizes[d] for d in spec.indexed]
    inside = lax.clamp(jnp.zeros_like(indices), indices, jnp.broadcast_to(np.array(last, indices.dtype), indices.shape))
    moved = inside + jnp.stack([jnp.asarray(first.get(d, 0), indices.dtype) for d in spec.indexed])
    if spec.mode is not Mode.FILL_OR_DROP:
        return moved
    return jnp.where((inside == indices).all(-1, keepdims=True), moved, -1)


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
        fill_value=None if spec.fill is None else thawed(spec.fill)[()],
    )


def _masked_lookup(
    table: jax.Array, indices: jax.Array, spec: GatherSpec, sizes: Sequence[int], row_dim: int, origin: Any
) -> jax.Array:
    """The look-ups that fall in the rows of a block; zero bits for the others."""
    column, extent, rows = spec.indexed.index(row_dim), spec.table_shape[row_dim], table.shape[row_dim]
    indices = signed(indices)
    row = indices[..., column]
    wanted = row if spec.mode is Mode.FILL_OR_DROP else jnp.clip(row, 0, extent - 1)
    local = wanted - jnp.asarray(origin, wanted.dtype)
    near = indices.at[..., column].set(jnp.clip(local, 0, rows - 1))
    found = _lookup(table, near, spec, sizes, spec.mode, False)
    result = jnp.where(_like_result((local >= 0) & (local < rows), spec), found, nothing(found.dtype))
    if spec.mode is not Mode.FILL_OR_DROP:
        return result
    # An index beyond the table falls in no block: the first block answers it.
    astray = ((wanted < 0) | (wanted >= extent)) & (jnp.asarray(origin) == 0)
    return jnp.where(_like_result(astray, spec), fill_of(spec.fill, found.dtype), result)


def _like_result(mask: jax.Array, spec: GatherSpec) -> jax.Array:
    """A mask over look-ups, ready to broadcast against the result."""
    return jnp.expand_dims(mask, spec.numbers.offset_dims)


def signed(indices: jax.Array) -> jax.Array:
    """Indices in a signed type of at least 32 bits; those beyond it become its largest number."""
    wide = jnp.int64 if indices.dtype.itemsize == 8 else jnp.int32
    if jnp.issubdtype(indices.dtype, jnp.unsignedinteger) and indices.dtype.itemsize >= 4:
        indices = jnp.minimum(indices, jnp.asarray(jnp.iinfo(wide).max, indices.dtype))
    return indices.astype(wide)


def fill_of(fill: Frozen | None, dtype: Any) -> jax.Array:
    """The value for an index beyond the table: `fill`, or as `lax.gather` NaN, the lowest or the highest number."""
    value: Any = None if fill is None else thawed(fill)
    if value is None:
        if jnp.issubdtype(dtype, jnp.inexact):
            value = np.nan
        elif dtype == np.bool_:
            value = True
        else:
            info = jnp.iinfo(dtype)
            value = info.max if info.min == 0 else info.min
    return jnp.asarray(value, dtype)
