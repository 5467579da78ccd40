"""Gathers and scatters by constant indices: slices, and rows as a view, which need no look-up.

All look-ups of a slice have one constant position. Among them are empty index vectors (`x.at[:].add(u)`) and slices
(`x.at[1:-1].set(u)`), whose index vectors are constants. Such a gather is a view; a scatter combines a slice of the
table with the updates, and its result is a view of that and of the rest of the table.
Limits: several updates of one position are combined with each other first, which reassociates sums and products. Those
of floats of less than 32 bits, which would round differently, and those by a user's function are combined with the
table one after the other, each part of the window by a vertex.

Rows by constant numbers are a view, whose rows are exchanged when tiles read them:

    rows = take_rows(x, np.array([2, 0, 2]))  # [n, …] → [3, …]

A gather takes computed indices, so that its vertices look up each of them. Limits: no differentiation rule; whoever
binds it defines a gradient around it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ipujax.lowering.jax_compat import Primitive, make_primitive
from ipujax.lowering.popops import GatherSpec, Mode, ScatterSpec, fill_of
from ipujax.lowering.rules.base.context import Context, Rule
from ipujax.runtime.tensor import Tensor, concat, elements


def _compute(x: jax.Array, *, rows: tuple[int, ...]) -> list[jax.Array]:
    return [jnp.take(x, np.array(rows, np.int32), axis=0, mode="clip")]


def _shapes(x: Any, *, rows: tuple[int, ...]) -> list[jax.ShapeDtypeStruct]:
    assert rows and min(rows) >= 0 and max(rows) < x.shape[0]
    return [jax.ShapeDtypeStruct((len(rows), *x.shape[1:]), x.dtype)]


def _batched(operands: Sequence[Any], axes: Sequence[int], *, rows: tuple[int, ...]) -> tuple[list[Any], list[int]]:
    (x,), (axis,) = operands, axes
    return take_rows_p.bind(jnp.moveaxis(x, axis, 1), rows=rows), [1]


take_rows_p = make_primitive("take_rows", _compute, _shapes, _batched)


def take_rows(x: jax.Array, rows: np.ndarray) -> jax.Array:
    """Return the rows with the numbers `rows`, in row-major order of an array of any rank, int: [rows.size, …]."""
    (view,) = take_rows_p.bind(x, rows=tuple(rows.ravel().tolist()))
    return jnp.asarray(view)


def take_rows_rule(ctx: Context, x: Tensor, *, rows: tuple[int, ...]) -> list[Tensor]:
    """Joins slices of consecutive rows."""
    starts = [0, *(np.flatnonzero(np.diff(rows) != 1) + 1).tolist(), len(rows)]
    return [concat([x[rows[a] : rows[b - 1] + 1] for a, b in pairwise(starts)], 0)]


RULES: dict[str, Rule] = {"take_rows": take_rows_rule}


Position = Sequence[int]  # a component for each indexed dimension
_MOST_COMPARED = 4096  # indices that are compared; assumed: more are rarely all equal


class _Combination(NamedTuple):
    """Functions that combine the updates of one position with each other, and then with the table."""

    of_updates: Callable[..., jax.Array]
    with_table: Callable[..., jax.Array]


_COMBINATIONS = {
    "scatter-add": _Combination(lax.reduce_sum, lax.add),
    "scatter-sub": _Combination(lax.reduce_sum, lax.sub),
    "scatter-mul": _Combination(lax.reduce_prod, lax.mul),
    "scatter-min": _Combination(lax.reduce_min, lax.min),
    "scatter-max": _Combination(lax.reduce_max, lax.max),
}


def constant_position(indices: Tensor) -> Position | None:
    """Position in the table that all look-ups of a gather or scatter have, if it is known while lowering; else None.

    Then the look-up is a slice. More indices than `_MOST_COMPARED` are not compared.

    Args:
        indices: indices of a gather or scatter, [look-ups …, indexed dimensions]: a vector for each look-up.
    """
    if not indices.shape[-1]:  # no dimension is indexed
        return ()
    variables = indices.variables()
    constant = all(v.is_constant and not v.by_replica for v in variables)
    if not constant or not 0 < indices.size <= _MOST_COMPARED:
        return None
    # Of each element of the view: which variable it is in, and its number there.
    variable_numbers, element_numbers = elements(indices.node, variables)
    values = np.zeros(indices.shape, object)
    for number, variable in enumerate(variables):
        is_of_variable = variable_numbers == number
        values[is_of_variable] = np.ravel(np.asarray(variable.value))[element_numbers[is_of_variable]]
    vectors = values.reshape(-1, indices.shape[-1])
    return tuple(int(n) for n in vectors[0]) if (vectors == vectors[0]).all() else None


def gather_from(table: jax.Array, position: Position, spec: GatherSpec, out_shape: Sequence[int]) -> jax.Array:
    """Result of a gather whose look-ups all have one position: a window of the table, repeated for each look-up.

    Args:
        table: the array that is looked up.
        position: index vector of all look-ups, as `constant_position` returns it.
        spec: parameters of the gather.
        out_shape: shape of the result.
    """
    batched = spec.numbers.operand_batching_dims
    # A batched dimension is in the window as a whole: each of its elements belongs to another look-up.
    sizes = [n if d in batched else spec.slice_sizes[d] for d, n in enumerate(table.shape)]
    starts, is_inside = _clamped_starts(table.shape, sizes, spec.indexed, position)
    if spec.mode is Mode.FILL_OR_DROP and not is_inside:
        return lax.broadcast(fill_of(spec.fill, table.dtype), out_shape)
    window = lax.slice(table, starts, [start + n for start, n in zip(starts, sizes, strict=True)])
    result_dim_of = spec.result_dims()  # for each dimension of the table; None for one that the result does not have
    window = lax.squeeze(window, [d for d, out in enumerate(result_dim_of) if out is None])
    result_dims = [out for out in result_dim_of if out is not None]
    window = lax.transpose(window, np.argsort(result_dims).tolist())
    return lax.broadcast_in_dim(window, out_shape, sorted(result_dims))


def combines_in_order(spec: ScatterSpec) -> bool:
    """True if updates of one position are combined with the table one after the other."""
    if spec.kind == "scatter":
        return spec.function is not None
    return spec.is_narrow_sum


def scatter_to(
    table: jax.Array,
    updates: jax.Array,
    position: Position,
    spec: ScatterSpec,
    primitive: Primitive,
    params: dict[str, Any],
) -> jax.Array:
    """Result of a scatter whose updates all have one position: the table with a window of it combined with them.

    Args:
        table: the array that is updated.
        updates: updates, [look-ups …, window …] in the order of the dimension numbers.
        position: index vector of all updates, as `constant_position` returns it.
        spec: parameters of the scatter.
        primitive: primitive of the scatter, which `_in_order` binds again.
        params: parameters of that primitive.
    """
    numbers = spec.numbers
    extents = spec.update_sizes()
    sizes = [n if d in numbers.operand_batching_dims else extents[d] for d, n in enumerate(table.shape)]
    starts, is_inside = _clamped_starts(table.shape, sizes, spec.indexed, position)
    if spec.mode is not Mode.CLIP and not is_inside:
        return table
    window = lax.dynamic_slice(table, starts, sizes)
    lookups = [u for u in range(updates.ndim) if u not in numbers.update_window_dims]  # dimensions of look-ups
    batched = zip(numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True)
    batch_dims = {d: lookups[i] for d, i in batched}  # by dimension of the table that of the updates
    # Dimension of the updates for each of the table; None for one that they do not have.
    dims = [batch_dims.get(d, u) for d, u in enumerate(spec.update_dims())]
    repeats = [u for u in lookups if u not in batch_dims.values()]  # along these all updates meet in the window
    if combines_in_order(spec):
        window = _in_order(window, updates, spec, primitive, params)
    elif spec.kind in _COMBINATIONS:
        combination = _COMBINATIONS[spec.kind]
        combined = combination.of_updates(updates, repeats) if repeats else updates
        window = combination.with_table(window, _like_window(combined, dims, repeats, sizes))
    else:
        # Of updates that replace the last counts.
        first = [n - 1 if u in repeats else 0 for u, n in enumerate(updates.shape)]
        last_update = lax.squeeze(lax.slice(updates, first, updates.shape), repeats)
        window = _like_window(last_update, dims, repeats, sizes)
    return lax.dynamic_update_slice(table, window, starts)


def _clamped_starts(
    shape: Sequence[int], sizes: Sequence[int], indexed: Sequence[int], position: Position
) -> tuple[list[int], bool]:
    """Start of the window, clamped so that it fits, and whether it fits unclamped."""
    by_dim = dict(zip(indexed, position, strict=True))
    unclamped = [by_dim.get(d, 0) for d in range(len(shape))]
    starts = [min(max(start, 0), n - size) for start, n, size in zip(unclamped, shape, sizes, strict=True)]
    return starts, starts == unclamped


def _like_window(updates: jax.Array, dims: Sequence[int | None], reduced: Sequence[int], shape: Sequence[int]) -> Any:
    """Updates transposed to the order of the table's dimensions, in the shape of the window that they are written to.

    Args:
        updates: updates without their dimensions `reduced`.
        dims: dimension of the updates, with these, for each of the table; None for one that they do not have.
        reduced: dimensions along which they were combined.
        shape: shape of the window, of size 1 where updates have no dimension.
    """
    remaining = [u for u in range(updates.ndim + len(reduced)) if u not in reduced]
    return lax.transpose(updates, [remaining.index(u) for u in dims if u is not None]).reshape(shape)


def _in_order(
    window: jax.Array, updates: jax.Array, spec: ScatterSpec, primitive: Primitive, params: dict[str, Any]
) -> jax.Array:
    """Window of a table with updates applied one after the other: for those that rounding does not let reassociate.

    It is a scatter to the window alone, which gets a further dimension of size 1 in which all updates have index 0.

    Args:
        window: the part of the table that all updates cover.
        updates: the updates.
        spec: parameters of the scatter to the table.
        primitive: primitive of that scatter.
        params: its parameters.
    """
    old = spec.numbers
    rank = window.ndim
    lookups = [n for u, n in enumerate(updates.shape) if u not in old.update_window_dims]  # numbers of look-ups
    numbers = lax.ScatterDimensionNumbers(
        update_window_dims=old.update_window_dims,
        inserted_window_dims=(*old.inserted_window_dims, rank),
        scatter_dims_to_operand_dims=(rank,),
        operand_batching_dims=old.operand_batching_dims,
        scatter_indices_batching_dims=old.scatter_indices_batching_dims,
    )
    indices = lax.full((*lookups, 1), 0, np.int32)
    window_params = {**params, "dimension_numbers": numbers, "unique_indices": False}
    return primitive.bind(lax.expand_dims(window, (rank,)), indices, updates, **window_params)[..., 0]
