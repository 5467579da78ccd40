"""Constant fills, encodings of indices, and padding.

Source: popops `Fill.hpp`, `Zero.hpp`, `Encoding.hpp`, `EncodingConstants.hpp`, `Pad.hpp`, `NormaliseImage.hpp`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from ipujax.lowering.emit import placing
from ipujax.lowering.layout import map_linearly
from ipujax.poplar.library import add, check_tensors
from ipujax.poplar.types import cast_values
from ipujax.runtime.errors import GraphError
from ipujax.runtime.graph import Graph, Sequence as Program
from ipujax.runtime.tensor import Tensor, concat, dtype_name

MASKED_LABEL_CODE = 0xFFFFFFFF  # index of no class; -1 as INT (popops EncodingConstants.hpp)
_COLOURS = 3
_PADDED_COLOURS = 4  # popops pads images to four channels (NormaliseImage.hpp)


def fill(graph: Graph, x: Tensor, prog: Program, value: Any, name: str = "fill") -> None:
    """Write one value to all elements of a tensor.

    Raises:
        GraphError: a value that the tensor's type cannot represent.
    """
    check_tensors(name, x)
    # Checked here, because `jnp.full` wraps integers in silence.
    number = cast_values(value, x.dtype, f"{name}: the value")
    add(graph, lambda: jnp.full(x.shape, number, x.dtype), [], prog, name, [x])


def zero(graph: Graph, x: Tensor, prog: Program, name: str = "zero") -> None:
    """Write zeros to all elements of a tensor."""
    fill(graph, x, prog, 0, name)


def iota(graph: Graph, x: Tensor, start: int, prog: Program, name: str = "iota") -> None:
    """Write start, start + 1, … to a vector.

    Raises:
        GraphError: a tensor that is not a vector of integers, or numbers out of the range of its type.
    """
    check_tensors(name, x)
    if x.ndim != 1 or x.dtype.kind not in "iu":
        got = f"{dtype_name(x.dtype)}{list(x.shape)}"
        raise GraphError(f"{name} must write to a vector of integers", got=got)
    if x.size:  # `jnp.arange` wraps in silence
        cast_values(np.array([start, start + x.size - 1]), x.dtype, f"{name}: first and last number")
    add(graph, lambda: jnp.arange(start, start + x.size, dtype=x.dtype), [], prog, name, [x])


def encode_one_hot(
    graph: Graph,
    indices: Tensor,
    encoded: Tensor,
    prog: Program,
    on: float | Tensor = 1,
    off: float | Tensor = 0,
    name: str = "one_hot",
) -> None:
    """Write `on` where the column is the row's index, and `off` elsewhere.

    Args:
        graph: graph to add to.
        indices: [n], integers; one beyond the columns, as `MASKED_LABEL_CODE`, makes a row without `on`.
        encoded: [n, classes], written.
        prog: program to add to.
        on: value at the index, a number or a tensor of one element.
        off: value elsewhere, likewise.
        name: debug name.

    Raises:
        GraphError: shapes that do not match, or a value that the type of `encoded` cannot represent.

    Source: popops::encodeOneHot.
    """
    if encoded.ndim != 2 or indices.shape != encoded.shape[:1]:
        got = f"{list(indices.shape)} and {list(encoded.shape)}"
        raise GraphError(f"{name}: `encoded` must have a row for each index", expected="[n] and [n, classes]", got=got)
    # Checked here, because a cast to integers drops the fraction in silence.
    values = [v if isinstance(v, Tensor) else cast_values(v, encoded.dtype, f"{name}: a value") for v in (on, off)]
    for value in values:
        if isinstance(value, Tensor) and encoded.dtype.kind in "biu" and value.dtype.kind not in "biu":
            got = dtype_name(value.dtype)
            raise GraphError(f"{name}: a value of {dtype_name(encoded.dtype)}", expected="an integer", got=got)

    def one_hot(i: jax.Array, *scalars: jax.Array) -> jax.Array:
        # `scalars` are the arrays of those values that are tensors, in the order of `values`.
        unused = iter(scalars)
        hit, miss = (next(unused).reshape(()).astype(encoded.dtype) if isinstance(v, Tensor) else v for v in values)
        return jnp.where(is_indexed(i, encoded.shape), hit, miss)

    add(graph, one_hot, [indices, *(v for v in values if isinstance(v, Tensor))], prog, name, [encoded])


def is_indexed(indices: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Return the mask [n, columns] of the column that each index [n] names."""
    wide = widened(indices)
    return jax.lax.broadcasted_iota(wide.dtype, shape, 1) == wide[:, None]


def widened(indices: jax.Array) -> jax.Array:
    """Return indices of a type that has the number of every column: INT for those of 8 and 16 bits."""
    return indices.astype(jnp.int32) if indices.dtype.itemsize < 4 else indices


def pad(
    graph: Graph,
    x: Tensor,
    lower: Sequence[int],
    upper: Sequence[int],
    value: float = 0,
    name: str = "pad",
    *,
    mode: Literal["constant", "edge", "reflect"] = "constant",
) -> Tensor:
    """Return a view of a tensor with padding around it; nothing runs until it is used.

    Args:
        graph: graph to add the constant to.
        x: the tensor.
        lower: elements before each dimension; a negative number crops.
        upper: elements after each dimension, likewise.
        value: of the new elements, for "constant".
        name: debug name.
        mode: "constant"; "edge" repeats the outermost element; "reflect" mirrors at it, without repeating it.

    Returns:
        A view.

    Raises:
        GraphError: not one number a dimension, cropping beyond the size, too few elements to repeat or mirror, or a
            value that the tensor's type cannot represent.

    Source: popops::pad, padding::Type.
    """
    if not len(lower) == len(upper) == x.ndim:
        got = f"{list(lower)}, {list(upper)}"
        raise GraphError(f"{name}: each dimension needs one number", expected=f"{x.ndim} each", got=got)
    if mode not in ("constant", "edge", "reflect"):
        expected = '"constant", "edge" or "reflect"'
        raise GraphError(f"{name}: unknown mode", expected=expected, got=repr(mode))
    # Dimension by dimension: later ones extend the padding of earlier ones into the corners.
    for dim, (low, high) in enumerate(zip(lower, upper, strict=True)):
        if min(0, low) + min(0, high) + x.shape[dim] < 0:
            got = f"{low} and {high} of {x.shape[dim]} elements"
            raise GraphError(f"{name}: crops more than the dimension", got=got)
        crop = [slice(None)] * x.ndim
        crop[dim] = slice(max(0, -low), x.shape[dim] - max(0, -high))
        x = x[tuple(crop)]
        if low > 0 or high > 0:
            before, after = _make_padding(graph, x, dim, max(0, low), max(0, high), value, mode, name)
            # Empty parts are dropped, except around an empty tensor, where they still change its shape.
            x = concat([part for part in (before, x, after) if part.size or not x.size], dim)
    return x


def _make_padding(
    graph: Graph, x: Tensor, dim: int, low: int, high: int, value: float, mode: str, name: str
) -> tuple[Tensor, Tensor]:
    """Return the padding before and after a tensor along one dimension, as views."""
    extent = x.shape[dim]

    def part(begin: int, end: int) -> Tensor:
        return x.slice([begin if d == dim else 0 for d in range(x.ndim)],
                       [end if d == dim else n for d, n in enumerate(x.shape)])  # fmt: skip

    if mode == "constant":
        constant = graph.add_constant(cast_values(value, x.dtype, f"{name}: the value"), name)
        with placing(graph):
            map_linearly(graph, constant)
        before, after = (
            constant.broadcast_in_dim(tuple(count if d == dim else n for d, n in enumerate(x.shape)), ())
            for count in (low, high)
        )
        return before, after
    if extent == 0 or (mode == "reflect" and max(low, high) >= extent):
        got = f"{low} and {high} around {extent} elements"
        raise GraphError(f"{name}: too few elements to {'mirror' if mode == 'reflect' else 'repeat'}", got=got)
    if mode == "edge":
        return part(0, 1).broadcast(low, dim), part(extent - 1, extent).broadcast(high, dim)
    return part(1, low + 1).reverse(dim), part(extent - 1 - high, extent - 1).reverse(dim)


def normalise_image(
    graph: Graph,
    x: Tensor,
    in_scale: float,
    offsets: Tensor,
    scales: Tensor,
    prog: Program,
    name: str = "normalise_image",
) -> Tensor:
    """Compute colours as `(x · in_scale - offset) · scale`, and add a fourth channel of zeros.

    Args:
        graph: graph to add to.
        x: [..., 3], UNSIGNED_CHAR, HALF or FLOAT.
        in_scale: of all elements.
        offsets: [3], of the result's type.
        scales: [3], likewise.
        prog: program to add to.
        name: debug name.

    Returns:
        A tensor [..., 4], HALF for UNSIGNED_CHAR, else of the type of `x`.

    Raises:
        GraphError: other shapes or types.

    Source: popops::normaliseImage.
    """
    dtype = np.dtype(np.float16) if x.dtype == np.uint8 else x.dtype
    if x.shape[-1:] != (_COLOURS,) or not offsets.shape == scales.shape == (_COLOURS,):
        got = f"{list(x.shape)}, {list(offsets.shape)} and {list(scales.shape)}"
        raise GraphError(f"{name}: the image must have three colours", expected="[..., 3], [3] and [3]", got=got)
    if dtype not in (np.float16, np.float32) or not offsets.dtype == scales.dtype == dtype:
        got = ", ".join(dtype_name(t.dtype) for t in (x, offsets, scales))
        raise GraphError(
            f"{name}: types of offsets and scales", expected="offsets and scales of the result's type", got=got
        )

    def normalise(a: jax.Array, offset: jax.Array, scale: jax.Array) -> jax.Array:
        # Cast first: a product of UNSIGNED_CHAR would overflow.
        colours = (a.astype(dtype) * jnp.asarray(in_scale, dtype) - offset) * scale
        return jnp.pad(colours, [(0, 0)] * (a.ndim - 1) + [(0, _PADDED_COLOURS - _COLOURS)])

    return add(graph, normalise, [x, offsets, scales], prog, name)
