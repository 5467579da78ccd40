"""Look-ups and scatters of a table in the memory order of its variable, where that is not the table's.

A table may be a view whose variable stores the columns of rows in groups (`layout.memory_order`): each column dimension
of the table is then cut into two dimensions of the variable, groups and columns of a group. The operation is over the
dimensions of the variable, and its rows have the memory order of the table, with the dimensions of look-ups in the
position of the table's rows. Dimensions that are indexed or batched are not cut; those that are cut are copied in full.

Input: arguments as of `gather` and `plan_scatter`. Output: the same, with results in the memory order of the table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from jax import lax

from ipujax.lowering.layout import MemoryOrder, memory_order
from ipujax.lowering.popops.indexing.gather import GatherSpec, gather
from ipujax.lowering.popops.indexing.scatter_vertex import ScatterSpec
from ipujax.lowering.popops.maps.constants import immediate_of
from ipujax.runtime.graph import Builder
from ipujax.runtime.tensor import Tensor


@dataclass(frozen=True, slots=True)
class RowOrder:
    """Table, and its looked-up rows or its updates, over the dimensions of its variable.

    Args:
        table: memory order of the table.
        rows: memory order of the rows, whose dimensions of look-ups are in the position of the table's rows.
        windows: dimensions of the variable of rows that they have in common with the table.
        outermost: for each dimension of the table the first of the variable's dimensions that it is cut into.
    """

    table: MemoryOrder
    rows: MemoryOrder
    windows: tuple[int, ...]
    outermost: tuple[int, ...]

    @property
    def in_groups(self) -> tuple[int, ...]:
        """Dimensions of the variable that run inside a group."""
        return tuple(d for d in range(len(self.table.order)) if d not in self.outermost)

    def variable_dims(self, dims: Sequence[int]) -> tuple[int, ...]:
        """Dimensions of the variable for dimensions of the table that are not cut into groups."""
        return tuple(self.outermost[d] for d in dims)

    def paired(self, dims: Sequence[int], partners: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Dimensions of the variable in rising order, and the dimensions of another tensor paired with them."""
        pairs = sorted(zip(self.variable_dims(dims), partners, strict=True))
        return tuple(d for d, _ in pairs), tuple(partner for _, partner in pairs)


def _row_order(
    table: MemoryOrder, window_of: Sequence[int | None], fixed: Sequence[int], row_shape: Sequence[int]
) -> RowOrder | None:
    """Memory order of looked-up rows with which a gather or scatter can work on the table's variable, without a copy.

    The variable has the table's dimensions in another order, some cut in two, as channels into groups. None where the
    table has the dimensions of its variable already; or where a cut dimension is indexed, batched or not copied in
    full, so that no operation over the variable's dimensions is the same.

    Args:
        table: memory order of the table.
        window_of: for each dimension of the table that of the rows; None for one that rows do not have.
        fixed: dimensions of the table that are indexed or batched.
        row_shape: shape of the rows (of a gather the result, of a scatter the updates), look-ups included.
    """
    cut = [d for d, sizes in enumerate(table.sizes) if len(sizes) > 1]
    table_dim = {window: d for d, window in enumerate(window_of) if window is not None}
    # Dimensions of the table of which every look-up has all elements.
    copied = [d for window, d in table_dim.items() if d not in fixed and row_shape[window] == table.shape[d]]
    if table.is_own or not set(cut) <= set(copied):
        return None
    sizes = [table.sizes[table_dim[w]] if table_dim.get(w) in cut else (n,) for w, n in enumerate(row_shape)]
    # Number of the first of the finer dimensions that each dimension of the rows, and of the table, is cut into.
    row_firsts = [sum(len(row) for row in sizes[:w]) for w in range(len(sizes))]
    table_firsts = [sum(len(row) for row in table.sizes[:d]) for d in range(len(table.sizes))]
    lookups = [row_firsts[w] for w in range(len(sizes)) if w not in table_dim]  # dimensions of look-ups
    # The rows have the order of the table, with the look-ups in the place of the first fixed dimension.
    order: list[int] = []
    windows: list[int] = []  # positions in `order` that are dimensions of the table
    lookup_position = min((table.order.index(table_firsts[d]) for d in fixed), default=0)
    for position, (finer, d) in enumerate(zip(table.order, table.view_dims, strict=True)):
        if position == lookup_position:
            order += lookups
        window = window_of[d]
        if window is not None:
            windows.append(len(order))
            order.append(row_firsts[window] + finer - table_firsts[d])
    outermost = tuple(table.order.index(first) for first in table_firsts)
    return RowOrder(table, MemoryOrder(tuple(sizes), tuple(order)), tuple(windows), outermost)


def gather_over_variable(
    spec: GatherSpec, table: MemoryOrder, out_shape: Sequence[int]
) -> tuple[GatherSpec, MemoryOrder] | None:
    """Rewrites a gather so that its table is the variable behind a view, and the result is in memory order as well.

    So nothing is rearranged before or after the vertices. Returns the gather and the order of its rows; None where no
    gather over the dimensions of the variable is the same, or where they are those of the table. `table` is the memory
    order of the view.
    """
    numbers = spec.numbers
    absent = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
    offsets = iter(numbers.offset_dims)
    # Dimension of the result for each dimension of the table; None for one that looked-up rows do not have.
    window_of = [None if d in absent else next(offsets) for d in range(len(spec.table_shape))]
    fixed = (*spec.indexed, *numbers.operand_batching_dims)
    row_order = _row_order(table, window_of, fixed, out_shape)
    if row_order is None:
        return None
    batching, of_indices = row_order.paired(numbers.operand_batching_dims, numbers.start_indices_batching_dims)
    shape = table.variable_shape
    # Slice sizes over the variable: a dimension that is cut into groups is copied in full.
    sizes = tuple(
        n if len(table.sizes[d]) > 1 else spec.slice_sizes[d] for n, d in zip(shape, table.view_dims, strict=True)
    )
    numbers = lax.GatherDimensionNumbers(
        offset_dims=row_order.windows,
        collapsed_slice_dims=tuple(sorted(row_order.variable_dims(numbers.collapsed_slice_dims))),
        start_index_map=row_order.variable_dims(numbers.start_index_map),
        operand_batching_dims=batching,
        start_indices_batching_dims=of_indices,
    )
    rewritten = replace(
        spec,
        numbers=numbers,
        slice_sizes=sizes,
        table_shape=shape,
        out_rank=len(row_order.rows.order),
        uncut=row_order.in_groups,  # the columns of a group are contiguous: a tile has all of them
    )
    return rewritten, row_order.rows


def scatter_over_variable(spec: ScatterSpec, table: MemoryOrder) -> tuple[ScatterSpec, MemoryOrder] | None:
    """Rewrites a scatter so that its table is the variable behind a view, and the updates are in memory order as well.

    So the table is not rearranged before or after the vertices. Returns the scatter and the order of its updates; None
    where no scatter over the dimensions of the variable is the same, or where they are those of the table. `table` is
    the memory order of the view.
    """
    numbers = spec.numbers
    fixed = (*spec.indexed, *numbers.operand_batching_dims)
    row_order = _row_order(table, spec.update_dims(), fixed, spec.update_shape)
    if row_order is None:
        return None
    batching, of_indices = row_order.paired(numbers.operand_batching_dims, numbers.scatter_indices_batching_dims)
    numbers = lax.ScatterDimensionNumbers(
        update_window_dims=row_order.windows,
        inserted_window_dims=tuple(sorted(row_order.variable_dims(numbers.inserted_window_dims))),
        scatter_dims_to_operand_dims=row_order.variable_dims(numbers.scatter_dims_to_operand_dims),
        operand_batching_dims=batching,
        scatter_indices_batching_dims=of_indices,
    )
    rewritten = replace(
        spec,
        numbers=numbers,
        table_shape=table.variable_shape,
        update_shape=row_order.rows.variable_shape,
        uncut=row_order.in_groups,  # the columns of a group are contiguous: a tile has all of them
    )
    return rewritten, row_order.rows


def gather_in_memory_order(
    builder: Builder, table: Tensor, indices: Tensor, out_shape: Sequence[int], spec: GatherSpec
) -> Tensor:
    """Looks up slices of a table of `spec.table_shape`, in the order it has in memory, so that it is not rearranged.

    A table may be a view, such as a transposed variable: then lookups are over the dimensions of the variable, where
    one can write them so.

    Args:
        table: tensor with at least one element.
        indices: integer tensor, index vectors in its last dimension.
        out_shape: shape of the result.
        spec: parameters of the gather.
    """
    order = memory_order(table)
    rewritten = None if order is None else gather_over_variable(spec, order, out_shape)
    if order is None or rewritten is None:
        return gather(builder, table, indices, out_shape, spec)
    over_variable, rows = rewritten
    result = gather(builder, order.of_variable(table), indices, rows.variable_shape, over_variable)
    return rows.of_view(result)


class OrderedScatter(NamedTuple):
    """Scatter over the dimensions of its table's variable, or the scatter as it was.

    Args:
        spec: its parameters.
        table: the table in the shape of the scatter.
        updates: the updates likewise.
        view_result: function from the result of the scatter to the same in the shape that the table had.
    """

    spec: ScatterSpec
    table: Tensor
    updates: Tensor
    view_result: Callable[[Tensor], Tensor]


def scatter_in_memory_order(spec: ScatterSpec, table: Tensor, updates: Tensor) -> OrderedScatter:
    """Rewrites a scatter to the order that its table has in memory, where one can, so that no table is rearranged.

    A table may be a view, such as a transposed variable: then the dimensions of the variable are those of the scatter.
    """
    order = _order_of_table(table, updates)
    rewritten = scatter_over_variable(spec, order)
    if rewritten is None:
        return OrderedScatter(spec, table, updates, lambda result: result)
    over_variable, rows = rewritten
    return OrderedScatter(over_variable, order.of_variable(table), rows.of_variable(updates), order.of_view)


def _order_of_table(table: Tensor, updates: Tensor) -> MemoryOrder:
    """Memory order of a table; one that is a single constant has no memory, and gets an order like its updates."""
    if immediate_of(table) is None:
        return memory_order(table) or MemoryOrder.own(table.shape)
    update_order = memory_order(updates)
    in_groups = update_order is not None and not update_order.is_own
    return MemoryOrder.with_channels(table.shape, table.ndim - 1) if in_groups else MemoryOrder.own(table.shape)
