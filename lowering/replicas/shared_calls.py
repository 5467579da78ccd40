"""Primitive of a host function that several replicas call together, as they all have its operands.

    results = call_once_p.bind(*operands, jaxpr=…, sharing=…)

`jaxpr` is of one equation, the call. Replicas are taken in groups of `sharing`, one after the other: the first replica
of each calls, and all of the group get the results. Devices of a mesh do so, as those of `jax.jit`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ipujax.lowering.jax_compat import ClosedJaxpr, JaxprEqn, eval_equation, jaxpr_as_fun, make_holding_primitive

HOST_CALLS = frozenset({"pure_callback", "io_callback", "debug_callback", "debug_print"})


def call_once(eqn: JaxprEqn, operands: Sequence[jax.Array], sharing: int) -> list[jax.Array]:
    """Results of a host call on operands that `sharing` replicas have alike."""
    jaxpr = jax.make_jaxpr(lambda *values: eval_equation(eqn, *values))(*operands)
    return list(call_once_p.bind(*operands, jaxpr=jaxpr, sharing=sharing))


def _compute(*operands: jax.Array, jaxpr: ClosedJaxpr, **_: Any) -> list[jax.Array]:
    return list(jaxpr_as_fun(jaxpr)(*operands))


def _shapes(*_: Any, jaxpr: ClosedJaxpr, **__: Any) -> list[Any]:
    return list(jaxpr.out_avals)


def calls_of_groups(operands: Sequence[jax.Array], jaxpr: ClosedJaxpr, sharing: int) -> list[jax.Array]:
    """Results [replicas, …] of all replicas, in plain JAX."""
    calls = [_compute(*(x[first] for x in operands), jaxpr=jaxpr) for first in range(0, len(operands[0]), sharing)]
    return [jnp.repeat(jnp.stack(values), sharing, 0) for values in zip(*calls, strict=True)]


call_once_p = make_holding_primitive("call_once", _compute, _shapes, "jaxpr")
