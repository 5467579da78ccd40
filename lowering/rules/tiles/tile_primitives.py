"""Primitives of tile-level JAX: functions mapped over tiles, and arrays placed on tiles, ordered and timed.

A mapped function is one vertex a tile, which computes one row of every result:

    results = tile_map_p.bind(*operands, body=…, stacked=…, num_tiles=…, tiles=…, name=…)

`body` is the jaxpr of one row; operand n has a row for each tile if `stacked[n]`, and is common to all tiles otherwise.
`tiles` are distinct; None leaves rows on the tiles that have them. In plain JAX the function is mapped over the rows.

A vmap keeps the tiles and maps the body. The derivative is two mapped functions: the results with all values that the
linear part needs, and the linear part, which has a transpose; so both run on the tiles of the function.
Limits: the body has no side effects; no collectives.

Others place arrays on tiles, order steps, and read the cycle counter:

    (y,) = tile_put_p.bind(x, rows=…, tiles=…)      # row i of y is row rows[i] of x, on tile tiles[i]
    results = tile_barrier_p.bind(*arrays)          # the arrays, after all steps before it on all tiles
    *results, count = cycle_count_p.bind(*arrays, num_tiles=…)   # the arrays, and the counter of the tile of each row

In plain JAX there is no machine: the counter reads 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ipujax.lowering.jax_compat import ClosedJaxpr, define_jvp, define_transpose, jaxpr_as_fun, make_primitive

COUNT_WORDS = 2  # of 32 bits, the low one first: the counter of a tile has 64 bits


def _put(x: jax.Array, *, rows: tuple[int, ...], tiles: tuple[int, ...]) -> list[jax.Array]:
    in_place = rows == tuple(range(x.shape[0]))
    return [x if in_place else jnp.take(x, np.array(rows, np.int32), axis=0, mode="clip")]


def _shapes_put(x: Any, *, rows: tuple[int, ...], tiles: tuple[int, ...]) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct((len(rows), *x.shape[1:]), x.dtype)]


def _batched_put(operands: Sequence[Any], axes: Sequence[int], **params: Any) -> tuple[list[Any], list[int]]:
    (x,) = operands
    (axis,) = axes
    return tile_put_p.bind(jnp.moveaxis(x, axis, 1), **params), [1]


def _jvp_put(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> tuple[Any, Any]:
    (tangent,) = tangents
    return tile_put_p.bind(*primals, **params), [None if tangent is None else tile_put_p.bind(tangent, **params)[0]]


def _transposed_put(
    cotangents: Sequence[Any], operands: Sequence[Any], is_linear: Sequence[bool], *, rows: tuple[int, ...], **_: Any
) -> list[Any]:
    """Transpose of `tile_put`: the cotangent of a row is the sum of those of its copies on tiles, zeros without copies.

    Args:
        cotangents: cotangent of the only result, [tiles, …]; None for zeros.
        operands: the only operand, [rows, …].
        is_linear: True for it.
        rows: the row that each tile got.
    """
    (cotangent,) = cotangents
    (x,) = operands
    if cotangent is None:
        return [jnp.zeros(x.shape, x.dtype)]
    if rows == tuple(range(x.shape[0])):
        return [cotangent]
    if x.shape[0] == 1:
        return [jnp.sum(cotangent, 0, keepdims=True, dtype=x.dtype)]
    return [jnp.zeros(x.shape, x.dtype).at[np.array(rows, np.int32)].add(cotangent)]


tile_put_p = make_primitive("tile_put", _put, _shapes_put, _batched_put)
define_jvp(tile_put_p, _jvp_put)
define_transpose(tile_put_p, _transposed_put)


def _same(*arrays: Any) -> list[Any]:
    return list(arrays)


def _batched_barrier(operands: Sequence[Any], axes: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    return tile_barrier_p.bind(*operands), list(axes)


def _jvp_barrier(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
    return tile_barrier_p.bind(*primals), list(tangents)


tile_barrier_p = make_primitive("tile_barrier", _same, _same, _batched_barrier)
define_jvp(tile_barrier_p, _jvp_barrier)


def _count(*arrays: Any, num_tiles: int) -> list[Any]:
    return [*arrays, jnp.zeros((num_tiles, COUNT_WORDS), jnp.uint32)]


def _shapes_count(*arrays: Any, num_tiles: int) -> list[Any]:
    return [*arrays, jax.ShapeDtypeStruct((num_tiles, COUNT_WORDS), np.dtype(np.uint32))]


def _batched_count(operands: Sequence[Any], axes: Sequence[Any], *, num_tiles: int) -> tuple[list[Any], list[Any]]:
    # One counter for the batch, whose indices run at the same time.
    return cycle_count_p.bind(*operands, num_tiles=num_tiles), [*axes, None]


def _jvp_count(primals: Sequence[Any], tangents: Sequence[Any], *, num_tiles: int) -> tuple[Any, Any]:
    return cycle_count_p.bind(*primals, num_tiles=num_tiles), [*tangents, None]


cycle_count_p = make_primitive("cycle_count", _count, _shapes_count, _batched_count)
define_jvp(cycle_count_p, _jvp_count)


Flags = tuple[bool, ...]


def map_rows(
    fun: Callable[..., Sequence[Any]],
    operands: Sequence[Any],
    stacked: Sequence[bool],
    num_tiles: int,
    tiles: tuple[int, ...] | None,
    name: str,
) -> list[jax.Array]:
    """Maps a function over tiles: binds a primitive that runs it once on each; returns its results, [tiles, …] each.

    Args:
        fun: function of the rows of operands that returns a sequence of arrays.
        operands: the arrays.
        stacked: whether an operand has a row for each tile.
        num_tiles: number of tiles.
        tiles: the tile of each row; None leaves rows on the tiles that have them.
        name: name of the function.
    """
    body = _jaxpr_of_rows(fun, operands, stacked)
    params = {"stacked": tuple(stacked), "num_tiles": num_tiles, "tiles": tiles, "name": name}
    return list(tile_map_p.bind(*operands, body=body, **params))


def _jaxpr_of_rows(fun: Callable[..., Any], operands: Sequence[Any], stacked: Sequence[bool]) -> ClosedJaxpr:
    return jax.make_jaxpr(fun)(*_row_shapes(operands, stacked))


def _row_shapes(operands: Sequence[Any], stacked: Sequence[bool]) -> list[jax.ShapeDtypeStruct]:
    """Shape and dtype of a row of each operand; of one that is common to all tiles its own."""
    pairs = zip(operands, stacked, strict=True)
    return [jax.ShapeDtypeStruct(x.shape[1:] if has_rows else x.shape, x.dtype) for x, has_rows in pairs]


def _compute(*operands: jax.Array, body: ClosedJaxpr, stacked: Flags, num_tiles: int, **_: Any) -> list[jax.Array]:
    """Results in plain JAX."""
    axes = [0 if rows else None for rows in stacked]
    return list(jax.vmap(jaxpr_as_fun(body), axes, axis_size=num_tiles)(*operands))


def _shapes(*_: Any, body: ClosedJaxpr, num_tiles: int, **__: Any) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct((num_tiles, *aval.shape), aval.dtype) for aval in body.out_avals]


def _batched(
    operands: Sequence[jax.Array], axes: Sequence[int | None], *, body: ClosedJaxpr, stacked: Flags, **params: Any
) -> tuple[list[jax.Array], list[int]]:
    """Batching rule of `jax.vmap` for a function mapped over tiles: each tile computes all indices of the batch.

    Args:
        operands: operands, some with a dimension for the batch.
        axes: that dimension of each operand; None for one that is common to the batch.
        body: jaxpr of a tile's function.
        stacked: for each operand whether it has a row for each tile.
        params: other parameters of the primitive.

    Returns:
        The results, [tiles, batch, …], and the dimension of each for the batch.
    """
    # The batch is behind the tiles.
    arrays = [
        x if axis is None else jnp.moveaxis(x, axis, 1 if rows else 0)
        for x, axis, rows in zip(operands, axes, stacked, strict=True)
    ]
    size = next(x.shape[axis] for x, axis in zip(operands, axes, strict=True) if axis is not None)
    mapped = jax.vmap(jaxpr_as_fun(body), [None if axis is None else 0 for axis in axes], axis_size=size)
    results = map_rows(mapped, arrays, stacked, **params)
    return results, [1] * len(results)


def _jvp(
    primals: Sequence[Any], tangents: Sequence[Any], *, body: ClosedJaxpr, stacked: Flags, **params: Any
) -> tuple[Sequence[Any], Sequence[Any]]:
    """Derivative of a function mapped over tiles, as two mapped functions, so that both run on the tiles of the first.

    The forward part returns the function's results, then the residuals: what the linear part needs of the primals. The
    linear part maps residuals and tangents to tangents of results; JAX transposes it for gradients.

    Args:
        primals: the operands.
        tangents: tangent of each operand; None for zero.
        body: jaxpr of a tile's function.
        stacked: for each operand whether it has a row for each tile.
        params: other parameters of the primitive.

    Returns:
        The results, and their tangents, None for zero.
    """
    active = [n for n, tangent in enumerate(tangents) if tangent is not None]
    run = jaxpr_as_fun(body)

    def linearized(*rows: Any) -> Any:
        def of_active(*values: Any) -> Any:
            replaced = dict(zip(active, values, strict=True))
            return run(*(replaced.get(n, row) for n, row in enumerate(rows)))

        return jax.linearize(of_active, *(rows[n] for n in active))

    forward, out_shape = jax.make_jaxpr(linearized, return_shape=True)(*_row_shapes(primals, stacked))
    num_results = len(body.out_avals)
    outvars = forward.jaxpr.outvars
    # A residual that is an operand is read from there, and not stored a second time.
    positions = {var: n for n, var in enumerate(forward.jaxpr.invars)}
    stored = [n for n, var in enumerate(outvars) if n < num_results or _position(positions, var) is None]

    def forward_part(*rows: Any) -> list[Any]:
        outs = jaxpr_as_fun(forward)(*rows)
        return [outs[n] for n in stored]

    values = dict(zip(stored, map_rows(forward_part, primals, stacked, **params), strict=True))
    operand_of = [_position(positions, var) for var in outvars[num_results:]]
    residuals = [
        values[number] if operand is None else primals[operand]
        for number, operand in enumerate(operand_of, num_results)
    ]
    have_rows = [operand is None or stacked[operand] for operand in operand_of]
    # The linear part that `linearize` returns is a pytree, whose leaves are the residuals.
    push_tree = jax.tree.structure(out_shape[1])
    is_active = [jnp.issubdtype(aval.dtype, jnp.inexact) for aval in body.out_avals]

    def linear_part(*rows: Any) -> list[Any]:
        """Tangents of results, from the residuals and the tangents of active operands."""
        push = jax.tree.unflatten(push_tree, rows[: len(residuals)])
        pushed = push(*rows[len(residuals) :])
        return [tangent for tangent, has_tangent in zip(pushed, is_active, strict=True) if has_tangent]

    flags = [*have_rows, *(stacked[n] for n in active)]
    pushed = iter(map_rows(linear_part, [*residuals, *(tangents[n] for n in active)], flags, **params))
    return [values[n] for n in range(num_results)], [next(pushed) if has_tangent else None for has_tangent in is_active]


def _position(positions: dict[Any, int], var: Any) -> int | None:
    """Number of the operand that a result is; None if it is none."""
    return None if hasattr(var, "val") else positions.get(var)  # a literal has no hash


def _transposed(
    cotangents: Sequence[Any],
    operands: Sequence[Any],
    is_linear: Sequence[bool],
    *,
    body: ClosedJaxpr,
    stacked: Flags,
    **params: Any,
) -> list[Any]:
    """Transpose of a function mapped over tiles, as another mapped function, on the same tiles.

    Args:
        cotangents: cotangent of each result, [tiles, …]; None for zero.
        operands: operands; of those that the function is linear in shape and dtype alone.
        is_linear: which operands these are.
        body: jaxpr of a tile's function.
        stacked: for each operand whether it has a row for each tile.
        params: other parameters of the primitive.

    Returns:
        Cotangents of the operands that the function is linear in, None for others.
    """
    linear = [n for n, is_one in enumerate(is_linear) if is_one]
    nonlinear = [n for n, is_one in enumerate(is_linear) if not is_one]
    active = [n for n, cotangent in enumerate(cotangents) if cotangent is not None]
    linear_rows = _row_shapes([operands[n] for n in linear], [stacked[n] for n in linear])

    def pulled(*rows: Any) -> tuple[Any, ...]:
        """Cotangents of linear operands, from the other operands and the cotangents of active results."""
        fixed = dict(zip(nonlinear, rows, strict=False))  # `rows` go on with the cotangents

        def of_linear(*values: Any) -> list[Any]:
            inputs = fixed | dict(zip(linear, values, strict=True))
            outs = jaxpr_as_fun(body)(*(inputs[n] for n in range(len(operands))))
            return [outs[n] for n in active]

        return tuple(jax.linear_transpose(of_linear, *linear_rows)(list(rows[len(nonlinear) :])))

    inputs = [*(operands[n] for n in nonlinear), *(cotangents[n] for n in active)]
    flags = [*(stacked[n] for n in nonlinear), *(True for _ in active)]
    pulls = map_rows(pulled, inputs, flags, **params)
    # An operand that all tiles read has the sum of their cotangents.
    results = {n: x if stacked[n] else jnp.sum(x, 0, dtype=x.dtype) for n, x in zip(linear, pulls, strict=True)}
    return [results.get(n) for n in range(len(operands))]


tile_map_p = make_primitive("tile_map", _compute, _shapes, _batched)
define_jvp(tile_map_p, _jvp)
define_transpose(tile_map_p, _transposed)
