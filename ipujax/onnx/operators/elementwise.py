"""Elementwise operators: functions of one, two or any number of arrays, which broadcast as in NumPy; non-linearities;
casts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import onnx
from jax import lax

from ipujax.onnx.element_types import REMEDY, bit_cast, canonical, cast, element_dtype, is_floating, working_dtype
from ipujax.onnx.onnx_errors import OutsideError, WideValueError
from ipujax.onnx.operators.operand_types import Array, Optional, Value
from ipujax.onnx.registry import is_static, operator, register


def divide(a: Value, b: Value) -> Array:
    """Quotient; of integers rounded toward zero."""
    if is_floating(a):
        return jnp.divide(a, b)
    return lax.div(*jnp.broadcast_arrays(a, b))


def power(x: Value, y: Value) -> Array:
    """Power in the dtype of the base, whatever that of the exponent."""
    base = jnp.asarray(x)
    exponent = jnp.asarray(y)
    if is_floating(base):
        return jnp.power(base, exponent.astype(base.dtype) if is_floating(exponent) else exponent).astype(base.dtype)
    if is_floating(exponent):
        # Floats do not hold all integers: powers by whole numbers are products of integers.
        wide = exponent.astype(jnp.promote_types(exponent.dtype, jnp.float32))
        root = jnp.power(base.astype(wide.dtype), wide).astype(base.dtype)
        is_whole = jnp.round(exponent) == exponent
        return jnp.where(is_whole, _integer_power(base, exponent.astype(base.dtype)), root)
    if is_static(y) and np.min(y, initial=0) >= 0:
        return lax.integer_pow(base, 0) if exponent.size == 0 else jnp.power(base, exponent).astype(base.dtype)
    return _integer_power(base, exponent)


def _integer_power(base: Array, exponent: Array) -> Array:
    """Power of integers; with a negative exponent the reciprocal, rounded toward zero."""
    sign = jnp.where((base < 0) & (exponent % 2 != 0), -1, 1)
    reciprocal = jnp.where(abs(base) == 1, sign, 0).astype(base.dtype)
    integer_power = jnp.power(base, jnp.maximum(exponent, 0))
    return jnp.where(exponent < 0, reciprocal, integer_power.astype(base.dtype))


def remainder(a: Value, b: Value, *, fmod: int = 0) -> Array:
    """Remainder with the sign of the divisor, of the dividend if `fmod`."""
    return (jnp.fmod if fmod else jnp.mod)(a, b)


def reciprocal(x: Value) -> Array:
    return jnp.divide(jnp.ones((), jnp.asarray(x).dtype), x)


def clip(x: Value, low: Optional = None, high: Optional = None) -> Array:
    """Elements limited to an interval; to its upper end where the interval is empty."""
    for bound, name in ((low, "min"), (high, "max")):
        if bound is not None and np.size(bound) != 1:
            raise OutsideError(f"{name} is no number", expected="one element", got=list(np.shape(bound)))
    raised = x if low is None else jnp.maximum(x, low)
    return jnp.asarray(raised if high is None else jnp.minimum(raised, high))


def is_infinite(x: Value, *, detect_negative: int = 1, detect_positive: int = 1) -> Array:
    """Mask of infinities of the signs that are asked for."""
    positive = jnp.isposinf(x) & bool(detect_positive)
    negative = jnp.isneginf(x) & bool(detect_negative)
    return positive | negative


def bit_shift(x: Value, y: Value, *, direction: str) -> Array:
    """Elements shifted; by a negative number, or by all bits or more, every bit is the bit that is shifted in."""
    x, y = jnp.broadcast_arrays(x, y)
    if direction == "LEFT":
        return lax.shift_left(x, y)
    shift = lax.shift_right_arithmetic if jnp.issubdtype(x.dtype, jnp.signedinteger) else lax.shift_right_logical
    return shift(x, y)


def error_function(x: Value) -> Array:
    """Error function; of integers in float32, rounded toward zero."""
    x = jnp.asarray(x)
    return lax.erf(x) if is_floating(x) else lax.erf(x.astype(jnp.float32)).astype(x.dtype)


def variadic(function: Callable[[Any, Any], Any]) -> Callable[..., Array]:
    """Return the operator that combines any number of arrays with a function of two."""

    def combined(*inputs: Value) -> Array:
        return reduce(function, map(jnp.asarray, inputs))

    return combined


def mean(*inputs: Value) -> Array:
    first, *rest = map(jnp.asarray, inputs)
    # The sum of half precision may leave its range.
    return (variadic(jnp.add)(first.astype(working_dtype(first.dtype)), *rest) / len(inputs)).astype(first.dtype)


@operator("LeakyRelu")
def leaky_relu(x: Value, *, alpha: float = 0.01) -> Array:
    return jnp.where(x >= 0, x, alpha * x)


@operator("PRelu")
def parametric_relu(x: Value, slope: Value) -> Array:
    return jnp.where(x >= 0, x, jnp.multiply(slope, x))


@operator("ThresholdedRelu")
def thresholded_relu(x: Value, *, alpha: float = 1.0) -> Array:
    return jnp.where(x > alpha, x, jnp.zeros_like(x))


@operator("Elu")
def elu(x: Value, *, alpha: float = 1.0) -> Array:
    return _exponential_linear(x, alpha)


@operator("Selu")
def selu(x: Value, *, alpha: float = 1.67326319217681884765625, gamma: float = 1.05070102214813232421875) -> Array:
    return gamma * _exponential_linear(x, alpha)


@operator("Celu")
def celu(x: Value, *, alpha: float = 1.0) -> Array:
    return jnp.maximum(x, 0) + jnp.minimum(0, alpha * jnp.expm1(_negative_part(x) / alpha))


def _exponential_linear(x: Value, alpha: float) -> Array:
    return jnp.where(x >= 0, x, alpha * jnp.expm1(_negative_part(x)))


def _negative_part(x: Value) -> Array:
    """The branch that is not taken must not overflow: its gradient would be 0 · ∞."""
    return jnp.where(x >= 0, jnp.zeros_like(x), x)


@operator("HardSigmoid")
def hard_sigmoid(x: Value, *, alpha: float = 0.2, beta: float = 0.5) -> Array:
    return jnp.clip(alpha * jnp.asarray(x) + beta, 0, 1)


@operator("Swish")
def swish(x: Array, *, alpha: float = 1.0) -> Array:
    return x * jax.nn.sigmoid(x if alpha == 1 else alpha * x)


@operator("SwiGLU")
def swish_gate(a: Array, b: Value, *, alpha: float = 1.0) -> Array:
    return swish(a, alpha=alpha) * b


@operator("Gelu")
def gelu(x: Value, *, approximate: str = "none") -> Array:
    return jax.nn.gelu(jnp.asarray(x), approximate=approximate == "tanh")


@operator("Shrink")
def shrink(x: Array, *, lambd: float = 0.5, bias: float = 0.0) -> Array:
    low = (x + bias).astype(x.dtype)
    high = (x - bias).astype(x.dtype)
    return jnp.where(x < -lambd, low, jnp.where(x > lambd, high, jnp.zeros_like(x)))


def unary(function: Callable[[Any], Any]) -> Callable[[Value], Array]:
    """Return the operator of one input: a JAX function without its further parameters."""

    def of_one(x: Value) -> Array:
        return function(jnp.asarray(x))

    return of_one


def two(function: Callable[[Any, Any], Any]) -> Callable[[Value, Value], Array]:
    """Return the operator of two inputs: a JAX function without its further parameters."""

    def of_two(a: Value, b: Value) -> Array:
        return function(jnp.asarray(a), jnp.asarray(b))

    return of_two


UNARY: Mapping[str, Callable[[Any], Any]] = {
    "Abs": jnp.abs,
    "Acos": jnp.arccos,
    "Acosh": jnp.arccosh,
    "Asin": jnp.arcsin,
    "Asinh": jnp.arcsinh,
    "Atan": jnp.arctan,
    "Atanh": jnp.arctanh,
    "BitwiseNot": jnp.bitwise_not,
    "Ceil": jnp.ceil,
    "Cos": jnp.cos,
    "Cosh": jnp.cosh,
    "Det": jnp.linalg.det,  # of each matrix
    "Exp": jnp.exp,
    "Floor": jnp.floor,
    "HardSwish": lambda x: x * hard_sigmoid(x, alpha=1 / 6, beta=0.5),
    "IsNaN": jnp.isnan,
    "Log": jnp.log,
    "Mish": lambda x: x * jnp.tanh(jax.nn.softplus(x)),
    "Neg": jnp.negative,
    "Not": jnp.logical_not,
    "Relu": jax.nn.relu,
    "Round": jnp.round,  # half to even
    "Sigmoid": jax.nn.sigmoid,
    "Sign": jnp.sign,
    "Sin": jnp.sin,
    "Sinh": jnp.sinh,
    "Softplus": jax.nn.softplus,
    "Softsign": jax.nn.soft_sign,
    "Sqrt": jnp.sqrt,
    "Tan": jnp.tan,
    "Tanh": jnp.tanh,
}
BINARY: Mapping[str, Callable[[Any, Any], Any]] = {
    "Add": jnp.add,
    "And": jnp.logical_and,
    "BitwiseAnd": jnp.bitwise_and,
    "BitwiseOr": jnp.bitwise_or,
    "BitwiseXor": jnp.bitwise_xor,
    "Div": divide,
    "Equal": jnp.equal,
    "Greater": jnp.greater,
    "GreaterOrEqual": jnp.greater_equal,
    "Less": jnp.less,
    "LessOrEqual": jnp.less_equal,
    "Mul": jnp.multiply,
    "Or": jnp.logical_or,
    "Pow": power,
    "Sub": jnp.subtract,
    "Xor": jnp.logical_xor,
}
VARIADIC: Mapping[str, Callable[[Any, Any], Any]] = {"Max": jnp.maximum, "Min": jnp.minimum, "Sum": jnp.add}
FUNCTIONS: Mapping[str, Callable[..., Array]] = {
    "BitShift": bit_shift,
    "Clip": clip,
    "Erf": error_function,
    "IsInf": is_infinite,
    "Mean": mean,
    "Mod": remainder,
    "Reciprocal": reciprocal,
    "Where": lambda condition, x, y: jnp.where(condition, x, y),
}

TABLES: tuple[tuple[Mapping[str, Callable[..., Any]], Callable[..., Callable[..., Array]]], ...] = (
    (UNARY, unary),
    (BINARY, two),
    (VARIADIC, variadic),
    (FUNCTIONS, lambda function: function),
)
for _functions, _adapter in TABLES:
    for _name, _function in _functions.items():
        register("", _name)(_adapter(_function))


@operator("Cast")
def cast_to(x: Value, *, to: int, saturate: int = 1, round_mode: str = "up") -> Array:
    return cast(x, element_dtype(to), saturate=bool(saturate), round_mode=round_mode)


@operator("CastLike")
def cast_like(x: Value, target: Value, *, saturate: int = 1, round_mode: str = "up") -> Array:
    return cast(x, jnp.asarray(target).dtype, saturate=bool(saturate), round_mode=round_mode)


@operator("BitCast")
def reinterpret(x: Value, *, to: int) -> Array:
    dtype = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(to))
    if canonical(dtype) != dtype and is_floating(x) != is_floating(np.empty(0, dtype)):
        message = f"elements of {dtype} are computed with 32 bits, which are other bits"
        raise WideValueError(message, expected=f"{dtype} with 64 bits", got=str(canonical(dtype)), hint=REMEDY)
    return bit_cast(x, element_dtype(to))
