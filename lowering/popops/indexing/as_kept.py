"""Look-ups and scatters of a table over the dimensions that its memory has, where these are in another order.

Input: as `gather` and `plan_scatter` have it. Output: the same, with results that are kept as the table is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ipujax.lowering.layout import MemoryOrder, memory_order
from ipujax.lowering.popops.indexing.gather import GatherSpec, gather
from ipujax.lowering.popops.indexing.row_order import gather_in_order, scatter_in_order
from ipujax.lowering.popops.indexing.scatter import ScatterSpec
from ipujax.lowering.popops.maps.constants import immediate_of
from ipujax.runtime.graph import Graph, Sequence as ProgramSequence
from ipujax.runtime.tensor import Tensor


def gather_as_kept(
    graph: Graph,
    table: Tensor,
    indices: Tensor,
    out_shape: Sequence[int],
    spec: GatherSpec,
    prog: ProgramSequence,
    name: str,
) -> Tensor:
    """Looks up slices of a table in the order of its memory; arguments and result as `gather`."""
    held = memory_order(table)
    ordered = None if held is None else gather_in_order(spec, held, out_shape)
    if held is None or ordered is None:
        return gather(graph, table, indices, out_shape, spec, prog, name)
    spec, of = ordered
    found = gather(graph, held.of_variable(table), indices, of.rows.variable_shape, spec, prog, name)
    return of.rows.of_view(found)


def scatter_as_kept(
    spec: ScatterSpec, table: Tensor, updates: Tensor
) -> tuple[ScatterSpec, Tensor, Tensor, Callable[[Tensor], Tensor]]:
    """A scatter in the order of its table's memory.

    Args:
        spec: the scatter.
        table: as `plan_scatter` has it.
        updates: as there.

    Returns:
        The three for `plan_scatter`, and the function from its result to the table as `spec` has it.
    """
    held = _order_of_table(table, updates)
    ordered = scatter_in_order(spec, held)
    if ordered is None:
        return spec, table, updates, lambda result: result
    spec, of = ordered
    return spec, held.of_variable(table), of.rows.of_variable(updates), held.of_view


def _order_of_table(table: Tensor, updates: Tensor) -> MemoryOrder:
    """How a table is kept; one of a single constant as its updates are."""
    if immediate_of(table) is None:
        return memory_order(table) or MemoryOrder.own(table.shape)
    of_updates = memory_order(updates)
    in_groups = of_updates is not None and not of_updates.is_own
    return MemoryOrder.with_channels(table.shape, table.ndim - 1) if in_groups else MemoryOrder.own(table.shape)
