"""Pass `split_maps`: elementwise equations are computed by the parts that are read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ipujax.lowering.jax_compat import JaxprEqn, jaxpr_as_fun, shape_of
from ipujax.lowering.passes import PASSES
from ipujax.lowering.primitives import record_of
from tests.lowering.helpers import check

X, B = np.arange(24, dtype=np.float32).reshape(4, 6) / 10, np.arange(6, dtype=np.float32)


def gated(x: Any, b: Any) -> Any:
    first, second = jnp.split(x @ x.T @ x + b, 2, 1)
    return jnp.tanh(first) * jax.nn.sigmoid(second)


def chain(x: Any, b: Any) -> Any:
    first, second, _ = jnp.split(jnp.exp(x * b - x) * 2, (2, 4), 1)
    return first + second, second * second


def to_products(x: Any, b: Any) -> Any:
    first, second = jnp.split(x + b, 2, 1)
    return first.T @ second


def read_apart(x: Any, b: Any) -> Any:
    """Vertices of one superstep compute `x + b`; by parts those of several would, as products are between."""
    first, second = jnp.split(x + b, 2, 1)
    return jnp.tanh(jnp.tanh(first) @ (b[:3, None] * b[:3]) + second)


def read_by_sums(x: Any, b: Any) -> Any:
    return [jnp.sin(part).sum() for part in jnp.split(jnp.exp(x + b), 3, 1)]


def read_twice(x: Any, b: Any) -> Any:
    whole = x + b
    first, second = jnp.split(whole, 2, 1)
    return first * second, whole


def returned(x: Any, b: Any) -> Any:
    first, second = jnp.split(x + b, 2, 1)
    return first, jnp.cos(second)


def split(fun: Callable[..., Any]) -> list[JaxprEqn]:
    """Equations behind the pass, whose numbers are those of the function."""
    jaxpr = dict(PASSES)["split_maps"](jax.make_jaxpr(fun)(X, B))
    for actual, expected in zip(jaxpr_as_fun(jaxpr)(X, B), jax.tree.leaves(fun(X, B)), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-6)
    return jaxpr.eqns


@pytest.mark.parametrize("fun", [gated, chain])
def test_computes_by_parts(fun: Callable[..., Any]) -> None:
    elementwise = [eqn for eqn in split(fun) if record_of(eqn).cost == "elementwise"]
    assert X.shape not in [shape_of(eqn.outvars[0]) for eqn in elementwise]
    check(fun, X, B, tiles=(1, 5), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("fun", [to_products, read_apart, read_by_sums, read_twice, returned])
def test_keeps_other_splits(fun: Callable[..., Any]) -> None:
    before = jax.make_jaxpr(fun)(X, B).eqns
    assert [eqn.primitive.name for eqn in split(fun)] == [eqn.primitive.name for eqn in before]
