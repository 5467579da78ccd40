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
    """Parts of a row, a power of 2, so that two fit on a tile and idle tiles share up to `most_parts` of a long row."""
    target = graph.target
    length = shape[axis]
    num_bytes = length * sum(map(element_bytes, dtypes))
    usable = target.operation_bytes
    if length < 4:
        return 1
    # Idle tiles for each row, but no more parts than the root of its length; then as many as two parts on a tile need.
    idle = target.tiles_per_ipu // (prod(shape) // length) if length >= _LONG else 1
    shared = min(most_parts or length, max(1, idle), 1 << int(log2(length)) // 2)
    fitting = 1.0 if 2 * num_bytes <= usable else min(length / 2, max(2.0, 2 * _COPIES * num_bytes / usable))
    return max(1 << int(log2(max(1, shared))), 1 << ceil(log2(fitting)))


def long_cumulative(x: jax.Array, *, fun: Callable[..., jax.Array], axis: int, reverse: bool, parts: int) -> jax.Array:
    """Running results along a dimension: `fun` is the operation of `lax`, `parts` the number of parts of a row."""
    n = x.shape[axis]
    rows = jnp.moveaxis(lax.rev(x, (axis,)) if reverse else x, axis, -1)
    length = -(-n // parts)
    padded_length = parts * length
    batch = rows.shape[:-1]
    # Padding behind a row does not change the running results before it.
    rows = lax.pad(rows, jnp.zeros((), x.dtype), [(0, 0, 0)] * len(batch) + [(0, padded_length - n, 0)])
    rows = rows.reshape((*batch, parts, length))
    running = fun(rows, axis=rows.ndim - 1)
    # Each part but the first goes on from the result at the end of the part before it.
    part_ends = fun(running[..., -1], axis=rows.ndim - 2)[..., :-1, None]
    pair = jnp.stack([jnp.broadcast_to(part_ends, running[..., 1:, :].shape), running[..., 1:, :]], -1)
    continued = fun(pair, axis=pair.ndim - 1)[..., 1]
    results = jnp.concatenate([running[..., :1, :], continued], -2).reshape((*batch, padded_length))[..., :n]
    result = jnp.moveaxis(results, -1, axis)
    return lax.rev(result, (axis,)) if reverse else result


def long_top_k(x: jax.Array, *, k: int, axis: int, parts: int) -> tuple[jax.Array, jax.Array]:
    """Largest k elements along an axis, of equal ones the first, and their positions; parts of rows come first."""
    rows = jnp.moveaxis(x, axis, -1)
    n = x.shape[axis]
    batch = rows.shape[:-1]
    length = -(-n // parts)
    full = n // length
    values, positions = lax.top_k(rows[..., : full * length].reshape((*batch, full, length)), min(k, length))
    positions = positions + length * lax.broadcasted_iota(positions.dtype, positions.shape, len(batch))
    values, positions = (y.reshape((*batch, full * min(k, length))) for y in (values, positions))
    if remainder := n - full * length:
        last_values, indices = lax.top_k(rows[..., full * length :], min(k, remainder))
        values = jnp.concatenate([values, last_values], -1)
        positions = jnp.concatenate([positions, indices + full * length], -1)
    # Parts are in order, so that of equals the first is still first.
    best, indices = lax.top_k(values, k)
    positions = jnp.take_along_axis(positions, indices, -1, mode="promise_in_bounds")
    return jnp.moveaxis(best, -1, axis), jnp.moveaxis(positions, -1, axis)


def sorted_parts(*operands: jax.Array, axis: int, num_keys: int, parts: int) -> list[jax.Array]:
    """Sorted parts of the rows of all operands, with added keys by which no two elements are equal."""
    n = operands[0].shape[axis]
    rank = operands[0].ndim
    length = -(-n // parts)
    padded_length = parts * length
    rows = [jnp.moveaxis(x, axis, -1) for x in operands]
    batch = rows[0].shape[:-1]
    position = lax.broadcasted_iota(np.int32, (*batch, padded_length), rank - 1)
    padding = [(0, 0, 0)] * len(batch) + [(0, padded_length - n, 0)]
    padded = [lax.pad(x, jnp.zeros((), x.dtype), padding) for x in rows]
    # The first key puts padding last; the position as last key makes all elements distinct.
    arrays = [(position >= n).astype(np.uint8), *padded[:num_keys], position, *padded[num_keys:]]
    blocks = [x.reshape((*batch, parts, length)) for x in arrays]
    return list(lax.sort(blocks, dimension=rank, is_stable=False, num_keys=num_keys + EXTRA_KEYS))


def merges(parts: int) -> list[tuple[int, bool]]:
    """Steps of the network: number of neighbours in each, and whether the second half is mirrored."""
    # Level k merges sorted rows of 2^(k-1) parts; its first step mirrors, the others compare at half the distance.
    levels = range(1, parts.bit_length())
    return [(1 << step, step == level) for level in levels for step in range(level, 0, -1)]


def pairs_of(*blocks: jax.Array, size: int, mirrored: bool) -> list[jax.Array]:
    """Pairs of blocks as rows: each block of the first half of `size` neighbours with one of the second half."""
    # Blocks are along the last dimension but one. Mirrored, the first is paired with the last, which makes two halves
    # sorted one after the other a bitonic row.
    *batch, parts, length = blocks[0].shape
    split = [x.reshape((*batch, parts // size, 2, size // 2, length)) for x in blocks]
    dim = len(batch) + 1
    halves = [[lax.index_in_dim(x, half, dim, False) for half in range(2)] for x in split]
    return [jnp.concatenate([first, _mirrored_if(second, mirrored)], -1) for first, second in halves]


def blocks_of(*pairs: jax.Array, mirrored: bool) -> list[jax.Array]:
    """Blocks of merged pairs in their old positions, those of second halves with the larger elements."""
    *batch, groups, half, double = pairs[0].shape
    length = double // 2
    halves = [jnp.stack([x[..., :length], _mirrored_if(x[..., length:], mirrored)], len(batch) + 1) for x in pairs]
    return [x.reshape((*batch, groups * 2 * half, length)) for x in halves]


def joined_parts(*blocks: jax.Array, count: int, axis: int, num_keys: int) -> list[jax.Array]:
    """Rows of `count` elements from sorted parts, without the added keys."""
    *batch, parts, length = blocks[0].shape
    rows = [x.reshape((*batch, parts * length))[..., :count] for x in blocks]
    return [jnp.moveaxis(x, -1, axis) for x in (*rows[1 : num_keys + 1], *rows[num_keys + EXTRA_KEYS :])]


def _mirrored_if(x: jax.Array, mirrored: bool) -> jax.Array:
    return lax.rev(x, (x.ndim - 2,)) if mirrored else x
