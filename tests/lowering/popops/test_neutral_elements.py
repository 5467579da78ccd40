"""Neutral elements of monoids against JAX's reductions of empty arrays."""

import jax.numpy as jnp
import numpy as np
import pytest

from ipujax.lowering.popops.vertices.reducers import REDUCERS, neutral

_REALS = ("float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
_INTEGERS = ("int32", "uint32", "int16", "uint8", "int4")
_DTYPES = {
    **dict.fromkeys(("add", "mul", "only"), (*_REALS, *_INTEGERS, "complex64")),
    **dict.fromkeys(("max", "min"), (*_REALS, *_INTEGERS, "bool")),
    **dict.fromkeys(("and", "or", "xor"), ("bool", "int32", "uint32", "int8")),
    "signed_add": (*_REALS, "complex64"),
}


@pytest.mark.parametrize(("monoid", "dtype"), [(name, x) for name, dtypes in _DTYPES.items() for x in dtypes])
def test_neutral_element_is_the_reduction_of_an_empty_array(monoid: str, dtype: str) -> None:
    expected = np.asarray(REDUCERS[monoid](jnp.zeros((0,), dtype), axes=(0,)))
    scalar = neutral(monoid, jnp.dtype(dtype))
    assert (scalar.dtype, scalar.shape) == (expected.dtype, ())
    assert scalar.tobytes() == expected.tobytes()  # bits, so that −0.0 is not 0.0


@pytest.mark.parametrize("monoid", ["max", "min"])
def test_maximum_of_a_dtype_without_infinity_and_zero_keeps_every_number(monoid: str) -> None:
    numbers = np.asarray([2.0**-127, 1.0, 2.0**127]).astype(jnp.float8_e8m0fnu)
    combined = {"max": np.maximum, "min": np.minimum}[monoid](numbers, neutral(monoid, numbers.dtype))
    np.testing.assert_array_equal(combined.astype(np.float32), numbers.astype(np.float32))
