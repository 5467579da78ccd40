"""Constants, carries and stacks of bodies: each input has the shape of the operand, or of a row of the stack."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from ipujax.lowering.jax_compat import JaxprEqn, shape_of
from ipujax.lowering.jaxpr import CONTROL_FLOW, bodies, while_condition

# The shape tells a value: constants of the body, of the condition, carries, stacks and results that are stacked.
OF_BODY, OF_CONDITION, CARRY, ROWS, COUNT = jnp.ones(2), jnp.ones(3), jnp.ones(5), jnp.ones((4, 7)), 4


def scanned(x: jax.Array) -> Any:
    return lax.scan(lambda c, row: (c + OF_BODY.sum() * row.sum(), row[:6]), x, ROWS)


def while_loop(x: jax.Array) -> Any:
    return lax.while_loop(lambda c: c.sum() < OF_CONDITION.sum(), lambda c: c + OF_BODY.sum(), x)


def branches(x: jax.Array) -> Any:
    return lax.cond(x[0] > 0, lambda c: c + OF_BODY.sum(), lambda c: c * OF_CONDITION.sum(), x)


def equation(fun: Callable[..., Any]) -> JaxprEqn:
    (eqn,) = (eqn for eqn in jax.make_jaxpr(fun)(CARRY).eqns if eqn.primitive.name in CONTROL_FLOW)
    return eqn


@pytest.mark.parametrize(
    ("fun", "constants", "carries", "stacks"),
    [
        (scanned, {(2,)}, {(5,)}, {(4, 7)}),
        (while_loop, {(2,)}, {(5,)}, set()),
        (branches, {(2,), (3,), (5,)}, set(), set()),
    ],
)
def test_operands_by_shape(fun: Any, constants: Any, carries: Any, stacks: Any) -> None:
    eqn = equation(fun)
    for body in bodies(eqn):
        places = [{shape_of(x) for x in eqn.invars[where]} for where in body.operands]
        assert places == [constants, carries, stacks]


@pytest.mark.parametrize("fun", [scanned, while_loop, branches])
def test_inputs_and_results_have_the_types_outside(fun: Any) -> None:
    eqn = equation(fun)
    for body in bodies(eqn):
        inner = body.jaxpr.jaxpr
        pairs = [*zip(body.of_operands(eqn.invars), inner.invars, body.inputs.are_stacks(), strict=True)]
        pairs += zip(eqn.outvars, inner.outvars, body.results.are_stacks(), strict=True)
        assert all(shape_of(outer)[is_stack:] == shape_of(inside) for outer, inside, is_stack in pairs)
        before, after = inner.invars[body.inputs.carries], inner.outvars[body.results.carries]
        assert list(map(shape_of, before)) == list(map(shape_of, after))


def test_condition_reads_its_constants_and_the_carries() -> None:
    eqn = equation(while_loop)
    condition = while_condition(eqn.params)
    shapes = [shape_of(x) for x in condition.of_operands(eqn.invars)]
    assert shapes == [shape_of(x) for x in condition.jaxpr.jaxpr.invars] == [(3,), (5,)]
