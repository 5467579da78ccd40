"""NaN, infinities, signed zeros, the largest and the smallest numbers, through every family of operations.

Results equal plain JAX to the bit, signs of zeros too, except for the last bits of operations that round.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tests.lowering.helpers import lowered, quick_jit, run_engine, run_tiles, small_target
from tests.lowering.rules.op_case import OpCase
from tests.lowering.rules.op_rows_elementwise import binary, unary

TILES = 5
FLOATS = (
    *(0.0, -0.0, 1.0, -1.0, 0.5, -2.5, 3.5, np.inf, -np.inf, np.nan),
    *(2.0**31, -(2.0**31), 2.0**32, 1e10, 3.4e38, -3.4e38, 1.2e-38),
)
DTYPES = ("float32", "float16", "bfloat16")


def specials(dtype: str) -> np.ndarray:
    """All special values of a dtype."""
    with np.errstate(over="ignore"):
        return np.asarray(FLOATS, jnp.dtype(dtype))


def grid(rows: int, columns: int, dtype: str = "float32") -> np.ndarray:
    """Matrix of special values without two equal rows."""
    values = specials(dtype)
    return values[(np.arange(rows)[:, None] * 5 + np.arange(columns) * 3) % len(values)]


def assert_equal(actual: Any, expected: Any, rtol: float, message: str) -> None:
    """Asserts equality, with NaN equal to NaN and zeros of one sign; within `rtol` where finite."""
    actual = np.asarray(actual)
    expected = np.asarray(expected)
    assert actual.dtype == expected.dtype and actual.shape == expected.shape, message
    if expected.dtype.kind == "c":
        assert_equal(actual.real, expected.real, rtol, message)
        assert_equal(actual.imag, expected.imag, rtol, message)
    elif jnp.issubdtype(expected.dtype, jnp.floating):
        actual = actual.astype(np.float64)
        expected = expected.astype(np.float64)
        np.testing.assert_allclose(actual, expected, rtol, 1e-37 if rtol else 0, err_msg=message)
        is_zero = expected == 0
        signs = [np.signbit(x)[is_zero] for x in (actual, expected)]
        np.testing.assert_array_equal(*signs, f"{message}: signs of zeros")
    else:
        np.testing.assert_array_equal(actual, expected, err_msg=message)


def compare(fun: Callable[..., Any], arguments: Sequence[Any], rtol: float) -> None:
    """Compares all executions with plain JAX."""
    expected = jax.tree.leaves(quick_jit(fun)(*arguments))
    program = lowered(fun, arguments, small_target(TILES))
    runs = {
        "engine": run_engine(program, arguments),
        "literal engine": run_engine(program, arguments, exact_splits=True),
        "tiles": run_tiles(program, arguments),
    }
    for execution, results in runs.items():
        for actual, expected_leaf in zip(results, expected, strict=True):
            assert_equal(actual, expected_leaf, rtol, execution)


def of_floats(cases: Sequence[OpCase], operands: int) -> list[OpCase]:
    """Rows with a number of float32 operands of one shape."""
    rows = []
    for case in cases:
        arguments = case.arguments()
        kinds = {(np.shape(x), np.asarray(x).dtype) for x in arguments} if len(arguments) == operands else {()}
        if len(kinds) == 1 and next(iter(kinds))[1:] == (np.dtype(np.float32),):
            rows.append(case)
    return rows


UNARY = of_floats([*unary(), *binary()], 1)
BINARY = of_floats(binary(), 2)


def test_covers_most_elementwise_rows() -> None:
    assert len({case.primitive for case in UNARY}) > 45 and len({case.primitive for case in BINARY}) > 15


@pytest.mark.parametrize("quarter", range(4))
def test_unary(quarter: int) -> None:
    for case in UNARY[quarter::4]:
        compare(case.fun, [specials("float32")], max(case.rtol, 1e-6))


@pytest.mark.parametrize("quarter", range(4))
def test_binary(quarter: int) -> None:
    """Every special value with every other."""
    lhs, rhs = (x.reshape(-1) for x in np.meshgrid(specials("float32"), specials("float32")))
    for case in BINARY[quarter::4]:
        if lhs.shape == jax.eval_shape(case.fun, lhs, rhs).shape:
            compare(case.fun, [lhs, rhs], max(case.rtol, 1e-6))


def test_extreme_integers() -> None:
    """Overflow wraps; division by zero and shifts beyond the width are those of XLA."""
    extremes = np.array([0, 1, -1, 2, 31, 32, 33, -(2**31), 2**31 - 1, -(2**31) + 1], np.int32)
    lhs, rhs = (x.reshape(-1) for x in np.meshgrid(extremes, extremes))
    functions = (lax.add, lax.mul, lax.sub, lax.div, lax.rem, lax.shift_left, lax.shift_right_logical,
                 lax.shift_right_arithmetic, lax.max, lax.bitwise_xor)  # fmt: skip
    for dtype in (np.int32, np.uint32, np.int8):
        compare(lambda a, b: [f(a, b) for f in functions], [lhs.astype(dtype), rhs.astype(dtype)], 0)
    compare(lambda a: [lax.neg(a), lax.abs(a), lax.sign(a), lax.clz(a), lax.population_count(a)], [extremes], 0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_casts(dtype: str) -> None:
    """Casts to integers saturate, and convert NaN, as in XLA."""
    to = ("float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int32", "uint8", "int8", "bool")
    compare(lambda x: [x.astype(jnp.dtype(name)) for name in to], [specials(dtype)], 0)


def windows(x: Any, start: float, reducer: Any) -> Any:
    return lax.reduce_window(x, np.asarray(start, x.dtype), reducer, (2, 3), (1, 2), "SAME")


# Name → function of a matrix, and whether its sums may be reassociated.
FAMILIES: dict[str, tuple[Callable[[Any], Any], bool]] = {
    "sums": (lambda x: [lax.reduce_sum(x, a) for a in ((0,), (1,), (0, 1))], True),
    "products": (lambda x: (lax.reduce_prod(x, (0,)), lax.reduce_prod(x, (1,))), True),
    "extremes": (lambda x: [f(x, a) for f in (lax.reduce_max, lax.reduce_min) for a in ((0,), (1,), (0, 1))], False),
    "places of extremes": (lambda x: [f(x, a, np.int32) for f in (lax.argmax, lax.argmin) for a in (0, 1)], False),
    "running": (lambda x: [f(x, 0) for f in (lax.cumsum, lax.cumprod, lax.cummax, lax.cummin)], True),
    "running backwards": (lambda x: [f(x, 1, reverse=True) for f in (lax.cummax, lax.cummin)], False),
    "sorted": (lambda x: [lax.sort(x, dimension=0), *lax.sort((x, x.T.reshape(x.shape)), num_keys=1)], False),
    "largest": (lambda x: lax.top_k(x, 3), False),
    "largest in windows": (lambda x: (windows(x, -np.inf, lax.max), windows(x, np.inf, lax.min)), False),
    "sums in windows": (lambda x: windows(x, 0, lax.add), True),
    "gradient of the largest": (lambda x: jax.grad(lambda x: windows(x, -np.inf, lax.max).sum())(x), False),
    "products of matrices": (lambda x: (x @ x.T, lax.dot_general(x, x, (((0,), (0,)), ((1,), (1,))))), True),
    "convolution": (lambda x: lax.conv_general_dilated(x[None, None], x[None, None, :2, :2], (1, 1), "SAME"), True),
    "chosen": (lambda x: (jnp.where(x > 0, x, -x), lax.select_n(x == x, x, x[::-1])), False),
    "padded": (lambda x: lax.pad(x, np.asarray(-0.0, x.dtype), ((1, 0, 1), (0, -1, 0))), False),
    "padded with NaN": (lambda x: lax.pad(x, np.asarray(np.nan, x.dtype), ((1, 0, 1), (0, 2, 0))), False),
    "looked up": (lambda x: (x[np.array([3, 0, 3, -1])], jnp.take(x, np.array([99, -99, 2]), 0)), False),
    "written": (lambda x: (x.at[np.array([1, 3])].set(x[:2]), x.at[2:4].set(-0.0)), False),
    "written to zeros": (lambda x: jnp.zeros_like(x).at[np.array([1, 3])].set(x[:2]), False),
    "negative zeros written to": (lambda x: jnp.full_like(x, -0.0).at[np.array([1, 3])].set(x[:2]), False),
    "zeros beyond the table": (lambda x: x.at[np.array([1, 99])].get(mode="fill", fill_value=0.0), False),
    "negative zeros beyond the table": (lambda x: x.at[np.array([1, 99])].get(mode="fill", fill_value=-0.0), False),
    "added": (lambda x: [y.at[np.array([1, 3, 1])].add(x[:3]) for y in (x, jnp.full_like(x, -0.0))], True),
    "extremes written": (lambda x: (x.at[np.array([1, 3, 1])].max(x[:3]), x.at[np.array([1, 3, 1])].min(x[:3])), False),
    "sliced": (lambda x: (lax.dynamic_slice(x, (np.int32(1), np.int32(2)), (3, 4)), lax.rev(x, (0, 1)), x.T), False),
    "carried": (lambda x: lax.scan(lambda c, r: (lax.max(c, r), c), x[0], x), False),
    "branches": (lambda x: lax.cond(x[0, 0] == 0, lambda: -x, lambda: x), False),
    "bits": (lambda x: lax.bitcast_convert_type(x, np.uint8), False),
    "of the user's own": (lambda x: lax.reduce(x, np.asarray(-0.0, x.dtype), lambda a, b: lax.max(a, b), (1,)), False),
}  # fmt: skip


NARROW = DTYPES[1:]


@pytest.mark.parametrize("dtype", [DTYPES[0], *NARROW])
@pytest.mark.parametrize("name", FAMILIES)
def test_families(name: str, dtype: str) -> None:
    fun, rounds = FAMILIES[name]
    narrow = {"float32": 1e-6, "float16": 2e-2, "bfloat16": 5e-2}[dtype]
    compare(fun, [grid(6, 7, dtype)], narrow if rounds else 0)
