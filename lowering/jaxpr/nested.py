"""Jaxprs inside the parameters of equations: loop bodies, branches, callees."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from ipujax.lowering.jax_compat import (
    Atom,
    ClosedJaxpr,
    DropVar,
    Jaxpr,
    JaxprEqn,
    Var,
    closed,
    is_on_host,
    jaxprs_in_params,
    on_device,
    without_axes,
)

Rewrite = Callable[[ClosedJaxpr], ClosedJaxpr]

_JAXPR_TYPES = frozenset({Jaxpr, ClosedJaxpr})


_OF_64_BITS = frozenset(("float64", "int64", "uint64", "complex128"))


def with_inner(eqn: JaxprEqn, rewrite: Rewrite) -> JaxprEqn:
    """Rewrite every jaxpr in the parameters of an equation; an equation without changes stays the same object."""
    # `rewrite` keeps inputs and outputs. An open jaxpr that would get constants stays, because it has no room for them.
    if not holds_jaxprs(eqn):
        return eqn
    params = {key: _rewrite_parameter(value, rewrite) for key, value in eqn.params.items()}
    return eqn if all(params[key] is value for key, value in eqn.params.items()) else eqn.replace(params=params)


def holds_jaxprs(eqn: JaxprEqn) -> bool:
    """Return True if the parameters of an equation contain a jaxpr."""
    for value in eqn.params.values():  # a plain loop: every pass calls this for every equation
        if isinstance(value, tuple):
            if not _JAXPR_TYPES.isdisjoint(map(type, value)):
                return True
        elif type(value) in _JAXPR_TYPES:
            return True
    return False


def _rewrite_parameter(value: Any, rewrite: Rewrite) -> Any:
    """Return an equation's parameter with `rewrite` applied to it if it is a jaxpr, or to those in a tuple.

    A parameter without changes stays the same object.
    """
    if isinstance(value, ClosedJaxpr):
        return rewrite(value)
    if isinstance(value, Jaxpr) and not value.constvars:
        rewritten = rewrite(closed(value))
        # The parameter has no place for constants: where the rewrite adds some, the jaxpr stays as it is.
        return value if rewritten.consts else rewritten.jaxpr
    if isinstance(value, tuple) and any(isinstance(item, ClosedJaxpr) for item in value):
        items = [_rewrite_parameter(item, rewrite) for item in value]
        if all(map(operator.is_, items, value)):
            return value
        kind: Any = type(value)
        return kind(*items) if hasattr(value, "_fields") else tuple(items)
    return value


def with_equations(jaxpr: ClosedJaxpr, eqns: Sequence[JaxprEqn]) -> ClosedJaxpr:
    """Return a jaxpr with other equations; with the same ones the same object, so that equations go on sharing it."""
    is_same = len(eqns) == len(jaxpr.eqns) and all(map(operator.is_, eqns, jaxpr.eqns))
    return jaxpr if is_same else ClosedJaxpr(jaxpr.jaxpr.replace(eqns=list(eqns)), jaxpr.consts)


def once(rewrite: Rewrite) -> Rewrite:
    """Return a rewrite of jaxprs that runs once for each: a jaxpr that several equations hold stays one object.

    Jaxprs are compared by identity, with the identities of their constants.
    """
    results: dict[tuple[int, ...], tuple[ClosedJaxpr, ClosedJaxpr]] = {}

    def run(jaxpr: ClosedJaxpr) -> ClosedJaxpr:
        key = id(jaxpr.jaxpr), *map(id, jaxpr.consts)
        if key not in results:
            results[key] = jaxpr, rewrite(jaxpr)  # the jaxpr is stored so that its id is not reused
        return results[key][1]

    return run


def everywhere(rewrite: Callable[[ClosedJaxpr, Rewrite], ClosedJaxpr]) -> Rewrite:
    """Make a rewrite of one jaxpr a rewrite of all jaxprs in it too, such as bodies of loops.

    `rewrite` gets a jaxpr, and a function for the jaxprs inside it: this rewrite itself. Each is rewritten once, so
    that one that several equations share stays one object.
    """

    @once
    def run(jaxpr: ClosedJaxpr) -> ClosedJaxpr:
        return rewrite(jaxpr, run)

    return run


def substituted(atom: Atom, table: Mapping[Var, Atom]) -> Atom:
    """Return what replaces an atom in a table; itself if nothing does."""
    return table.get(atom, atom) if isinstance(atom, Var) else atom  # a literal has no hash


def spliced(jaxpr: Jaxpr, table: Mapping[Var, Atom]) -> tuple[list[JaxprEqn], list[Atom]]:
    """Return copies of the equations and results of a jaxpr, to be put into another one.

    Args:
        jaxpr: the jaxpr.
        table: what replaces its inputs and constants, and maybe other variables; the rest get new variables, since a
            jaxpr may be put in several times.
    """
    replaced = dict(table)
    eqns = list[JaxprEqn]()
    for eqn in jaxpr.eqns:
        invars = [substituted(atom, replaced) for atom in eqn.invars]
        replaced.update({v: Var(v.aval) for v in eqn.outvars if not isinstance(v, DropVar) and v not in replaced})
        outvars: list[Any] = [substituted(var, replaced) for var in eqn.outvars]
        eqns.append(eqn.replace(invars=invars, outvars=outvars))
    return eqns, [substituted(atom, replaced) for atom in jaxpr.outvars]


def primitive_names(jaxpr: Jaxpr) -> Iterator[str]:
    """Return the names of the primitives of a jaxpr and of the jaxprs inside it."""
    return (eqn.primitive.name for eqn in equations(jaxpr))


def equations(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    """Yield the equations of a jaxpr and of the jaxprs inside them, outer ones first."""
    for eqn in jaxpr.eqns:
        yield eqn
        if holds_jaxprs(eqn):
            yield from equations_inside(eqn)


def has_64_bit_values(jaxpr: ClosedJaxpr) -> bool:
    """Return whether a jaxpr has numbers of 64 bits, which JAX computes with `jax_enable_x64` alone.

    A function may set it for a part of its code.
    """
    avals = [*jaxpr.in_avals, *jaxpr.out_avals, *(v.aval for eqn in equations(jaxpr.jaxpr) for v in eqn.outvars)]
    return any(str(getattr(aval, "dtype", "")) in _OF_64_BITS for aval in avals)


def equations_inside(eqn: JaxprEqn) -> Iterator[JaxprEqn]:
    """Yield the equations of the jaxprs in an equation, at any depth."""
    for inner in jaxprs_in_params(eqn.params):
        yield from equations(getattr(inner, "jaxpr", inner))


def distinct_jaxprs(jaxpr: ClosedJaxpr, holders: Collection[str] | None = None) -> Iterator[ClosedJaxpr]:
    """Yield a jaxpr and those inside it, each once; with `holders` those in equations of these primitives alone."""
    visited = {id(jaxpr.jaxpr)}
    stack = [jaxpr]
    while stack:
        body = stack.pop()
        yield body
        eqns = [eqn for eqn in body.jaxpr.eqns if holders is None or eqn.primitive.name in holders]
        for inner in (closed(inner) for eqn in eqns for inner in jaxprs_in_params(eqn.params)):
            if id(inner.jaxpr) not in visited:
                visited.add(id(inner.jaxpr))
                stack.append(inner)


def variables(atoms: Iterable[Atom]) -> list[Var]:
    """Return the variables among atoms."""
    return [atom for atom in atoms if isinstance(atom, Var)]


def variables_read(eqn: JaxprEqn) -> list[Var]:
    """Return the operands of an equation that are not literals."""
    return variables(eqn.invars)


def axes_around(code: Jaxpr | JaxprEqn) -> frozenset[str]:
    """Return the names of the axes that a jaxpr or an equation reads from outside: of `jax.vmap`, or of replicas."""
    of_axes: Collection[Any] = code.effects - without_axes(code.effects)
    return frozenset(effect.name for effect in of_axes)


def results_in_memories(jaxpr: ClosedJaxpr) -> tuple[Any, ...]:
    """Return the abstract values of results, in the memories where `jax.jit` of JAX 0.10 leaves them."""
    # All are on the device unless an argument is on the host, or a value is put there; constants of the function and
    # values computed from them have no influence.
    puts = (eqn for eqn in equations(jaxpr.jaxpr) if eqn.primitive.name == "device_put")
    if any(map(is_on_host, jaxpr.in_avals)) or any(is_on_host(var.aval) for eqn in puts for var in eqn.outvars):
        return tuple(jaxpr.out_avals)
    return tuple(map(on_device, jaxpr.out_avals))
