"""Tables in streaming memory of which only some rows move.

    table[indices]                                      the rows are loaded
    table.at[indices].add(updates), .subtract(updates)  the rows are loaded, added to, and stored
    table.at[indices].set(updates)                      the rows are stored
    lax.dynamic_slice, lax.dynamic_update_slice         consecutive rows are loaded, or stored

Input: an equation that looks up or updates rows of a table. Output: equations that do so in streaming memory. Updates
of a row with several indices are added up first, at the first of them: so every stored copy of the row is equal.
Limits: entire rows of the first dimension, at computed indices: `table[2]` is a view. Several consecutive rows per
index only if all together are half of the table or less, and sums of them at one index only. Of `n` indices of a sum,
all pairs are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ipujax.lowering.jax_compat import JaxprEqn, Literal, shape_of
from ipujax.lowering.jaxpr import spliced
from ipujax.lowering.offload.primitives import remote_rows_p, remote_update_p
from ipujax.lowering.primitives import LOOK_UPS

_DROPS = lax.GatherScatterMode.FILL_OR_DROP
_SUMS = frozenset(("scatter-add", "scatter-sub"))


def row_access(eqn: JaxprEqn) -> list[JaxprEqn]:
    """Equations that move the accessed rows, for one that `accesses_rows` of a table in streaming memory."""
    access = _ACCESSES[eqn.primitive.name]
    return in_place_of(eqn, access.function(eqn, access.windows(eqn)))


def accesses_rows(eqn: JaxprEqn) -> bool:
    """True if an equation reads or writes rows of its first operand, and nothing else of it."""
    name = eqn.primitive.name
    if name not in _ACCESSES or (name == "scatter" and eqn.params["update_jaxpr"] is not None):
        return False
    return not isinstance(eqn.invars[0], Literal) and _is_by_rows(eqn, _ACCESSES[name].windows(eqn))


def writes_rows(eqn: JaxprEqn) -> bool:
    """True if an equation writes rows of its first operand."""
    return eqn.primitive.name not in LOOK_UPS and accesses_rows(eqn)


def is_slice_of_rows(eqn: JaxprEqn) -> bool:
    """True if an equation slices consecutive rows of its operand at constant indices: `table[2:4]`."""
    if eqn.primitive.name != "slice" or isinstance(eqn.invars[0], Literal):
        return False
    table = shape_of(eqn.invars[0])
    rows = shape_of(eqn.outvars[0])
    params = eqn.params
    return len(table) > 1 and rows[0] > 0 and rows[1:] == table[1:] and set(params["strides"] or (1,)) == {1}


@dataclass(frozen=True, slots=True)
class _Windows:
    """The windows of a table that an equation reads or writes."""

    count: int  # number of windows
    sizes: tuple[int, ...]  # size of each along each dimension of the table
    axes: tuple[int, ...]  # their dimensions in the result, or in the updates
    dropped: tuple[int, ...] = ()  # dimensions of the table of which they have size 1, and that `axes` leave out
    indexed: tuple[int, ...] = (0,)  # dimensions of the table in which an index is the start of a window
    mode: Any = lax.GatherScatterMode.CLIP  # treatment of windows outside the table

    def order(self, rank: int) -> tuple[int, ...]:
        """The dimensions of the result or the updates: those of indices, then those of windows."""
        return (*(axis for axis in range(rank) if axis not in self.axes), *self.axes)


def _is_by_rows(eqn: JaxprEqn, windows: _Windows) -> bool:
    """True if the windows are entire rows of the first dimension, one each or few of them."""
    table = shape_of(eqn.invars[0])
    if len(table) < 2 or windows.sizes[1:] != table[1:] or windows.dropped not in ((), (0,)):
        return False
    if windows.indexed != (0,) and (0 not in windows.indexed or windows.mode == _DROPS):
        return False  # in other dimensions an index clamps to 0, but in this mode another than 0 drops the row
    rows_of_window = windows.sizes[0]
    # Windows of several rows: only if all are half of the table or less, as more move about as much as the whole table;
    # and sums of them at one index only, as windows at several may have rows in common.
    may_have_several = windows.count == 1 or eqn.primitive.name not in _SUMS
    is_half_or_less = 0 < 2 * windows.count * rows_of_window <= table[0]
    return rows_of_window == 1 or (is_half_or_less and may_have_several)


def _windows_of_gather(eqn: JaxprEqn) -> _Windows:
    """Windows of its table that a gather reads, in a form that scatters have too: to tell accesses by entire rows."""
    dims: Any = eqn.params["dimension_numbers"]
    dropped = (*dims.collapsed_slice_dims, *dims.operand_batching_dims)
    sizes = tuple(eqn.params["slice_sizes"])
    return _Windows(
        count=_num_indices(eqn),
        sizes=sizes,
        axes=dims.offset_dims,
        dropped=dropped,
        indexed=dims.start_index_map,
        mode=eqn.params["mode"],
    )


def _windows_of_scatter(eqn: JaxprEqn) -> _Windows:
    """Windows of its table that a scatter writes; their sizes are those of the updates."""
    dims: Any = eqn.params["dimension_numbers"]
    table, _, updates = map(shape_of, eqn.invars)
    dropped = (*dims.inserted_window_dims, *dims.operand_batching_dims)
    window_sizes = iter([updates[axis] for axis in dims.update_window_dims])
    return _Windows(
        count=_num_indices(eqn),
        sizes=tuple(1 if d in dropped else next(window_sizes) for d in range(len(table))),
        axes=dims.update_window_dims,
        dropped=dropped,
        indexed=dims.scatter_dims_to_operand_dims,
        mode=eqn.params["mode"],
    )


def _windows_of_slice(eqn: JaxprEqn) -> _Windows:
    """The one window that a dynamic slice reads, or that its update writes."""
    sizes = shape_of(eqn.outvars[0] if eqn.primitive.name == "dynamic_slice" else eqn.invars[1])
    return _Windows(count=1, sizes=sizes, axes=tuple(range(len(sizes))))


def _num_indices(eqn: JaxprEqn) -> int:
    return prod(shape_of(eqn.invars[1])[:-1])


def _row_numbers(table: Any, indices: Any, windows: _Windows) -> Any:
    """Numbers of the accessed rows, int32[count · rows]; clamped to the table unless the mode drops others.

    `indices` are the start of each window along the indexed dimensions, int[…, dimensions]; int[] of a dynamic slice.
    """
    if len(windows.indexed) > 1:  # along the others windows are whole, and start at 0
        column = windows.indexed.index(0)
        indices = lax.slice_in_dim(indices, column, column + 1, axis=indices.ndim - 1)
    num_rows = windows.sizes[0]  # of each window
    shape = windows.count, num_rows
    starts = lax.reshape(indices, (windows.count,))
    max_start = starts.dtype.type(min(table.shape[0] - num_rows, jnp.iinfo(starts.dtype).max))
    clamped = lax.clamp(starts.dtype.type(0), starts, max_start)
    numbers = lax.convert_element_type(clamped, np.int32)
    if num_rows > 1:
        numbers = lax.add(lax.broadcast_in_dim(numbers, shape, (0,)), lax.broadcasted_iota(np.int32, shape, 1))
    if windows.mode == _DROPS:
        is_inside = lax.broadcast_in_dim(lax.eq(starts, clamped), numbers.shape, (0,))
        # Beyond any table, so that the row reads as zeros and is not written.
        numbers = lax.select(is_inside, numbers, lax.full_like(numbers, np.iinfo(np.int32).max))
    return lax.reshape(numbers, (prod(shape),))


def _look_up_rows(eqn: JaxprEqn, windows: _Windows) -> Callable[..., Any]:
    """The function that loads the rows and gives them the shape and the fill value of the equation."""
    shape = shape_of(eqn.outvars[0])
    order = windows.order(len(shape))

    def look_up(table: Any, indices: Any, *_: Any) -> Any:
        numbers = _row_numbers(table, indices, windows)
        (rows,) = remote_rows_p.bind(table, numbers)
        if windows.mode == _DROPS:
            is_inside = lax.broadcast_in_dim(lax.lt(numbers, np.int32(table.shape[0])), rows.shape, (0,))
            rows = lax.select(is_inside, rows, lax.full_like(rows, _fill_value(eqn)))
        # From dimensions of indices, then of windows, to their order in the result.
        return lax.transpose(lax.reshape(rows, [shape[axis] for axis in order]), np.argsort(order))

    return look_up


def _fill_value(eqn: JaxprEqn) -> Any:
    """Value of rows outside the table; by default, as in JAX, NaN, the maximum if unsigned, else the minimum."""
    out: Any = eqn.outvars[0].aval
    if eqn.params["fill_value"] is not None:
        return eqn.params["fill_value"]
    if jnp.issubdtype(out.dtype, jnp.inexact):
        return np.nan
    if jnp.issubdtype(out.dtype, jnp.unsignedinteger):
        return jnp.iinfo(out.dtype).max
    return jnp.iinfo(out.dtype).min if jnp.issubdtype(out.dtype, jnp.integer) else True


def _add_rows(eqn: JaxprEqn, windows: _Windows, *, combine: Callable[[Any, Any], Any] = lax.add) -> Callable[..., Any]:
    """The function that loads rows, combines them with the sum of all updates of each, and stores them.

    Args:
        eqn: a scatter that adds to its table, or subtracts; unused, as of all functions of `_ACCESSES`.
        windows: windows of the table that it updates.
        combine: the new row from the old one and the sum of its updates.
    """

    def add(table: Any, indices: Any, updates: Any) -> Any:
        numbers = _row_numbers(table, indices, windows)
        (rows,) = remote_rows_p.bind(table, numbers)
        values = _by_rows(updates, windows, rows.shape)
        added = values if windows.count == 1 else _sums_by_row(numbers, values)  # of one window each row occurs once
        return remote_update_p.bind(table, numbers, combine(rows, added))[0]

    return add


def _sums_by_row(numbers: Any, values: Any) -> Any:
    """For each row of `values` the sum of all that have its number; `numbers` has that of each, int32[count]."""
    count = numbers.shape[0]
    # A count × count comparison: each row's sum is at the first row with its number, so that duplicates are equal.
    row, other = (lax.broadcast_in_dim(numbers, (count, count), (axis,)) for axis in (0, 1))
    is_same_row = lax.convert_element_type(lax.eq(row, other), np.float32)
    first = lax.reshape(lax.argmax(is_same_row, 1, np.int32), (count, 1))  # of equal values argmax takes the first
    in_bounds = lax.GatherScatterMode.PROMISE_IN_BOUNDS
    window = tuple(range(1, values.ndim))
    # −0.0 is neutral in a sum; 0.0 would turn a sum of −0.0 into 0.0.
    sums = lax.scatter_add(
        lax.full_like(values, -0.0), first, values, lax.ScatterDimensionNumbers(window, (0,), (0,)), mode=in_bounds
    )
    look_up = lax.GatherDimensionNumbers(window, (0,), (0,))
    return lax.gather(sums, first, look_up, (1, *values.shape[1:]), mode=in_bounds)


def _set_rows(eqn: JaxprEqn, windows: _Windows) -> Callable[..., Any]:
    """The function that replaces entire rows of a table off chip, in place of an update of all of it."""

    def put(table: Any, indices: Any, updates: Any) -> Any:
        numbers = _row_numbers(table, indices, windows)
        return remote_update_p.bind(table, numbers, _by_rows(updates, windows, (*numbers.shape, *table.shape[1:])))[0]

    return put


def _set_slice(eqn: JaxprEqn, windows: _Windows) -> Callable[..., Any]:
    put = _set_rows(eqn, windows)
    return lambda table, update, start, *_: put(table, start, update)


def _by_rows(updates: Any, windows: _Windows, shape: tuple[int, ...]) -> Any:
    """Updates in the order of rows."""
    return lax.reshape(lax.transpose(updates, windows.order(updates.ndim)), shape)


class _Access(NamedTuple):
    """Access of a primitive to a table.

    Args:
        windows: windows that an equation accesses.
        function: makes of an equation and its windows the function of its operands that moves rows.
    """

    windows: Callable[[JaxprEqn], _Windows]
    function: Callable[[JaxprEqn, _Windows], Callable[..., Any]]


_ACCESSES: Mapping[str, _Access] = {
    "gather": _Access(_windows_of_gather, _look_up_rows),
    "dynamic_slice": _Access(_windows_of_slice, _look_up_rows),
    "scatter": _Access(_windows_of_scatter, _set_rows),
    "dynamic_update_slice": _Access(_windows_of_slice, _set_slice),
    "scatter-add": _Access(_windows_of_scatter, _add_rows),
    "scatter-sub": _Access(_windows_of_scatter, partial(_add_rows, combine=lax.sub)),
}


def in_place_of(eqn: JaxprEqn, fun: Callable[..., Any]) -> list[JaxprEqn]:
    """Traces a function of an equation's operands to equations that replace it.

    Args:
        eqn: the equation, of one result; its operands, result, line and scope are those of the replacement.
        fun: from arrays to one array, by functions of `jax.lax` that call no others.
    """
    avals: list[Any] = [x.aval for x in eqn.invars]
    body = jax.make_jaxpr(fun)(*(jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals))
    assert not body.consts, "a spliced function has no constants"
    # The traced body reads the operands of the equation, and defines its result.
    (result,) = body.jaxpr.outvars
    table = dict(zip((*body.jaxpr.invars, result), (*eqn.invars, *eqn.outvars), strict=True))
    eqns, _ = spliced(body.jaxpr, table)
    return [inner.replace(source_info=eqn.source_info) for inner in eqns]
