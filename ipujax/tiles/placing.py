"""Arrays on tiles: placed, replicated, gathered, ordered by barriers, and measured by cycle counters.

Input and output: arrays of JAX, of which a row is on a tile. Outside of `ipu.jit` the functions compute the same
numbers, and nothing is placed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from ipujax.lowering.rules import cycle_count_p, tile_barrier_p, tile_put_p
from ipujax.runtime.errors import ArgumentTypeError, ArgumentValueError
from ipujax.tiles.tile_arguments import as_array, shown, tile_array, tile_numbers, whole_numbers


def tile_put_sharded(array: Any, tiles: Sequence[int]) -> jax.Array:
    """Place each row of an array on a tile.

    Args:
        array: [tiles, …], of any dtype.
        tiles: tile of each row, distinct.

    Returns:
        The array, row i of which is on tile `tiles[i]`.

    Raises:
        ArgumentTypeError: a scalar, or tiles that are not whole numbers.
        ArgumentValueError: another number of rows than tiles, or a tile twice; under `ipu.jit` a tile that the device
            lacks.
    """
    numbers = tile_numbers(tiles, "tile_put_sharded")
    x = tile_array(array, len(numbers), "tile_put_sharded")
    return _put(x, tuple(range(len(numbers))), numbers)


def tile_put_replicated(array: Any, tiles: Sequence[int]) -> jax.Array:
    """Place a copy of an array on each of several tiles.

    Args:
        array: of any shape and dtype.
        tiles: the tiles, distinct.

    Returns:
        [tiles, …]: a row for each tile. Its gradient is the sum of those of the copies.

    Raises:
        ArgumentTypeError: tiles that are not whole numbers.
        ArgumentValueError: a tile twice; under `ipu.jit` a tile that the device lacks.
    """
    numbers = tile_numbers(tiles, "tile_put_replicated")
    x = tile_array(as_array(array, "tile_put_replicated", "array")[None], 1, "tile_put_replicated")
    return _put(x, (0,) * len(numbers), numbers)


def tile_gather(array: Any, indices: Sequence[int], tiles: Sequence[int]) -> jax.Array:
    """Place chosen rows of an array on tiles; rows that are on their tile already do not move.

    Args:
        array: [rows, …], on tiles or not.
        indices: row of the array for each tile; a row may come several times.
        tiles: the tiles, distinct.

    Returns:
        [tiles, …]: row i is row `indices[i]`, on tile `tiles[i]`. A halo exchange is a gather by shifted indices.

    Raises:
        ArgumentTypeError: a scalar, or indices or tiles that are not whole numbers.
        ArgumentValueError: not as many indices as tiles, an index that is not a row, or a tile twice; under `ipu.jit` a
            tile that the device lacks.
    """
    numbers = tile_numbers(tiles, "tile_gather")
    rows = whole_numbers(indices, "tile_gather: indices")
    x = tile_array(array, None, "tile_gather")
    if len(rows) != len(numbers):
        expected = f"{len(numbers)}, one for each tile"
        raise ArgumentValueError("tile_gather: number of indices", expected=expected, got=len(rows))
    outside = [row for row in rows if not 0 <= row < x.shape[0]]
    if outside:
        expected = f"rows 0 … {x.shape[0] - 1} of {shown(x)}"
        raise ArgumentValueError("tile_gather: indices", expected=expected, got=f"row {outside[0]}")
    return _put(x, rows, numbers)


def _put(x: jax.Array, rows: tuple[int, ...], tiles: tuple[int, ...]) -> jax.Array:
    (result,) = tile_put_p.bind(x, rows=rows, tiles=tiles)
    return result


def tile_barrier(*arrays: Any) -> Any:
    """Order steps: those that need its results begin when all steps before it are over on all tiles.

    Args:
        arrays: of any shapes and dtypes.

    Returns:
        The array, or a tuple of them.

    Raises:
        ArgumentTypeError: no array.
    """
    results = tuple(tile_barrier_p.bind(*_arrays(arrays, "tile_barrier")))
    return results[0] if len(results) == 1 else results


def cycle_count(*arrays: Any, sync: bool = False) -> tuple[jax.Array, ...]:
    """Read the cycle counter of tiles between the steps that compute arrays and those that need them.

    Args:
        arrays: tile arrays, [tiles, …]; the counter is read after the steps that compute them.
        sync: whether all tiles sync first, as by `tile_barrier`.

    Returns:
        The arrays, and after them the counters, uint32[tiles, 2]: low and high word of the cycles that the IPU of the
        tile has run. The counter stands still while it is read, so the difference of two is the sum of the steps
        between them in the profile. Outside of `ipu.jit` there is no machine: zeros.

    Raises:
        ArgumentTypeError: no array, or a scalar.
    """
    checked = _arrays(arrays, "cycle_count")
    first = tile_array(checked[0], None, "cycle_count")
    operands = tile_barrier_p.bind(*checked) if sync else checked
    return tuple(cycle_count_p.bind(*operands, num_tiles=first.shape[0]))


def _arrays(arrays: Sequence[Any], name: str) -> list[Any]:
    if not arrays:
        raise ArgumentTypeError(f"{name}: arguments", expected="at least one array", got="none")
    return [as_array(x, name, f"array {n}") for n, x in enumerate(arrays)]
