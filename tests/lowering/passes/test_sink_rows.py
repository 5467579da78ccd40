"""Pass `sink_rows`: loops compute rows of stacks from rows of arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from ipujax.lowering.jax_compat import ClosedJaxpr, check_jaxpr, jaxpr_as_fun
from ipujax.lowering.jaxpr import elements_of, equations
from ipujax.lowering.offload import batch_arguments
from ipujax.lowering.passes.count_loops import count_loops
from ipujax.lowering.passes.inline import inline
from ipujax.lowering.passes.sink_rows import sink_rows

ROWS = np.random.default_rng(0).integers(0, 255, size=(6, 4, 8)).astype(np.uint8)
WEIGHTS = np.random.default_rng(1).normal(size=(8, 8)).astype(np.float32)
Fun = Callable[[Any, Any], Any]


def step(w: Any, x: Any) -> Any:
    return 0.9 * w + x.T @ x, None


def cast_and_divide(w: Any, rows: Any) -> Any:
    return lax.scan(step, w, rows.astype(jnp.float32) / 255)[0]


def by_channel(w: Any, rows: Any) -> Any:
    """Statistics have no rows: the loop reads them whole."""
    return lax.scan(step, w, (rows.astype(jnp.float32) - w[0]) / jnp.exp(w[1]))[0]


def reshaped(w: Any, rows: Any) -> Any:
    flat = rows.reshape(24, 8).astype(jnp.float32) / 255
    return lax.scan(step, w, flat.reshape(6, 4, 8))[0]


def of_parts(w: Any, rows: Any) -> Any:
    halves = jnp.concatenate([rows[:, :, 4:], rows[:, :, :4]], 2).astype(jnp.float32)
    return lax.scan(step, w, jnp.swapaxes(jnp.swapaxes(halves, 1, 2), 1, 2))[0]


def two_operands(w: Any, rows: Any) -> Any:
    wide = rows.astype(jnp.float32)
    pairs = wide / 255, jnp.where(rows > 100, wide, 0.0), rows
    return lax.scan(lambda w, x: (0.9 * w + x[0].T @ x[1] + x[2].sum(), None), w, pairs)[0]


def backwards(w: Any, rows: Any) -> Any:
    return lax.scan(step, w, rows.astype(jnp.float32) / 255, reverse=True)[0]


def counted(w: Any, rows: Any) -> Any:
    wide = rows.astype(jnp.float32) / 255
    return lax.fori_loop(0, 6, lambda i, w: step(w, wide[i])[0], w)


def nested(w: Any, rows: Any) -> Any:
    def outer(w: Any, rows: Any) -> Any:
        return lax.scan(step, w, rows * 2)[0], None

    return lax.scan(outer, w, rows.astype(jnp.float32).reshape(3, 2, 4, 8) / 255)[0]


def two_loops(w: Any, rows: Any) -> Any:
    wide = rows.astype(jnp.float32) / 255
    return lax.scan(step, lax.scan(step, w, wide)[0], wide)[0]


def gradient(w: Any, rows: Any) -> Any:
    def loss(w: Any) -> Any:
        def add(total: Any, x: Any) -> Any:
            return total + jnp.sin(x @ w).sum(), None

        return lax.scan(add, 0.0, rows.astype(jnp.float32) / 255)[0]

    return jax.grad(loss)(w)


def read_by_a_sum_too(w: Any, rows: Any) -> Any:
    wide = rows.astype(jnp.float32) / 255
    return lax.scan(step, w, wide)[0] + wide.sum()


def returned_too(w: Any, rows: Any) -> Any:
    wide = rows.astype(jnp.float32) / 255
    return lax.scan(step, w, wide)[0], wide


def reversed_rows(w: Any, rows: Any) -> Any:
    return lax.scan(step, w, rows.astype(jnp.float32)[::-1])[0]


def sums_of_rows(w: Any, rows: Any) -> Any:
    return lax.scan(step, w, jnp.cumsum(rows.astype(jnp.float32), 0))[0]


def drawn(w: Any, rows: Any) -> Any:
    noise = jax.random.bits(jax.random.key(0), (6, 4, 8)).astype(jnp.float32)
    return lax.scan(step, w, noise)[0] + rows.sum()


def of_carry(w: Any, rows: Any) -> Any:
    """A cast to fewer bytes of what is on the tiles anyway, which would be kept for longer."""

    def outer(w: Any, _: Any) -> Any:
        return w + lax.scan(lambda total, x: (total + x, None), jnp.zeros(8, jnp.bfloat16), w.astype(jnp.bfloat16))[
            0
        ], None

    return lax.scan(outer, w + rows[0, 0], None, length=2)[0]


SUNK = [by_channel, cast_and_divide, reshaped, of_parts, two_operands, backwards, counted, nested, two_loops, gradient]
KEPT = [read_by_a_sum_too, returned_too, reversed_rows, sums_of_rows, drawn, of_carry]


def before_and_after(fun: Fun) -> tuple[ClosedJaxpr, ClosedJaxpr]:
    before = count_loops(inline(jax.make_jaxpr(fun)(WEIGHTS, ROWS)))
    after = sink_rows(before, of_loops=True)
    check_jaxpr(after.jaxpr)
    return before, after


@pytest.mark.parametrize("fun", SUNK)
def test_each_element_is_computed_by_the_same_equations(fun: Fun) -> None:
    """Not in one compiled function, where XLA rounds by the fusion that an equation is in."""
    before, after = before_and_after(fun)
    with jax.disable_jit():
        expected = jaxpr_as_fun(before)(WEIGHTS, ROWS)
        actual = jaxpr_as_fun(after)(WEIGHTS, ROWS)
    for x, y in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("fun", SUNK)
def test_loops_read_rows_of_arguments(fun: Fun) -> None:
    before, after = before_and_after(fun)
    assert 1 not in batch_arguments(before, of_loops=True) or fun is two_operands
    assert batch_arguments(after, of_loops=True)[1] == 6
    before_loops = [eqn for eqn in after.eqns if eqn.primitive.name != "scan"]
    whole = [eqn.primitive.name for eqn in before_loops if elements_of(eqn.outvars[0]) >= ROWS.size]
    assert set(whole) <= {"reshape"}


@pytest.mark.parametrize("fun", KEPT)
def test_stacks_stay_that_others_read_or_that_are_no_rows(fun: Fun) -> None:
    before, after = before_and_after(fun)
    assert [eqn.primitive.name for eqn in equations(after.jaxpr)] == [
        eqn.primitive.name for eqn in equations(before.jaxpr)
    ]


def test_a_row_of_an_argument_that_is_read_twice_comes_once() -> None:
    _, after = before_and_after(two_operands)
    (loop,) = [eqn for eqn in after.eqns if eqn.primitive.name == "scan"]
    assert loop.invars.count(after.jaxpr.invars[1]) == 1


def test_nothing_changes_where_loops_do_not_stream() -> None:
    jaxpr = inline(jax.make_jaxpr(cast_and_divide)(WEIGHTS, ROWS))
    assert sink_rows(jaxpr) is jaxpr
