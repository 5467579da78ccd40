"""Operators of ai.graphcore with effects or subgraphs: calls, prints, aborts, random masks, collectives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ipujax.popart.enumerations import CollectiveOperator
from ipujax.popart.exceptions import popart_exception, poplar_runtime_error
from ipujax.popart.operators.domain import REPLICA_AXIS, graphcore, has_replicas, node_key


@graphcore("Call")
def call(*operands: Any, callee: Callable[..., Any], output_count: int = 1) -> tuple[Any, ...]:
    """Return the results of a subgraph."""
    results = callee(*operands)
    return tuple(results) if isinstance(results, tuple | list) else (results,)


@graphcore("PrintTensor")
def print_tensor(
    x: jax.Array, *, print_gradient: int = 1, title: str = "", node_name: str = "", **form: Any
) -> jax.Array:
    """Return x, printed while the program runs; with its gradient, where `print_gradient` is 1."""
    name = (title or node_name or "tensor").replace("{", "(").replace("}", ")")
    return _printed(x, name, bool(print_gradient))


def _printed(x: jax.Array, name: str, with_gradient: bool) -> jax.Array:
    """Return an array that is printed when it is computed, and so is its gradient if that is wanted."""

    @jax.custom_vjp
    def printing(value: jax.Array) -> jax.Array:
        jax.debug.print(name + ": {}", value)
        return value

    def forward(value: jax.Array) -> tuple[jax.Array, None]:
        return printing(value), None

    def backward(_: None, gradient: jax.Array) -> tuple[jax.Array]:
        if with_gradient:
            jax.debug.print("Gradient___" + name + ": {}", gradient)
        return (gradient,)

    printing.defvjp(forward, backward)
    result: jax.Array = printing(x)
    return result


@graphcore("Abort")
def abort(condition: Any = None, *, node_name: str = "") -> jax.Array:
    """Stop the program: always, or where the condition is not zero."""

    def check(value: Any) -> None:
        if value:
            raise poplar_runtime_error(f"Abort Program: the program was aborted by {node_name or 'abort'}")

    is_met = jnp.asarray(True) if condition is None else jnp.any(condition != 0)
    jax.debug.callback(check, is_met)
    return is_met


@graphcore("ShapedDropout")
def shaped_dropout(x: jax.Array, *, shape: Sequence[int], ratio: float = 0.5, node_name: str = "") -> jax.Array:
    """Return x with elements of a mask of a broadcast shape set to zero and the others scaled up; x in inference."""
    key = node_key(node_name, is_mask=True)
    if key is None:
        return x
    mask = jax.random.bernoulli(key, 1.0 - ratio, tuple(shape))
    return jnp.where(mask, x / (1.0 - ratio), 0).astype(x.dtype)


# Reduction → collective of JAX. Source of the names: `gcl/CollectiveTypes.hpp`.
_COLLECTIVES: dict[CollectiveOperator, Callable[..., Any]] = {
    CollectiveOperator.Add: jax.lax.psum,
    CollectiveOperator.Mean: jax.lax.pmean,
    CollectiveOperator.Min: jax.lax.pmin,
    CollectiveOperator.Max: jax.lax.pmax,
}


@graphcore("ReplicatedAllReduce")
def replicated_all_reduce(
    x: jax.Array, *unused: Any, collectiveOperator: int = 0, commGroup: Sequence[int] = ()
) -> jax.Array:
    """Return the sum, mean, least or largest of x over replicas."""
    operator = CollectiveOperator(collectiveOperator)
    if operator not in _COLLECTIVES:
        expected = ", ".join(kind.name for kind in _COLLECTIVES)
        raise popart_exception(f"replicas cannot be reduced by {operator.name}", expected=expected)
    if any(commGroup):
        raise popart_exception("collectives are over all replicas", expected="CommGroupType.All", got=list(commGroup))
    if not has_replicas():
        return x
    result: jax.Array = _COLLECTIVES[operator](x, REPLICA_AXIS)
    return result
