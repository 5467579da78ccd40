"""Sequences, which are tuples, and optionals, whose empty one is None.

Both exist only while a model is traced; where a program decides what is in them, they are `bounded_values`.
"""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
import numpy as np

from ipujax.onnx.bounded_values import BoundedSequence, TracedOptional
from ipujax.onnx.budget import Budget
from ipujax.onnx.onnx_errors import TracedOperandError
from ipujax.onnx.operators.operand_types import ceil_div, integers, refuse_outside
from ipujax.onnx.operators.shapes import stops_of
from ipujax.onnx.registry import is_static, operator, static

Values = tuple[Any, ...]


def _position(position: Any, length: int, default: int) -> int:
    index = default if position is None else int(static(position, "position").reshape(()))
    # The default of an insertion, the place behind the last element, is the only one that is no element's.
    refuse_outside(np.asarray(index), -length, max(length - 1, default), f"a sequence of {length} has no position")
    return index + length if index < 0 else index


@operator("SequenceConstruct")
def sequence_construct(*inputs: Any) -> tuple[Values]:
    """Return a sequence of the inputs."""
    return (inputs,)


@operator("SequenceEmpty")
def sequence_empty(*, dtype: int = 1) -> tuple[Values]:
    """Return an empty sequence; its dtype does not matter while tracing."""
    return ((),)


def _as_buffer(sequence: Values, room: int) -> BoundedSequence:
    """Return a sequence as a buffer, for a traced position; one whose tensors differ needs a static position."""
    forms = {(tuple(x.shape), np.dtype(x.dtype)) for x in sequence}
    if len(forms) != 1:
        message = "a position in a sequence of tensors that are not alike must be static"
        hint = "name the graph input that it depends on in load(static=…)"
        raise TracedOperandError(message, expected="a static position", got="a traced position", hint=hint)
    elements = tuple(map(jnp.asarray, sequence))
    return BoundedSequence.of(elements, len(elements) + room, elements[0], "read at a traced position")


@operator("SequenceAt")
def sequence_at(sequence: Values | BoundedSequence, position: Any) -> Any:
    """Return the element at a position; a traced one needs elements of one shape."""
    if isinstance(sequence, BoundedSequence):
        return (sequence.at(position),)
    if not is_static(position):
        return (_as_buffer(sequence, 0).at(position),)
    return (sequence[_position(position, len(sequence), 0)],)


@operator("SequenceInsert")
def sequence_insert(
    sequence: Values | BoundedSequence, tensor: Any, position: Any = None
) -> tuple[Values | BoundedSequence]:
    """Return a sequence with a tensor before a position, else at its end."""
    if isinstance(sequence, BoundedSequence):
        return (sequence.inserted(tensor, position),)
    if not is_static(position):
        return (_as_buffer(sequence, 1).inserted(tensor, position),)
    index = _position(position, len(sequence), len(sequence))
    return ((*sequence[:index], tensor, *sequence[index:]),)


@operator("SequenceErase")
def sequence_erase(sequence: Values | BoundedSequence, position: Any = None) -> tuple[Values | BoundedSequence]:
    """Return a sequence without the element at a position, else without its last."""
    if isinstance(sequence, BoundedSequence):
        return (sequence.erased(position),)
    if not is_static(position):
        return (_as_buffer(sequence, 0).erased(position),)
    index = _position(position, len(sequence), len(sequence) - 1)
    return ((*sequence[:index], *sequence[index + 1 :]),)


@operator("SequenceLength")
def sequence_length(sequence: Values | BoundedSequence) -> Any:
    """Return the number of elements, int64; static but of a bounded sequence."""
    if isinstance(sequence, BoundedSequence):
        return sequence.length
    return np.asarray(len(sequence), np.int64)


@operator("SplitToSequence")
def split_to_sequence(x: Any, split: Any = None, *, axis: int = 0, keepdims: int = 1, budget: Budget) -> tuple[Values]:
    """Return parts of a tensor: of sizes `split`, of one size if it is a scalar, else of size 1."""
    extent = x.shape[axis]
    sizes = np.asarray(1) if split is None else static(split, "split")
    is_one_size = sizes.ndim == 0
    if is_one_size:
        refuse_outside(sizes, 1, math.inf, "split")
    budget.check_unrolled(ceil_div(extent, int(sizes)) if is_one_size else len(sizes), "parts of a sequence")
    cuts = list(range(int(sizes), extent, int(sizes))) if is_one_size else stops_of(integers(sizes), extent, axis)
    parts = (np if is_static(x) else jnp).split(x, cuts, axis)
    is_squeezed = split is None and not keepdims
    return (tuple(part.squeeze(axis) if is_squeezed else part for part in parts),)


@operator("ConcatFromSequence")
def concat_from_sequence(sequence: Values | BoundedSequence, *, axis: int, new_axis: int = 0) -> Any:
    """Return the elements joined along an axis, or stacked along a new one."""
    if isinstance(sequence, BoundedSequence):
        return sequence.concatenated(axis, bool(new_axis))
    xp = np if is_static(sequence) else jnp
    return xp.stack(sequence, axis) if new_axis else xp.concatenate(sequence, axis)


@operator("Optional")
def optional(value: Any = None, *, type: Any = None) -> tuple[Any]:
    """Return an optional with a value, or an empty one."""
    return (value,)


@operator("OptionalHasElement")
def optional_has_element(value: Any = None) -> Any:
    """Return whether an optional has a value, bool; static but where a program decides it."""
    if isinstance(value, TracedOptional):
        return value.is_present
    return np.asarray(value is not None)


@operator("OptionalGetElement")
def optional_get_element(value: Any) -> tuple[Any]:
    """Return the value of an optional; a ValueError if it is empty, zeros where a program finds it empty."""
    if isinstance(value, TracedOptional):
        return (value.value,)
    if value is None:
        raise ValueError("the optional is empty")
    return (value,)
