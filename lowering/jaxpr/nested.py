"""Jaxprs inside the parameters of equations: loop bodies, branches, callees."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from ipujax.lowering.jax_compat import (
    Atom,
    ClosedJaxpr,
    Jaxpr,
    JaxprEqn,
    Var,
    closed,
    is_on_host,
    jaxprs_in_params,
    on_device,
)

Rewrite = Callable[[ClosedJaxpr], ClosedJaxpr]


def with_inner(eqn: JaxprEqn, rewrite: Rewrite) -> JaxprEqn:
    """The equation with every jaxpr in its parameters rewritten; the equation itself where that changes none.

    Args:
        eqn: the equation.
        rewrite: from a jaxpr to one of the same inputs and outputs. An open jaxpr that would get constants, which it
            has no place for, stays as it is.
    """
    if not holds_jaxprs(eqn):
        return eqn
    params = {key: _rewritten(value, rewrite) for key, value in eqn.params.items()}
    return eqn if all(params[key] is value for key, value in eqn.params.items()) else eqn.replace(params=params)


def holds_jaxprs(eqn: JaxprEqn) -> bool:
    """Whether there is a jaxpr in the parameters of an equation."""
    for value in eqn.params.values():  # most equations have none, and every pass asks each
        if isinstance(value, tuple):
            for item in value:
                if isinstance(item, (Jaxpr, ClosedJaxpr)):
                    return True
        elif isinstance(value, (Jaxpr, ClosedJaxpr)):
            return True
    return False


def _rewritten(value: Any, rewrite: Rewrite) -> Any:
    if isinstance(value, ClosedJaxpr):
        return rewrite(value)
    if isinstance(value, Jaxpr) and not value.constvars:
        new = rewrite(closed(value))
        return value if new.consts else new.jaxpr
    if isinstance(value, tuple) and any(isinstance(item, ClosedJaxpr) for item in value):
        inside = [_rewritten(item, rewrite) for item in value]
        if all(map(operator.is_, inside, value)):
            return value
        kind: Any = type(value)
        return kind(*inside) if hasattr(value, "_fields") else tuple(inside)
    return value


def once(rewrite: Rewrite) -> Rewrite:
    """The same rewriting, done once for a jaxpr: one that several equations hold stays one object."""
    done: dict[tuple[int, ...], tuple[ClosedJaxpr, ClosedJaxpr]] = {}

    def run(jaxpr: ClosedJaxpr) -> ClosedJaxpr:
        key = id(jaxpr.jaxpr), *map(id, jaxpr.consts)
        if key not in done:
            done[key] = jaxpr, rewrite(jaxpr)  # holding it keeps its id
        return done[key][1]

    return run


def everywhere(rewrite: Callable[[ClosedJaxpr, Rewrite], ClosedJaxpr]) -> Rewrite:
    """A rewriting that does the same to jaxprs inside; one that several equations hold stays one.

    Args:
        rewrite: from a jaxpr, and what rewrites those its equations hold, to an equal jaxpr.
    """

    @once
    def run(jaxpr: ClosedJaxpr) -> ClosedJaxpr:
        return rewrite(jaxpr, run)

    return run


def primitive_names(jaxpr: Jaxpr) -> Iterator[str]:
    """The names of the primitives of a jaxpr and of the jaxprs inside it."""
    return (eqn.primitive.name for eqn in equations(jaxpr))


def equations(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    """The equations of a jaxpr and of the jaxprs they hold, each before what it holds."""
    for eqn in jaxpr.eqns:
        yield eqn
        if holds_jaxprs(eqn):
            yield from equations_inside(eqn)


def equations_inside(eqn: JaxprEqn) -> Iterator[JaxprEqn]:
    """The equations of the jaxprs that an equation holds, and of those inside them."""
    for inner in jaxprs_in_params(eqn.params):
        yield from equations(getattr(inner, "jaxpr", inner))


def variables(atoms: Iterable[Atom]) -> list[Var]:
    """The variables among atoms."""
    return [atom for atom in atoms if isinstance(atom, Var)]


def variables_read(eqn: JaxprEqn) -> list[Var]:
    """The operands of an equation that are no literals."""
    return variables(eqn.invars)


def results_in_memories(jaxpr: ClosedJaxpr) -> tuple[Any, ...]:
    """The abstract values of results in the memories that `jax.jit` of JAX 0.10 leaves them in.

    It leaves all on the device unless an argument is on the host, or something is put there: what the function closes
    over, and what is computed of that, is not asked.
    """
    puts = (eqn for eqn in equations(jaxpr.jaxpr) if eqn.primitive.name == "device_put")
    if any(map(is_on_host, jaxpr.in_avals)) or any(is_on_host(var.aval) for eqn in puts for var in eqn.outvars):
        return tuple(jaxpr.out_avals)
    return tuple(map(on_device, jaxpr.out_avals))
