"""Rules of elementwise operations of StableHLO and CHLO, by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ipujax.lowering.stablehlo.translation import Operation, Rule, Scope, Values, dtype_of, has_64_bits, integer, word

_SAME: dict[str, Callable[..., Any]] = {
    "abs": lax.abs,
    "and": lax.bitwise_and,
    "atan2": lax.atan2,
    "cbrt": lax.cbrt,
    "ceil": lax.ceil,
    "clamp": lax.clamp,
    "complex": lax.complex,
    "cosine": lax.cos,
    "count_leading_zeros": lax.clz,
    "divide": lax.div,
    "exponential": lax.exp,
    "exponential_minus_one": lax.expm1,
    "floor": lax.floor,
    "imag": lax.imag,
    "is_finite": lax.is_finite,
    "log": lax.log,
    "log_plus_one": lax.log1p,
    "logistic": lax.logistic,
    "maximum": lax.max,
    "minimum": lax.min,
    "negate": lax.neg,
    "not": lax.bitwise_not,
    "or": lax.bitwise_or,
    "popcnt": lax.population_count,
    "power": lax.pow,
    "real": lax.real,
    "remainder": lax.rem,
    "round_nearest_afz": lambda x: lax.round(x, lax.RoundingMethod.AWAY_FROM_ZERO),
    "round_nearest_even": lambda x: lax.round(x, lax.RoundingMethod.TO_NEAREST_EVEN),
    "rsqrt": lax.rsqrt,
    "select": lambda truth, yes, no: lax.select_n(truth, no, yes),
    "shift_left": lax.shift_left,
    "shift_right_arithmetic": lax.shift_right_arithmetic,
    "shift_right_logical": lax.shift_right_logical,
    "sign": lax.sign,
    "sine": lax.sin,
    "sqrt": lax.sqrt,
    "subtract": lax.sub,
    "tan": lax.tan,
    "tanh": lax.tanh,
    "xor": lax.bitwise_xor,
}

# Of CHLO, whose names are those of composites too; parameters that an operation may have are its operands.
CHLO: dict[str, Callable[..., Any]] = {
    "acos": lax.acos,
    "acosh": lax.acosh,
    "asin": lax.asin,
    "asinh": lax.asinh,
    "atan": lax.atan,
    "atanh": lax.atanh,
    "bessel_i1e": lax.bessel_i1e,
    "conj": lax.conj,
    "cosh": lax.cosh,
    "digamma": lax.digamma,
    "erf": lax.erf,
    "erf_inv": lax.erf_inv,
    "erfc": lax.erfc,
    "lgamma": lax.lgamma,
    "next_after": lax.nextafter,
    "polygamma": lax.polygamma,
    "sinh": lax.sinh,
    "square": lax.square,
    "tan": lax.tan,
    "zeta": lax.zeta,
}

# Of truths add and multiply are or and and.
_ADDITIVE: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "add": (lax.add, lax.bitwise_or),
    "multiply": (lax.mul, lax.bitwise_and),
}

ELEMENTWISE = frozenset((*_SAME, *_ADDITIVE, *CHLO, "compare", "convert"))

_COMPARISONS: dict[str, Callable[..., Any]] = {
    "EQ": lax.eq,
    "NE": lax.ne,
    "LT": lax.lt,
    "LE": lax.le,
    "GT": lax.gt,
    "GE": lax.ge,
}
_TOTAL_ORDER: dict[str, Callable[..., Any]] = {
    "EQ": lax.eq_to_p.bind,
    "NE": lambda x, y: lax.bitwise_not(lax.eq_to_p.bind(x, y)),
    "LT": lax.lt_to_p.bind,
    "LE": lax.le_to_p.bind,
    "GT": lambda x, y: lax.lt_to_p.bind(y, x),
    "GE": lambda x, y: lax.le_to_p.bind(y, x),
}


def _rule(fun: Callable[..., Any]) -> Rule:
    return lambda scope, op, operands: [fun(*operands)]


def _additive_rule(of_numbers: Callable[..., Any], of_truths: Callable[..., Any]) -> Rule:
    def rule(scope: Scope, op: Operation, operands: Values) -> Sequence[Any]:
        return [(of_truths if operands[0].dtype == bool else of_numbers)(*operands)]

    return rule


def compare_rule(scope: Scope, op: Operation, operands: Values) -> Sequence[Any]:
    """Comparison, of floating-point numbers by their values or in their total order."""
    is_total = word(op, "compare_type") == "TOTALORDER" and jnp.issubdtype(operands[0].dtype, jnp.floating)
    return [(_TOTAL_ORDER if is_total else _COMPARISONS)[word(op, "comparison_direction")](*operands)]


def convert_rule(scope: Scope, op: Operation, operands: Values) -> Sequence[Any]:
    """Conversion to the dtype of the result."""
    (x,) = operands
    dtype = dtype_of(op.results[0].type)
    return [x if x.dtype == dtype else lax.convert_element_type(x, dtype)]


class Words64:
    """Pairs of 32-bit words that the module sees as numbers of 64 bits: the state of random numbers.

    Args:
        words: uint32[..., 2].
    """

    dtype = jnp.dtype("uint64")

    def __init__(self, words: jax.Array) -> None:
        self.words = words
        self.shape = words.shape[:-1]


def bitcast_rule(scope: Scope, op: Operation, operands: Values) -> Sequence[Any]:
    """`stablehlo.bitcast_convert`: bits as numbers of another dtype; 64 bits that JAX lacks are pairs of words."""
    (x,) = operands
    dtype = dtype_of(op.results[0].type)
    if isinstance(x, Words64):
        return [x.words]
    if dtype.itemsize == 8 and not has_64_bits() and x.dtype == jnp.uint32:
        return [Words64(x)]
    return [lax.bitcast_convert_type(x, dtype)]


def reduce_precision_rule(scope: Scope, op: Operation, operands: Values) -> Sequence[Any]:
    """Rounding to fewer bits."""
    (x,) = operands
    return [lax.reduce_precision(x, integer(op, "exponent_bits"), integer(op, "mantissa_bits"))]


RULES: dict[str, Rule] = {
    **{f"stablehlo.{name}": _rule(fun) for name, fun in _SAME.items()},
    **{f"stablehlo.{name}": _additive_rule(*funs) for name, funs in _ADDITIVE.items()},
    **{f"chlo.{name}": _rule(fun) for name, fun in CHLO.items()},
    "stablehlo.compare": compare_rule,
    "stablehlo.convert": convert_rule,
    "stablehlo.bitcast_convert": bitcast_rule,
    "stablehlo.reduce_precision": reduce_precision_rule,
}
