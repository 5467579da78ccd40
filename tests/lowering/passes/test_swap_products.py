"""Pass `swap_products`: products that are only read transposed are computed with swapped operands."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from ipujax.lowering.jax_compat import jaxpr_as_fun
from ipujax.lowering.jaxpr import primitive_names
from ipujax.lowering.passes import PASSES
from tests.lowering.helpers import check

RNG = np.random.default_rng(1)
X, W, G = (RNG.normal(size=shape).astype(np.float32) for shape in ((6, 10), (10, 7), (6, 7)))
BATCHED = RNG.normal(size=(3, 6, 10)).astype(np.float32), RNG.normal(size=(3, 10, 4)).astype(np.float32)


def swapped(fun: Any, *args: Any) -> Any:
    """The jaxpr after the pass."""
    return dict(PASSES)["swap_products"](jax.make_jaxpr(fun)(*args))


def loop(x: Any, w: Any) -> Any:
    return lax.fori_loop(0, 2, lambda _, c: c + lax.transpose(lax.dot(x, w), (1, 0)), jnp.zeros((7, 6)))


SWAPPED = {
    "gradient of weights": (jax.grad(lambda w, x: (jnp.tanh(x @ w) ** 2).sum()), (W, X)),
    "plain": (lambda x, w: lax.transpose(lax.dot(x, w), (1, 0)), (X, W)),
    "batched": (lambda x, w: lax.transpose(lax.batch_matmul(x, w), (0, 2, 1)), BATCHED),
    "in a loop": (loop, (X, W)),
    "precisions of both operands": (
        lambda x, w: lax.transpose(lax.dot(x, w, precision=("high", "highest")), (1, 0)),
        (X, W),
    ),
}
UNCHANGED = {
    "read twice": (lambda x, w: (lambda y: (y, lax.transpose(y, (1, 0))))(lax.dot(x, w)), (X, W)),
    "another permutation": (lambda x, w: lax.transpose(lax.batch_matmul(x, w), (1, 0, 2)), BATCHED),
    "the result of a sum": (lambda x: lax.transpose(x + 1, (1, 0)), (X,)),
}


@pytest.mark.parametrize("name", SWAPPED)
def test_swaps_operands(name: str) -> None:
    fun, args = SWAPPED[name]
    jaxpr = swapped(fun, *args)
    num_transposes = list(primitive_names(jax.make_jaxpr(fun)(*args).jaxpr)).count("transpose")
    assert list(primitive_names(jaxpr.jaxpr)).count("transpose") == num_transposes - 1
    np.testing.assert_allclose(jaxpr_as_fun(jaxpr)(*args)[0], fun(*args), rtol=1e-5, atol=1e-5)
    check(fun, *args, tiles=(1, 7), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", UNCHANGED)
def test_keeps_other_products(name: str) -> None:
    fun, args = UNCHANGED[name]
    assert "transpose" in primitive_names(swapped(fun, *args).jaxpr)
    check(fun, *args, tiles=(1, 7), rtol=1e-4, atol=1e-4)
