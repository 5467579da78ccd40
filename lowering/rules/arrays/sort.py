"""Rules for sorting rows and for their largest elements, exact or approximate."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import ceil, log2
from typing import Any

import jax
from jax import lax

from ipujax.lowering.popops import each_row, sort, top_k
from ipujax.lowering.rules.base.context import Context, Rule, bound, lower_array_function
from ipujax.lowering.rules.base.fallback import fallback
from ipujax.lowering.rules.base.long_rows import (
    EXTRA_KEYS,
    blocks_of,
    joined_parts,
    long_top_k,
    merge_steps,
    pairs_of,
    parts_of,
    sorted_parts,
)
from ipujax.runtime.graph import Sequence as ProgramSequence, WholeOperation
from ipujax.runtime.tensor import Tensor

_MOST_PARTS = 32  # parts of a row that fits; assumed: more take more merge steps, which run and compile longer


def sort_rule(ctx: Context, *operands: Tensor, dimension: int, is_stable: bool, num_keys: int) -> Sequence[Tensor]:
    """Adds a sort of several tensors together along one dimension; long rows are sorted in parts on several tiles."""
    if not operands[0].size:
        return fallback(ctx, *operands)
    parts = parts_of(ctx.graph, operands[0].shape, dimension, [x.dtype for x in operands], _MOST_PARTS)
    if parts > 1:
        return _sort_in_parts(ctx, operands, dimension, num_keys, parts, is_stable=is_stable)
    return sort(ctx.builder, operands, dimension, num_keys, is_stable=is_stable)


def _sort_in_parts(
    ctx: Context, operands: Sequence[Tensor], axis: int, num_keys: int, parts: int, *, is_stable: bool
) -> Sequence[Tensor]:
    """Sorts rows in parts, on a tile each, that are then merged in pairs; equal keys keep their order.

    The program has the steps of the parts, which cycles are counted of; XLA computes the sort of whole rows at once.

    Args:
        ctx: the equation.
        operands: arrays of one shape that are sorted together: first the keys, then what is moved with them.
        axis: dimension that is sorted.
        num_keys: number of operands that are keys.
        parts: number of parts of a row, a power of 2.
        is_stable: whether the user asked that equal keys keep their order.
    """
    count = operands[0].shape[axis]
    keys = num_keys + EXTRA_KEYS
    inside = ctx.into(ProgramSequence())  # the parts' own program
    blocks = lower_array_function(inside, partial(sorted_parts, axis=axis, num_keys=num_keys, parts=parts), operands)
    for step in merge_steps(parts):
        pairs = lower_array_function(inside, partial(pairs_of, step=step), blocks)
        # A pair is two sorted rows; the added keys make all elements distinct.
        merged = sort(
            inside.builder.named("merge"), pairs, pairs[0].ndim - 1, keys, is_stable=False, has_sorted_halves=True
        )
        blocks = lower_array_function(inside, partial(blocks_of, step=step), merged)
    results = lower_array_function(inside, partial(joined_parts, count=count, axis=axis, num_keys=num_keys), blocks)

    def compute(arrays: list[jax.Array]) -> list[jax.Array]:
        # The parts keep the order of equal keys, which a sort that need not be stable may do too.
        return list(lax.sort(arrays, dimension=axis, is_stable=is_stable, num_keys=num_keys))

    ctx.prog.add(WholeOperation(inside.prog, tuple(operands), tuple(results), compute))
    return results


def top_k_rule(ctx: Context, x: Tensor, *, k: int, axis: int) -> Sequence[Tensor]:
    """Adds the search for the `k` largest elements along one dimension, and their positions; in parts of long rows."""
    if not x.size or not k:
        return fallback(ctx, x)
    parts = parts_of(ctx.graph, x.shape, axis, [x.dtype])
    # Only where the k largest of each part are fewer than the row.
    if parts > 1 and k * parts < x.shape[axis]:
        return lower_array_function(ctx, partial(long_top_k, k=k, axis=axis, parts=parts), [x])
    return top_k(ctx.builder, x, k, axis)


def approx_top_k_rule(ctx: Context, x: Tensor, *, k: int, reduction_dimension: int, **params: Any) -> Sequence[Tensor]:
    """Adds the search for largest or smallest elements along one dimension, approximately: XLA may miss some."""
    if not x.size or not all(aval.size for aval in ctx.out_avals):
        return fallback(ctx, x)
    axis = reduction_dimension % x.ndim
    fun = bound(ctx.primitive, k=k, reduction_dimension=axis, **params)
    results = [(aval.shape[axis], aval.dtype) for aval in ctx.out_avals]
    operations = ceil(log2(k + 1)) + 1  # assumed: a binary search in a sorted list of k for each element
    return each_row(ctx.builder, "TopK", x, axis, fun, results, operations)


RULES: dict[str, Rule] = {"sort": sort_rule, "top_k": top_k_rule, "approx_top_k": approx_top_k_rule}
