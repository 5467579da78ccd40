"""Folding of operations on constants: JAX's results, without JAX where arithmetic fixes every bit."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from ipujax.lowering.popops.maps.constants import fold
from ipujax.lowering.popops.vertices.kernel import Op
from ipujax.lowering.rules.numerics.elementwise import op_of
from tests.lowering.helpers import check

SAMPLES: dict[str, tuple[Any, ...]] = {
    "float32": (0.0, -0.0, 1.0, -1.5, 1e-45, -1e-40, 1.1754944e-38, 3.4e38, 1 / 3, np.inf, -np.inf, np.nan),
    "int32": (0, 1, -1, 7, -(2**31), 2**31 - 1),
    "uint32": (0, 1, 7, 2**31, 2**32 - 1),
    "bool": (False, True),
    "float64": (
        0.0,
        -0.0,
        1.0,
        -1.5,
        1e-310,
        -5e-324,
        2.2250738585072014e-308,
        1.7e308,
        1 / 3,
        np.inf,
        -np.inf,
        np.nan,
    ),
    "int64": (0, 1, -1, 7, -(2**63), 2**63 - 1),
}
ARITHMETIC = (lax.add, lax.sub, lax.mul)
COMPARISONS = (lax.eq, lax.ne, lax.lt, lax.le, lax.gt, lax.ge)
BITWISE = (lax.bitwise_and, lax.bitwise_or, lax.bitwise_xor)
BINARY = {
    "float32": (*ARITHMETIC, *COMPARISONS, lax.div, lax.nextafter),
    "int32": (*ARITHMETIC, *COMPARISONS, *BITWISE, lax.div, lax.min, lax.max),
    "uint32": (*ARITHMETIC, *COMPARISONS, *BITWISE, lax.min, lax.max),
    "float64": (*ARITHMETIC, *COMPARISONS, lax.div, lax.nextafter),
    "int64": (*ARITHMETIC, *COMPARISONS, *BITWISE, lax.div, lax.min, lax.max),
    "bool": (*COMPARISONS, *BITWISE),
}
FLOATS = (lax.neg, lax.floor, lax.ceil, lax.is_finite)
SIGNED = (lax.neg, lax.bitwise_not, lax.sign, lax.abs)
UNARY = {
    "float32": FLOATS,
    "int32": SIGNED,
    "uint32": (lax.neg,),
    "bool": (lax.bitwise_not,),
    "float64": FLOATS,
    "int64": SIGNED,
}


def bits(values: np.ndarray) -> np.ndarray:
    """Bits of floats; all NaNs are equal."""
    if values.dtype.kind != "f":
        return values
    return np.where(np.isnan(values), -1, values.view(f"int{8 * values.itemsize}"))


def op(fun: Callable[..., Any], *operands: np.ndarray) -> Op:
    """Operation that a function of these operands is traced to."""
    (eqn,) = jax.make_jaxpr(fun)(*operands).eqns
    return op_of(eqn)


@pytest.mark.parametrize("dtype", SAMPLES)
def test_folds_to_the_bits_of_jax(dtype: str) -> None:
    values = np.array(SAMPLES[dtype], dtype)
    pairs = [np.array(column, dtype) for column in zip(*product(values, values), strict=True)]
    with jax.enable_x64(True):
        for fun, operands in [(f, pairs) for f in BINARY[dtype]] + [(f, [values]) for f in UNARY[dtype]]:
            check_bits(fun, *operands)
        for other in sorted(SAMPLES.keys() - {dtype}):
            check_bits(lambda x, other=other: lax.convert_element_type(x, other), values)


def check_bits(fun: Callable[..., Any], *operands: np.ndarray) -> None:
    rows = list(zip(*operands, strict=True))
    operation = op(fun, *rows[0])
    got = np.stack([fold(operation, [np.asarray(x) for x in scalars]) for scalars in rows])
    np.testing.assert_array_equal(bits(got), bits(np.asarray(fun(*operands))), err_msg=f"{fun} {operands[0].dtype}")


def test_folds_a_selection() -> None:
    cases = [np.int32(3), np.int32(4)]
    for index in (np.bool_(False), np.bool_(True), np.int32(1)):
        assert fold(op(lax.select_n, index, *cases), [np.asarray(x) for x in (index, *cases)]) == cases[int(index)]


def test_folds_a_function_that_only_costs_as_its_primitive() -> None:
    double_and_add = Op("add", lambda x, y: 2 * x + y, np.dtype(np.float32))
    assert fold(double_and_add, [np.float32(3).reshape(()), np.float32(1).reshape(())]) == 7


def test_folds_common_arithmetic_without_xla(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("JAX computed an operation on constants")

    monkeypatch.setattr(jax, "ensure_compile_time_eval", refuse)
    check(lambda x: x * (jnp.float32(3) / jnp.float32(7)) + lax.neg(jnp.float32(2)), np.ones((4,), np.float32))
