"""Functions of tile-level JAX: `ipu.tile_map`, arrays placed on tiles, barriers and cycle counters.

`ipu.tile_map` maps a function, a primitive of JAX or a codelet over the rows of tile arrays, one row a tile.
Input: the function of one row of each array, and the arrays. Output: its results with a row for each tile.
Under `ipu.jit` each tile runs one vertex, which has the cycles of the function's primitives on one tile, or of the
codelet's own estimate. Elsewhere, and in gradients and batches, plain JAX maps the same function.

The others place, replicate and gather arrays of which a row is on a tile, order steps by barriers, and read cycle
counters. Outside of `ipu.jit` they compute the same numbers, and nothing is placed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ipujax.lowering.jax_compat import Primitive, constants_as_inputs, jaxpr_as_fun, primitive_function
from ipujax.lowering.jaxpr import primitive_names
from ipujax.lowering.refs import discharged_body
from ipujax.lowering.rules import TILE_PRIMITIVES, cycle_count_p, map_rows, tile_barrier_p, tile_put_p
from ipujax.poplar.vertex import NUM_DIMS, Vertex, connected_fields
from ipujax.runtime.errors import ArgumentTypeError, ArgumentValueError, IpuError
from ipujax.runtime.tensor import dtype_name
from ipujax.tiles.codelet_calls import codelet_call


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
    try:
        numbers = np.asarray(list(values) if isinstance(values, range) else values)
    except ValueError:  # lists of different lengths
        numbers = np.asarray(None)
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
    except (TypeError, ValueError, OverflowError) as error:  # of masked arrays, uneven lists and large numbers too
        got = f"{type(x).__name__}: {error}"
        raise ArgumentTypeError(f"{name}: {argument}", expected="an array", got=got) from error


def shown(x: Any) -> str:
    """Return dtype and shape as errors show them."""
    return f"{dtype_name(x.dtype)}{list(x.shape)}"


def shown_all(arrays: Sequence[Any]) -> str:
    """Return dtypes and shapes as errors show them."""
    return ", ".join(map(shown, arrays)) or "no array"


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


def tile_map(
    fn: Callable[..., Any] | type[Vertex] | Primitive,
    *arrays: Any,
    tiles: Sequence[int] | None = None,
    gradient: Callable[..., Any] | None = None,
    **params: Any,
) -> Any:
    """Map a function over tiles: tile i computes it on row i of each array.

    Args:
        fn: a JAX function of one row of each array, a primitive of JAX, or a codelet, a subclass of `poplar.Vertex`.
        arrays: pytrees of arrays [tiles, …]; of a codelet one array for each field that is read.
        tiles: tile of each row, distinct; None takes the tiles that have the rows, and 0, 1, 2, … if none is known.
            They are needed where there are no arrays.
        gradient: of a codelet, see `ipu.codelet_call`; functions are differentiated by JAX.
        **params: keywords of the function, parameters of the primitive, or state of the codelet.

    Returns:
        The pytree of results of `fn`, each with a leading axis of tiles, row i on the tile of row i.

    Raises:
        ArgumentTypeError: `fn` is not callable, does not run on rows of these shapes, has side effects, maps over tiles
            itself, or returns no arrays.
        ArgumentValueError: arrays without a row for each tile, or a tile twice; under `ipu.jit` a tile that the device
            lacks.
    """
    name = _name(fn)
    where = f"tile_map of {name}"
    numbers = None if tiles is None else tile_numbers(tiles, where)
    leaves, tree = jax.tree.flatten(arrays)
    if numbers is None and not leaves:
        raise ArgumentTypeError(f"{where}: arguments", expected="arrays, or tiles=", got="neither")
    num_tiles = len(numbers) if numbers is not None else tile_array(leaves[0], None, where, "array 0").shape[0]
    rows = [tile_array(x, num_tiles, where, f"array {n}") for n, x in enumerate(leaves)]
    if isinstance(fn, type) and issubclass(fn, Vertex):
        return _map_codelet(fn, rows, numbers, gradient, params, where)
    if gradient is not None:
        raise ArgumentTypeError(f"{where}: gradient", expected="a codelet", got=name, hint="jax.custom_vjp")
    return _map_function(_function(fn, params, where), rows, tree, num_tiles, numbers, name)


def _name(fn: Any) -> str:
    return str(getattr(fn, "__name__", None) or getattr(fn, "name", None) or type(fn).__name__).strip("<>")


def _function(fn: Any, params: dict[str, Any], where: str) -> Callable[..., Any]:
    if isinstance(fn, Primitive):
        return primitive_function(fn, params)
    if not callable(fn):
        raise ArgumentTypeError(where, expected="a function, a primitive or a codelet", got=repr(fn))
    return partial(fn, **params) if params else fn


def _map_codelet(
    codelet: type[Vertex],
    rows: Sequence[jax.Array],
    tiles: tuple[int, ...] | None,
    gradient: Callable[..., Any] | None,
    state: dict[str, Any],
    where: str,
) -> Any:
    """Call a codelet once a tile, each vertex with its tile's row of every array."""
    read = [field for field in connected_fields(codelet) if field.is_read and field.kind in NUM_DIMS]
    # `codelet_call` takes an array of the field's own dimensions as common to all vertices.
    for field, x in zip(read, rows, strict=False):
        if x.ndim != NUM_DIMS[field.kind] + 1:
            expected = f"{NUM_DIMS[field.kind] + 1} dimensions: a {field.kind} for each tile"
            raise ArgumentValueError(f"{where}: array of field {field.name}", expected=expected, got=shown(x))
    return codelet_call(codelet, *rows, tiles=tiles, gradient=gradient, **state)


def _map_function(
    fn: Callable[..., Any], rows: Sequence[jax.Array], tree: Any, num_tiles: int, tiles: Any, name: str
) -> Any:
    """Trace a function of one row of each array, check it, and bind it to run on each tile with its own rows."""
    where = f"tile_map of {name}"
    shapes = [jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in rows]

    def of_leaves(*leaves: Any) -> Any:
        return fn(*jax.tree.unflatten(tree, leaves))

    try:
        jaxpr, out_shape = jax.make_jaxpr(of_leaves, return_shape=True)(*shapes)
    except IpuError:
        raise
    except (TypeError, ValueError) as error:  # of JAX, or of the function, about its operands
        raise ArgumentTypeError(
            f"{where}: the function does not run on one row of each array",
            expected=f"a function of {shown_all(shapes)}",
            got=str(error).partition("\n")[0] or type(error).__name__,
            hint="it takes rows without the axis of tiles",
        ) from error
    jaxpr = discharged_body(jaxpr, where)
    if jaxpr.effects:
        got = ", ".join(sorted(map(str, jaxpr.effects)))
        raise ArgumentTypeError(where, expected="a function without side effects", got=got, hint="print its results")
    nested = sorted(TILE_PRIMITIVES.intersection(primitive_names(jaxpr.jaxpr)))
    if nested:
        hint = "a tile runs the function alone; call tile functions around tile_map"
        raise ArgumentTypeError(where, expected="no tile functions inside", got=", ".join(nested), hint=hint)
    empty = [aval for aval in jaxpr.out_avals if 0 in aval.shape]
    if not jaxpr.out_avals or empty:
        got = shown(empty[0]) if empty else "no result"
        raise ArgumentTypeError(f"{where}: results", expected="arrays with elements", got=got)
    # Arrays that the function closes over are the same on all tiles.
    opened, values = constants_as_inputs(jaxpr)
    constants = [jnp.asarray(x) for x in values]
    run = jaxpr_as_fun(opened)
    stacked = [*(False for _ in constants), *(True for _ in rows)]
    results = map_rows(run, [*constants, *rows], stacked, num_tiles, tiles, name)
    return jax.tree.unflatten(jax.tree.structure(out_shape), results)
