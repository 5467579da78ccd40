"""Primitives that libraries and scripts define, replaced by the equations that implement them.

Control flow, calls of the host and products inside such a primitive, as in `lineax.linear_solve`, are no part of the
jaxpr that has it; the compiler lowers them all the same.

Input: a jaxpr. Output: an equal one, in which calls of traced implementations stand in their place.
Limits: an implementation that is no JAX code stays a primitive.
"""

from __future__ import annotations

import inspect
from functools import partial

from ipujax.jax_scripts.places import is_of_script_or_library
from ipujax.lowering.jax_compat import ClosedJaxpr, Jaxpr, JaxprEqn, call_equation, traced_impl
from ipujax.lowering.jaxpr import Rewrite, equations, everywhere, primitive_names, with_equations, with_inner


def has_library_primitives(jaxpr: Jaxpr) -> bool:
    """Return whether a jaxpr, or one inside it, has an equation of such a primitive."""
    return any(map(_is_of_library, equations(jaxpr)))


def with_implementations(jaxpr: ClosedJaxpr) -> ClosedJaxpr:
    """Return the jaxpr with implementations in place of these primitives; one without any stays the same object."""
    return everywhere(_implemented_body)(jaxpr)


def _implemented_body(jaxpr: ClosedJaxpr, inside: Rewrite) -> ClosedJaxpr:
    eqns = [_implemented(eqn, inside) for eqn in jaxpr.jaxpr.eqns]
    return with_equations(jaxpr, eqns)


def _implemented(eqn: JaxprEqn, inside: Rewrite) -> JaxprEqn:
    if not _is_of_library(eqn):
        return with_inner(eqn, inside)
    callee = traced_impl(eqn)
    if callee is None or eqn.primitive.name in primitive_names(callee.jaxpr):  # it would be replaced without end
        return eqn
    return call_equation(eqn.invars, eqn.outvars, inside(callee), eqn)


def _is_of_library(eqn: JaxprEqn) -> bool:
    implementation = inspect.unwrap(eqn.primitive.impl)
    while isinstance(implementation, partial):
        implementation = inspect.unwrap(implementation.func)
    code = getattr(implementation, "__code__", None)
    return code is not None and is_of_script_or_library(code.co_filename)
