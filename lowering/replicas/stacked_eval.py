"""Evaluates what one replica computes for all replicas at once, in plain JAX: every value is [replicas, …].

Equations without collectives are mapped over that axis, without a name for it; collectives are operations on it
(`gcl.stacked`). Control flow with collectives inside stays control flow, and follows replica 0: replicas that come to
a collective must agree on whether they do, as on the machine.

Limits: ordered effects cannot be mapped (JAX says so).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ipujax.lowering.gcl import COLLECTIVES, is_collective
from ipujax.lowering.jax_compat import (
    CALLEES,
    ClosedJaxpr,
    JaxprEqn,
    closed,
    eval_equation,
    eval_jaxpr,
    jaxprs_in_params,
)
from ipujax.runtime.host import ALONE, Instances

Values = list[jax.Array]

# Parameter that holds what an equation does nothing but evaluate, by primitive name.
EVALUATED = {**CALLEES, "function_call": "jaxpr", "ipu_staged_pipeline": "loop"}


@dataclass(frozen=True, slots=True)
class Replicas:
    """Replicas that are evaluated.

    Args:
        count: how many there are, of all instances.
        instances: processes among which they are shared; the local ones are the leading axis of every value.
    """

    count: int
    instances: Instances = ALONE

    @property
    def here(self) -> int:
        """Number of local replicas."""
        return self.instances.local(self.count)


def stacked_eval(jaxpr: ClosedJaxpr, operands: Sequence[jax.Array], replicas: Replicas) -> Values:
    """The results of all replicas that are here.

    Args:
        jaxpr: what one replica computes.
        operands: [replicas here, …] for each input.
        replicas: how many.
    """
    equation, constant = partial(_equation, replicas=replicas), partial(_for_all, replicas=replicas)
    return eval_jaxpr(jaxpr, operands, equation, constant)


def meets(eqn: JaxprEqn) -> bool:
    """Whether an equation is a collective, or holds one."""
    if is_collective(eqn):
        return True
    return any(meets(inner) for jaxpr in jaxprs_in_params(eqn.params) for inner in jaxpr.eqns)


def _equation(eqn: JaxprEqn, operands: Values, replicas: Replicas) -> Values:
    name = eqn.primitive.name
    if is_collective(eqn):
        instances, everyone = replicas.instances, [replicas.instances.all_of(x) for x in operands]
        return [instances.own(x) for x in COLLECTIVES[name](eqn, replicas.count).compute(everyone, replicas.count)]
    if not meets(eqn):
        return list(jax.vmap(partial(eval_equation, eqn), axis_size=replicas.here)(*operands))
    if name in EVALUATED:
        return stacked_eval(closed(eqn.params[EVALUATED[name]]), operands, replicas)
    return _CONTROL[name](eqn, operands, replicas)


def _for_all(x: Any, replicas: Replicas) -> jax.Array:
    return jnp.broadcast_to(x, (replicas.here, *jnp.shape(x)))


def _scan(eqn: JaxprEqn, operands: Values, replicas: Replicas) -> Values:
    params = eqn.params
    num_consts, first_stack = params["num_consts"], params["num_consts"] + params["num_carry"]
    consts = operands[:num_consts]

    def body(carry: Values, slices: Values) -> tuple[Values, Values]:
        results = stacked_eval(params["jaxpr"], [*consts, *carry, *slices], replicas)
        return results[: params["num_carry"]], results[params["num_carry"] :]

    stacks = [jnp.moveaxis(x, 1, 0) for x in operands[first_stack:]]
    carry, pushed = lax.scan(
        body, operands[num_consts:first_stack], stacks, length=params["length"], reverse=params["reverse"]
    )
    return [*carry, *(jnp.moveaxis(x, 0, 1) for x in pushed)]


def _while(eqn: JaxprEqn, operands: Values, replicas: Replicas) -> Values:
    params = eqn.params
    first, second = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]

    def goes_on(carry: Values) -> jax.Array:
        (predicate,) = stacked_eval(params["cond_jaxpr"], [*operands[:first], *carry], replicas)
        return predicate[0]

    def body(carry: Values) -> Values:
        return stacked_eval(params["body_jaxpr"], [*operands[first:second], *carry], replicas)

    return lax.while_loop(goes_on, body, operands[second:])


def _cond(eqn: JaxprEqn, operands: Values, replicas: Replicas) -> Values:
    def branch(jaxpr: ClosedJaxpr, *inner: jax.Array) -> Values:
        return stacked_eval(jaxpr, inner, replicas)

    branches = [partial(branch, jaxpr) for jaxpr in eqn.params["branches"]]
    return list(lax.switch(operands[0][0], branches, *operands[1:]))


_CONTROL: dict[str, Callable[[JaxprEqn, Values, Replicas], Values]] = {"scan": _scan, "while": _while, "cond": _cond}
