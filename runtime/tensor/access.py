"""Reading and writing of views with JAX.

Input: a node of `ipujax.runtime.tensor.view`, and arrays of the variables' own shapes. Output: an array of the node's
shape, or the variables' arrays after a write. An affine piece becomes reshape, slice, reverse, transpose and broadcast
in that order, each only where it changes something; XLA fuses these, and on CPU a reshape is free. Writes invert the
order, down to a `dynamic_update_slice`. A list of elements, or a piece that no static slice fits, is a gather or
scatter.

A view of a concatenation may be reshaped, so that each of its rows is in parts, or transposed, so that each part is.
Its affine parts are joined in rows, in the order in which their arrays have their dimensions, and the result is
reshaped and transposed (`Joined`). XLA then finds that two views are of one array, and joins it once.

    node [d0, …, dn] = transpose(reshape(concatenate(parts, axis)))

Works on traced arrays, and on arrays of PRNG keys. Limit: gathered elements are numbered in 32 bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import prod

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ipujax.runtime.tensor.affine import Affine
from ipujax.runtime.tensor.slice_plan import SlicePlan, slice_plan
from ipujax.runtime.tensor.variable import Variable
from ipujax.runtime.tensor.view import Concat, Indexed, Node, Reshaped


@dataclass(frozen=True, slots=True)
class Joined:
    """A concatenation whose parts have their dimensions in the order of memory.

    Args:
        parts: views without dimensions of size 1, but for the axis.
        axis: number of the dimension along which they are joined.
        shape: dimensions of the joined parts, in the order of the arrays.
        order: for each of these dimensions, its number among those of the view, of which one may be split in two.
        view_shape: shape of the view with that dimension split.
    """

    parts: tuple[Affine, ...]
    axis: int
    shape: tuple[int, ...]
    order: tuple[int, ...]
    view_shape: tuple[int, ...]

    @property
    def bounds(self) -> list[int]:
        """First index of each part along the axis, and the extent."""
        return list(accumulate((part.shape[self.axis] for part in self.parts), initial=0))

    def view(self, array: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """Return the joined parts as the view, of `shape`."""
        inverse = [self.order.index(number) for number in range(len(self.order))]
        return lax.reshape(_transposed(lax.reshape(array, self.shape), inverse), shape)

    def array(self, new: jax.Array) -> jax.Array:
        """Return an array of the view's shape as the joined parts."""
        joined_shape = list(self.parts[0].shape)
        joined_shape[self.axis] = self.bounds[-1]
        return lax.reshape(_transposed(lax.reshape(new, self.view_shape), self.order), joined_shape)


def _transposed(array: jax.Array, order: Sequence[int]) -> jax.Array:
    return array if list(order) == sorted(order) else lax.transpose(array, tuple(order))


def joined(node: Concat) -> Joined | None:
    """Return a concatenation by its parts; None if a part is not affine."""
    parts = [part for part in node.parts if isinstance(part, Affine)]
    if len(parts) < len(node.parts):
        return None
    axis = node.axis
    shape = node.shape
    rows, steps = _equal_rows(parts)
    if rows > 1:
        row_parts = parts[: len(steps)]
        parts = [_with_rows(part, axis, rows, step) for part, step in zip(row_parts, steps, strict=True)]
        shape = (*shape[:axis], rows, shape[axis] // rows, *shape[axis + 1 :])
        axis += 1
    order = _storage_order(max(parts, key=lambda part: prod(part.shape)))
    split_dims = [number for number in order if number == axis or shape[number] > 1]
    views = tuple(replace(part, dims=tuple(part.dims[number] for number in split_dims)) for part in parts)
    return Joined(views, split_dims.index(axis), tuple(shape[n] for n in order), order, shape)


def _equal_rows(parts: Sequence[Affine]) -> tuple[int, list[int]]:
    """Return the number of equal rows that parts form, and the distance of rows in each part of the first."""
    count = len(parts)
    for period in (n for n in range(1, count) if count % n == 0):
        steps = [parts[n + period].offset - parts[n].offset for n in range(period)]
        expected = (
            replace(parts[n % period], offset=parts[n % period].offset + n // period * steps[n % period])
            for n in range(count)
        )
        if all(part == row for part, row in zip(parts, expected, strict=True)):
            return count // period, steps
    return 1, []


def _with_rows(part: Affine, axis: int, rows: int, step: int) -> Affine:
    return replace(part, dims=(*part.dims[:axis], ((rows, step),), *part.dims[axis:]))


def _storage_order(part: Affine) -> tuple[int, ...]:
    """Return the dimensions by their largest strides, outermost first."""
    strides = [max((abs(stride) for _, stride in group), default=0) for group in part.dims]
    return tuple(sorted(range(len(strides)), key=lambda n: (strides[n] != 0, -strides[n])))


Values = Mapping[Variable, jax.Array]


# --- reading ----------------------------------------------------------------------------------------------------------


def read_node(node: Node, values: Values) -> jax.Array:
    """Return the elements of a node, as an array of its shape.

    Affine parts are concatenated in the order of their memory, and the whole is transposed to the shape of the node,
    once in place of once a part.
    """
    if isinstance(node, Affine):
        return _read_affine(node, values[node.variable])
    if isinstance(node, Concat):
        in_memory_order = joined(node)
        if in_memory_order is not None:
            arrays = [read_node(part, values) for part in in_memory_order.parts]
            return in_memory_order.view(lax.concatenate(arrays, in_memory_order.axis), node.shape)
        return lax.concatenate([read_node(part, values) for part in node.parts], node.axis)
    if isinstance(node, Reshaped):
        return lax.reshape(read_node(node.source, values), node.shape)
    return _read_indexed(node, values)


def _read_affine(piece: Affine, array: jax.Array) -> jax.Array:
    """Read a piece of a variable's array as one static slice; by a gather where none fits."""
    shape = piece.shape
    if piece.is_whole:
        return _reshape(array, shape)
    if piece.is_empty:
        return _reshape(lax.slice(_reshape(array, (piece.variable.size,)), (0,), (0,)), shape)
    plan = slice_plan(piece.variable.shape, piece.offset, piece.dims)
    if plan is None:  # no static slice fits
        return _take(_reshape(array, (piece.variable.size,)), piece.flat_indices())
    if plan.window:
        first, length = plan.window
        array = lax.slice(_reshape(array, (piece.variable.size,)), (first,), (first + length,))
    array = _reshape(array, plan.radices)
    if plan.counts != plan.radices:
        array = lax.slice(array, plan.starts, plan.limits, plan.steps)
    if plan.reversed_axes:
        array = lax.rev(array, plan.reversed_axes)
    return _arrange_as_view(piece, plan, array)


def _arrange_as_view(piece: Affine, plan: SlicePlan, array: jax.Array) -> jax.Array:
    """Transpose sliced axes to the order of the view, broadcast, and reshape to the view."""
    if list(plan.axes) != sorted(plan.axes):
        array = lax.transpose(array, _order_as_view(piece, plan))
    if piece.has_broadcast:
        moving = tuple(n for n, stride in piece.subdims if stride)
        expanded, moving_axes = _expanded_shape(piece)
        array = lax.broadcast_in_dim(_reshape(array, moving), expanded, moving_axes)
    return _reshape(array, piece.shape)


def _order_as_view(piece: Affine, plan: SlicePlan) -> tuple[int, ...]:
    """Return the transpose of all sliced axes: axes of size 1 become the view's dimensions of size 1, the rest last."""
    moving = iter(plan.axes)
    unit = iter([i for i, n in enumerate(plan.counts) if n == 1])
    order: list[int] = []
    for group in piece.dims:
        order += (
            [next(moving) for _, stride in group if stride]
            if group
            else [i for i in (next(unit, None),) if i is not None]
        )
    return (*order, *unit)


def _expanded_shape(piece: Affine) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shape with each sub-dimension as a dimension, and the dimensions whose stride is not 0."""
    expanded: list[int] = []
    moving: list[int] = []
    for group in piece.dims:
        for n, stride in group or ((1, 0),):
            if stride:
                moving.append(len(expanded))
            expanded.append(n)
    return tuple(expanded), tuple(moving)


def _read_indexed(node: Indexed, values: Values) -> jax.Array:
    flat = [_reshape(values[v], (v.size,)) for v in node.variables]
    if len(flat) == 1:
        return _take(flat[0], node.index)
    firsts = np.cumsum([0, *(v.size for v in node.variables[:-1])])
    return _take(lax.concatenate(flat, 0), firsts[node.which] + node.index)


def _take(flat: jax.Array, index: np.ndarray) -> jax.Array:
    return jnp.asarray(flat).at[index.astype(np.int32)].get(mode="promise_in_bounds", wrap_negative_indices=False)


def _reshape(array: jax.Array, shape: Sequence[int]) -> jax.Array:
    return array if array.shape == tuple(shape) else lax.reshape(array, tuple(shape))


# --- writing ----------------------------------------------------------------------------------------------------------


def write_node(node: Node, values: Values, new: jax.Array) -> dict[Variable, jax.Array]:
    """Return the arrays of the node's variables after `new` is written to it; its elements must be distinct."""
    updated: dict[Variable, jax.Array] = {}
    _write_node(node, values, new, updated)
    return updated


def _write_node(node: Node, values: Values, new: jax.Array, updated: dict[Variable, jax.Array]) -> None:
    """Write `new` to a view part by part; `updated` has the arrays so far, and changes."""
    if isinstance(node, Affine):
        if piece_covers(node):  # the old value is not read, so it need not exist
            updated[node.variable] = _write_all(node, new)
        else:
            variable = node.variable
            updated[variable] = _write_affine(node, _latest_value(variable, values, updated), new)
    elif isinstance(node, Concat):
        parts = joined(node)
        axis = node.axis if parts is None else parts.axis
        array = new if parts is None else parts.array(new)
        bounds = node.bounds if parts is None else parts.bounds
        for part, low, high in zip((parts or node).parts, bounds, bounds[1:], strict=False):
            _write_node(part, values, lax.slice_in_dim(array, low, high, axis=axis), updated)
    elif isinstance(node, Reshaped):
        _write_node(node.source, values, lax.reshape(new, node.source.shape), updated)
    else:
        _write_indexed(node, values, new, updated)


def _latest_value(variable: Variable, values: Values, updated: Values) -> jax.Array:
    return updated[variable] if variable in updated else values[variable]


def piece_covers(piece: Affine) -> bool:
    """Check whether a piece without aliases contains every element of its variable."""
    return prod(piece.shape) == piece.variable.size


def _write_all(piece: Affine, new: jax.Array) -> jax.Array:
    """Return the variable's new array when the piece is a permutation of it: `new` in the order of the variable."""
    if piece.is_whole:
        return _reshape(new, piece.variable.shape)
    plan = slice_plan(piece.variable.shape, piece.offset, piece.dims)
    if plan is None:
        order = np.argsort(piece.flat_indices(), axis=None)  # the inverse permutation: a gather, not a scatter
        return _reshape(_take(_reshape(new, order.shape), order), piece.variable.shape)
    return _reshape(_block(plan, new), piece.variable.shape)


def _block(plan: SlicePlan, new: jax.Array) -> jax.Array:
    """Arrange new elements of a view in the order and shape of the sliced axes of its variable."""
    moving = [plan.counts[axis] for axis in plan.axes]
    if list(plan.axes) != sorted(plan.axes):
        new = lax.transpose(_reshape(new, moving), tuple(int(i) for i in np.argsort(plan.axes)))
    new = _reshape(new, plan.counts)
    return lax.rev(new, plan.reversed_axes) if plan.reversed_axes else new


def _write_affine(piece: Affine, array: jax.Array, new: jax.Array) -> jax.Array:
    """Return the variable's array with the piece replaced."""
    if piece.is_empty:
        return array
    shape = piece.variable.shape
    size = piece.variable.size
    plan = slice_plan(shape, piece.offset, piece.dims)
    if plan is None:
        return _reshape(_put(_reshape(array, (size,)), piece.flat_indices(), new), shape)
    block = _block(plan, new)
    if plan.window is None:
        return _reshape(_replace_slice(_reshape(array, plan.radices), plan, block), shape)
    first, length = plan.window
    flat = _reshape(array, (size,))
    rows = _replace_slice(_reshape(lax.slice(flat, (first,), (first + length,)), plan.radices), plan, block)
    return _reshape(lax.dynamic_update_slice(flat, _reshape(rows, (length,)), (first,)), shape)


def _replace_slice(array: jax.Array, plan: SlicePlan, block: jax.Array) -> jax.Array:
    """Replace the plan's slice in an array of the plan's radices."""
    if plan.counts == plan.radices:
        return block
    fine = plan.with_steps_as_axes()  # `dynamic_update_slice` has no strides
    if all(step == 1 for step in fine.steps):
        rows = lax.dynamic_update_slice(_reshape(array, fine.radices), _reshape(block, fine.counts), fine.starts)
        return _reshape(rows, plan.radices)
    strided = tuple(slice(*sls) for sls in zip(plan.starts, plan.limits, plan.steps, strict=True))
    return jnp.asarray(array).at[strided].set(block)


def _write_indexed(node: Indexed, values: Values, new: jax.Array, updated: dict[Variable, jax.Array]) -> None:
    """Sort `new` by memory order once, so that the part of each variable is a slice of it."""
    which = node.which.reshape(-1)
    index = node.index.reshape(-1)
    flat_new = _reshape(new, (index.size,))
    order = np.lexsort((index, which))
    if np.any(order[1:] < order[:-1]):
        flat_new = _take(flat_new, order)
        which = which[order]
        index = index[order]
    bounds = np.searchsorted(which, np.arange(len(node.variables) + 1))
    for variable, low, high in zip(node.variables, bounds, bounds[1:], strict=False):
        part = lax.slice(flat_new, (low,), (high,))
        if high - low < variable.size:
            flat = _reshape(_latest_value(variable, values, updated), (variable.size,))
            part = _put(flat, index[low:high], part)
        updated[variable] = _reshape(part, variable.shape)


def _put(flat: jax.Array, index: np.ndarray, new: jax.Array) -> jax.Array:
    at = jnp.asarray(flat).at[index.astype(np.int32)]
    # `unique_indices` holds as only writable tensors are written.
    return at.set(new, mode="promise_in_bounds", unique_indices=True, wrap_negative_indices=False)
