"""Costs of elementwise codelets against the figures of PopLibs, row by row.

Source: poplibs `lib/popops/popopsCycleEstimators.{hpp,cpp}` and `PerformanceEstimation.cpp`. A slope is one iteration
of the loop, the constant the cycles of a worker outside of it. A row of a table there without a natural vector width is
a full iteration; one with it is a vector of 64 bits and gets the overhead of the loop: 4 unary, 5 binary, 2 in add,
subtract, multiply of floats.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

import ipujax as ipu
from ipujax.lowering.popops.vertices.elementwise_cycles import OP_COSTS, elementwise_cycles
from tests.lowering.helpers import small_target

UNARY = 17
BINARY = 26
FLOAT_BINARY = 29
EXP = 33
ONE_REGION = 5 + 6
CAST = 19 + 18
F32 = np.float32
F16 = np.float16
I32 = np.int32
BOOL = np.bool_

# Row, dtype, cycles of an iteration (figure + overhead), its elements, constant of a worker, operands, source symbol.
FIGURES = [
    *((op, F32, 1 + 2, 2, FLOAT_BINARY, 2, "binaryOpPerfInfo ADD …") for op in ("add", "sub", "mul", "add_any")),
    *((op, F16, 1 + 2, 4, BINARY, 2, "binaryOpPerfInfo ADD …") for op in ("add", "sub", "mul", "add_any")),
    *((op, I32, 7, 1, BINARY, 2, "binaryOpPerfInfo ADD …") for op in ("add", "sub", "mul", "add_any", "max", "min")),
    *((op, F32, 3, 2, FLOAT_BINARY, 2, "binaryOpPerfInfo MAXIMUM, MINIMUM") for op in ("max", "min")),
    *((op, F16, 4, 4, BINARY, 2, "binaryOpPerfInfo MAXIMUM, MINIMUM") for op in ("max", "min")),
    ("clamp", F32, 2, 2, ONE_REGION, 3, "clampCycles, Clamp"),
    ("clamp", F16, 2, 4, ONE_REGION, 3, "clampCycles, Clamp"),
    ("clamp", I32, 7, 1, ONE_REGION, 3, "clampCycles, Clamp"),
    *(("select_n", dtype, 5, 1, ONE_REGION, 3, "selectCycles, Select") for dtype in (F32, F16, I32, BOOL)),
    ("div", F32, 10, 2, FLOAT_BINARY, 2, "binaryOpPerfInfo DIVIDE"),
    ("div", F16, 21, 4, BINARY, 2, "binaryOpPerfInfo DIVIDE"),
    ("div", I32, 277, 1, BINARY, 2, "binaryOpPerfInfo DIVIDE"),
    ("rem", F32, 133, 2, FLOAT_BINARY, 2, "binaryOpPerfInfo REMAINDER"),
    ("rem", F16, 300, 4, BINARY, 2, "binaryOpPerfInfo REMAINDER"),
    ("rem", I32, 292, 1, BINARY, 2, "binaryOpPerfInfo REMAINDER"),
    ("pow", F32, 312, 1, FLOAT_BINARY, 2, "binaryOpPerfInfo POWER"),
    ("pow", F16, 325, 1, BINARY, 2, "binaryOpPerfInfo POWER"),
    ("pow", I32, 32, 1, BINARY, 2, "binaryOpPerfInfo POWER"),
    ("atan2", F32, 272, 2, FLOAT_BINARY, 2, "binaryOpPerfInfo ATAN2"),
    ("atan2", F16, 578, 4, BINARY, 2, "binaryOpPerfInfo ATAN2"),
    *((op, F32, 14, 4, FLOAT_BINARY, 2, "binaryOpPerfInfo EQUAL …") for op in ("eq", "ge", "gt", "le", "lt")),
    *((op, F16, 9, 4, BINARY, 2, "binaryOpPerfInfo EQUAL …") for op in ("eq", "ge", "gt", "le", "lt")),
    *((op, I32, 22, 4, BINARY, 2, "binaryOpPerfInfo EQUAL, GREATER_THAN, LESS_THAN") for op in ("eq", "gt", "lt")),
    *((op, I32, 26, 4, BINARY, 2, "binaryOpPerfInfo GREATER_THAN_EQUAL, LESS_THAN_EQUAL") for op in ("ge", "le")),
    ("eq", BOOL, 6, 4, BINARY, 2, "binaryOpPerfInfo EQUAL"),
    ("ne", F32, 20, 4, FLOAT_BINARY, 2, "binaryOpPerfInfo NOT_EQUAL"),
    ("ne", F16, 11, 4, BINARY, 2, "binaryOpPerfInfo NOT_EQUAL"),
    ("ne", I32, 22, 4, BINARY, 2, "binaryOpPerfInfo NOT_EQUAL"),
    ("ne", BOOL, 5, 4, BINARY, 2, "binaryOpPerfInfo NOT_EQUAL"),
    *((op, I32, 7, 1, BINARY, 2, "binaryOpPerfInfo BITWISE_AND …") for op in ("and", "or", "xor")),
    *((op, np.int16, 3, 4, BINARY, 2, "binaryOpPerfInfo BITWISE_AND, BITWISE_OR") for op in ("and", "or")),
    ("xor", np.int16, 5, 2, BINARY, 2, "binaryOpPerfInfo BITWISE_XOR"),
    *((op, BOOL, 5, 4, BINARY, 2, "binaryOpPerfInfo LOGICAL_AND, LOGICAL_OR") for op in ("and", "or")),
    *((f"shift_{op}", I32, 7, 1, BINARY, 2, "binaryOpPerfInfo SHIFT_LEFT …") for op in ("left", "right_logical")),
    ("shift_right_arithmetic", I32, 7, 1, BINARY, 2, "binaryOpPerfInfo SHIFT_RIGHT_SIGN_EXTEND"),
    ("not", I32, 1 + 4, 2, UNARY, 1, "unaryOpPerfInfo BITWISE_NOT"),
    ("not", np.int16, 2, 4, UNARY, 1, "unaryOpPerfInfo BITWISE_NOT"),
    ("not", BOOL, 17 + 4, 1, UNARY, 1, "unaryOpPerfInfo LOGICAL_NOT"),
    ("population_count", I32, 1 + 4, 1, UNARY, 1, "unaryOpPerfInfo POPCOUNT"),
    ("clz", I32, 1 + 4, 1, UNARY, 1, "unaryOpPerfInfo COUNT_LEADING_ZEROS"),
    ("neg", F32, 2, 2, UNARY, 1, "unaryOpPerfInfo NEGATE"),
    ("neg", F16, 2, 4, UNARY, 1, "unaryOpPerfInfo NEGATE"),
    ("neg", I32, 2 + 4, 1, UNARY, 1, "unaryOpPerfInfo NEGATE"),
    ("sign", F32, 5 + 4, 2, UNARY, 1, "unaryOpPerfInfo SIGNUM"),
    ("sign", F16, 5 + 4, 4, UNARY, 1, "unaryOpPerfInfo SIGNUM"),
    ("sign", I32, 5 + 4, 1, UNARY, 1, "unaryOpPerfInfo SIGNUM"),
    ("abs", F32, 1 + 4, 1, UNARY, 1, "unaryOpPerfInfo ABSOLUTE"),
    ("abs", F16, 1 + 4, 1, UNARY, 1, "unaryOpPerfInfo ABSOLUTE"),
    ("abs", I32, 2 + 4, 1, UNARY, 1, "unaryOpPerfInfo ABSOLUTE"),
    ("square", F32, 2, 2, UNARY, 1, "unaryOpPerfInfo SQUARE"),
    ("square", F16, 2, 4, UNARY, 1, "unaryOpPerfInfo SQUARE"),
    ("square", I32, 1 + 4, 2, UNARY, 1, "unaryOpPerfInfo SQUARE"),
    *((op, F32, 6, 2, EXP, 1, "unaryOpPerfInfo EXPONENT, EXPONENT2") for op in ("exp", "exp2")),
    *((op, F16, 4, 4, EXP, 1, "unaryOpPerfInfo EXPONENT, EXPONENT2") for op in ("exp", "exp2")),
    ("expm1", F32, 4 + 4, 1, UNARY, 1, "unaryOpPerfInfo EXPONENT_MINUS_ONE"),
    ("expm1", F16, 5 + 4, 4, UNARY, 1, "unaryOpPerfInfo EXPONENT_MINUS_ONE"),
    ("log", F32, 12, 2, UNARY, 1, "unaryOpPerfInfo LOGARITHM"),
    ("log", F16, 4, 4, UNARY, 1, "unaryOpPerfInfo LOGARITHM"),
    ("log1p", F32, 18 + 4, 2, UNARY, 1, "unaryOpPerfInfo LOGARITHM_ONE_PLUS"),
    ("log1p", F16, 18 + 4, 4, UNARY, 1, "unaryOpPerfInfo LOGARITHM_ONE_PLUS"),
    ("tanh", F32, 12, 2, UNARY, 1, "unaryOpPerfInfo TANH"),
    ("tanh", F16, 4, 4, UNARY, 1, "unaryOpPerfInfo TANH"),
    ("logistic", F32, 12, 2, UNARY, 1, "unaryOpPerfInfo SIGMOID"),
    ("logistic", F16, 6, 4, UNARY, 1, "unaryOpPerfInfo SIGMOID"),
    ("sqrt", F32, 10, 2, UNARY, 1, "unaryOpPerfInfo SQRT"),
    ("sqrt", F16, 23, 4, UNARY, 1, "unaryOpPerfInfo SQRT"),
    ("rsqrt", F32, 8, 2, UNARY, 1, "unaryOpPerfInfo RSQRT"),
    ("rsqrt", F16, 19, 4, UNARY, 1, "unaryOpPerfInfo RSQRT"),
    ("cbrt", F32, 27 + 4, 2, UNARY, 1, "unaryOpPerfInfo CBRT"),
    ("cbrt", F16, 17 + 4, 4, UNARY, 1, "unaryOpPerfInfo CBRT"),
    ("erf", F32, 41, 1, UNARY, 1, "unaryOpPerfInfo ERF"),
    ("erf", F16, 13, 1, UNARY, 1, "unaryOpPerfInfo ERF"),
    *((op, F32, 2300 + 4, 1, UNARY, 1, "unaryOpPerfInfo SIN, COS") for op in ("sin", "cos")),
    *((op, F16, 25, 1, UNARY, 1, "unaryOpPerfInfo SIN, COS") for op in ("sin", "cos")),
    ("tan", F32, 5100, 1, UNARY, 1, "unaryOpPerfInfo TAN"),
    ("tan", F16, 5700, 1, UNARY, 1, "unaryOpPerfInfo TAN"),
    *(("asin", dtype, 102 + 4, 1, UNARY, 1, "unaryOpPerfInfo ASIN") for dtype in (F32, F16)),
    *((op, F32, 2 + 4, 2, UNARY, 1, "unaryOpPerfInfo FLOOR, CEIL, ROUND") for op in ("floor", "ceil", "round")),
    *((op, F16, 2 + 4, 4, UNARY, 1, "unaryOpPerfInfo FLOOR, CEIL, ROUND") for op in ("floor", "ceil", "round")),
    ("is_finite", F32, 5 + 4, 2, UNARY, 1, "unaryOpPerfInfo IS_FINITE"),
    ("is_finite", F16, 5 + 4, 4, UNARY, 1, "unaryOpPerfInfo IS_FINITE"),
    ("convert_element_type", F32, 1, 2, CAST, 1, "castWorkerCycles, getCast1DCycleEstimate"),
    ("convert_element_type", F16, 2, 4, CAST, 1, "castWorkerCycles, getCast1DCycleEstimate"),
    ("convert_element_type", I32, 2, 1, CAST, 1, "castWorkerCycles, getCast1DCycleEstimate"),
]  # fmt: skip
WITHOUT_FIGURE = {
    *("mulhi", "nextafter", "eq_to", "le_to", "lt_to", "integer_pow", "erfc", "erf_inv", "lgamma", "digamma"),
    *("acos", "atan", "sinh", "cosh", "asinh", "acosh", "atanh", "real", "imag", "conj", "complex", "zeta"),
    *("bessel_i0e", "bessel_i1e", "igamma", "igammac", "igamma_grad_a", "polygamma", "regularized_incomplete_beta"),
    *("reduce_precision", "bitcast_convert_type", "copy"),
}


@pytest.mark.parametrize("row", FIGURES, ids=lambda row: f"{row[0]}-{np.dtype(row[1])}")
def test_has_slope_and_constant_of_the_source(row: tuple[str, type, int, int, int, int, str]) -> None:
    op, dtype, cycles, vector, constant, operands, source = row
    target = small_target(1)
    workers = target.worker_contexts
    sizes = np.array([0, 1, 5]) * workers * vector
    total = elementwise_cycles(op, dtype, operands, 0, sizes, target)
    slope = (total - total[0]) / workers
    np.testing.assert_array_equal(slope, [0, cycles, 5 * cycles], err_msg=source)
    launch = total[0] - target.supervisor_overhead_cycles - (9 if operands == 1 else 0)  # 9: UnaryOp1D, supervisor
    assert launch == workers * constant, source


def test_rows_have_a_figure_or_are_assumed() -> None:
    assert {row[0] for row in FIGURES} | WITHOUT_FIGURE == set(OP_COSTS)
    assert WITHOUT_FIGURE.isdisjoint(row[0] for row in FIGURES)


@pytest.mark.parametrize("op", ["add", "sub", "mul"])
def test_scalar_operand_saves_its_load(op: str) -> None:
    """BroadcastScalar1D: 1 cycle of overhead an iteration, not 2, and 20 cycles of a worker outside of the loop."""
    total = elementwise_cycles(op, F32, 1, 1, np.array([0, 2 * 6 * 5]), small_target(1))
    np.testing.assert_array_equal(total, 11 + 6 * np.array([20, 20 + 5 * (1 + 1)]))


@pytest.mark.parametrize(
    ("op", "dtype", "cycles", "vector"),
    [
        ("div", F32, 6, 2),
        ("div", np.float16, 8, 2),
        ("rem", F32, 93, 2),
        ("max", np.float16, 3, 4),
        ("lt", F32, 12, 4),
        ("ge", np.int32, 20, 4),
        ("ne", np.float16, 10, 4),
        ("shift_left", np.int32, 6, 1),
    ],
)
def test_operations_by_a_scalar(op: str, dtype: Any, cycles: int, vector: int) -> None:
    """popops/popopsCycleEstimators.hpp, broadcastOpPerfInfo; popopsCycleEstimators.cpp, broadcastArithmetic1D…."""
    elements = np.array([0, 4 * 6 * 5])
    launch, total = elementwise_cycles(op, dtype, 1, 1, elements, small_target(1))
    assert total - launch == 6 * 4 * 5 // vector * cycles


POWERS: list[tuple[complex, Callable[..., Any]]] = [
    (-1.0, lambda x: 1 / x),
    (-0.5, jax.lax.rsqrt),
    (0.5, jax.lax.sqrt),
    (2.0, jax.lax.square),
    (3.0, lambda x: x**3),
]


@pytest.mark.parametrize(("exponent", "equivalent"), POWERS)
def test_constant_power_costs_its_equivalent(exponent: complex, equivalent: Callable[..., Any]) -> None:
    """Apart from a few cycles before the loop."""
    device = ipu.IPUModel(tiles_per_ipu=1)
    x = jax.ShapeDtypeStruct((6000,), np.float32)
    power, expected = (
        ipu.jit(fun, device=device).lower(x).compile().profile.phase_cycles["compute"]
        for fun in (lambda x: x**exponent, equivalent)
    )
    assert abs(power - expected) < 20


def test_complex_power() -> None:
    x = np.array([1 + 2j, 3 - 1j], np.complex64)
    for exponent in (2 + 0j, 1j):
        np.testing.assert_allclose(ipu.jit(lambda x, e=exponent: x**e)(x), jax.jit(lambda x, e=exponent: x**e)(x))
