"""Derivatives through functions of several replicas whose rules are the user's own, against closed forms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import ipujax as ipu
from tests.lowering.replicas.replica_helpers import SPLIT


@jax.custom_vjp
def total(x: Any, power: Any) -> Any:
    return lax.psum(x, "replica") ** power


# Not the derivative, so that it shows which rule is taken.
total.defvjp(lambda x, power: (total(x, power), power), lambda power, change: (10 * power * change, None))


@jax.custom_jvp
def shared(x: Any, power: Any) -> Any:
    return lax.psum(x, "replica") ** power


@shared.defjvp
def _(primals: Any, tangents: Any) -> Any:
    return shared(*primals), lax.pmax(tangents[0], "replica") * primals[1]


def in_loop(fun: Callable[..., Any]) -> Callable[..., Any]:
    def repeated(x: Any, power: Any) -> Any:
        return lax.scan(lambda y, _: (fun(y, power), None), x, None, length=2)[0]

    return repeated


def in_branch(fun: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, power: lax.cond(lax.pmax(x[0], "replica") > 0, lambda: fun(x, power), lambda: x)


X = np.arange(1.0, 5.0, dtype=np.float32)
POWER = np.int32(1)


@pytest.mark.parametrize(
    ("around", "factor"),
    [(lambda fun: fun, 10.0), (in_branch, 10.0), (in_loop, 100.0)],
    ids=["alone", "branch", "loop"],
)
def test_rules_with_collectives_are_those_of_the_user(around: Callable[..., Any], factor: float) -> None:
    def step(x: Any) -> Any:
        return around(total)(x, POWER)

    run = ipu.jit(step, device=ipu.CPU(), replicas=2, in_specs=SPLIT, out_specs=SPLIT)
    np.testing.assert_array_equal(jax.grad(lambda x: jnp.sum(run(x)))(X), np.full(4, factor))


@jax.custom_vjp
def scaled(x: Any) -> Any:
    return 2 * x


scaled.defvjp(lambda x: (scaled(x), None), lambda _, change: (lax.psum(change, "replica"),))


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("fun", [scaled, jax.jit(lambda x: scaled(x))], ids=["alone", "inside"])
def test_a_rule_may_have_collectives_where_its_function_has_none(fun: Callable[..., Any], replicas: int) -> None:
    run = ipu.jit(fun, device=ipu.CPU(), replicas=replicas, in_specs=SPLIT, out_specs=SPLIT)
    changes = jax.grad(lambda x: jnp.sum(run(x) * X))(X)
    np.testing.assert_array_equal(changes, np.tile(X.reshape(replicas, -1).sum(0), replicas))


@pytest.mark.parametrize("has_sum", [False, True])
def test_linear_calls_have_the_transpose_of_the_user(has_sum: bool) -> None:
    def total(x: Any) -> Any:
        return lax.psum(x, "replica") if has_sum else x

    # Not the transpose, so that it shows which function is taken.
    def step(x: Any) -> Any:
        return jax.custom_derivatives.linear_call(
            lambda power, x: total(power * x), lambda power, change: 10 * power * total(change), 2.0, x
        )

    run = ipu.jit(step, device=ipu.CPU(), replicas=2, in_specs=SPLIT, out_specs=SPLIT)
    rows = 20 * X.reshape(2, 2)
    expected = np.tile(rows.sum(0), (2, 1)) if has_sum else rows
    np.testing.assert_array_equal(jax.grad(lambda x: jnp.sum(run(x) * X))(X), expected.ravel())


def test_tangents_follow_rules_with_collectives() -> None:
    run = ipu.jit(lambda x: shared(x, POWER), device=ipu.CPU(), replicas=2, in_specs=SPLIT, out_specs=SPLIT)
    results, changes = jax.jvp(run, (X,), (X,))
    np.testing.assert_array_equal(results, [4, 6, 4, 6])
    np.testing.assert_array_equal(changes, [3, 4, 3, 4])


def test_linear_solves_with_collectives_have_the_tangents_of_their_equation() -> None:
    def step(x: Any) -> Any:
        def solve(_: Any, right_side: Any) -> Any:
            return right_side / lax.psum(x * x, "replica")

        return lax.custom_linear_solve(lambda v: lax.psum(x * x * v, "replica"), lax.psum(x, "replica"), solve)

    def expected(x: Any) -> Any:
        rows = x.reshape(2, 2)
        return jnp.tile(rows.sum(0) / (rows**2).sum(0), 2)

    run = ipu.jit(step, device=ipu.CPU(), replicas=2, in_specs=SPLIT, out_specs=SPLIT)
    tangents = (jax.jvp(fun, (X,), (X[::-1],)) for fun in (run, expected))
    np.testing.assert_allclose(*tangents, rtol=1e-5)
