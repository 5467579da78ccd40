"""Location of the first operation that computes a NaN, or an infinity, in a lowered function.

`jax.debug_nans` and `jax.debug_infs` check the results of a compiled function, and call it again with arrays, so that
each operation runs, and is checked, by itself. Operations of the program are not those that a user wrote; the equations
are, and name her lines.

Input: a jaxpr without calls, and arrays of its inputs. Output: its results, or JAX's error with the user's line.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from ipujax.lowering.jax_compat import ClosedJaxpr, JaxprEqn, Literal, eval_equation, eval_jaxpr, is_evaluating
from ipujax.lowering.source_info import naming_line


def locates_nans() -> bool:
    """True if JAX runs a function operation by operation, because a NaN or an infinity is in its results."""
    checks = jax.config.jax_debug_nans or jax.config.jax_debug_infs  # type: ignore[attr-defined]
    return bool(checks) and is_evaluating()


def run_equations(jaxpr: ClosedJaxpr, operands: Sequence[Any]) -> list[Any]:
    """Return the results of a jaxpr, computed equation by equation.

    Raises:
        FloatingPointError: an equation has a NaN or an infinity; its note is the user's line.
    """
    return eval_jaxpr(jaxpr, operands, _run_equation, lambda constant: constant)


def _run_equation(eqn: JaxprEqn, operands: Sequence[Any]) -> Sequence[Any]:
    if all(isinstance(atom, Literal) for atom in eqn.invars):  # a NaN that is meant, such as that of `jnp.var`
        with jax.debug_nans(False), jax.debug_infs(False):
            return list(eval_equation(eqn, *operands))
    with naming_line(eqn):
        return list(eval_equation(eqn, *operands))
