"""Rows of the op table for elementwise primitives."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.lowering.rules.op_case import HALF_ULP, MAIN, ULP, OpCase, booleans, integers, normal, uniform


def unary() -> list[OpCase]:
    """Functions of one operand; the interval keeps arguments where the function is defined and tame."""
    rows: list[tuple[str, Callable[..., Any], float, float, bool]] = [
        ("abs", lax.abs, -3, 3, True),
        ("acos", lax.acos, -0.9, 0.9, True),
        ("acosh", lax.acosh, 1.1, 4, True),
        ("asin", lax.asin, -0.9, 0.9, True),
        ("asinh", lax.asinh, -3, 3, True),
        ("atan", lax.atan, -3, 3, True),
        ("atanh", lax.atanh, -0.9, 0.9, True),
        ("cbrt", lax.cbrt, 0.2, 3, True),
        ("ceil", lax.ceil, -3, 3, False),
        ("cos", lax.cos, -3, 3, True),
        ("cosh", lax.cosh, -3, 3, True),
        ("digamma", lax.digamma, 0.5, 4, False),
        ("erf", lax.erf, -2, 2, True),
        ("erf_inv", lax.erf_inv, -0.9, 0.9, True),
        ("erfc", lax.erfc, -2, 2, True),
        ("exp", lax.exp, -3, 3, True),
        ("exp2", lax.exp2, -3, 3, True),
        ("expm1", lax.expm1, -3, 3, True),
        ("floor", lax.floor, -3, 3, False),
        ("lgamma", lax.lgamma, 0.5, 4, True),
        ("log", lax.log, 0.1, 4, True),
        ("log1p", lax.log1p, -0.5, 4, True),
        ("logistic", lax.logistic, -4, 4, True),
        ("neg", lax.neg, -3, 3, True),
        ("round", partial(lax.round, rounding_method=lax.RoundingMethod.TO_NEAREST_EVEN), -3, 3, False),
        ("rsqrt", lax.rsqrt, 0.1, 4, True),
        ("sign", lax.sign, -3, 3, False),
        ("sin", lax.sin, -3, 3, True),
        ("sinh", lax.sinh, -3, 3, True),
        ("sqrt", lax.sqrt, 0.1, 4, True),
        ("square", lax.square, -3, 3, True),
        ("tan", lax.tan, -1.2, 1.2, True),
        ("tanh", lax.tanh, -3, 3, True),
    ]
    cases = []
    for number, (name, fun, low, high, grad) in enumerate(rows):
        dtype = (np.float16, jnp.bfloat16)[number % 2]
        small = ((), (1, 3, 1), (0, 3), (1,))[number % 4]
        cases += [
            OpCase(name, "f32", fun, (uniform(*MAIN, low=low, high=high),), 4 * ULP, ULP, grad=grad, grad_rtol=3e-5),
            OpCase(name, "narrow", fun, (uniform(5, 7, low=low, high=high, dtype=dtype),), HALF_ULP[dtype], 2e-3),
            OpCase(name, "small", fun, (uniform(*small, low=low, high=high),), 4 * ULP, ULP, grad=grad, grad_rtol=3e-5),
        ]
    return cases


def special() -> list[OpCase]:
    """Special functions of several operands, and the parts of complex numbers."""
    x = normal(*MAIN)
    degrees = uniform(5, 1, low=0.5, high=4)
    unit = uniform(5, 1, low=0.05, high=0.95)
    tolerance = {"rtol": 3e-5, "atol": 1e-6}
    numbers = lambda rng: (rng.normal(size=MAIN) + 1j * rng.normal(size=MAIN)).astype(np.complex64)  # noqa: E731
    return [
        OpCase("bessel_i0e", "f32", lax.bessel_i0e, (x,), **tolerance, grad=True),
        OpCase("bessel_i1e", "f32", lax.bessel_i1e, (x,), **tolerance),
        OpCase("igamma", "f32", lax.igamma, (degrees, degrees), **tolerance),
        OpCase("igammac", "f32", lax.igammac, (degrees, degrees), **tolerance),
        OpCase("igamma_grad_a", "f32", lax.igamma_grad_a, (degrees, degrees), **tolerance),
        OpCase("polygamma", "gradient", jax.grad(lambda x: lax.digamma(x).sum()), (degrees,), **tolerance),
        OpCase("zeta", "f32", lambda x: lax.zeta(1 + x, x), (degrees,), **tolerance),
        OpCase("regularized_incomplete_beta", "f32", lax.betainc, (degrees, degrees, unit), **tolerance),
        OpCase("complex", "parts", lax.complex, (x, x)),
        OpCase("real", "part", lax.real, (numbers,)),
        OpCase("imag", "part", lax.imag, (numbers,)),
        OpCase("conj", "mirror", lambda z: lax.conj(z) * 2, (numbers,)),
        OpCase("abs", "complex", lambda x: jnp.abs(x * (1 + 2j)) ** 2, (x,), **tolerance, grad=True, grad_rtol=3e-5),
    ]


def binary() -> list[OpCase]:
    positive = uniform(*MAIN, low=0.2, high=2)
    floats = normal(*MAIN)
    ints = integers(*MAIN)
    shifts = integers(*MAIN, low=0, high=31)
    nonzero = integers(*MAIN, low=1)
    ints16 = integers(5, 7, dtype=np.int16)
    int_pairs = integers(13, 7, 2, dtype=np.int16)
    wide = integers(*MAIN, low=-(2**31), high=2**31)
    cases = [
        OpCase("add", "f32", lax.add, (floats, floats), grad=True),
        OpCase("add", "int", lax.add, (ints, ints)),
        OpCase("mulhi", "int", lax.mulhi, (wide, wide)),
        OpCase("mulhi", "unsigned", lax.mulhi, (integers(5, low=0, high=2**32, dtype=np.uint32),) * 2),
        OpCase("add", "scalars", lax.add, (normal(), normal()), grad=True),
        OpCase("add", "half", lax.add, (normal(5, 7, dtype=np.float16), normal(5, 7, dtype=np.float16)), 1e-3),
        OpCase("add", "bfloat16", lax.add, (normal(5, 7, dtype=jnp.bfloat16), normal(5, 7, dtype=jnp.bfloat16)), 8e-3),
        OpCase("add", "rows", lambda x, b: x + b, (floats, normal(29)), ULP, split_rtol=ULP, grad=True),
        OpCase("add", "outer", lambda x, y: x[:, None] + y, (normal(13), normal(1, 29)), grad=True),
        OpCase("sub", "f32", lax.sub, (floats, floats), grad=True),
        OpCase("sub", "from-one", lambda x: 1 - x, (floats,), grad=True),
        OpCase("mul", "f32", lax.mul, (floats, floats), grad=True),
        OpCase("mul", "transposed", lambda x, y: x * y.T, (floats, normal(29, 13)), grad=True),
        OpCase("mul", "empty", lax.mul, (normal(0, 3), normal(0, 3)), grad=True),
        OpCase("add_any", "f32", jax.grad(lambda x, y: jnp.sum(x * x * y)), (floats, floats), ULP, ULP),
        OpCase("max", "f32", lax.max, (floats, floats), grad=True),
        OpCase("max", "relu", lambda x: jnp.maximum(x, 0), (floats,)),
        OpCase("min", "f32", lax.min, (floats, floats), grad=True),
        OpCase("min", "bool", lax.min, (booleans(*MAIN), booleans(*MAIN))),
        OpCase("clamp", "scalars", lambda x: lax.clamp(-0.5, x, 0.5), (floats,), grad=True),
        OpCase("clamp", "arrays", lax.clamp, (uniform(*MAIN, low=-1, high=0), floats, positive), grad=True),
        OpCase("clamp", "runtime-scalars", lax.clamp, (uniform(low=-1, high=0), floats, uniform(low=0, high=1))),
        OpCase("div", "f32", lax.div, (floats, positive), ULP, grad=True),
        OpCase("div", "int", lax.div, (ints, nonzero)),
        OpCase("rem", "f32", lax.rem, (floats, positive), ULP, 1e-6),
        OpCase("rem", "int", lax.rem, (ints, nonzero)),
        OpCase("pow", "f32", lax.pow, (positive, floats), 2e-6, grad=True),
        OpCase("pow", "int-exponent", lax.pow, (positive, ints), 4e-6),
        OpCase("integer_pow", "cube", lambda x: x**3, (floats,), ULP, grad=True),
        OpCase("integer_pow", "inverse", lambda x: lax.integer_pow(x, -2), (positive,), 2e-6, grad=True),
        OpCase("atan2", "f32", lax.atan2, (floats, positive), 2e-6, grad=True),
        OpCase("nextafter", "f32", lax.nextafter, (floats, floats)),
        OpCase("and", "int", lax.bitwise_and, (ints, ints)),
        OpCase("or", "bool", lax.bitwise_or, (booleans(5, 7), booleans(5, 7))),
        OpCase("xor", "uint", lax.bitwise_xor, (integers(*MAIN, low=0, dtype=np.uint32),) * 2),
        OpCase("not", "bool", lax.bitwise_not, (booleans(*MAIN),)),
        OpCase("not", "int", lax.bitwise_not, (ints,)),
        OpCase("shift_left", "int", lax.shift_left, (ints, shifts)),
        OpCase("shift_right_logical", "int", lax.shift_right_logical, (ints, shifts)),
        OpCase("shift_right_arithmetic", "int", lax.shift_right_arithmetic, (ints, shifts)),
        OpCase("population_count", "int", lax.population_count, (ints,)),
        OpCase("clz", "int", lax.clz, (ints,)),
        OpCase(
            "is_finite", "f32", lax.is_finite, (lambda rng: rng.choice(np.float32([-np.inf, np.nan, 0, 1.5]), MAIN),)
        ),
        OpCase("select_n", "where", jnp.where, (booleans(*MAIN), floats, floats), grad=True),
        OpCase("select_n", "scalar", lambda p, x, y: lax.select_n(p, x, y), (booleans(), floats, floats), grad=True),
        OpCase("select_n", "three", lax.select_n, (integers(*MAIN, low=0, high=3), floats, floats, floats), grad=True),
        OpCase("convert_element_type", "half", lambda x: x.astype(np.float16), (floats,), grad=True, grad_rtol=2e-3),
        OpCase("convert_element_type", "bfloat16", lambda x: x.astype(jnp.bfloat16), (floats,)),
        OpCase("convert_element_type", "int", lambda x: (3 * x).astype(np.int32), (floats,)),
        OpCase("convert_element_type", "bool", lambda x: x.astype(np.bool_), (ints,)),
        OpCase("reduce_precision", "f32", lambda x: lax.reduce_precision(x, 5, 7), (floats,), grad=True),
        OpCase("bitcast_convert_type", "same", lambda x: lax.bitcast_convert_type(x, np.int32), (floats,)),
        OpCase("bitcast_convert_type", "parts", lambda x: lax.bitcast_convert_type(x, np.uint16), (floats,)),
        OpCase("bitcast_convert_type", "bytes", lambda x: lax.bitcast_convert_type(x, np.uint8), (normal(),)),
        OpCase("bitcast_convert_type", "joined", lambda x: lax.bitcast_convert_type(x, np.int32), (int_pairs,)),
        OpCase("bitcast_convert_type", "half", lambda x: lax.bitcast_convert_type(x, jnp.bfloat16), (ints16,)),
    ]
    ordered = lambda rng: rng.choice(np.float32([-np.inf, -1, -0.0, 0.0, 2, np.inf, np.nan]), MAIN)  # noqa: E731
    for primitive in (lax.eq_to_p, lax.le_to_p, lax.lt_to_p):
        cases.append(OpCase(primitive.name, "total order", primitive.bind, (ordered, ordered)))
        cases.append(OpCase(primitive.name, "int", primitive.bind, (integers(5, 7), integers(5, 7))))
    search = partial(jnp.searchsorted, np.sort(np.random.default_rng(0).normal(size=29).astype(np.float32)))
    cases.append(OpCase("le_to", "search", search, (floats,)))
    for name in ("eq", "ne", "ge", "gt", "le", "lt"):
        fun = getattr(lax, name)
        cases.append(OpCase(name, "int", fun, (integers(*MAIN, low=0, high=3), integers(*MAIN, low=0, high=3))))
        cases.append(OpCase(name, "f32", fun, (floats, floats)))
        cases.append(OpCase(name, "constant", lambda x, fun=fun: fun(x, np.float32(0)), (normal(5, 1),)))
    return cases
