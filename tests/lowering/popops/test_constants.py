"""Operations on constants alone: JAX's results, without JAX where arithmetic fixes every bit."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from ipujax.lowering.popops.maps.constants import folded
from ipujax.lowering.popops.vertices.kernel import Op
from ipujax.lowering.rules.numerics.elementwise import op_of
from tests.lowering.helpers import check

SAMPLES: dict[str, tuple[Any, ...]] = {
    "float32": (0.0, -0.0, 1.0, -1.5, 1e-45, -1e-40, 1.1754944e-38, 3.4e38, 1 / 3, np.inf, -np.inf, np.nan),
    "int32": (0, 1, -1, 7, -(2**31), 2**31 - 1),
    "uint32": (0, 1, 7, 2**31, 2**32 - 1),
    "bool": (False, True),
}
ARITHMETIC = (lax.add, lax.sub, lax.mul)
COMPARISONS = (lax.eq, lax.ne, lax.lt, lax.le, lax.gt, lax.ge)
BITWISE = (lax.bitwise_and, lax.bitwise_or, lax.bitwise_xor)
BINARY = {
    "float32": (*ARITHMETIC, *COMPARISONS, lax.div),
    "int32": (*ARITHMETIC, *COMPARISONS, *BITWISE, lax.div),
    "uint32": (*ARITHMETIC, *COMPARISONS, *BITWISE),
    "bool": (*COMPARISONS, *BITWISE),
}
UNARY = {"float32": (lax.neg,), "int32": (lax.neg, lax.bitwise_not), "uint32": (lax.neg,), "bool": (lax.bitwise_not,)}


def bits(values: np.ndarray) -> np.ndarray:
    """Floats by their bits, all NaNs alike."""
    return np.where(np.isnan(values), -1, values.view(np.int32)) if values.dtype == np.float32 else values


def op(fun: Callable[..., Any], *operands: np.ndarray) -> Op:
    """The operation that a function of these operands is traced to."""
    (eqn,) = jax.make_jaxpr(fun)(*operands).eqns
    return op_of(eqn)


@pytest.mark.parametrize("dtype", SAMPLES)
def test_results_are_those_of_jax_to_the_bit(dtype: str) -> None:
    values = np.array(SAMPLES[dtype], dtype)
    pairs = [np.array(column, dtype) for column in zip(*product(values, values), strict=True)]
    for fun, operands in [(f, pairs) for f in BINARY[dtype]] + [(f, [values]) for f in UNARY[dtype]]:
        each = list(zip(*operands, strict=True))
        one = op(fun, *each[0])
        got = np.stack([folded(one, [np.asarray(x) for x in scalars]) for scalars in each])
        np.testing.assert_array_equal(bits(got), bits(np.asarray(fun(*operands))), err_msg=f"{fun} {dtype}")


def test_a_choice_takes_the_case_of_its_number() -> None:
    cases = [np.int32(3), np.int32(4)]
    for which in (np.bool_(False), np.bool_(True), np.int32(1)):
        assert folded(op(lax.select_n, which, *cases), [np.asarray(x) for x in (which, *cases)]) == cases[int(which)]


def test_an_operation_that_is_only_charged_as_another_is_itself() -> None:
    twice = Op("add", lambda x, y: 2 * x + y, np.dtype(np.float32))
    assert folded(twice, [np.float32(3).reshape(()), np.float32(1).reshape(())]) == 7


def test_common_arithmetic_on_constants_compiles_nothing_with_xla(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("an operation on constants was given to JAX")

    monkeypatch.setattr(jax, "ensure_compile_time_eval", refuse)
    check(lambda x: x * (jnp.float32(3) / jnp.float32(7)) + lax.neg(jnp.float32(2)), np.ones((4,), np.float32))
