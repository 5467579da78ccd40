"""Records of primitives that move elements: reshapes, transposes, broadcasts, slices, joins, statements, sources,
gathers and scatters.

Factors of gathers and scatters: 0, 1, … are the dimensions of the operand, 100, 101, … those of the indices but the
last. A dimension of the operand that is indexed one row at a time may be split: a part reads or writes its own rows,
and reads 0 for others, so that the sum over parts has each row. Updates that are added may be split too: parts then
give partial sums, of which the first includes the operand.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any

import jax
import jax.numpy as jnp

from ipujax.lowering.jax_compat import CALLEES, JaxprEqn
from ipujax.lowering.popops import SCATTER_MONOIDS, SCATTERS
from ipujax.lowering.primitives.record import (
    Factors,
    PrimitiveRecord,
    Shapes,
    each_alone,
    elementwise,
    factors_by_number,
    factors_except,
    none_split,
    over_axes,
    shapes,
)

INDEX = 100  # first factor of the dimensions of indices


def _gather_factors(eqn: JaxprEqn) -> Factors:
    """Factors of a gather: what can be split so that parts are computed alone: lookups, windows, rows of the table.

    Rows are indexed dimensions of which a window has one element: a device looks up those that it has, at its own
    positions, and zeros for the others, so that results add up. Windows have the other dimensions whole. Rows of random
    keys, which have no sums, are not split.
    """
    numbers = eqn.params["dimension_numbers"]
    operand, indices = shapes(eqn.invars)
    indexed = set(numbers.start_index_map)
    table_factors = _table_factors(operand, eqn.params["slice_sizes"], indexed, numbers.operand_batching_dims)
    table_aval: Any = eqn.invars[0].aval
    if jnp.issubdtype(table_aval.dtype, jax.dtypes.extended):
        table_factors = [None if d in indexed else d for d in table_factors]
    batches = dict(zip(numbers.start_indices_batching_dims, numbers.operand_batching_dims, strict=True))
    # A batch dimension of the indices shares the factor of the table's, which has its number; others have their own.
    index_factors = [batches.get(d, INDEX + d) for d in range(len(indices) - 1)]
    dropped = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    window_factors = iter(_window_factors([d for d in range(len(operand)) if d not in dropped], table_factors, indexed))
    lookup_factors = iter(index_factors)
    rank = len(shapes(eqn.outvars)[0])
    result_factors = [next(window_factors if d in numbers.offset_dims else lookup_factors) for d in range(rank)]
    # The last dimension of the indices, an index vector, is never split.
    factors = factors_by_number(eqn, [table_factors, [*index_factors, None]], [result_factors])
    # A device with a part of the rows looks up positions relative to where its part begins.
    rows = _row_factors(table_factors, indexed)
    return replace(factors, reductions=dict.fromkeys(rows, "add"), positions=frozenset(rows))


def _table_factors(
    shape: Sequence[int], window: Sequence[int], indexed: set[int], batching_dims: Sequence[int]
) -> list[int | None]:
    """Factor of each dimension of the table of a gather or scatter: the dimension's number, None if it is not split.

    Batches are split, indexed dimensions of which a window has one element, and others that a window has whole.

    Args:
        shape: shape of the table.
        window: size of a window along each dimension.
        indexed: dimensions that indices select windows along.
        batching_dims: dimensions along which lookups and table are a batch.
    """
    return [
        d if d in batching_dims or size == (1 if d in indexed else n) else None
        for d, (n, size) in enumerate(zip(shape, window, strict=True))
    ]


def _window_factors(
    window_dims: Sequence[int], table_factors: Sequence[int | None], indexed: set[int]
) -> list[int | None]:
    """Factors of the dimensions of windows, which are `window_dims` of the table: its own, but None if indexed.

    A window has one element of an indexed dimension that is not collapsed: there is nothing to split.
    """
    return [None if d in indexed else table_factors[d] for d in window_dims]


def _row_factors(table_factors: Sequence[int | None], indexed: set[int]) -> list[int]:
    return [d for d in table_factors if d is not None and d in indexed]


def _scatter_factors(eqn: JaxprEqn) -> Factors:
    """Factors of a scatter: the indices along which its parts can be computed alone.

    They are rows of the table, windows, and lookups if updates are added: then parts of the lookups give terms to sum.
    """
    numbers = eqn.params["dimension_numbers"]
    operand, indices, updates = shapes(eqn.invars)
    indexed = set(numbers.scatter_dims_to_operand_dims)
    dropped = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
    window_dims = [d for d in range(len(operand)) if d not in dropped]
    size_of = dict(zip(window_dims, (updates[d] for d in numbers.update_window_dims), strict=True))
    window = [size_of.get(d, 1) for d in range(len(operand))]
    table_factors = _table_factors(operand, window, indexed, numbers.operand_batching_dims)
    batches = dict(zip(numbers.scatter_indices_batching_dims, numbers.operand_batching_dims, strict=True))
    adds = SCATTER_MONOIDS.get(eqn.primitive.name) == "add"
    # A batch dimension of the indices shares the factor of the table's, which has its number; others have their own.
    index_factors = [batches.get(d, INDEX + d if adds else None) for d in range(len(indices) - 1)]
    lookup_factors = iter(index_factors)
    window_factors = iter(_window_factors(window_dims, table_factors, indexed))
    update_factors = [
        next(window_factors if d in numbers.update_window_dims else lookup_factors) for d in range(len(updates))
    ]
    # The last dimension of the indices, an index vector, is never split.
    factors = factors_by_number(eqn, [table_factors, [*index_factors, None], update_factors], [table_factors])
    split_lookups = [f for f in index_factors if f is not None and f >= INDEX]
    # A part of these is not computed as the whole is: what it adds depends on where it begins.
    positions = frozenset((*split_lookups, *_row_factors(table_factors, indexed)))
    return replace(factors, reductions=dict.fromkeys(split_lookups, "add"), positions=positions)


def _windows_of_block(eqn: JaxprEqn, operands: Shapes, results: Shapes) -> Mapping[str, Any]:
    """Dimensions that are read whole are as long as in the block of the table."""
    batching = eqn.params["dimension_numbers"].operand_batching_dims
    sizes = zip(eqn.params["slice_sizes"], shapes(eqn.invars)[0], operands[0], strict=True)
    windows = (local if size == n else size for size, n, local in sizes)
    return {"slice_sizes": tuple(1 if d in batching else size for d, size in enumerate(windows))}


def _reshape_factors(eqn: JaxprEqn) -> Factors:
    """Factors (indices) of a reshape, the common refinement of both shapes: [6, 4] → [2, 12] has factors 2, 3, 4.

    From the first sizes on that do not divide each other, as 2 and 3, there are no more factors: what is left of these
    dimensions, and all later ones, are computed whole.
    """
    (before,), (after,) = shapes(eqn.invars[:1]), shapes(eqn.outvars)
    labels: tuple[list[tuple[int, ...]], list[tuple[int, ...]]] = ([], [])  # factors of each dimension, on both sides
    sizes: dict[int, int] = {}  # by factor
    if 0 in before or eqn.params.get("dimensions") is not None:
        return Factors((((),) * len(before),), (((),) * len(after),), {})
    remaining = [list(before), list(after)]  # sizes that no factor has taken yet
    open_labels: list[list[int]] = [[], []]  # factors of the first of these dimensions so far
    # Both shapes are consumed from the major end; each common divisor is a factor.
    while remaining[0] and remaining[1]:
        a, b = remaining[0][0], remaining[1][0]
        size = a if b % a == 0 else b if a % b == 0 else 0
        if not size:
            return _with_others_whole(labels, open_labels, sizes, remaining)
        number = len(sizes)
        sizes[number] = size
        for side in (0, 1):
            open_labels[side].append(number)
            remaining[side][0] //= size
            if remaining[side][0] == 1:
                labels[side].append(tuple(open_labels[side]))
                open_labels[side] = []
                remaining[side].pop(0)
        _skip_ones(remaining, open_labels, labels)
    for side in (0, 1):
        labels[side].extend(() for _ in remaining[side])
    return Factors((tuple(labels[0]),), (tuple(labels[1]),), sizes)


def _skip_ones(
    remaining: list[list[int]], open_labels: list[list[int]], labels: tuple[list[tuple[int, ...]], ...]
) -> None:
    """Gives the next dimensions of size 1 of a reshape no factor, on either side; the lists are updated.

    Lists have an item for each side, before (0) and after (1) the reshape.

    Args:
        remaining: sizes of dimensions to which no factors are assigned yet, major first.
        open_labels: factors so far of the first of these dimensions.
        labels: factors of each dimension before it.
    """
    for side in (0, 1):
        while remaining[side] and remaining[side][0] == 1 and not open_labels[side]:
            labels[side].append(())
            remaining[side].pop(0)


def _with_others_whole(
    labels: tuple[list[tuple[int, ...]], list[tuple[int, ...]]],
    open_labels: list[list[int]],
    sizes: dict[int, int],
    remaining: list[list[int]],
) -> Factors:
    """Factors of a reshape whose remaining sizes have none in common: the first dimension keeps those that it has.

    What is left of it, and later dimensions, are computed whole.

    Args:
        labels: for operand and result the factors of each dimension so far.
        open_labels: for both the factors that the next dimension has already.
        sizes: size of each factor.
        remaining: for both the sizes from the next dimension on.
    """
    for side in (0, 1):
        labels[side].append(tuple(open_labels[side]))
        labels[side].extend(() for _ in remaining[side][1:])
    return Factors((tuple(labels[0]),), (tuple(labels[1]),), sizes)


def _transpose_factors(eqn: JaxprEqn) -> Factors:
    order = eqn.params["permutation"]
    return factors_by_number(eqn, [range(len(order))], [order])


def _broadcast_factors(eqn: JaxprEqn) -> Factors:
    (operand, *_), (result,) = shapes(eqn.invars), shapes(eqn.outvars)
    places = eqn.params["broadcast_dimensions"]
    numbers = [d if n == result[d] else None for n, d in zip(operand, places, strict=True)]
    return factors_by_number(eqn, [numbers], [range(len(result))])


def _squeeze_factors(eqn: JaxprEqn) -> Factors:
    rank = len(shapes(eqn.invars)[0])
    dropped = {d % rank for d in eqn.params["dimensions"]}
    remaining = [d for d in range(rank) if d not in dropped]
    return factors_by_number(eqn, [[None if d in dropped else d for d in range(rank)]], [remaining])


def _concatenate_factors(eqn: JaxprEqn) -> Factors:
    return factors_except(eqn, (eqn.params["dimension"],))


def _split_factors(eqn: JaxprEqn) -> Factors:
    return factors_except(eqn, (eqn.params["axis"],))


def _rev_factors(eqn: JaxprEqn) -> Factors:
    return factors_except(eqn, eqn.params["dimensions"])


def _changed_dims(eqn: JaxprEqn) -> list[int]:
    (before, *_), (after,) = shapes(eqn.invars), shapes(eqn.outvars)
    return [d for d, (n, m) in enumerate(zip(before, after, strict=True)) if n != m]


def _slice_factors(eqn: JaxprEqn) -> Factors:
    return factors_except(eqn, _changed_dims(eqn))


def _slice_of_block(eqn: JaxprEqn, operands: Shapes, results: Shapes) -> Mapping[str, Any]:
    changed = _changed_dims(eqn)
    limits = zip(operands[0], eqn.params["limit_indices"], strict=True)
    return {"limit_indices": tuple(limit if d in changed else n for d, (n, limit) in enumerate(limits))}


def _pad_factors(eqn: JaxprEqn) -> Factors:
    config = eqn.params["padding_config"]
    return factors_except(eqn, [d for d, amounts in enumerate(config) if tuple(amounts) != (0, 0, 0)])


def _dynamic_slice_factors(eqn: JaxprEqn) -> Factors:
    rank = len(shapes(eqn.outvars)[0])
    changed = _changed_dims(eqn)
    numbers = [None if d in changed else d for d in range(rank)]
    return factors_by_number(eqn, [numbers, *[()] * (len(eqn.invars) - 1)], [numbers])


def _dynamic_update_slice_factors(eqn: JaxprEqn) -> Factors:
    operand, update, *_ = shapes(eqn.invars)
    numbers = [d if n == m else None for d, (n, m) in enumerate(zip(operand, update, strict=True))]
    return factors_by_number(eqn, [numbers, numbers, *[()] * (len(eqn.invars) - 2)], [numbers])


def _iota_factors(eqn: JaxprEqn) -> Factors:
    factors = factors_by_number(eqn, [()] * len(eqn.invars), [range(len(shapes(eqn.outvars)[0]))])
    return replace(factors, positions=frozenset({eqn.params["dimension"]}))


def _tile_factors(eqn: JaxprEqn) -> Factors:
    return factors_except(eqn, _changed_dims(eqn))


def _shape_in(param: str) -> Any:
    """The shape of the result's block in a parameter."""
    return lambda eqn, operands, results: {param: tuple(results[0])}


# Starts of dimensions that are read whole become 0: JAX clips them to that, by the shape of a block too.
_SLICE_SIZES = _shape_in("slice_sizes")

_RankDims = Callable[[Mapping[str, Any]], tuple[frozenset[int], frozenset[int]]]
# Of collectives, by parameters: dimensions of the operand, and of the result, that are parts of ranks.
_RANK_DIMS: dict[str, _RankDims] = {
    "all_gather": lambda p: _dims_of_ranks(p["all_gather_dimension"], p["tiled"])[::-1],
    "reduce_scatter": lambda p: _dims_of_ranks(p["scatter_dimension"], p["tiled"]),
    "all_to_all": lambda p: (frozenset({p["split_axis"], p["concat_axis"]}),) * 2,
}


def _dims_of_ranks(dim: int, is_tiled: bool) -> tuple[frozenset[int], frozenset[int]]:
    """Dimensions of ranks: of the value with the parts of all ranks, and of one rank's, which has it if tiled."""
    return frozenset({dim}), frozenset({dim} if is_tiled else ())


def _rank_factors(eqn: JaxprEqn, dims: _RankDims) -> Factors:
    """Index space of a collective: a factor (index) for each dimension but those that it cuts, or joins, by rank."""

    def factor_numbers(shape: Sequence[int], whole_dims: frozenset[int]) -> list[int | None]:
        numbers = count()
        return [None if d in whole_dims else next(numbers) for d in range(len(shape))]

    (operand,), (result,) = shapes(eqn.invars), shapes(eqn.outvars)
    of_operand, of_result = dims(eqn.params)
    return factors_by_number(eqn, [factor_numbers(operand, of_operand)], [factor_numbers(result, of_result)])


# Primitives that read a part of their first operand at indices that are data.
LOOK_UPS = frozenset(("dynamic_slice", "gather"))
RECORDS: dict[str, PrimitiveRecord] = {
    "gather": PrimitiveRecord(_gather_factors, _windows_of_block, "look-up", rows="read"),
    **{name: PrimitiveRecord(_scatter_factors, monoid=SCATTER_MONOIDS.get(name), rows="written") for name in SCATTERS},
    "reshape": PrimitiveRecord(_reshape_factors, _shape_in("new_sizes"), "view", "in order", keeps_sums=True),
    "squeeze": PrimitiveRecord(_squeeze_factors, cost="view", view="in order", keeps_sums=True),
    "broadcast_in_dim": PrimitiveRecord(_broadcast_factors, _shape_in("shape"), "view", "repeated"),
    "transpose": PrimitiveRecord(_transpose_factors, cost="view", view="permuted", keeps_sums=True),
    "rev": PrimitiveRecord(_rev_factors, cost="view", view="reversed"),
    "slice": PrimitiveRecord(_slice_factors, _slice_of_block, "part"),
    "split": PrimitiveRecord(_split_factors, cost="part"),
    "unstack": PrimitiveRecord(cost="part"),
    "concatenate": PrimitiveRecord(_concatenate_factors, cost="joined"),
    "stack": PrimitiveRecord(cost="joined"),
    "tile": PrimitiveRecord(_tile_factors, cost="joined"),
    "pad": PrimitiveRecord(_pad_factors),
    "dynamic_slice": PrimitiveRecord(_dynamic_slice_factors, _SLICE_SIZES, "look-up"),
    "dynamic_update_slice": PrimitiveRecord(_dynamic_update_slice_factors, cost="look-up"),
    "iota": PrimitiveRecord(_iota_factors, _shape_in("shape"), "none"),
    "optimization_barrier": PrimitiveRecord(each_alone, cost="none"),
    "dce_sink": PrimitiveRecord(cost="none"),
    **dict.fromkeys(("name", "stop_gradient"), PrimitiveRecord(elementwise, cost="none")),
    "host_put": PrimitiveRecord(elementwise),
    "sharding_constraint": PrimitiveRecord(elementwise, cost="statement", keeps_sums=True),
    **dict.fromkeys(
        ("reshard", "device_put", "layout_constraint", "shard_alike", "xla_metadata_value"),
        PrimitiveRecord(elementwise, cost="statement"),
    ),
    # Over the replicas around the mesh.
    **{
        name: PrimitiveRecord(partial(over_axes, monoid=monoid))
        for name, monoid in (("psum", "add"), ("pmax", "max"), ("pmin", "min"))
    },
    **{name: PrimitiveRecord(partial(_rank_factors, dims=dims)) for name, dims in _RANK_DIMS.items()},
    **dict.fromkeys(("pvary", "pcast", "ppermute", "pbroadcast"), PrimitiveRecord(each_alone)),
    **dict.fromkeys(("scan", "while", "cond", "function_call", *CALLEES), PrimitiveRecord(cost="body")),
    **dict.fromkeys(
        (
            *("random_bits", "random_seed", "random_split", "random_fold_in", "random_wrap", "random_unwrap"),
            *("random_gamma", "random_clone", "rng_bit_generator"),
        ),
        PrimitiveRecord(none_split),
    ),
    "rng_uniform": PrimitiveRecord(none_split, has_state=True),
}
