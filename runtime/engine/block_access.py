"""Taking blocks out of arrays and putting them in, for many static starts at once.

Starts are int64[*grid, dimensions]: where the block at each point of a grid starts in each dimension; all blocks have
the same lengths. Blocks are arrays [*grid, *lengths]. Where starts follow one axis of the grid in each dimension, which
is how planners cut, blocks come and go by slices, reshapes and transposes; anything else is taken by a gather and put
by a loop of updates in place.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


def varying_axes(starts: np.ndarray) -> tuple[bool, ...]:
    """Says along which axes of the grid the starts, int64[*grid, dimensions], differ."""
    return tuple(bool(np.any(starts != starts.take([0], axis))) for axis in range(starts.ndim - 1))


def take_blocks(value: jax.Array, starts: np.ndarray, lengths: tuple[int, ...]) -> jax.Array:
    """Takes the blocks of `lengths` at `starts` out of an array.

    Args:
        value: the array.
        starts: int64[*grid, dimensions]; every block lies inside the array.
        lengths: of each dimension of a block.

    Returns:
        [*grid, *lengths].
    """
    grid = starts.shape[:-1]
    axes = _axis_of_each_dimension(starts)
    if axes is None:
        flat = starts.reshape(-1, value.ndim).astype(np.int32)
        blocks = jax.vmap(lambda start: lax.dynamic_slice(value, list(start), lengths))(flat)
        return blocks.reshape(*grid, *lengths)
    grid_positions, block_positions, position = [0] * len(grid), [], 0
    for dimension, (axis, length) in enumerate(zip(axes, lengths, strict=True)):
        if axis is None:
            first = int(starts[(0,) * len(grid)][dimension])
            value = lax.slice_in_dim(value, first, first + length, axis=position)
        else:
            value = _cut_dimension(value, position, _starts_along(starts, dimension, axis), length)
            grid_positions[axis] = position
            position += 1
        block_positions.append(position)
        position += 1
    return lax.transpose(value, [*grid_positions, *block_positions])


def _cut_dimension(value: jax.Array, dimension: int, starts: np.ndarray, length: int) -> jax.Array:
    """Replaces one dimension by two: number of the block, and index within the block."""
    if _are_adjacent(starts, length):
        shape = (*value.shape[:dimension], len(starts), length, *value.shape[dimension + 1 :])
        return lax.slice_in_dim(value, int(starts[0]), int(starts[-1]) + length, axis=dimension).reshape(shape)
    return jnp.take(value, starts[:, None] + np.arange(length), axis=dimension, mode="clip")


Box = tuple[tuple[int, ...], jax.Array]  # the first index of a box that adjacent blocks fill, and its values


def join_blocks(blocks: jax.Array, starts: np.ndarray) -> Box | None:
    """Joins blocks that fill one box, without reading what was there.

    Args:
        blocks: [*grid, *lengths].
        starts: int64[*grid, dimensions].

    Returns:
        The box, or None if the blocks do not fill one in the order of their grid.
    """
    rank = starts.ndim - 1
    grid, lengths = blocks.shape[:rank], blocks.shape[rank:]
    axes = _axis_of_each_dimension(starts)
    if axes is None:
        return None
    order, shape = [], []
    for dimension, (axis, length) in enumerate(zip(axes, lengths, strict=True)):
        if axis is not None and not _are_adjacent(_starts_along(starts, dimension, axis), length):
            return None
        order += [rank + dimension] if axis is None else [axis, rank + dimension]
        shape.append(length if axis is None else grid[axis] * length)
    first = tuple(int(s) for s in starts[(0,) * rank])
    return first, lax.transpose(blocks, order).reshape(shape) if grid else blocks


def put_blocks(value: jax.Array, starts: np.ndarray, blocks: jax.Array) -> jax.Array:
    """Puts blocks at `starts` into an array, in row-major order of the grid.

    Args:
        value: the array.
        starts: int64[*grid, dimensions]; every block lies inside the array.
        blocks: [*grid, *lengths].

    Returns:
        The array with the blocks in place.
    """
    rank = starts.ndim - 1
    flat_starts = jnp.asarray(starts.reshape(-1, value.ndim), jnp.int32)
    flat_blocks = blocks.reshape(len(flat_starts), *blocks.shape[rank:])

    def put(value: jax.Array, step: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        start, block = step
        return lax.dynamic_update_slice(value, block, list(start)), None

    return lax.scan(put, value, (flat_starts, flat_blocks))[0]


def _axis_of_each_dimension(starts: np.ndarray) -> list[int | None] | None:
    """Finds the axis of the grid each dimension follows: None for none, and None in all if they are not one to one.

    Args:
        starts: int64[*grid, dimensions].
    """
    result: list[int | None] = []
    for dimension in range(starts.shape[-1]):
        axes = [axis for axis, varies in enumerate(varying_axes(starts[..., dimension, None])) if varies]
        if len(axes) > 1:
            return None
        result.append(axes[0] if axes else None)
    return result if sorted(a for a in result if a is not None) == list(range(starts.ndim - 1)) else None


def _starts_along(starts: np.ndarray, dimension: int, axis: int) -> np.ndarray:
    """Starts of one dimension along the only axis it follows, int64[n]."""
    return np.moveaxis(starts[..., dimension], axis, -1).reshape(-1, starts.shape[axis])[0]


def _are_adjacent(starts: np.ndarray, length: int) -> bool:
    return bool(np.all(np.diff(starts) == length))
