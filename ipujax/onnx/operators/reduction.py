"""Reductions over axes, running sums and products, the softmax family, and products of matrices and tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ipujax.onnx.element_types import index_dtype, is_floating, working_dtype
from ipujax.onnx.onnx_errors import OutsideError
from ipujax.onnx.operators.operand_types import Array, Optional, Static, Value, axis_of, integers, size_of
from ipujax.onnx.registry import operator, register

Axes = tuple[int, ...]
Reduce = Callable[[Array, Axes], Array]


def _sum(x: Array, axes: Axes) -> Array:
    # JAX would widen integers
    return jnp.sum(x, axis=axes, keepdims=True, dtype=x.dtype)


_MOST_RESTS = 46340  # of which the sum is less than 2³¹, each being less than their number


def _mean(x: Array, axes: Axes) -> Array:
    """Mean, of nothing 0; of integers exact, rounded toward zero: their sum may be out of range."""
    count = size_of([x.shape[axis] for axis in axes])
    if not count:
        return _sum(x, axes)
    if is_floating(x) or count > _MOST_RESTS:
        return jnp.mean(x, axis=axes, keepdims=True)
    quotients = x // count
    rests = _sum(x - quotients * count, axes)
    floor = _sum(quotients, axes) + rests // count
    return floor + ((floor < 0) & (rests % count != 0)).astype(x.dtype)


def _product(x: Array, axes: Axes) -> Array:
    return jnp.prod(x, axis=axes, keepdims=True, dtype=x.dtype)


def _largest(x: Array, axes: Axes) -> Array:
    return jnp.max(x, axis=axes, keepdims=True, initial=_limits(x)[0] if x.size == 0 else None)


def _smallest(x: Array, axes: Axes) -> Array:
    return jnp.min(x, axis=axes, keepdims=True, initial=_limits(x)[1] if x.size == 0 else None)


def _limits(x: Array) -> tuple[Any, Any]:
    """Results for no elements: lower and upper limit of the dtype."""
    if x.dtype == bool:
        return False, True
    if is_floating(x):
        return -jnp.inf, jnp.inf
    info = jnp.iinfo(x.dtype)
    return info.min, info.max


def _norm(x: Array, axes: Axes) -> Array:
    return jnp.sqrt(_sum(x * x, axes))


def _log_sum_exp(x: Array, axes: Axes) -> Array:
    return jax.nn.logsumexp(x, axis=axes, keepdims=True) if axes else x


REDUCTIONS: Mapping[str, Reduce] = {
    "ReduceL1": lambda x, axes: _sum(jnp.abs(x), axes),
    "ReduceL2": _norm,
    "ReduceLogSum": lambda x, axes: jnp.log(_sum(x, axes)),
    "ReduceLogSumExp": _log_sum_exp,
    "ReduceMax": _largest,
    "ReduceMean": _mean,
    "ReduceMin": _smallest,
    "ReduceProd": _product,
    "ReduceSum": _sum,
    "ReduceSumSquare": lambda x, axes: _sum(x * x, axes),
}
# Computed in float32 for integers, and rounded toward zero.
IRRATIONAL = {"ReduceL2", "ReduceLogSum", "ReduceLogSumExp"}
# Computed in float32 for half precision, whose range squares and sums may leave where the result does not.
WIDE = {"ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceSumSquare"}


def _reduction(name: str, reduce: Reduce) -> Callable[..., Array]:
    """Make the function of an ONNX reduction from one of arrays and axes."""

    def reduced(x: Array, axes: Static | None = None, *, keepdims: int = 1, noop_with_empty_axes: int = 0) -> Array:
        named = () if axes is None else integers(axes)
        # An axis that is named twice is reduced once, as in onnxruntime.
        listed = tuple(sorted({axis_of(axis, x.ndim) for axis in named}))
        chosen = listed if listed or noop_with_empty_axes else tuple(range(x.ndim))
        wide = x.astype(jnp.float32) if name in IRRATIONAL and not is_floating(x) else x
        wide = wide.astype(working_dtype(x.dtype)) if name in WIDE and is_floating(x) else wide
        result = reduce(wide, chosen).astype(x.dtype)
        return result if keepdims else jnp.squeeze(result, chosen)

    reduced.__name__ = name
    reduced.__doc__ = (
        "Reduction over static axes; over all, or none if `noop_with_empty_axes`, where no axes are listed."
    )
    return reduced


for _name, _reduce in REDUCTIONS.items():
    register("", _name)(_reduction(_name, _reduce))


def _index(find: Callable[..., Array]) -> Callable[..., Array]:
    """Return the operator that finds the largest or the smallest element."""

    def found(x: Array, *, axis: int = 0, keepdims: int = 1, select_last_index: int = 0) -> Array:
        """Index of the largest or smallest element along an axis; of equal ones the first, or the last."""
        index = find(jnp.flip(x, axis) if select_last_index else x, axis=axis, keepdims=bool(keepdims))
        return (x.shape[axis] - 1 - index if select_last_index else index).astype(index_dtype())

    return found


operator("ArgMax")(_index(jnp.argmax))
operator("ArgMin")(_index(jnp.argmin))


def _running(combine: Callable[..., Array], neutral: int) -> Callable[..., Array]:
    """Return the operator that adds up, or multiplies, the elements up to each."""

    def running(x: Array, axis: Static, *, exclusive: int = 0, reverse: int = 0) -> Array:
        """Sums or products of the elements up to each along an axis, without itself if exclusive."""
        along = integers(axis)[0]
        line = jnp.moveaxis(x, along, 0)
        ordered = line[::-1] if reverse else line
        if exclusive:
            first = jnp.full((min(1, len(line)), *line.shape[1:]), neutral, x.dtype)
            ordered = jnp.concatenate([first, ordered[:-1]])
        total = combine(ordered, axis=0, dtype=x.dtype)
        return jnp.moveaxis(total[::-1] if reverse else total, 0, along)

    return running


operator("CumSum")(_running(jnp.cumsum, 0))
operator("CumProd")(_running(jnp.cumprod, 1))


@operator("Softmax")
def softmax(x: Value, *, axis: int = -1) -> Array:
    return jax.nn.softmax(x, axis=axis)


@operator("LogSoftmax")
def log_softmax(x: Value, *, axis: int = -1) -> Array:
    return jax.nn.log_softmax(x, axis=axis)


@operator("Hardmax")
def hardmax(x: Array, *, axis: int = -1) -> Array:
    """One at the first largest element along an axis, zero elsewhere."""
    if not x.size:
        return x
    return jax.nn.one_hot(jnp.argmax(x, axis=axis), x.shape[axis], axis=axis, dtype=x.dtype)


@operator("MatMul")
def matmul(a: Value, b: Value) -> Array:
    return jnp.matmul(a, b)


@operator("Gemm")
def gemm(
    a: Value,
    b: Value,
    c: Optional = None,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
    transA: int = 0,
    transB: int = 0,
) -> Array:
    """α A B + β C, either matrix transposed or not; scales of one are no operations."""
    for matrix, name in ((a, "A"), (b, "B")):
        if np.ndim(matrix) != 2:
            raise OutsideError(f"{name} is no matrix", expected="2 dimensions", got=list(np.shape(matrix)))
    product = jnp.matmul(jnp.transpose(a) if transA else a, jnp.transpose(b) if transB else b)
    scaled = _scaled(product, alpha)
    if c is None:
        return scaled
    addend = jnp.broadcast_to(c, product.shape) if np.ndim(c) > 2 else jnp.asarray(c)
    return scaled + _scaled(addend, beta)


def _scaled(x: Array, factor: float) -> Array:
    return x if factor == 1 else (factor * x).astype(x.dtype)


@operator("Einsum")
def einstein_sum(*inputs: Value, equation: str) -> Array:
    return jnp.einsum(equation.replace(" ", ""), *map(jnp.asarray, inputs))
