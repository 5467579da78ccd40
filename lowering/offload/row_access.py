"""Tables in streaming memory of which only some rows move.

    table[indices]                                      the rows are loaded
    table.at[indices].add(updates), .subtract(updates)  the rows are loaded, added to, and stored
    table.at[indices].set(updates)                      the rows are stored
    lax.dynamic_slice, lax.dynamic_update_slice         rows that lie one after the other are loaded, or stored

Input: an equation that looks up or updates rows of a table. Output: equations that do so in streaming memory. Updates
of a row that is named several times are added up first, where it is named first: so every copy of the row that is
stored is the same.
Limits: rows of the first dimension, in full, at numbers that are computed: `table[2]`, a view, is not. Several rows one
after the other if all that are named are half of the table or less; sums of them at one place only. Of `n` indices of
a sum, all pairs are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from ipujax.lowering.jax_compat import JaxprEqn, Literal, shape_of, spliced
from ipujax.lowering.offload.primitives import remote_rows_p, remote_update_p

_DROPS = lax.GatherScatterMode.FILL_OR_DROP
_LOOK_UPS = frozenset(("gather", "dynamic_slice"))
_SUMS = frozenset(("scatter-add", "scatter-sub"))


def row_access(eqn: JaxprEqn) -> list[JaxprEqn]:
    """Equations that move the rows that an equation reads or writes of its first operand.

    Args:
        eqn: one that `takes_rows`; its first operand lies in streaming memory, the others do not.
    """
    windows_of, access = _ACCESSES[eqn.primitive.name]
    return spliced(access(eqn, windows_of(eqn)), eqn)


def takes_rows(eqn: JaxprEqn) -> bool:
    """Whether an equation reads or writes rows of its first operand, and nothing else of it."""
    name = eqn.primitive.name
    if name not in _ACCESSES or (name == "scatter" and eqn.params["update_jaxpr"] is not None):
        return False
    return not isinstance(eqn.invars[0], Literal) and _is_by_rows(eqn, _ACCESSES[name][0](eqn))


def writes_rows(eqn: JaxprEqn) -> bool:
    """Whether an equation writes rows of its first operand."""
    return eqn.primitive.name not in _LOOK_UPS and takes_rows(eqn)


def is_slice_of_rows(eqn: JaxprEqn) -> bool:
    """Whether an equation shows rows of its operand that lie one after the other, and are known: `table[2:4]`."""
    if eqn.primitive.name != "slice" or isinstance(eqn.invars[0], Literal):
        return False
    table, rows, params = shape_of(eqn.invars[0]), shape_of(eqn.outvars[0]), eqn.params
    return len(table) > 1 and rows[0] > 0 and rows[1:] == table[1:] and set(params["strides"] or (1,)) == {1}


@dataclass(frozen=True, slots=True)
class _Windows:
    """The windows of a table that an equation reads or writes.

    Args:
        count: how many.
        sizes: of each, in all dimensions of the table.
        axes: their dimensions in what is read or written.
        dropped: dimensions of the table, of size 1, that are not among these.
        named: the dimensions in which an index says where a window starts.
        mode: what becomes of windows that do not lie inside.
    """

    count: int
    sizes: tuple[int, ...]
    axes: tuple[int, ...]
    dropped: tuple[int, ...] = ()
    named: tuple[int, ...] = (0,)
    mode: Any = lax.GatherScatterMode.CLIP

    def order(self, rank: int) -> tuple[int, ...]:
        """The dimensions of what is read or written: those of indices, then those of windows."""
        return (*(axis for axis in range(rank) if axis not in self.axes), *self.axes)


def _is_by_rows(eqn: JaxprEqn, windows: _Windows) -> bool:
    """Whether the windows are whole rows of the first dimension."""
    table = shape_of(eqn.invars[0])
    if len(table) < 2 or windows.sizes[1:] != table[1:] or windows.dropped not in ((), (0,)):
        return False
    if windows.named != (0,) and (0 not in windows.named or windows.mode == _DROPS):
        return False  # other numbers are clamped to 0, but where they drop a row
    size, is_sum = windows.sizes[0], eqn.primitive.name in _SUMS
    is_few = 0 < 2 * windows.count * size <= table[0] and (windows.count == 1 or not is_sum)
    return size == 1 or is_few


def _gathered(eqn: JaxprEqn) -> _Windows:
    dims: Any = eqn.params["dimension_numbers"]
    dropped = (*dims.collapsed_slice_dims, *dims.operand_batching_dims)
    sizes = tuple(eqn.params["slice_sizes"])
    return _Windows(_count(eqn), sizes, dims.offset_dims, dropped, dims.start_index_map, eqn.params["mode"])


def _scattered(eqn: JaxprEqn) -> _Windows:
    dims: Any = eqn.params["dimension_numbers"]
    dropped = (*dims.inserted_window_dims, *dims.operand_batching_dims)
    sizes = (*(1 for _ in dropped), *(shape_of(eqn.invars[2])[axis] for axis in dims.update_window_dims))
    named = dims.scatter_dims_to_operand_dims
    return _Windows(_count(eqn), sizes, dims.update_window_dims, dropped, named, eqn.params["mode"])


def _sliced(eqn: JaxprEqn) -> _Windows:
    sizes = shape_of(eqn.outvars[0] if eqn.primitive.name == "dynamic_slice" else eqn.invars[1])
    return _Windows(1, sizes, tuple(range(len(sizes))))


def _count(eqn: JaxprEqn) -> int:
    return prod(shape_of(eqn.invars[1])[:-1])


def _numbers(table: Any, indices: Any, windows: _Windows) -> Any:
    """The rows that are named, one after the other; clamped to those there are if the mode does not drop others."""
    if len(windows.named) > 1:
        column = windows.named.index(0)
        indices = lax.slice_in_dim(indices, column, column + 1, axis=indices.ndim - 1)
    shape = windows.count, windows.sizes[0]
    flat = lax.reshape(indices, shape[:1])
    last = flat.dtype.type(min(table.shape[0] - shape[1], jnp.iinfo(flat.dtype).max))
    clamped = lax.clamp(flat.dtype.type(0), flat, last)
    numbers = lax.convert_element_type(clamped, np.int32)
    if shape[1] > 1:
        numbers = lax.add(lax.broadcast_in_dim(numbers, shape, (0,)), lax.broadcasted_iota(np.int32, shape, 1))
    if windows.mode == _DROPS:
        known = lax.broadcast_in_dim(lax.eq(flat, clamped), numbers.shape, (0,))
        numbers = lax.select(known, numbers, lax.full_like(numbers, np.iinfo(np.int32).max))
    return lax.reshape(numbers, (prod(shape),))


def _look_up(eqn: JaxprEqn, windows: _Windows) -> Callable[..., Any]:
    shape = shape_of(eqn.outvars[0])
    order = windows.order(len(shape))

    def look_up(table: Any, indices: Any, *_: Any) -> Any:
        numbers = _numbers(table, indices, windows)
        (rows,) = remote_rows_p.bind(table, numbers)
        if windows.mode == _DROPS:
            known = lax.broadcast_in_dim(lax.lt(numbers, np.int32(table.shape[0])), rows.shape, (0,))
            rows = lax.select(known, rows, lax.full_like(rows, _fill(eqn)))
        return lax.transpose(lax.reshape(rows, [shape[axis] for axis in order]), np.argsort(order))

    return look_up


def _fill(eqn: JaxprEqn) -> Any:
    """What stands for rows that are not there; unless told, as `jax.lax.gather` does: NaN, the most of unsigned
    integers, the least of signed ones."""
    out: Any = eqn.outvars[0].aval
    if eqn.params["fill_value"] is not None:
        return eqn.params["fill_value"]
    if jnp.issubdtype(out.dtype, jnp.inexact):
        return np.nan
    if jnp.issubdtype(out.dtype, jnp.unsignedinteger):
        return jnp.iinfo(out.dtype).max
    return jnp.iinfo(out.dtype).min if jnp.issubdtype(out.dtype, jnp.integer) else True


def _add(eqn: JaxprEqn, windows: _Windows, *, combine: Callable[[Any, Any], Any] = lax.add) -> Callable[..., Any]:
    def add(table: Any, indices: Any, updates: Any) -> Any:
        numbers = _numbers(table, indices, windows)
        (rows,) = remote_rows_p.bind(table, numbers)
        values = _by_rows(updates, windows, rows.shape)
        added = values if windows.count == 1 else _sums(numbers, values)
        return remote_update_p.bind(table, numbers, combine(rows, added))[0]

    return add


def _sums(numbers: Any, values: Any) -> Any:
    """For each row the sum of the values of all rows of its number."""
    count = numbers.shape[0]
    own, other = (lax.broadcast_in_dim(numbers, (count, count), (axis,)) for axis in (0, 1))
    same = lax.convert_element_type(lax.eq(own, other), np.float32)
    first = lax.reshape(lax.argmax(same, 1, np.int32), (count, 1))
    inside, window = lax.GatherScatterMode.PROMISE_IN_BOUNDS, tuple(range(1, values.ndim))
    sums = lax.scatter_add(
        lax.full_like(values, -0.0), first, values, lax.ScatterDimensionNumbers(window, (0,), (0,)), mode=inside
    )
    look_up = lax.GatherDimensionNumbers(window, (0,), (0,))
    return lax.gather(sums, first, look_up, (1, *values.shape[1:]), mode=inside)


def _set(eqn: JaxprEqn, windows: _Windows) -> Callable[..., Any]:
    def put(table: Any, indices: Any, updates: Any) -> Any:
        numbers = _numbers(table, indices, windows)
        return remote_update_p.bind(table, numbers, _by_rows(updates, windows, (*numbers.shape, *table.shape[1:])))[0]

    return put


def _set_slice(eqn: JaxprEqn, windows: _Windows) -> Callable[..., Any]:
    put = _set(eqn, windows)
    return lambda table, update, start, *_: put(table, start, update)


def _by_rows(updates: Any, windows: _Windows, shape: tuple[int, ...]) -> Any:
    """What is written, row by row."""
    return lax.reshape(lax.transpose(updates, windows.order(updates.ndim)), shape)


_ACCESSES: Mapping[str, tuple[Callable[[JaxprEqn], _Windows], Callable[[JaxprEqn, _Windows], Callable[..., Any]]]] = {
    "gather": (_gathered, _look_up),
    "dynamic_slice": (_sliced, _look_up),
    "scatter": (_scattered, _set),
    "dynamic_update_slice": (_sliced, _set_slice),
    "scatter-add": (_scattered, _add),
    "scatter-sub": (_scattered, partial(_add, combine=lax.sub)),
}
