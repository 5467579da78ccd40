"""Tables in streaming memory of which only some rows move.

    table[indices]                    the rows are loaded
    table.at[indices].add(updates)    the rows are loaded, added to, and stored
    table.at[indices].set(updates)    the rows are stored

Input: an equation that looks up or updates rows of a table. Output: equations that do so in streaming memory. Updates
of a row that is named several times are added up first, where it is named first: so
every copy of the row that is stored is the same.
Limits: rows of the first dimension, in full. Of `n` indices, all pairs are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from ipujax.lowering.jax_compat import JaxprEqn, Literal, shape_of, spliced
from ipujax.lowering.offload.primitives import remote_rows_p, remote_update_p

_DROPS = lax.GatherScatterMode.FILL_OR_DROP


def row_access(eqn: JaxprEqn) -> list[JaxprEqn]:
    """Equations that move the rows that an equation reads or writes of its first operand.

    Args:
        eqn: one that `takes_rows`; its first operand lies in streaming memory, the others do not.
    """
    return spliced(_ACCESSES[eqn.primitive.name](eqn), eqn)


def takes_rows(eqn: JaxprEqn) -> bool:
    """Whether an equation reads or writes rows of its first operand, and nothing else of it."""
    applies_function = eqn.primitive.name == "scatter" and eqn.params["update_jaxpr"] is not None
    return eqn.primitive.name in _ACCESSES and not applies_function and _is_by_rows(eqn)


def writes_rows(eqn: JaxprEqn) -> bool:
    """Whether an equation writes rows of its first operand."""
    return eqn.primitive.name != "gather" and takes_rows(eqn)


def _is_by_rows(eqn: JaxprEqn) -> bool:
    """Whether whole rows of the first dimension are named by one index each."""
    dims: Any = eqn.params["dimension_numbers"]
    table, indices = (shape_of(atom) for atom in eqn.invars[:2])
    if len(table) < 2 or indices[-1:] != (1,) or isinstance(eqn.invars[0], Literal):
        return False
    count, rank = len(indices) - 1, len(table)
    offsets = tuple(range(count, count + rank - 1))
    if eqn.primitive.name == "gather":
        own = dims.offset_dims, dims.collapsed_slice_dims, dims.start_index_map, dims.operand_batching_dims
        return own == (offsets, (0,), (0,), ()) and tuple(eqn.params["slice_sizes"]) == (1, *table[1:])
    own = (
        dims.update_window_dims,
        dims.inserted_window_dims,
        dims.scatter_dims_to_operand_dims,
        dims.operand_batching_dims,
    )
    is_whole = shape_of(eqn.invars[2])[count:] == table[1:]
    return own == (offsets, (0,), (0,), ()) and is_whole


def _numbers(indices: Any, rows: int, mode: Any) -> Any:
    """The rows that indices name, one after the other; clamped to those there are if the mode does not drop others."""
    flat = lax.reshape(indices, (indices.size,))
    last = flat.dtype.type(min(rows - 1, jnp.iinfo(flat.dtype).max))
    clamped = lax.clamp(flat.dtype.type(0), flat, last)
    known = lax.eq(flat, clamped)
    numbers = lax.convert_element_type(clamped, np.int32)
    return numbers if mode != _DROPS else lax.select(known, numbers, lax.full_like(numbers, np.iinfo(np.int32).max))


def _gather(eqn: JaxprEqn) -> Callable[..., Any]:
    def look_up(table: Any, indices: Any, *, mode: Any, fill: Any, shape: tuple[int, ...]) -> Any:
        numbers = _numbers(indices, table.shape[0], mode)
        (rows,) = remote_rows_p.bind(table, numbers)
        if mode == _DROPS:
            known = lax.broadcast_in_dim(lax.lt(numbers, np.int32(table.shape[0])), rows.shape, (0,))
            rows = lax.select(known, rows, lax.full_like(rows, fill))
        return lax.reshape(rows, shape)

    params = eqn.params
    fill = params["fill_value"]
    if fill is None:
        dtype: Any = eqn.outvars[0].aval
        fill = _default_fill(np.dtype(dtype.dtype))
    return partial(look_up, mode=params["mode"], fill=fill, shape=shape_of(eqn.outvars[0]))


def _default_fill(dtype: np.dtype) -> Any:
    """What `jax.lax.gather` fills with unless told: NaN, the most of unsigned integers, the least of signed ones."""
    if jnp.issubdtype(dtype, jnp.inexact):
        return np.nan
    if jnp.issubdtype(dtype, jnp.unsignedinteger):
        return jnp.iinfo(dtype).max
    return jnp.iinfo(dtype).min if jnp.issubdtype(dtype, jnp.integer) else True


def _add(eqn: JaxprEqn) -> Callable[..., Any]:
    def add(table: Any, indices: Any, updates: Any, *, mode: Any) -> Any:
        numbers = _numbers(indices, table.shape[0], mode)
        (rows,) = remote_rows_p.bind(table, numbers)
        count = numbers.shape[0]
        own, other = (lax.broadcast_in_dim(numbers, (count, count), (axis,)) for axis in (0, 1))
        same = lax.convert_element_type(lax.eq(own, other), np.float32)
        first = lax.reshape(lax.argmax(same, 1, np.int32), (count, 1))
        values, inside = lax.reshape(updates, rows.shape), lax.GatherScatterMode.PROMISE_IN_BOUNDS
        window = tuple(range(1, rows.ndim))
        sums = lax.scatter_add(
            lax.full_like(values, -0.0), first, values, lax.ScatterDimensionNumbers(window, (0,), (0,)), mode=inside
        )
        look_up = lax.GatherDimensionNumbers(window, (0,), (0,))
        added = lax.gather(sums, first, look_up, (1, *rows.shape[1:]), mode=inside)
        return remote_update_p.bind(table, numbers, lax.add(rows, added))[0]

    return partial(add, mode=eqn.params["mode"])


def _set(eqn: JaxprEqn) -> Callable[..., Any]:
    def put(table: Any, indices: Any, updates: Any, *, mode: Any) -> Any:
        numbers = _numbers(indices, table.shape[0], mode)
        return remote_update_p.bind(table, numbers, lax.reshape(updates, (numbers.size, *table.shape[1:])))[0]

    return partial(put, mode=eqn.params["mode"])


_ACCESSES: Mapping[str, Callable[[JaxprEqn], Callable[..., Any]]] = {
    "gather": _gather,
    "scatter": _set,
    "scatter-add": _add,
}
