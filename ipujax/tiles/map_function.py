"""`ipu.tile_map`: a function, a primitive of JAX or a codelet mapped over the rows of tile arrays, one row a tile.

Input: the function of one row of each array, and the arrays. Output: its results with a row for each tile.
Under `ipu.jit` each tile runs one vertex, which has the cycles of the function's primitives on one tile, or of the
codelet's own estimate. Elsewhere, and in gradients and batches, plain JAX maps the same function.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from ipujax.codelet_calls import codelet_call
from ipujax.lowering.jax_compat import Primitive, constants_as_inputs, jaxpr_as_fun, primitive_function
from ipujax.lowering.jaxpr import primitive_names
from ipujax.lowering.refs import discharged_body
from ipujax.lowering.rules import TILE_PRIMITIVES, map_rows
from ipujax.poplar.vertex import NUM_DIMS, Vertex, connected_fields
from ipujax.runtime.errors import ArgumentTypeError, ArgumentValueError, IpuError
from ipujax.tiles.tile_arguments import shown, shown_all, tile_array, tile_numbers


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
            got=str(error).splitlines()[0],
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
