"""Long rows, worked on in parts by several tiles: running results, sorting, largest elements.

A short row stays on one tile, with the result of `lax`. A row that does not fit, or a long one where tiles are idle,
is cut into equal parts. Running results: those of parts, then of the parts' ends, combined with the parts. Sorting:
sorted parts, then pairs of them merged in the order of a bitonic network. Largest elements: those of parts, and the
largest of these.
Limits: running sums and products are reassociated. A network of n parts has log2(n) (log2(n) + 1) / 2 steps, each
through all elements. A reduction by a user's function may not be associative, so its rows are not cut.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import ceil, log2, prod
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ipujax.runtime.graph import Graph
from ipujax.runtime.tensor import element_bytes

EXTRA_KEYS = 2  # of a sort: one puts padding last, one keeps the order of equal keys
_COPIES = 4  # operands and results, as mapped and as exchanged
_LONG = 1024  # elements; assumed: combining parts costs some thousand cycles, a row of this length 18,000


def parts_of(
    graph: Graph, shape: Sequence[int], axis: int, dtypes: Sequence[object], most_parts: int | None = None
) -> int:
    """Number of parts to compute each row in, a power of 2: more than one for rows too long for a tile, or idle tiles.

    Args:
        graph: graph of the operation, for its target.
        shape: shape of the operands.
        axis: dimension of the rows.
        dtypes: dtypes of the operands.
        most_parts: limit of the parts that idle tiles share; no limit for rows that do not fit a tile.
    """
    target = graph.target
    row_length = shape[axis]
    row_bytes = row_length * sum(map(element_bytes, dtypes))
    usable_bytes = target.operation_bytes
    if row_length < 4:  # two parts of two elements
        return 1
    # Combining the ends of parts is work too: no more parts than the root of the row's length.
    tiles_per_row = target.tiles_per_ipu // (prod(shape) // row_length) if row_length >= _LONG else 1
    parts_for_idle_tiles = max(1, min(most_parts or row_length, tiles_per_row, 1 << int(log2(row_length)) // 2))
    # A row that fits in one part is computed in place, beside its result. Parts are merged two at a time, and then a
    # tile has `_COPIES` of both; each has two elements at least.
    fits = 2 * row_bytes <= usable_bytes
    parts_to_fit = 1.0 if fits else min(row_length / 2, max(2.0, 2 * _COPIES * row_bytes / usable_bytes))
    return max(1 << int(log2(parts_for_idle_tiles)), 1 << ceil(log2(parts_to_fit)))


def long_cumulative(x: jax.Array, *, fun: Callable[..., jax.Array], axis: int, reverse: bool, parts: int) -> jax.Array:
    """Running results along a dimension, such as running sums, of rows that are cut in parts.

    The parts are computed at once, then each goes on from the end of the parts before it.

    Args:
        x: the array.
        fun: operation of `lax` for whole rows: `cumsum`, `cumprod`, `cummax` or another.
        axis: the dimension.
        reverse: whether to run from its end.
        parts: number of parts of a row.
    """
    row_length = x.shape[axis]
    rows = jnp.moveaxis(lax.rev(x, (axis,)) if reverse else x, axis, -1)
    part_length = -(-row_length // parts)
    padded_length = parts * part_length
    batch = rows.shape[:-1]
    # Padding behind a row does not change the running results before it.
    rows = lax.pad(rows, jnp.zeros((), x.dtype), [(0, 0, 0)] * len(batch) + [(0, padded_length - row_length, 0)])
    rows = rows.reshape((*batch, parts, part_length))
    running = fun(rows, axis=rows.ndim - 1)
    # Each part but the first goes on from the result at the end of the part before it.
    part_ends = fun(running[..., -1], axis=rows.ndim - 2)[..., :-1, None]
    later_parts = running[..., 1:, :]
    # `fun` combines an end and an element as the running results of a row of two.
    pairs = jnp.stack([jnp.broadcast_to(part_ends, later_parts.shape), later_parts], -1)
    continued = fun(pairs, axis=pairs.ndim - 1)[..., 1]
    results = jnp.concatenate([running[..., :1, :], continued], -2).reshape((*batch, padded_length))[..., :row_length]
    result = jnp.moveaxis(results, -1, axis)
    return lax.rev(result, (axis,)) if reverse else result


def long_top_k(x: jax.Array, *, k: int, axis: int, parts: int) -> tuple[jax.Array, jax.Array]:
    """Largest k elements along an axis, of equal ones the first, and their positions.

    They are the largest of the largest of each part, for rows too long for a tile.

    Args:
        x: the array.
        k: number of elements.
        axis: the axis.
        parts: number of parts that a row is cut into.
    """
    rows = jnp.moveaxis(x, axis, -1)
    row_length = x.shape[axis]
    batch = rows.shape[:-1]
    length = -(-row_length // parts)
    full_parts = row_length // length
    remainder = row_length - full_parts * length  # elements of a last, shorter part
    blocks = rows[..., : row_length - remainder].reshape((*batch, full_parts, length))
    values, positions = lax.top_k(blocks, min(k, length))
    positions = positions + length * lax.broadcasted_iota(positions.dtype, positions.shape, len(batch))
    values, positions = (y.reshape((*batch, full_parts * min(k, length))) for y in (values, positions))
    if remainder:
        last_values, indices = lax.top_k(rows[..., row_length - remainder :], min(k, remainder))
        values = jnp.concatenate([values, last_values], -1)
        positions = jnp.concatenate([positions, indices + row_length - remainder], -1)
    # Parts are in order, so that of equals the first is still first.
    best, indices = lax.top_k(values, k)
    positions = jnp.take_along_axis(positions, indices, -1, mode="promise_in_bounds")
    return jnp.moveaxis(best, -1, axis), jnp.moveaxis(positions, -1, axis)


def sorted_parts(*operands: jax.Array, axis: int, num_keys: int, parts: int) -> list[jax.Array]:
    """Parts of rows, [batch …, parts, length], each sorted by itself: the first step of a sort of rows in parts.

    Args:
        operands: arrays of one shape that are sorted together; the first `num_keys` are keys.
        axis: dimension that is sorted.
        num_keys: number of operands that are keys.
        parts: number of parts of a row.

    Returns:
        An array for each operand and each of the `EXTRA_KEYS` added keys, in this order: whether an element is padding,
        the keys, position in the row, other operands.
    """
    row_length = operands[0].shape[axis]
    rank = operands[0].ndim
    length = -(-row_length // parts)
    padded_length = parts * length
    rows = [jnp.moveaxis(x, axis, -1) for x in operands]
    batch = rows[0].shape[:-1]
    position = lax.broadcasted_iota(np.int32, (*batch, padded_length), rank - 1)
    padding = [(0, 0, 0)] * len(batch) + [(0, padded_length - row_length, 0)]
    padded = [lax.pad(x, jnp.zeros((), x.dtype), padding) for x in rows]
    # The first key puts padding last; the position as last key makes all elements distinct.
    arrays = [(position >= row_length).astype(np.uint8), *padded[:num_keys], position, *padded[num_keys:]]
    blocks = [x.reshape((*batch, parts, length)) for x in arrays]
    return list(lax.sort(blocks, dimension=rank, is_stable=False, num_keys=num_keys + EXTRA_KEYS))


class MergeStep(NamedTuple):
    """Step of a bitonic network: of `neighbours` parts each of the first half is merged with one of the second half.

    Mirrored, the first is merged with the last, so that two sorted halves make a bitonic row; else the first with the
    first of the second half.
    """

    neighbours: int
    mirrored: bool


def merge_steps(parts: int) -> list[MergeStep]:
    """Steps that sort a row of a power of 2 of sorted parts."""
    # Level k merges sorted rows of 2^(k-1) parts; its first step mirrors, each further one has half the neighbours.
    levels = range(1, parts.bit_length())
    return [MergeStep(1 << step, step == level) for level in levels for step in range(level, 0, -1)]


def pairs_of(*blocks: jax.Array, step: MergeStep) -> list[jax.Array]:
    """Pairs of parts of rows that a step of a bitonic sort merges, each pair as one row.

    Args:
        blocks: arrays that are sorted together, [batch …, parts, elements of a part].
        step: pairs each of the first half of so many neighbouring parts with one of the second half.

    Returns:
        For each array the pairs, [batch …, groups of neighbours, pairs of a group, elements of two parts].
    """
    neighbours, mirrored = step
    *batch, parts, length = blocks[0].shape
    split = [x.reshape((*batch, parts // neighbours, 2, neighbours // 2, length)) for x in blocks]
    dim = len(batch) + 1
    halves = [[lax.index_in_dim(x, half, dim, keepdims=False) for half in range(2)] for x in split]
    return [jnp.concatenate([first, _mirrored_if(second, mirrored=mirrored)], -1) for first, second in halves]


def blocks_of(*pairs: jax.Array, step: MergeStep) -> list[jax.Array]:
    """Parts of rows from merged pairs, in the positions before the step of a bitonic sort: inverse of `pairs_of`.

    Of each pair the second part has the larger elements. Arrays are [batch …, groups, pairs, elements of two parts].
    """
    *batch, groups, num_pairs, pair_length = pairs[0].shape
    length = pair_length // 2
    halves = [
        jnp.stack([x[..., :length], _mirrored_if(x[..., length:], mirrored=step.mirrored)], len(batch) + 1)
        for x in pairs
    ]
    return [x.reshape((*batch, groups * 2 * num_pairs, length)) for x in halves]


def joined_parts(*blocks: jax.Array, count: int, axis: int, num_keys: int) -> list[jax.Array]:
    """Rows of `count` elements from sorted parts, without padding and the added keys of `sorted_parts`."""
    *batch, parts, length = blocks[0].shape
    rows = [x.reshape((*batch, parts * length))[..., :count] for x in blocks]
    return [jnp.moveaxis(x, -1, axis) for x in (*rows[1 : num_keys + 1], *rows[num_keys + EXTRA_KEYS :])]


def _mirrored_if(x: jax.Array, *, mirrored: bool) -> jax.Array:
    return lax.rev(x, (x.ndim - 2,)) if mirrored else x
