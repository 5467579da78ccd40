"""Sums of products over a loop's iterations: computed behind it, with the same numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import ipujax as ipu
from ipujax.lowering.jax_compat import jaxpr_as_fun
from ipujax.lowering.jaxpr import scan_body
from tests.lowering.helpers import check
from tests.lowering.passes.test_hoist_products import ARGS, U, X, elman, hoisted, products, scanned

Y = np.sin(X)


def transposed_product(a: Any, b: Any) -> Any:
    return jnp.einsum("bm,bn->mn", a, b)


def gradient_of(step: Callable[..., Any]) -> Callable[..., Any]:
    def run(x: Any, w: Any, u: Any, b: Any) -> Any:
        return jax.grad(lambda *p: (scanned(step)(x, *p)[0] ** 2).sum(), (0, 1, 2))(w, u, b)

    return run


def summed(x: Any, y: Any) -> Any:
    start = jnp.ones((3, 3))
    return lax.scan(lambda c, rows: (c + transposed_product(*rows).T, None), start, (x, y), reverse=True)[0]


def of_many_rows(x: Any, y: Any) -> Any:
    """The operands are computed in the loop, and have a batch."""

    def step(c: Any, rows: Any) -> Any:
        a, b = jnp.cos(rows[0])[:, None], jnp.exp(rows[1])[:, None]
        return (c[0] * 2, jnp.einsum("bnm,bnk->bmk", a, b * c[0]) + c[1]), None

    return lax.scan(step, (1.0, jnp.zeros((2, 3, 3))), (x, y))[0]


# Products left in loops, and all others.
SUNK: dict[str, tuple[Callable[..., Any], tuple[Any, ...], int, int]] = {
    "gradients of a recurrent layer": (gradient_of(elman), ARGS, 2, 3),  # forward and backward h @ u stay
    "of rows, transposed": (summed, (X, Y), 0, 1),
    "of a batch": (of_many_rows, (X, Y), 0, 1),
}


@pytest.mark.parametrize("name", SUNK)
def test_computes_sums_behind_the_loop(name: str) -> None:
    fun, args, left, moved = SUNK[name]
    jaxpr = hoisted(fun, *args)
    assert products(jaxpr) == (left, moved)
    for got, expected in zip(jaxpr_as_fun(jaxpr)(*args), jax.tree.leaves(fun(*args)), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)
    check(fun, *args, tiles=(7,), rtol=1e-4, atol=1e-4)


def test_the_gradient_of_a_bias_moves_with_that_of_weights() -> None:
    *_, backward = (eqn for eqn in hoisted(gradient_of(elman), *ARGS).jaxpr.eqns if eqn.primitive.name == "scan")
    assert backward.params["num_carry"] == 1  # the gradient of h
    inside = scan_body(backward.params)
    stacked = backward.outvars[inside.results.stacks]
    assert [var.aval.shape for var in stacked] == [X.shape[:2] + U.shape[1:]]  # one for both products and the bias


def read_in_the_loop(x: Any, y: Any) -> Any:
    return lax.scan(lambda c, rows: (c + transposed_product(*rows), c.sum()), jnp.ones((3, 3)), (x, y))


def of_a_constant(x: Any, y: Any) -> Any:
    return lax.scan(lambda c, row: (c + jnp.cos(row).T @ y[0], None), jnp.ones((3, 3)), x)[0]


def once(x: Any, y: Any) -> Any:
    return lax.scan(lambda c, rows: (c + transposed_product(*rows), None), jnp.ones((3, 3)), (x[:1], y[:1]))[0]


def of_a_stage(x: Any, y: Any) -> Any:
    def step(c: Any, rows: Any) -> Any:
        with ipu.stage(0):
            return c + transposed_product(*rows), None

    return lax.scan(step, jnp.ones((3, 3)), (x, y))[0]


def carries(fun: Callable[..., Any], **settings: Any) -> list[int]:
    """Carries of the loops of a function."""
    eqns = hoisted(fun, X, Y, **settings).jaxpr.eqns
    return [eqn.params["num_carry"] for eqn in eqns if eqn.primitive.name == "scan"]


@pytest.mark.parametrize("fun", [read_in_the_loop, of_a_constant, once, of_a_stage])
def test_keeps_other_sums(fun: Callable[..., Any]) -> None:
    assert carries(fun) == [1]


def test_keeps_sums_where_memory_is_short() -> None:
    assert carries(summed) == []
    assert carries(summed, keeps_loops=True) == [1]
    assert carries(of_many_rows) == [1]
    assert carries(of_many_rows, num_tiles=1, byte_cost=1e3) == [2]


def test_the_loop_takes_fewer_supersteps() -> None:
    """Behind the loop a few supersteps take the sums of 64 iterations, which take one each in it."""
    arrays = [jax.ShapeDtypeStruct((64, 8, 32), jnp.float32)] * 2

    def sums(x: Any, y: Any) -> Any:
        return lax.scan(lambda c, rows: (c + transposed_product(*rows), None), jnp.ones((32, 32)), (x, y))[0]

    profile = ipu.jit(sums).profile(*arrays)
    assert profile.phase_cycles["sync"] <= 8 * profile.target.internal_sync_cycles
    assert profile.bound.cycles <= profile.cycles


@pytest.mark.parametrize("start", [0, -60_000])
def test_sums_of_half_precision_overflow_as_in_the_loop(start: int) -> None:
    """Ten products of 7,000 overflow float16 together; added to −60,000 one by one they do not."""
    rows = jnp.full((10, 1, 1), 7000 if start else 700, jnp.float16), jnp.ones((10, 1, 1), jnp.float16)

    def total(x: Any, y: Any) -> Any:
        begin = jnp.full((1, 1), start, jnp.float16)
        return lax.scan(lambda c, pair: (c + transposed_product(*pair), None), begin, (x, y))[0]

    loops = [eqn for eqn in hoisted(total, *rows).jaxpr.eqns if eqn.primitive.name == "scan"]
    assert len(loops) == (start != 0)
    np.testing.assert_allclose(ipu.jit(total)(*rows), jax.jit(total)(*rows), rtol=1e-2)
