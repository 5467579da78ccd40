"""Blocks taken out of arrays and put into them, for many static starts at once.

Starts are int64[*grid, dimensions]: the first index, in each dimension, of the block at each point of a grid; all
blocks have the same lengths. Blocks are arrays [*grid, *lengths]. Planners make starts that follow one axis of the grid
in each dimension: then slices, reshapes and transposes suffice. Others need a gather, or a loop of updates in place.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


def varying_axes(starts: np.ndarray) -> tuple[bool, ...]:
    """Return, for each axis of the grid, whether the starts, int64[*grid, dimensions], differ along it."""
    return tuple(bool(np.any(starts != starts.take([0], axis))) for axis in range(starts.ndim - 1))


def take_blocks(value: jax.Array, starts: np.ndarray, lengths: tuple[int, ...]) -> jax.Array:
    """Return the blocks of an array at `starts`, int64[*grid, dimensions], all inside of it, as [*grid, *lengths]."""
    grid = starts.shape[:-1]
    axes = _match_axes(starts)
    if axes is None:
        flat = starts.reshape(-1, value.ndim).astype(np.int32)
        blocks = jax.vmap(lambda start: lax.dynamic_slice(value, list(start), lengths))(flat)
        return blocks.reshape(*grid, *lengths)
    grid_positions = [0] * len(grid)
    block_positions = []
    position = 0
    for dimension, (axis, length) in enumerate(zip(axes, lengths, strict=True)):
        if axis is None:
            first = int(starts[(0,) * len(grid)][dimension])
            value = lax.slice_in_dim(value, first, first + length, axis=position)
        else:
            value = _split_dimension(value, position, _starts_along(starts, dimension, axis), length)
            grid_positions[axis] = position
            position += 1
        block_positions.append(position)
        position += 1
    return lax.transpose(value, [*grid_positions, *block_positions])


def _split_dimension(value: jax.Array, dimension: int, starts: np.ndarray, length: int) -> jax.Array:
    """Replace one dimension by two: number of the block, and index within the block."""
    if _are_adjacent(starts, length):
        shape = (*value.shape[:dimension], len(starts), length, *value.shape[dimension + 1 :])
        return lax.slice_in_dim(value, int(starts[0]), int(starts[-1]) + length, axis=dimension).reshape(shape)
    # All indices are inside the array: "clip" only keeps JAX from adding a test of each.
    return jnp.take(value, starts[:, None] + np.arange(length), axis=dimension, mode="clip")


JoinedBlock = tuple[tuple[int, ...], jax.Array]  # the first index of a block that adjacent blocks fill, and its values


def join_blocks(blocks: jax.Array, starts: np.ndarray) -> JoinedBlock | None:
    """Join blocks, [*grid, *lengths], at `starts`, int64[*grid, dimensions]; None if they do not fill one block."""
    rank = starts.ndim - 1
    grid = blocks.shape[:rank]
    lengths = blocks.shape[rank:]
    axes = _match_axes(starts)
    if axes is None:
        return None
    order = []
    shape = []
    for dimension, (axis, length) in enumerate(zip(axes, lengths, strict=True)):
        if axis is not None and not _are_adjacent(_starts_along(starts, dimension, axis), length):
            return None
        order += [rank + dimension] if axis is None else [axis, rank + dimension]
        shape.append(length if axis is None else grid[axis] * length)
    first = tuple(int(s) for s in starts[(0,) * rank])
    return first, lax.transpose(blocks, order).reshape(shape) if grid else blocks


def put_blocks(value: jax.Array, starts: np.ndarray, blocks: jax.Array) -> jax.Array:
    """Return an array with the blocks, [*grid, *lengths], put in at `starts`, int64[*grid, dimensions]."""
    rank = starts.ndim - 1
    flat_starts = jnp.asarray(starts.reshape(-1, value.ndim), jnp.int32)
    flat_blocks = blocks.reshape(len(flat_starts), *blocks.shape[rank:])

    def put(value: jax.Array, step: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        start, block = step
        return lax.dynamic_update_slice(value, block, list(start)), None

    # A scan updates its carry in place; blocks may overlap, so their order, row-major, counts.
    return lax.scan(put, value, (flat_starts, flat_blocks))[0]


def _match_axes(starts: np.ndarray) -> list[int | None] | None:
    """Return the axis of the grid that each dimension follows, or None for it; None in all if not one to one."""
    result: list[int | None] = []
    for dimension in range(starts.shape[-1]):
        axes = [axis for axis, varies in enumerate(varying_axes(starts[..., dimension, None])) if varies]
        if len(axes) > 1:
            return None
        result.append(axes[0] if axes else None)
    return result if sorted(a for a in result if a is not None) == list(range(starts.ndim - 1)) else None


def _starts_along(starts: np.ndarray, dimension: int, axis: int) -> np.ndarray:
    """Return the starts of a dimension along the only axis that it follows, int64[n]."""
    return np.moveaxis(starts[..., dimension], axis, -1).reshape(-1, starts.shape[axis])[0]


def _are_adjacent(starts: np.ndarray, length: int) -> bool:
    return bool(np.all(np.diff(starts) == length))
