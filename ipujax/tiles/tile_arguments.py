"""Checks of the arguments of tile-level functions: tiles, row numbers, and arrays with a row for each tile."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from ipujax.runtime.errors import ArgumentTypeError, ArgumentValueError
from ipujax.runtime.tensor import dtype_name


def tile_numbers(tiles: Any, name: str) -> tuple[int, ...]:
    """Return the numbers of distinct tiles.

    Args:
        tiles: a sequence or an array of whole numbers; one number is one tile.
        name: name of the function in errors.

    Raises:
        ArgumentTypeError: anything else.
        ArgumentValueError: no tile, a negative number, or a tile twice.
    """
    numbers = whole_numbers(tiles, f"{name}: tiles")
    if not numbers or min(numbers) < 0:
        got = f"tile {min(numbers)}" if numbers else "no tile"
        raise ArgumentValueError(f"{name}: tiles", expected="at least one tile, numbered from 0", got=got)
    tile, times = Counter(numbers).most_common(1)[0]
    if times > 1:
        raise ArgumentValueError(
            f"{name}: tiles",
            expected="each tile once: a tile has one row",
            got=f"tile {tile} {times} times",
            hint="reshape rows of one tile to one row, or tile_gather onto distinct tiles",
        )
    return numbers


def whole_numbers(values: Any, argument: str) -> tuple[int, ...]:
    """Return whole numbers as a tuple; raises ArgumentTypeError for anything else."""
    numbers = np.asarray(list(values) if isinstance(values, range) else values)
    if numbers.size == 0:
        return ()
    if numbers.dtype.kind not in "iu" or numbers.ndim > 1:
        raise ArgumentTypeError(argument, expected="whole numbers, one dimension", got=repr(values))
    return tuple(int(n) for n in numbers.reshape(-1))


def tile_array(x: Any, num_tiles: int | None, name: str, argument: str = "array") -> Any:
    """Return an array with a row for each tile.

    Args:
        x: array or anything that converts to one.
        num_tiles: number of tiles; any when None.
        name: name of the function in errors.
        argument: name of the argument in errors.

    Raises:
        ArgumentTypeError: not an array, or a scalar.
        ArgumentValueError: another number of rows, or no elements.
    """
    array = as_array(x, name, argument)
    if array.ndim == 0:
        expected = "a leading axis with a row for each tile"
        raise ArgumentTypeError(
            f"{name}: {argument}", expected=expected, got=shown(array), hint="ipu.tile_put_replicated"
        )
    if num_tiles is not None and array.shape[0] != num_tiles:
        raise ArgumentValueError(
            f"{name}: leading axis of {argument}",
            expected=f"{num_tiles}, the number of tiles",
            got=f"{array.shape[0]}: {shown(array)}",
            hint="reshape it to a row for each tile, or ipu.tile_put_replicated for an array that all tiles need",
        )
    if 0 in array.shape:
        raise ArgumentValueError(f"{name}: {argument}", expected="elements on each tile", got=shown(array))
    return array


def as_array(x: Any, name: str, argument: str) -> Any:
    """Return a value as an array of JAX; raise ArgumentTypeError for a value that cannot be converted."""
    try:
        return jnp.asarray(x)
    except TypeError as error:
        raise ArgumentTypeError(f"{name}: {argument}", expected="an array", got=type(x).__name__) from error


def shown(x: Any) -> str:
    """Return dtype and shape as errors show them."""
    return f"{dtype_name(x.dtype)}{list(x.shape)}"


def shown_all(arrays: Sequence[Any]) -> str:
    """Return dtypes and shapes as errors show them."""
    return ", ".join(map(shown, arrays)) or "no array"
