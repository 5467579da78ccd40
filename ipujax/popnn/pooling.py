"""Pooling of images and the gradient of its operand.

Source: popnn `Pooling.hpp`, `PoolingDef.hpp`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ipujax.poplar.library import add
from ipujax.runtime.errors import GraphError
from ipujax.runtime.graph import Graph, Sequence as Program
from ipujax.runtime.tensor import Tensor, dtype_name


@dataclass(frozen=True, slots=True)
class PoolParams:
    """Pooling of tensors [batch, channels, field…].

    Args:
        pooling_type: "max", "avg" (over elements that are not padding) or "sum".
        kernel_shape: sizes of the window.
        stride: step of the window in each dimension.
        padding_lower: padding before the input, 0 when empty.
        padding_upper: padding after it, 0 when empty.
    """

    pooling_type: Literal["max", "avg", "sum"]
    kernel_shape: tuple[int, ...]
    stride: tuple[int, ...]
    padding_lower: tuple[int, ...] = ()
    padding_upper: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.pooling_type not in ("max", "avg", "sum"):
            raise GraphError("unknown pooling_type", expected='"max", "avg" or "sum"', got=repr(self.pooling_type))
        rank = len(self.kernel_shape)
        paddings_fit = all(len(padding) in (0, rank) for padding in (self.padding_lower, self.padding_upper))
        if len(self.stride) != rank or not paddings_fit or min((1, *self.kernel_shape, *self.stride)) < 1:
            expected = "a window and a step of at least 1 in each dimension, and as many paddings"
            raise GraphError("parameters of a pooling", expected=expected, got=self)


def _pooling(params: PoolParams) -> Callable[[jax.Array], jax.Array]:
    """Make the function of a pooling, which counts no padding: [batch, channels, field] → the same, of windows."""

    def pool_array(x: jax.Array) -> jax.Array:
        window = (1, 1, *params.kernel_shape)
        strides = (1, 1, *params.stride)
        zeros = (0,) * len(params.kernel_shape)
        pairs = zip(params.padding_lower or zeros, params.padding_upper or zeros, strict=True)
        padding = ((0, 0), (0, 0), *pairs)
        if params.pooling_type == "max":  # padding is -inf, which no element is below
            return lax.reduce_window(x, np.array(-np.inf, x.dtype), lax.max, window, strides, padding)
        # Elements of an average are scaled before they are added, as in popnn: a sum of halves may be infinite. The
        # scale is a power of two, which rounds nothing.
        is_scaled = params.pooling_type == "avg" and x.dtype == jnp.float16
        scale = 0.5 ** math.ceil(math.log2(math.prod(window))) if is_scaled else 1
        total = lax.reduce_window(x * scale, np.array(0, x.dtype), lax.add, window, strides, padding)
        if params.pooling_type == "sum":
            return total
        # The number of elements of each window, without padding: a constant of the program.
        with jax.ensure_compile_time_eval():
            ones = jnp.ones((1, 1, *x.shape[2:]), jnp.float32)
            count = np.asarray(lax.reduce_window(ones, 0.0, lax.add, window, strides, padding))
        return total / (count * scale).astype(x.dtype)

    return pool_array


def _check_floats(name: str, x: Tensor) -> None:
    if x.dtype.kind != "f":
        raise GraphError(f"{name}: elements of a pooling", expected="FLOAT or HALF", got=dtype_name(x.dtype))


def pool(graph: Graph, params: PoolParams, x: Tensor, prog: Program, name: str = "pool") -> Tensor:
    """Pool a tensor [batch, channels, field…] into a new one.

    Raises:
        GraphError: elements that are no floats, or other dimensions than a batch, channels and the window's.
    """
    _check_floats(name, x)
    return add(graph, _pooling(params), [x], prog, name)


def pool_input_gradient(
    graph: Graph, params: PoolParams, x: Tensor, gradient: Tensor, prog: Program, name: str = "pool_gradient"
) -> Tensor:
    """Return the gradient of the operand of `pool`, from that operand and the gradient of the result."""

    _check_floats(name, x)

    # JAX's rule recomputes the forward pass, as far as the gradient reads it.
    def backward(a: jax.Array, g: jax.Array) -> jax.Array:
        (grad,) = jax.vjp(_pooling(params), a)[1](g)
        return grad

    return add(graph, backward, [x, gradient], prog, name)
