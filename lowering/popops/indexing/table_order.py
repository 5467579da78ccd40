"""Look-ups and scatters of a table in the memory order of its variable, where that is not the table's.

Input: arguments as of `gather` and `plan_scatter`. Output: the same, with results in the memory order of the table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ipujax.lowering.layout import MemoryOrder, memory_order
from ipujax.lowering.popops.indexing.gather import GatherSpec, gather
from ipujax.lowering.popops.indexing.row_order import gather_in_order, scatter_in_order
from ipujax.lowering.popops.indexing.scatter import ScatterSpec
from ipujax.lowering.popops.maps.constants import immediate_of
from ipujax.runtime.graph import Builder
from ipujax.runtime.tensor import Tensor


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
