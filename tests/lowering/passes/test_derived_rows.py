"""Rows that a loop computes from its other rows: no stack of them is stored, and numbers stay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from ipujax.lowering.jax_compat import jaxpr_as_fun
from ipujax.lowering.jaxpr import scan_body
from ipujax.lowering.passes import dce, narrow
from tests.lowering.helpers import check

X = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)


def rows_stored(fun: Callable[..., Any], *args: Any) -> list[int]:
    """Number of stacks that each loop stores behind the pass; its numbers are those of the function."""
    jaxpr = dce(narrow(jax.make_jaxpr(fun)(*args)))
    for actual, expected in zip(jaxpr_as_fun(jaxpr)(*args), jax.tree.leaves(fun(*args)), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-6, atol=1e-6)
    loops = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "scan"]
    return [len(eqn.outvars[scan_body(eqn.params).results.stacks]) for eqn in loops]


def two_loops(
    first: Callable[[Any], tuple[Any, ...]], second: Callable[..., Any], *, reverse: bool = False
) -> Callable[[Any], Any]:
    """A loop that stores rows, and one that reads all of them."""

    def fun(x: Any) -> Any:
        _, stacks = lax.scan(lambda c, row: (c + row, first(c + row)), jnp.zeros(3), x)
        return lax.scan(lambda c, rows: (c + second(*rows), None), jnp.ones(3), stacks, reverse=reverse)[0]

    return fun


def gradient(x: Any) -> Any:
    def loss(x: Any) -> Any:
        return lax.scan(lambda c, row: (jax.nn.sigmoid(c + row), None), jnp.zeros(3), x)[0].sum()

    return jax.grad(loss)(x)


STORED: dict[str, tuple[Callable[..., Any], int]] = {
    "factors of a logistic function's derivative": (gradient, 1),
    "a chain": (two_loops(lambda y: (y, 1 - y, y * (1 - y)), lambda a, b, c: a * b + c), 1),
    "through values that are not stored": (two_loops(lambda y: (y, y * (2 - y)), lambda a, b: a * b, reverse=True), 1),
    "dear functions": (two_loops(lambda y: (y, jnp.sin(y)), lambda a, b: a * b), 2),
    "of more equations than a row is worth": (two_loops(lambda y: (y, ((y + 1) * y - 2) * y), jnp.multiply), 2),
    "read by a sum": (two_loops(lambda y: (y, 1 - y), lambda a, b: a * b.sum()), 2),
    "compared": (two_loops(lambda y: (y, 1 - y), lambda a, b: jnp.where(b > a, a, 0)), 2),
}


@pytest.mark.parametrize("name", STORED)
def test_stores_rows_that_no_others_give(name: str) -> None:
    fun, stacks = STORED[name]
    assert rows_stored(fun, X)[0] == stacks


def test_equals_the_interpreter() -> None:
    check(gradient, X, tiles=(3,), rtol=1e-5, atol=1e-6)
