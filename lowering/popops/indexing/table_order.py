"""Look-ups and scatters of a table in the memory order of its variable, where that is not the table's.

Rows of the table are stored in groups of columns (`layout.memory_order`). The operation is over the dimensions of its
variable, and its rows have the memory order of the table, with the dimensions of look-ups in the position of the
table's rows. Dimensions that are indexed or batched are not cut; those that are cut are copied in full.

Input: arguments as of `gather` and `plan_scatter`. Output: the same, with results in the memory order of the table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ipujax.lowering.layout import MemoryOrder, memory_order
from ipujax.lowering.popops.indexing.gather import GatherSpec, gather
from ipujax.lowering.popops.indexing.scatter_vertex import ScatterSpec
from ipujax.lowering.popops.maps.constants import immediate_of
from ipujax.runtime.graph import Builder
from ipujax.runtime.tensor import Tensor


@dataclass(frozen=True, slots=True)
class RowOrder:
    """Table and its rows over the dimensions of its variable."""

    table: MemoryOrder  # memory order of the table
    rows: MemoryOrder  # memory order of the look-ups, or of the updates
    windows: tuple[int, ...]  # dimensions of rows, as `rows` has them, that are the table's
    starts: tuple[int, ...]  # dimension of the variable with which each dimension of the table begins

    @property
    def in_groups(self) -> tuple[int, ...]:
        """Dimensions of the variable that run inside a group."""
        outer = set(self.starts)
        return tuple(d for d in range(len(self.table.order)) if d not in outer)

    def variable_dims(self, dims: Sequence[int]) -> tuple[int, ...]:
        """Dimensions of the variable for uncut dimensions of the table."""
        return tuple(self.starts[d] for d in dims)

    def paired(self, dims: Sequence[int], partners: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Dimensions of the variable in rising order, and the dimensions of another tensor paired with them."""
        pairs = sorted(zip(self.variable_dims(dims), partners, strict=True))
        return tuple(d for d, _ in pairs), tuple(partner for _, partner in pairs)


def _row_order(
    table: MemoryOrder, window_of: Sequence[int | None], fixed: Sequence[int], row_shape: Sequence[int]
) -> RowOrder | None:
    """Order of the rows of a table; None where a dimension that is `fixed`, or not copied in full, is cut."""
    # `window_of`: dimension of the table → that of the rows, None for one that rows do not have. `fixed` dimensions are
    # indexed or batched. `row_shape` has the sizes of the rows, look-ups among them.
    cut = [d for d, sizes in enumerate(table.sizes) if len(sizes) > 1]
    table_dim = {window: d for d, window in enumerate(window_of) if window is not None}
    copied = [d for window, d in table_dim.items() if d not in fixed and row_shape[window] == table.shape[d]]
    if table.is_own or not set(cut) <= set(copied):
        return None
    sizes = [table.sizes[table_dim[w]] if table_dim.get(w) in cut else (n,) for w, n in enumerate(row_shape)]
    # The first of the finer dimensions that each dimension of the rows, and of the table, is cut into.
    row_firsts = [sum(len(row) for row in sizes[:w]) for w in range(len(sizes))]
    table_firsts = [sum(len(row) for row in table.sizes[:d]) for d in range(len(table.sizes))]
    lookups = [row_firsts[w] for w in range(len(sizes)) if w not in table_dim]
    order: list[int] = []
    windows: list[int] = []
    lookup_position = min((table.order.index(table_firsts[d]) for d in fixed), default=0)
    for position, (finer, d) in enumerate(zip(table.order, table.view_dims, strict=True)):
        if position == lookup_position:
            order += lookups
        window = window_of[d]
        if window is not None:
            windows.append(len(order))
            order.append(row_firsts[window] + finer - table_firsts[d])
    starts = tuple(table.order.index(first) for first in table_firsts)
    return RowOrder(table, MemoryOrder(tuple(sizes), tuple(order)), tuple(windows), starts)


def gather_in_order(
    spec: GatherSpec, table: MemoryOrder, out_shape: Sequence[int]
) -> tuple[GatherSpec, RowOrder] | None:
    """Rewrites a gather over the dimensions of its table's variable; None where it cannot be, or is that already."""
    numbers = spec.numbers
    absent = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
    offsets = iter(numbers.offset_dims)
    # Dimension of the result for each of the table; None for one that looked-up rows do not have.
    window_of = [None if d in absent else next(offsets) for d in range(len(spec.table_shape))]
    fixed = (*spec.indexed, *numbers.operand_batching_dims)
    row_order = _row_order(table, window_of, fixed, out_shape)
    if row_order is None:
        return None
    batching, of_indices = row_order.paired(numbers.operand_batching_dims, numbers.start_indices_batching_dims)
    shape = table.variable_shape
    # A dimension that is cut into groups is copied in full.
    sizes = tuple(
        n if len(table.sizes[d]) > 1 else spec.slice_sizes[d] for n, d in zip(shape, table.view_dims, strict=True)
    )
    numbers = numbers.__class__(
        row_order.windows,
        tuple(sorted(row_order.variable_dims(numbers.collapsed_slice_dims))),
        row_order.variable_dims(numbers.start_index_map),
        batching,
        of_indices,
    )
    rank = len(row_order.rows.order)
    spec = replace(
        spec, numbers=numbers, slice_sizes=sizes, table_shape=shape, out_rank=rank, uncut=row_order.in_groups
    )
    return spec, row_order


def scatter_in_order(spec: ScatterSpec, table: MemoryOrder) -> tuple[ScatterSpec, RowOrder] | None:
    """Rewrites a scatter over the dimensions of its table's variable; None as `gather_in_order`."""
    numbers = spec.numbers
    _, window_of = spec.windows()
    fixed = (*spec.indexed, *numbers.operand_batching_dims)
    row_order = _row_order(table, window_of, fixed, spec.update_shape)
    if row_order is None:
        return None
    batching, of_indices = row_order.paired(numbers.operand_batching_dims, numbers.scatter_indices_batching_dims)
    numbers = numbers.__class__(
        row_order.windows,
        tuple(sorted(row_order.variable_dims(numbers.inserted_window_dims))),
        row_order.variable_dims(numbers.scatter_dims_to_operand_dims),
        batching,
        of_indices,
    )
    spec = replace(
        spec,
        numbers=numbers,
        table_shape=table.variable_shape,
        update_shape=row_order.rows.variable_shape,
        uncut=row_order.in_groups,
    )
    return spec, row_order


def gather_as_kept(
    builder: Builder, table: Tensor, indices: Tensor, out_shape: Sequence[int], spec: GatherSpec
) -> Tensor:
    """Looks up slices of a table in its memory order; arguments and result as `gather`."""
    order = memory_order(table)
    ordered = None if order is None else gather_in_order(spec, order, out_shape)
    if order is None or ordered is None:
        return gather(builder, table, indices, out_shape, spec)
    spec, row_order = ordered
    rows = row_order.rows
    result = gather(builder, order.of_variable(table), indices, rows.variable_shape, spec)
    return rows.of_view(result)


def scatter_as_kept(
    spec: ScatterSpec, table: Tensor, updates: Tensor
) -> tuple[ScatterSpec, Tensor, Tensor, Callable[[Tensor], Tensor]]:
    """Rewrites a scatter for the memory order of its table; the function returns the result in the table's shape."""
    order = _order_of_table(table, updates)
    ordered = scatter_in_order(spec, order)
    if ordered is None:
        return spec, table, updates, lambda result: result
    spec, row_order = ordered
    return spec, order.of_variable(table), row_order.rows.of_variable(updates), order.of_view


def _order_of_table(table: Tensor, updates: Tensor) -> MemoryOrder:
    """Memory order of a table; of one that is a single constant that of its updates."""
    if immediate_of(table) is None:
        return memory_order(table) or MemoryOrder.own(table.shape)
    update_order = memory_order(updates)
    in_groups = update_order is not None and not update_order.is_own
    return MemoryOrder.with_channels(table.shape, table.ndim - 1) if in_groups else MemoryOrder.own(table.shape)
