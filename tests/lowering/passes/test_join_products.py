"""Pass `join_products`: products of parts of one array with one operand are one product."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ipujax as ipu
from ipujax.lowering.jax_compat import ClosedJaxpr, check_jaxpr, jaxpr_as_fun
from ipujax.lowering.jaxpr import primitive_names
from ipujax.lowering.offload.phase_steps import steps_of_phases
from ipujax.lowering.passes.inline import inline
from ipujax.lowering.passes.join_products import join_products
from tests.lowering.helpers import check

RNG = np.random.default_rng(5)
STEPS, BATCH, FEATURES, UNITS = 3, 2, 4, 5
X = RNG.normal(size=(STEPS, BATCH, FEATURES)).astype(np.float32)
W = RNG.normal(size=(FEATURES, UNITS)).astype(np.float32)
U = RNG.normal(size=(UNITS, UNITS)).astype(np.float32)


def unrolled(x: Any, w: Any, u: Any) -> Any:
    """A recurrent layer, step by step."""
    h = jnp.zeros((BATCH, UNITS))
    outputs = []
    for step in range(STEPS):
        h = jnp.tanh(x[step] @ w + h @ u)
        outputs.append(h)
    return jnp.stack(outputs)


def columns(x: Any, w: Any, u: Any) -> Any:
    """Products whose parts are transposed, and one of another shape."""
    whole = jnp.sin(x.reshape(STEPS * BATCH, FEATURES)).T
    return w.T @ whole[:, :2], w.T @ whole[:, 4:], w.T @ whole[:, :3]


def vectors(x: Any, w: Any, u: Any) -> Any:
    return [x[step, 0] @ w for step in range(STEPS)]


def joined(fun: Any, **settings: Any) -> ClosedJaxpr:
    jaxpr = join_products(inline(jax.make_jaxpr(fun)(X, W, U)), **settings)
    check_jaxpr(jaxpr.jaxpr)
    return jaxpr


def count(jaxpr: ClosedJaxpr) -> int:
    return list(primitive_names(jaxpr.jaxpr)).count("dot_general")


@pytest.mark.parametrize(("fun", "left"), [(unrolled, 1 + STEPS), (vectors, 1)])
def test_joins_products_of_parts(fun: Any, left: int) -> None:
    jaxpr = joined(fun)
    assert count(jaxpr) == left
    for got, expected in zip(jaxpr_as_fun(jaxpr)(X, W, U), jax.tree.leaves(fun(X, W, U)), strict=False):
        np.testing.assert_allclose(got, expected.reshape(got.shape) if got.ndim else expected, rtol=1e-5, atol=1e-6)
    check(fun, X, W, U, tiles=(1, 7), rtol=1e-4, atol=1e-5)


def test_keeps_products_of_phases_apart() -> None:
    """One of the first phase would read a part that a later phase computes."""

    def in_phases(x: Any, w: Any, u: Any) -> Any:
        h = jnp.zeros((BATCH, UNITS))
        for step in range(STEPS):
            with ipu.phase(step):
                h = jnp.tanh(x[step] @ w + h @ u)
        return h

    jaxpr = joined(in_phases)
    assert count(jaxpr) == 2 * STEPS
    steps_of_phases(jaxpr.eqns)  # refuses a phase that reads values of a later one


@pytest.mark.parametrize("settings", [{"num_tiles": 1, "byte_cost": 1e3}, {"keeps_products": True}])
def test_keeps_products_where_memory_is_short(settings: dict[str, Any]) -> None:
    assert count(joined(unrolled, **settings)) == 2 * STEPS


def test_keeps_products_of_a_constant_on_the_left() -> None:
    """Only parts that are left operands are joined."""
    assert count(joined(columns)) == 3


def test_keeps_products_that_a_checkpoint_computes_again() -> None:
    def loss(w: Any, x: Any, u: Any) -> Any:
        return (jax.checkpoint(unrolled)(x, w, u) ** 2).sum()

    def gradient(x: Any, w: Any, u: Any) -> Any:
        return jax.grad(loss)(w, x, u)

    forward = count(joined(lambda x, w, u: loss(w, x, u)))
    before = count(inline(jax.make_jaxpr(gradient)(X, W, U)))
    assert forward == 1 + STEPS
    assert count(joined(gradient)) == before - (STEPS - 1)  # those of the forward part alone
