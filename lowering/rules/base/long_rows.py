"""Rows that are long, or that no tile can hold, worked on in parts: running results, sorting, the largest elements.

A short row stays on one tile, where its result is that of `lax`. One that does not fit, or that is long where tiles are
idle, is cut in equal parts, in a further dimension that tiles share.

Running results: those of parts, and of their ends, which are then put before the parts. Sorting: parts are sorted, then
pairs of them merged in the order of a bitonic network, each pair by one tile. Largest elements: those of parts, and of
these.

Limits: running sums and products are reassociated. A network of n parts has log2(n) (log2(n) + 1) / 2 steps, each of
which goes through all elements, a pair of parts on one worker. A reduction by a function of the user's own is not known
to be associative, so that its rows are not cut.
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

EXTRA_KEYS = 2  # of a sort: what pads a row goes last, and equal keys keep their order
_COPIES = 4  # operands and results, where they lie and as they are exchanged
_LONG = 1024  # elements, assumed: putting parts together costs some thousand cycles, a row of so many 18,000


def parts_of(
    graph: Graph, shape: Sequence[int], axis: int, dtypes: Sequence[object], most_parts: int | None = None
) -> int:
    """In how many parts, a power of 2, a row is cut so that two of them fit on a tile, and tiles share a long one.

    Args:
        graph: gives the target.
        shape: of the operands.
        axis: the dimension that rows lie along.
        dtypes: of the operands.
        most_parts: of a row that would fit; as many as each has elements when None.
    """
    target, length = graph.target, shape[axis]
    num_bytes = length * sum(map(element_bytes, dtypes))
    most = target.available_memory_proportion * target.bytes_per_tile
    if length < 4:
        return 1
    idle = target.tiles_per_ipu // (prod(shape) // length) if length >= _LONG else 1
    shared = min(most_parts or length, max(1, idle), 1 << int(log2(length)) // 2)
    fitting = 1.0 if 2 * num_bytes <= most else min(length / 2, max(2.0, 2 * _COPIES * num_bytes / most))
    return max(1 << int(log2(max(1, shared))), 1 << ceil(log2(fitting)))


def long_cumulative(x: jax.Array, *, fun: Callable[..., jax.Array], axis: int, reverse: bool, parts: int) -> jax.Array:
    """Running results along a dimension: `fun` is the operation of `lax`, `parts` how often rows are cut."""
    n = x.shape[axis]
    rows = jnp.moveaxis(lax.rev(x, (axis,)) if reverse else x, axis, -1)
    length = -(-n // parts)
    whole, batch = parts * length, rows.shape[:-1]
    # What is put behind a row changes nothing before it.
    rows = lax.pad(rows, jnp.zeros((), x.dtype), [(0, 0, 0)] * len(batch) + [(0, whole - n, 0)])
    rows = rows.reshape((*batch, parts, length))
    inside = fun(rows, axis=rows.ndim - 1)
    ends = fun(inside[..., -1], axis=rows.ndim - 2)[..., :-1, None]
    pair = jnp.stack([jnp.broadcast_to(ends, inside[..., 1:, :].shape), inside[..., 1:, :]], -1)
    later = fun(pair, axis=pair.ndim - 1)[..., 1]
    joined = jnp.concatenate([inside[..., :1, :], later], -2).reshape((*batch, whole))[..., :n]
    result = jnp.moveaxis(joined, -1, axis)
    return lax.rev(result, (axis,)) if reverse else result


def long_top_k(x: jax.Array, *, k: int, axis: int, parts: int) -> tuple[jax.Array, jax.Array]:
    """The largest elements of rows, of equals the first, and where they are."""
    rows = jnp.moveaxis(x, axis, -1)
    n, batch = x.shape[axis], rows.shape[:-1]
    length = -(-n // parts)
    full = n // length
    values, places = lax.top_k(rows[..., : full * length].reshape((*batch, full, length)), min(k, length))
    places = places + length * lax.broadcasted_iota(places.dtype, places.shape, len(batch))
    values, places = (y.reshape((*batch, full * min(k, length))) for y in (values, places))
    if rest := n - full * length:
        last, at = lax.top_k(rows[..., full * length :], min(k, rest))
        values, places = jnp.concatenate([values, last], -1), jnp.concatenate([places, at + full * length], -1)
    # Parts follow each other, so that of equals the first stands first here too.
    best, at = lax.top_k(values, k)
    places = jnp.take_along_axis(places, at, -1, mode="promise_in_bounds")
    return jnp.moveaxis(best, -1, axis), jnp.moveaxis(places, -1, axis)


def sorted_parts(*operands: jax.Array, axis: int, num_keys: int, parts: int) -> list[jax.Array]:
    """The parts of rows that are sorted together, each sorted; of all operands, with keys by which no two are equal."""
    n, rank = operands[0].shape[axis], operands[0].ndim
    length = -(-n // parts)
    whole = parts * length
    rows = [jnp.moveaxis(x, axis, -1) for x in operands]
    batch = rows[0].shape[:-1]
    place = lax.broadcasted_iota(np.int32, (*batch, whole), rank - 1)
    padding = [(0, 0, 0)] * len(batch) + [(0, whole - n, 0)]
    padded = [lax.pad(x, jnp.zeros((), x.dtype), padding) for x in rows]
    # What pads a row goes to its end; no two elements are equal.
    arrays = [(place >= n).astype(np.uint8), *padded[:num_keys], place, *padded[num_keys:]]
    blocks = [x.reshape((*batch, parts, length)) for x in arrays]
    return list(lax.sort(blocks, dimension=rank, is_stable=False, num_keys=num_keys + EXTRA_KEYS))


def merges(parts: int) -> list[tuple[int, bool]]:
    """The steps of the network: how many neighbours each one is about, and whether the second half is mirrored."""
    levels = range(1, parts.bit_length())
    return [(1 << step, step == level) for level in levels for step in range(level, 0, -1)]


def pairs_of(*blocks: jax.Array, size: int, mirrored: bool) -> list[jax.Array]:
    """Each block of the first half of `size` neighbours with one of the other half, as one row.

    Blocks lie along the last dimension but one. Mirrored, the first goes with the last, which makes halves that are
    sorted one after the other into a row that is so.
    """
    *batch, parts, length = blocks[0].shape
    split = [x.reshape((*batch, parts // size, 2, size // 2, length)) for x in blocks]
    dim = len(batch) + 1
    return [
        jnp.concatenate([lax.index_in_dim(x, 0, dim, False), _turned(lax.index_in_dim(x, 1, dim, False), mirrored)], -1)
        for x in split
    ]


def blocks_of(*pairs: jax.Array, mirrored: bool) -> list[jax.Array]:
    """The blocks of merged pairs where they were, those of second halves with what is larger."""
    *batch, groups, half, double = pairs[0].shape
    length = double // 2
    halves = [jnp.stack([x[..., :length], _turned(x[..., length:], mirrored)], len(batch) + 1) for x in pairs]
    return [x.reshape((*batch, groups * 2 * half, length)) for x in halves]


def joined_parts(*blocks: jax.Array, count: int, axis: int, num_keys: int) -> list[jax.Array]:
    """Rows of `count` elements of sorted parts, without the keys that were added."""
    *batch, parts, length = blocks[0].shape
    found = [x.reshape((*batch, parts * length))[..., :count] for x in blocks]
    return [jnp.moveaxis(x, -1, axis) for x in (*found[1 : num_keys + 1], *found[num_keys + EXTRA_KEYS :])]


def _turned(x: jax.Array, mirrored: bool) -> jax.Array:
    return lax.rev(x, (x.ndim - 2,)) if mirrored else x
