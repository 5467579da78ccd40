"""Records of gather and scatter, by batch dimensions, by windows, and by the rows that are looked up.

Factors: 0, 1, … are the dimensions of the operand, 100, 101, … those of the indices but the last. A dimension of the
operand that is indexed one row at a time may be split: a part reads or writes its own rows, and the terms of what is
read add up. Updates that are added may be split too: parts then give terms of the sum, the operand being a term of the
first one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ipujax.lowering.jax_compat import JaxprEqn
from ipujax.lowering.popops import SCATTER_MONOIDS, SCATTERS
from ipujax.lowering.primitives.factors import Factors, aligned, shapes
from ipujax.lowering.primitives.record import PrimitiveRecord, Shapes

INDEX = 100  # first factor of the dimensions of indices


def _gather(eqn: JaxprEqn) -> Factors:
    numbers = eqn.params["dimension_numbers"]
    operand, indices = shapes(eqn.invars)
    dims = _operand_dims(operand, eqn.params["slice_sizes"], numbers.start_index_map)
    batches = dict(zip(numbers.start_indices_batching_dims, numbers.operand_batching_dims, strict=True))
    for dim in numbers.operand_batching_dims:
        dims[dim] = dim
    index_dims = [batches.get(d, INDEX + d) for d in range(len(indices) - 1)]
    dropped = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    windows = iter([d for d in range(len(operand)) if d not in dropped])
    is_window = [d in numbers.offset_dims for d in range(len(shapes(eqn.outvars)[0]))]
    lookups = iter(index_dims)
    # A row that is looked up stays as a window of one element unless it is collapsed.
    indexed = set(numbers.start_index_map)
    result = [_window_label(next(windows), dims, indexed) if window else next(lookups) for window in is_window]
    factors = aligned(eqn, [dims, [*index_dims, None]], [result])
    rows = _rows(dims, indexed)
    return replace(factors, reductions=dict.fromkeys(rows, "add"), positions=frozenset(rows))


def _operand_dims(shape: Sequence[int], sizes: Sequence[int], indexed: Sequence[int]) -> list[int | None]:
    """Dimensions that are read whole, and those of which one row at a time is."""
    return [
        d if (n == size and d not in indexed) or (size == 1 and d in indexed) else None
        for d, (n, size) in enumerate(zip(shape, sizes, strict=True))
    ]


def _window_label(dim: int, dims: Sequence[int | None], indexed: set[int]) -> int | None:
    return None if dim in indexed else dims[dim]


def _rows(dims: Sequence[int | None], indexed: set[int]) -> list[int]:
    return [d for d in dims if d is not None and d in indexed]


def _scatter(eqn: JaxprEqn) -> Factors:
    numbers = eqn.params["dimension_numbers"]
    operand, indices, updates = shapes(eqn.invars)
    indexed = set(numbers.scatter_dims_to_operand_dims)
    dropped = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
    windows = [d for d in range(len(operand)) if d not in dropped]
    size_of = dict(zip(windows, (updates[d] for d in numbers.update_window_dims), strict=True))
    sizes = [size_of.get(d, 1) for d in range(len(operand))]
    dims = _operand_dims(operand, sizes, tuple(indexed))
    batches = dict(zip(numbers.scatter_indices_batching_dims, numbers.operand_batching_dims, strict=True))
    for dim in numbers.operand_batching_dims:
        dims[dim] = dim
    adds = SCATTER_MONOIDS.get(eqn.primitive.name) == "add"
    index_dims = [batches.get(d, INDEX + d if adds else None) for d in range(len(indices) - 1)]
    lookups = iter(index_dims)
    window = iter(windows)
    is_window = [d in numbers.update_window_dims for d in range(len(updates))]
    update = [_window_label(next(window), dims, indexed) if flag else next(lookups) for flag in is_window]
    factors = aligned(eqn, [dims, [*index_dims, None], update], [dims])
    terms = [f for f in index_dims if f is not None and f >= INDEX]
    positions = frozenset((*terms, *_rows(dims, indexed)))
    return replace(factors, reductions=dict.fromkeys(terms, "add"), positions=positions)


def _windows_of_block(eqn: JaxprEqn, operands: Shapes, results: Shapes) -> Mapping[str, Any]:
    """Dimensions that are read whole are as long as in the block of the table."""
    batching = eqn.params["dimension_numbers"].operand_batching_dims
    sizes = zip(eqn.params["slice_sizes"], shapes(eqn.invars)[0], operands[0], strict=True)
    windows = (local if size == n else size for size, n, local in sizes)
    return {"slice_sizes": tuple(1 if d in batching else size for d, size in enumerate(windows))}


RECORDS: dict[str, PrimitiveRecord] = {
    "gather": PrimitiveRecord(_gather, _windows_of_block, "look-up", rows="read"),
    **{name: PrimitiveRecord(_scatter, monoid=SCATTER_MONOIDS.get(name), rows="written") for name in SCATTERS},
}
