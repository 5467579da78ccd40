"""Equations that hold open jaxprs with constants in their parameters, as those of lineax and optimistix do."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ipujax as ipu
from ipujax.lowering.jax_compat import Jaxpr, Primitive, closed, make_primitive
from ipujax.lowering.jaxpr import EquationNumbers

X = jnp.arange(3.0)
DEVICE = ipu.IPUModel(tiles_per_ipu=8)


def open_jaxpr(fun: Callable[..., Any], *args: Any) -> Jaxpr:
    """Jaxpr whose first input has become a constant without a value: an open jaxpr."""
    body = jax.make_jaxpr(fun)(*args).jaxpr
    names = body.debug_info.with_unknown_names()
    return body.replace(constvars=body.invars[:1], invars=body.invars[1:], debug_info=names)


def holder(name: str, *, is_known: bool) -> Primitive:
    """A primitive that doubles, whatever it holds; `is_known` if its implementation is JAX code."""
    apply = make_primitive(
        name, lambda x, **_: [x * 2], lambda x, **_: [x], lambda xs, axes, **_: ([xs[0] * 2], list(axes))
    )
    if not is_known:
        apply.def_impl(lambda x, **_: [np.asarray(x) * 2])
    return apply


def bound(apply: Primitive, value: Any) -> Callable[[Any], Any]:
    """A function of an equation that holds the value, with a derivative."""
    run = jax.custom_jvp(lambda x: apply.bind(x, fun=value)[0])
    run.defjvp(lambda x, t: (run(*x), 2 * t[0]))
    return run


@dataclass(frozen=True)
class Operator:
    """Static data that a library puts in a parameter."""

    fun: Any


class Settings(dict[str, Any]):
    """A mapping that can be hashed, as parameters must."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(tuple(self.items()))


HOLDS = holder("holds", is_known=True)
TWO = open_jaxpr(lambda c, v: v * c, X, X)
OTHER = open_jaxpr(lambda c, v: v * c + c, X, X)
PRINTS = open_jaxpr(lambda c, v: (jax.debug.callback(lambda _: None, v), v * c)[1], X, X)
NESTED = open_jaxpr(lambda c, v: bound(HOLDS, TWO)(v) * c, X, X)
LOOPS = open_jaxpr(lambda c, v: jax.lax.fori_loop(0, 3, lambda _, y: jax.jit(jnp.sin)(y * c), v), X, X)
CLOSED = jax.make_jaxpr(lambda v: v * np.arange(3.0))(X)
PARAMS: dict[str, Any] = {
    "one": TWO,
    "tuple": (TWO,),
    "several": (TWO, OTHER, TWO),
    "mapping": Settings(matvec=TWO, transposed=(OTHER, None)),
    "tuples of tuples": ((TWO, (OTHER,)), None, 3),
    "effects": (PRINTS,),
    "nested": (NESTED,),
    "loops": LOOPS,
    "with closed ones": (CLOSED, TWO),
    "object": Operator(TWO),
}
_NUMBERS = itertools.count()


def uses(value: Any, *, is_known: bool = True) -> Callable[[Any], Any]:
    """A function of an equation that holds the value."""
    apply = holder(f"apply{next(_NUMBERS)}", is_known=is_known)
    return lambda x: jnp.sin(bound(apply, value)(jnp.cos(x) + 1)) * 2


@pytest.mark.parametrize("is_known", [True, False])
@pytest.mark.parametrize("name", PARAMS)
def test_numbers_equal_those_of_jax(name: str, is_known: bool) -> None:
    fun = uses(PARAMS[name], is_known=is_known)
    np.testing.assert_array_equal(ipu.jit(fun, device=DEVICE)(X), jax.jit(fun)(X))


ROWS = jnp.stack([X, X + 1])
AROUND: dict[str, Callable[[Callable[[Any], Any]], Callable[[Any], Any]]] = {
    "scan": lambda fun: lambda x: jax.lax.scan(lambda c, v: (c + fun(v).sum(), fun(v)), 0.0, x),
    "vmap": jax.vmap,
    "grad": lambda fun: jax.grad(lambda x: fun(x[0]).sum() ** 2),
    "jvp": lambda fun: lambda x: jax.jvp(fun, (x[0],), (x[1],)),
    "cond": lambda fun: lambda x: jax.lax.cond(x[0, 0] > 1, fun, lambda y: y, x[1]),
    "while": lambda fun: lambda x: jax.lax.fori_loop(0, x[1, 1].astype(int), lambda _, y: fun(y), x[0]),
    "checkpoint": lambda fun: jax.grad(lambda x: jax.checkpoint(lambda y: fun(fun(y)).sum())(x[0])),
}


@pytest.mark.parametrize("around", AROUND)
def test_in_transformed_code(around: str) -> None:
    fun = AROUND[around](uses((TWO, NESTED)))
    results = ipu.jit(fun, device=DEVICE)(ROWS)
    expected = jax.jit(fun)(ROWS)
    for got, reference in zip(jax.tree.leaves(results), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(got, reference, rtol=1e-6)


def test_constants_become_inputs() -> None:
    assert closed(TWO).jaxpr.invars == [*TWO.constvars, *TWO.invars] and not closed(TWO).consts
    assert closed(CLOSED) is CLOSED and closed(CLOSED.jaxpr.replace(constvars=[])).in_avals == CLOSED.in_avals


def test_equation_numbers_compare_jaxprs_by_their_equations() -> None:
    """Equal jaxprs are outlined together, others not, in any container."""
    apply = holder("apply_numbered", is_known=True)
    numbers = EquationNumbers()

    def number(value: Any) -> int:
        (eqn,) = jax.make_jaxpr(lambda x: apply.bind(x, fun=None))(X).jaxpr.eqns
        return numbers.of(eqn.replace(params={"fun": value}))

    same = open_jaxpr(lambda c, v: v * c, X, X)
    copy = {"a": (TWO,)}
    assert number(TWO) == number(same) != number(OTHER)
    assert number(copy) == number({"a": (same,)}) != number({"a": (OTHER,)})
    assert number([TWO]) == number([same]) != number((TWO,))
