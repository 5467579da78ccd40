"""Gather and scatter, selection by masks, and order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ipujax.onnx.element_types import index_dtype, is_floating
from ipujax.onnx.onnx_errors import OutsideError
from ipujax.onnx.operators.operand_types import (
    MAX_SIZE,
    Array,
    Optional,
    Static,
    Value,
    along as axis_vector,
    axis_of,
    index_range,
    integers,
    refuse_outside,
    refuse_outside_axis,
)
from ipujax.onnx.registry import MaxSizes, data_dependent_size, is_static, operator


def wrapped(indices: Value, size: int, axis: int = 0) -> Any:
    """Return indices of an axis with the negative ones counted from its end; refuse static ones outside of it."""
    refuse_outside_axis(indices, size, axis)
    return _from_start(indices, size)


def _from_start(indices: Value, size: int) -> Any:
    numpy: Any = np if isinstance(indices, np.ndarray) else jnp
    return numpy.where(indices < 0, indices + size, indices)


@operator("Gather")
def gather(x: Array, indices: Value, *, axis: int = 0) -> Array:
    """Slices of an array along one axis."""
    along = axis_of(axis, x.ndim)
    if is_static(indices) and np.ndim(indices) == 0:  # a view
        return jax.lax.index_in_dim(x, int(wrapped(indices, x.shape[along], along)), along, keepdims=False)
    places = wrapped(indices, x.shape[along], along)
    if not x.shape[along]:  # traced indices have nothing to read: the body of a loop over no rows, which never runs
        return jnp.zeros((*x.shape[:along], *np.shape(indices), *x.shape[along + 1 :]), x.dtype)
    return jnp.take(x, places, axis=along, mode="clip")


def _element_index(indices: Value, shape: tuple[int, ...], axis: int) -> tuple[Any, ...]:
    """Index of an element for each entry: its own position on all axes but one."""
    rank = len(shape)
    along = axis_of(axis, rank)
    if indices.ndim != rank:
        raise OutsideError("the indices have another rank than the array", expected=rank, got=indices.ndim)
    positions = [
        np.arange(size).reshape([-1 if a == each else 1 for a in range(rank)])
        for each, size in enumerate(indices.shape)
    ]
    for each, size in enumerate(indices.shape):
        refuse_outside(np.asarray(size), 0, size if each == along else shape[each], f"axis {each} of the indices:")
    positions[along] = wrapped(indices, shape[along], along)
    return tuple(positions)


@operator("GatherElements")
def gather_elements(x: Array, indices: Value, *, axis: int = 0) -> Array:
    """Elements of an array, each at its own position but on one axis."""
    return x[_element_index(indices, x.shape, axis)]


@operator("GatherND")
def gather_nd(x: Array, indices: Value, *, batch_dims: int = 0) -> Array:
    """Slices of an array at index vectors, the last axis of `indices`; leading axes are shared."""
    _refuse_vectors_outside(indices, x.shape[batch_dims:], batch_dims)
    take = _take_vectors
    for _ in range(batch_dims):
        take = jax.vmap(take)
    return take(x, jnp.asarray(indices))


def _take_vectors(x: Array, indices: Array) -> Array:
    vectors = zip(jnp.moveaxis(indices, -1, 0), x.shape, strict=False)
    return x[tuple(_from_start(index, size) for index, size in vectors)]


def _refuse_vectors_outside(indices: Value, shape: Sequence[int], first_axis: int = 0) -> None:
    """Refuse index vectors, the last axis of `indices`, that are longer than a shape or outside of it."""
    length = np.shape(indices)[-1]
    refuse_outside(np.asarray(length), 0, len(shape), "the length of an index vector,")
    for place in range(length):
        refuse_outside_axis(indices[..., place], shape[place], first_axis + place)


def _update(x: Array, index: tuple[Any, ...], updates: Value, reduction: str) -> Array:
    place = x.at[index]
    methods: dict[str, Any] = {
        "add": place.add,
        "max": place.max,
        "min": place.min,
        "mul": place.multiply,
        "none": place.set,
    }
    return methods[reduction](updates, unique_indices=_is_unique(index, x.shape))


def _is_unique(index: tuple[Any, ...], shape: tuple[int, ...]) -> bool:
    """True if updates surely are of different elements: only then JAX has gradients of products."""
    if not is_static(index):
        return False
    # Indices out of range are clipped: ONNX forbids them, and here they only decide about gradients.
    flat = np.ravel_multi_index(tuple(np.broadcast_arrays(*index)), shape[: len(index)], mode="clip").ravel()
    return len(np.unique(flat)) == len(flat)


@operator("ScatterElements")
def scatter_elements(x: Array, indices: Value, updates: Value, *, axis: int = 0, reduction: str = "none") -> Array:
    """Array with elements replaced by, or combined with, updates at the positions that GatherElements reads."""
    # PyTorch's scatter, which exporters write as this node, ignores updates beyond the indices.
    read = jnp.asarray(updates)[tuple(map(slice, np.shape(indices)))]
    return _update(x, _element_index(indices, x.shape, axis), read, reduction)


@operator("Scatter")
def scatter(x: Array, indices: Value, updates: Value, *, axis: int = 0) -> Array:
    return scatter_elements(x, indices, updates, axis=axis)


@operator("ScatterND")
def scatter_nd(x: Array, indices: Value, updates: Value, *, reduction: str = "none") -> Array:
    """Array with slices at index vectors replaced by, or combined with, updates."""
    vectors = np.moveaxis(indices, -1, 0) if isinstance(indices, np.ndarray) else jnp.moveaxis(indices, -1, 0)
    _refuse_vectors_outside(indices, x.shape)
    index = tuple(_from_start(each, size) for each, size in zip(vectors, x.shape, strict=False))
    return _update(x, index, updates, reduction)


@operator("TensorScatter")
def tensor_scatter(
    past_cache: Value, update: Value, write_indices: Optional = None, *, axis: int = -2, mode: str = "linear"
) -> Array:
    """Cache of each sample with an update written from its write index on, around the end if circular."""
    cache, update = map(jnp.asarray, (past_cache, update))
    lines = jnp.moveaxis(cache, axis, 1)
    room = lines.shape[1] - (np.shape(update)[axis] if mode == "linear" else 1)
    refuse_outside(write_indices, 0, room, "write index")
    new = jnp.moveaxis(update, axis, 1)
    first = jnp.zeros(cache.shape[0], jnp.int32) if write_indices is None else jnp.asarray(write_indices)
    position = first[:, None] + index_range(new.shape[1])
    if mode == "circular":
        position = position % lines.shape[1]
    written = lines.at[index_range(cache.shape[0])[:, None], position].set(new)
    return jnp.moveaxis(written, 1, axis)


@operator("OneHot")
def one_hot(indices: Value, depth: Static, values: Value, *, axis: int = -1) -> Array:
    """On where the position on the new axis is the index, off elsewhere; `values` is (off, on)."""
    # Fractions are cut off, as by the cast to int64 that ONNX asks for.
    size = integers(depth)[0]
    refuse_outside(np.asarray(size), 0, MAX_SIZE, "depth")
    off, on = jnp.asarray(values)
    # Types of 8 and 16 bits do not have every position: integers would wrap, and floats be rounded to one another.
    narrow = np.dtype(indices.dtype).itemsize < 4
    wide = indices.astype(np.float32 if is_floating(indices) else np.int32) if narrow else indices
    whole = jnp.trunc(wide) if is_floating(indices) else wide
    expanded = jnp.expand_dims(_from_start(whole, size), axis)
    along = axis_of(axis, expanded.ndim)
    position = index_range(size).reshape([-1 if each == along else 1 for each in range(expanded.ndim)])
    return jnp.where(expanded == position, on, off)


@operator("TopK")
def top_k(x: Array, K: Static, *, axis: int = -1, largest: int = 1, sorted: int = 1) -> tuple[Array, Array]:
    """Largest or smallest elements along an axis, in order, and their indices; of equal ones the first."""
    count = integers(K)[0]
    lines = jnp.moveaxis(x, axis, -1)
    # Reversed elements keep the order of equal ones; a zero of either sign is 0.0, which XLA has in front of −0.0.
    ordered = lines if largest else jnp.negative(lines) if is_floating(x) else jnp.invert(lines)
    _, indices = jax.lax.top_k(jnp.where(ordered == 0, 0, ordered).astype(x.dtype), count)
    values = jnp.take_along_axis(lines, indices, axis=-1)
    return jnp.moveaxis(values, -1, axis), jnp.moveaxis(indices, -1, axis).astype(index_dtype())


@operator("NonZero")
def non_zero(x: Value, *, max_sizes: MaxSizes) -> Value:
    """Indices of the elements that are not zero, [axes, elements]; behind the last one, zeros up to the bound."""
    if is_static(x):
        return np.stack(np.nonzero(np.atleast_1d(x))).astype(np.int64)
    size = data_dependent_size(max_sizes, "the elements that are not zero")
    return jnp.stack(jnp.nonzero(jnp.atleast_1d(x), size=size)).astype(index_dtype())


@operator("Compress")
def compress(x: Value, condition: Value, *, axis: int | None = None, max_sizes: MaxSizes) -> Array:
    """Slices along an axis, or elements, where a condition holds; behind the last one, zeros up to the bound."""
    flat = jnp.ravel(x) if axis is None else jnp.asarray(x)
    along = 0 if axis is None else axis_of(axis, flat.ndim)
    if is_static(condition):
        refuse_outside(np.nonzero(condition)[0], 0, flat.shape[along] - 1, f"axis {along}: selected slice")
        return jnp.take(flat, np.nonzero(condition)[0], axis=along)
    size = data_dependent_size(max_sizes, "the elements that are selected")
    (index,) = jnp.nonzero(condition, size=size)
    real = axis_vector(index_range(size) < jnp.sum(jnp.asarray(condition), dtype=index.dtype), along, flat.ndim)
    return jnp.where(real, jnp.take(flat, index, axis=along), jnp.zeros((), flat.dtype))


# Results of `unique` beside the elements.
_ALL_OF_UNIQUE: dict[str, Any] = dict.fromkeys(("return_index", "return_inverse", "return_counts"), True)


@operator("Unique")
def unique(x: Value, *, axis: int | None = None, sorted: int = 1, max_sizes: MaxSizes, output_count: int = 1) -> Any:
    """Different elements or slices, first occurrences, positions in the result, and counts."""
    # They are in order, or in that of their first occurrences. Behind the last one, zeros up to the bound.
    if is_static(x):
        values, first, inverse, counts = np.unique(x, axis=axis, **_ALL_OF_UNIQUE)
        order = np.arange(len(first)) if sorted else np.argsort(first)
        rank = np.argsort(order)
        results = (np.take(values, order, axis or 0), first[order], rank[inverse.ravel()], counts[order])
        numbers = tuple(each.astype(np.int64) for each in results[1:])
        return (results[0], *numbers)[:output_count]
    size = data_dependent_size(max_sizes, "the different elements")
    values, firsts, positions, numbers = jnp.unique(x, axis=axis, size=size, fill_value=0, **_ALL_OF_UNIQUE)
    real = numbers > 0
    arrangement = jnp.arange(size) if sorted else jnp.argsort(jnp.where(real, firsts, np.iinfo(np.int32).max))
    ranks = jnp.argsort(arrangement)
    places = (jnp.where(real, firsts, 0)[arrangement], ranks[positions.ravel()], numbers[arrangement])
    return (jnp.take(values, arrangement, axis or 0), *(each.astype(index_dtype()) for each in places))[:output_count]
