"""Sizes of values, and a check of their types: arrays of numbers and of keys, and Refs until they are discharged.

Input: a traced jaxpr. Output: nothing, or an error that names value and line. Tokens may occur inside, because their
users are dropped; they cannot be arguments or results.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import jax
import jax.numpy as jnp

from ipujax.lowering.jax_compat import Atom, ClosedJaxpr, is_token
from ipujax.lowering.jaxpr.nested import equations
from ipujax.lowering.source_info import source_line
from ipujax.runtime.errors import ArgumentTypeError, GraphError
from ipujax.runtime.tensor import element_bytes

_EXPECTED = "arrays of numbers, or of keys of jax.random"


def check_values(jaxpr: ClosedJaxpr, who: str, names: Sequence[str]) -> None:
    """Refuse a jaxpr with values that no tile can store, such as tokens.

    Args:
        jaxpr: the jaxpr.
        who: name of the user's function, for the error.
        names: names of its inputs, `params['w']`, for the error.
    """
    arguments_and_results = [*zip((f"argument {name} of {who}" for name in names), jaxpr.in_avals, strict=True)]
    arguments_and_results += [(f"a result of {who}", aval) for aval in jaxpr.out_avals]
    for subject, aval in arguments_and_results:
        if not _is_storable(aval):
            hint = "leave the token out: effects keep their order by themselves" if is_token(aval) else _hint(aval)
            raise ArgumentTypeError(f"{subject} must be an array", expected=_EXPECTED, got=str(aval), hint=hint)
    for eqn in equations(jaxpr.jaxpr):
        for var in eqn.outvars:
            if not _is_storable(var.aval) and not is_token(var.aval):
                raise GraphError(
                    f"the result of {eqn.primitive} must be an array that a tile can store",
                    where=source_line(eqn) or None,
                    expected=_EXPECTED,
                    got=str(var.aval),
                    hint=_hint(var.aval),
                )


def _is_storable(aval: Any) -> bool:
    inner = aval.inner_aval if isinstance(aval, jax.ref.AbstractRef) else aval
    if not isinstance(inner, jax.core.ShapedArray):
        return False
    is_key = jnp.issubdtype(inner.dtype, jax.dtypes.prng_key)
    return is_key or not jnp.issubdtype(inner.dtype, jax.dtypes.extended)


def _hint(aval: Any) -> str:
    is_dtype = isinstance(aval, jax.core.ShapedArray)
    return f"the arrays that the {'dtype' if is_dtype else 'type'} of your own stands for, in its place"


def elements_of(atom: Atom) -> int:
    """Return the number of elements of an array."""
    aval: Any = atom.aval
    return prod(aval.shape)


def value_bytes(aval: Any) -> int:
    """Return the number of bytes of an array of a shape and dtype."""
    return prod(aval.shape) * element_bytes(aval.dtype)
