"""Sequences and optionals of which only a program knows how many elements they have: buffers, and what is in use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ipujax.onnx.onnx_errors import OnnxError


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class BoundedSequence:
    """A sequence of at most as many tensors as its buffer has rows; more are dropped.

    Args:
        buffer: [bound, …], zeros behind the elements.
        length: number of elements, an integer.
    """

    buffer: Any  # an array, or its shape in a form
    length: Any

    @classmethod
    def of(cls, elements: Sequence[Any], bound: int, element: Any, name: str) -> BoundedSequence:
        """Return a sequence of known elements.

        Args:
            elements: arrays of one shape.
            bound: rows of the buffer.
            element: dtype and shape of all.
            name: of the value, for errors.

        Raises:
            OnnxError: more elements than the bound, or an element of another shape or dtype.
        """
        if len(elements) > bound:
            raise OnnxError(f"sequence {name!r} has more elements than its bound", expected=bound, got=len(elements))
        for each in elements:
            if (tuple(each.shape), each.dtype) != (tuple(element.shape), element.dtype):
                expected = f"{element.dtype}{list(element.shape)}"
                message = f"elements of sequence {name!r}, whose length depends on traced values, are not alike"
                raise OnnxError(message, expected=expected, got=f"{each.dtype}{list(each.shape)}")
        rows = jnp.zeros((bound, *element.shape), element.dtype)
        buffer = rows.at[: len(elements)].set(jnp.stack(elements)) if elements else rows
        return cls(buffer, jnp.asarray(len(elements)))

    @property
    def dtype(self) -> np.dtype:
        """Of the elements."""
        return np.dtype(self.buffer.dtype)

    def at(self, position: Any) -> jax.Array:
        """Return an element; negative positions count from the end."""
        place = jnp.reshape(jnp.asarray(position), ())
        return self.buffer[jnp.where(place < 0, place + self.length, place)]

    def inserted(self, tensor: Any, position: Any = None) -> BoundedSequence:
        """Return a sequence with a tensor before a position, else at its end."""
        place = self._place(position)
        return self._of_rows(jnp.roll(self.buffer, 1, axis=0), place, tensor, 1)

    def erased(self, position: Any = None) -> BoundedSequence:
        """Return a sequence without the element at a position, else without its last."""
        place = self._place(-1 if position is None else position)
        rows = jnp.arange(len(self.buffer)).reshape(-1, *(1,) * (self.buffer.ndim - 1))
        behind = jnp.roll(self.buffer, -1, axis=0)
        shifted = jnp.where(rows < place, self.buffer, jnp.where(rows < self.length - 1, behind, 0))
        return BoundedSequence(shifted.astype(self.buffer.dtype), jnp.maximum(self.length - 1, 0))

    def _place(self, position: Any) -> jax.Array:
        if position is None:
            return self.length
        place = jnp.reshape(jnp.asarray(position), ())
        return jnp.where(place < 0, place + self.length, place)

    def _of_rows(self, behind: jax.Array, place: jax.Array, tensor: Any, growth: int) -> BoundedSequence:
        rows = jnp.arange(len(self.buffer)).reshape(-1, *(1,) * (self.buffer.ndim - 1))
        shifted = jnp.where(rows < place, self.buffer, jnp.where(rows == place, jnp.asarray(tensor), behind))
        length = jnp.minimum(self.length + growth, len(self.buffer))
        return BoundedSequence(shifted.astype(self.buffer.dtype), length)

    def concatenated(self, axis: int, is_new_axis: bool) -> jax.Array:
        """Return the elements along an axis, or stacked along a new one; zeros stand behind the last."""
        if is_new_axis:
            return jnp.moveaxis(self.buffer, 0, axis)
        axis = axis % (self.buffer.ndim - 1)
        beside = jnp.moveaxis(self.buffer, 0, axis)
        shape = beside.shape
        return beside.reshape(*shape[:axis], shape[axis] * shape[axis + 1], *shape[axis + 2 :])


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class TracedOptional:
    """An optional of which only the program knows whether it has a value.

    Args:
        value: zeros where there is none.
        is_present: whether there is one, bool.
    """

    value: Any
    is_present: jax.Array | jax.ShapeDtypeStruct


def merged(first: Any, second: Any, bound: int | None, name: str) -> Any:
    """Return a value's form on two ways, a tree of shapes: what `fitted` brings both values into.

    Args:
        first: shapes of the value on one way: of an array, a tuple of them, or None.
        second: on the other way.
        bound: from `load(max_sizes=)`, of axes and lengths that differ.
        name: of the value.

    Raises:
        OnnxError: forms that no bound makes equal, or that need one which is not given.
    """
    if (first is None) != (second is None):
        present = second if first is None else first
        value = present.value if isinstance(present, TracedOptional) else present
        return TracedOptional(value, jax.ShapeDtypeStruct((), np.dtype(bool)))
    kinds = tuple | BoundedSequence
    if isinstance(first, kinds) and isinstance(second, kinds):
        return _merged_sequences(first, second, bound, name)
    if isinstance(first, TracedOptional) or isinstance(second, TracedOptional):
        return first if isinstance(first, TracedOptional) else second
    if first is None or (first.shape, first.dtype) == (second.shape, second.dtype):
        return first
    if len(first.shape) != len(second.shape) or first.dtype != second.dtype:
        raise _differ(name, first, second, "export branches of one rank and dtype")
    size = _needed(bound, name, first, second)
    shape = tuple(a if a == b else size for a, b in zip(first.shape, second.shape, strict=True))
    return jax.ShapeDtypeStruct(shape, first.dtype)


def _merged_sequences(first: Any, second: Any, bound: int | None, name: str) -> Any:
    """Return the form of two sequences: as they are if all shapes are equal, else a buffer of `bound` elements."""
    leaves = [(x.shape, x.dtype) for x in jax.tree.leaves((first, second))]
    for each in (first, second):
        if isinstance(each, BoundedSequence):
            return each
    if [(x.shape, x.dtype) for x in first] == [(x.shape, x.dtype) for x in second]:
        return first
    if not leaves:
        return first
    size = _needed(bound, name, first, second)
    (shape, dtype), *_ = leaves
    buffer = jax.ShapeDtypeStruct((size, *shape), dtype)
    return BoundedSequence(buffer, jax.eval_shape(lambda: jnp.asarray(0)))


def fitted(value: Any, form: Any, name: str) -> Any:
    """Return a value in a form of `merged`: padded with zeros, as a buffer, or as an optional that says what it has."""
    if isinstance(form, TracedOptional):
        if isinstance(value, TracedOptional):
            return value
        empty = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), form.value)
        return TracedOptional(empty if value is None else value, jnp.asarray(value is not None))
    if isinstance(form, BoundedSequence):
        if isinstance(value, BoundedSequence):
            return value
        element = jax.ShapeDtypeStruct(form.buffer.shape[1:], form.buffer.dtype)
        return BoundedSequence.of(value, form.buffer.shape[0], element, name)
    if value is None or isinstance(value, tuple):
        return value
    array = jnp.asarray(value)
    widths = [(0, target - size) for size, target in zip(array.shape, form.shape, strict=True)]
    if min((after for _, after in widths), default=0) < 0:
        raise OnnxError(f"value {name!r} is larger than its bound", expected=list(form.shape), got=list(array.shape))
    return jnp.pad(array, widths) if any(after for _, after in widths) else array


def _needed(bound: int | None, name: str, first: Any, second: Any) -> int:
    if bound is None:
        raise _differ(name, first, second, f"load(max_sizes={{{name!r}: n}}) pads it with zeros")
    return bound


def _differ(name: str, first: Any, second: Any, hint: str) -> OnnxError:
    got = " and ".join(map(_described, (first, second)))
    return OnnxError(f"the branches give value {name!r} in different forms", expected="one form", got=got, hint=hint)


def _described(form: Any) -> str:
    if isinstance(form, tuple):
        return f"a sequence of {len(form)}"
    return "none" if form is None else f"{form.dtype}{list(form.shape)}"
