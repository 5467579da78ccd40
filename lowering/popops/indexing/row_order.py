"""Look-ups and scatters over the dimensions of a table's variable, where these are in another order than the table's.

Input: a gather or scatter, and a table whose rows are kept in groups of columns (`layout.memory_order`). Output: the
same over the dimensions of its variable; what is looked up, and what updates it, is then kept as the table is, with
all look-ups where the table has its rows.
Limits: dimensions that are indexed or batched are not cut; those that are cut are taken whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ipujax.lowering.layout import MemoryOrder
from ipujax.lowering.popops.indexing.gather import GatherSpec
from ipujax.lowering.popops.indexing.scatter_vertex import ScatterSpec


@dataclass(frozen=True, slots=True)
class RowOrder:
    """A table and its rows over the dimensions of its variable.

    Args:
        table: the order of the table.
        rows: the order of what is looked up, or of updates.
        windows: the dimensions of rows, as `rows` has them, that are the table's.
        place: the dimension of the variable that each dimension of the table begins.
    """

    table: MemoryOrder
    rows: MemoryOrder
    windows: tuple[int, ...]
    place: tuple[int, ...]

    @property
    def in_groups(self) -> tuple[int, ...]:
        """The dimensions of the variable that are the inside of a group."""
        outer = set(self.place)
        return tuple(d for d in range(len(self.table.order)) if d not in outer)

    def of(self, dims: Sequence[int]) -> tuple[int, ...]:
        """Where dimensions of the table that are not cut are among those of the variable."""
        return tuple(self.place[d] for d in dims)

    def paired(self, dims: Sequence[int], others: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """`of` dimensions in rising order, with those of another tensor that go with them."""
        pairs = sorted(zip(self.of(dims), others, strict=True))
        return tuple(d for d, _ in pairs), tuple(other for _, other in pairs)


def _row_order(
    held: MemoryOrder, window_of: Sequence[int | None], fixed: Sequence[int], row_shape: Sequence[int]
) -> RowOrder | None:
    """The rows of a table; None where a dimension that is `fixed`, or not taken whole, is cut.

    Args:
        held: the order of the table.
        window_of: for each dimension of the table that of the rows, None for one that rows do not have.
        fixed: the dimensions that are indexed or batched.
        row_shape: sizes of the rows, look-ups among them.
    """
    cut = [d for d, sizes in enumerate(held.sizes) if len(sizes) > 1]
    taken = {window: d for d, window in enumerate(window_of) if window is not None}
    whole = [d for window, d in taken.items() if d not in fixed and row_shape[window] == held.shape[d]]
    if held.is_own or not set(cut) <= set(whole):
        return None
    sizes = [held.sizes[taken[w]] if taken.get(w) in cut else (n,) for w, n in enumerate(row_shape)]
    first = [sum(len(row) for row in sizes[:w]) for w in range(len(sizes))]  # of the finer dimensions
    starts = [sum(len(row) for row in held.sizes[:d]) for d in range(len(held.sizes))]
    lookups = [first[w] for w in range(len(sizes)) if w not in taken]
    order, windows = list[int](), list[int]()
    at = min((held.order.index(starts[d]) for d in fixed), default=0)
    for position, (finer, d) in enumerate(zip(held.order, held.view_dims, strict=True)):
        if position == at:
            order += lookups
        window = window_of[d]
        if window is not None:
            windows.append(len(order))
            order.append(first[window] + finer - starts[d])
    place = tuple(held.order.index(start) for start in starts)
    return RowOrder(held, MemoryOrder(tuple(sizes), tuple(order)), tuple(windows), place)


def gather_in_order(
    spec: GatherSpec, held: MemoryOrder, out_shape: Sequence[int]
) -> tuple[GatherSpec, RowOrder] | None:
    """A gather over the dimensions of its table's variable; None where it cannot be, or is that already.

    Args:
        spec: the gather.
        held: the order of its table.
        out_shape: of its result.
    """
    numbers = spec.numbers
    gone = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
    offsets = iter(numbers.offset_dims)
    window_of = [None if d in gone else next(offsets) for d in range(len(spec.table_shape))]
    fixed = (*spec.indexed, *numbers.operand_batching_dims)
    found = _row_order(held, window_of, fixed, out_shape)
    if found is None:
        return None
    batching, of_indices = found.paired(numbers.operand_batching_dims, numbers.start_indices_batching_dims)
    shape, dims = held.variable_shape, held.view_dims
    sizes = tuple(n if len(held.sizes[d]) > 1 else spec.slice_sizes[d] for n, d in zip(shape, dims, strict=True))
    numbers = numbers.__class__(
        found.windows,
        tuple(sorted(found.of(numbers.collapsed_slice_dims))),
        found.of(numbers.start_index_map),
        batching,
        of_indices,
    )
    rank = len(found.rows.order)
    spec = replace(spec, numbers=numbers, slice_sizes=sizes, table_shape=shape, out_rank=rank, uncut=found.in_groups)
    return spec, found


def scatter_in_order(spec: ScatterSpec, held: MemoryOrder) -> tuple[ScatterSpec, RowOrder] | None:
    """A scatter over the dimensions of its table's variable; arguments and result as `gather_in_order`."""
    numbers, (_, window_of) = spec.numbers, spec.windows()
    fixed = (*spec.indexed, *numbers.operand_batching_dims)
    found = _row_order(held, window_of, fixed, spec.update_shape)
    if found is None:
        return None
    batching, of_indices = found.paired(numbers.operand_batching_dims, numbers.scatter_indices_batching_dims)
    numbers = numbers.__class__(
        found.windows,
        tuple(sorted(found.of(numbers.inserted_window_dims))),
        found.of(numbers.scatter_dims_to_operand_dims),
        batching,
        of_indices,
    )
    shape, row_shape = held.variable_shape, found.rows.variable_shape
    return replace(spec, numbers=numbers, table_shape=shape, update_shape=row_shape, uncut=found.in_groups), found
