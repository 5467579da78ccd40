"""Rules of `jax.custom_jvp` and `jax.custom_vjp` with collectives, for the values of all replicas at once.

Input: an equation with such a rule, and a function that evaluates a jaxpr of one replica for all. Output: results that
are differentiated by the rule. It is traced on one replica, over the axis that its collectives name, when a derivative
is taken.
Limits: a rule with collectives for a function without any is not found, as JAX traces it for a derivative alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ipujax.lowering.jax_compat import CALLEES, ClosedJaxpr, JaxprEqn, closed, eval_equation, trace_over_axis

CUSTOM_RULES = frozenset({"custom_jvp_call", "custom_vjp_call"})


@dataclass(frozen=True, slots=True)
class CustomRule:
    """A function with a rule, on values [local replicas, …]; further operands of it have no derivative.

    Args:
        eqn: the equation of one replica.
        evaluate: from a jaxpr of one replica, operands of all and further operands to results of all.
        axis: name of the axis of replicas.
        replicas: number of replicas of all instances.
    """

    eqn: JaxprEqn
    evaluate: Callable[[ClosedJaxpr, Sequence[Any], Sequence[Any]], list[jax.Array]]
    axis: str
    replicas: int

    def __call__(self, operands: Sequence[jax.Array], further: Sequence[jax.Array]) -> list[jax.Array]:
        """Results of all local replicas, with a derivative by the user's rule: a `custom_jvp` or `custom_vjp` again.

        Args:
            operands: operands of the equation on all local replicas.
            further: values that the evaluation needs beside them, which have no derivative.
        """
        if self.eqn.primitive.name == "custom_jvp_call":
            with_jvp = jax.custom_jvp(self._results)
            with_jvp.defjvp(self._jvp)
            return list(with_jvp(list(operands), list(further)))
        with_vjp = jax.custom_vjp(self._results)
        with_vjp.defvjp(self._forward, self._backward)
        return list(with_vjp(list(operands), list(further)))

    def _results(self, operands: list[Any], further: list[Any]) -> list[jax.Array]:
        callee = closed(self.eqn.params[CALLEES[self.eqn.primitive.name]])
        return self.evaluate(callee, operands, further)

    def _alone(self, *operands: Any) -> list[Any]:
        return list(eval_equation(self.eqn, *operands))

    def _of_all(self, fun: Callable[..., Any], further: list[Any], *values: Any) -> Any:
        """Results of a function of one replica, `fun`, on the values of all replicas.

        It is traced over the axis of replicas, so that its collectives mean them, then evaluated on stacked arrays.

        Args:
            fun: the function; operands and results are trees of arrays.
            further: values that the evaluation needs beside the operands.
            values: its operands, each array with the replicas in dimension 0.
        """
        leaves, tree = jax.tree.flatten(values)
        shapes = [jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in leaves]
        traced, results = trace_over_axis(
            lambda *xs: fun(*jax.tree.unflatten(tree, xs)), shapes, self.axis, self.replicas
        )
        return jax.tree.unflatten(jax.tree.structure(results), self.evaluate(traced, leaves, further))

    def _jvp(self, primals: tuple[list[Any], list[Any]], tangents: tuple[list[Any], list[Any]]) -> Any:
        """Results and their tangents on all replicas: JAX's own rule of `custom_jvp`, with the user's for one replica.

        Values of integers have no tangent: tangents are those of inexact values alone until `_for_all` adds the others.
        """
        operands, further = primals

        def jvp_of_replica(xs: list[Any], dxs: list[Any]) -> Any:
            results, changes = jax.jvp(self._alone, xs, _for_all(xs, dxs))
            return results, _of_inexact(results, changes)

        results, changes = self._of_all(jvp_of_replica, further, operands, _of_inexact(operands, tangents[0]))
        return results, _for_all(results, changes)

    def _forward(self, operands: list[Any], further: list[Any]) -> Any:
        results, pullback = self._of_all(lambda *xs: jax.vjp(self._alone, *xs), further, *operands)
        return results, (pullback, operands, results, further)

    def _backward(self, saved: Any, cotangents: list[Any]) -> Any:
        """Cotangents of the operands on all replicas, from those of the results: the second half of `custom_vjp`.

        Args:
            saved: values from `_forward`: the pullback of one replica, operands, results and further values.
            cotangents: cotangents of the results.
        """
        pullback, operands, results, further = saved

        def pullback_of_replica(pullback: Any, xs: list[Any], ys: list[Any], dys: list[Any]) -> Any:
            return _of_inexact(xs, pullback(_for_all(ys, dys)))

        result_cotangents = _of_inexact(results, cotangents)
        changes = self._of_all(pullback_of_replica, further, pullback, operands, results, result_cotangents)
        return _for_all(operands, changes), _for_all(further, [])


def _of_inexact(values: Sequence[Any], changes: Sequence[Any]) -> list[Any]:
    """Of tangents, or cotangents, of values those that have numbers."""
    return [change for x, change in zip(values, changes, strict=True) if jnp.issubdtype(x.dtype, jnp.inexact)]


def _for_all(values: Sequence[Any], changes: Sequence[Any]) -> list[Any]:
    """Tangents, or cotangents, of all values from those that have numbers."""
    remaining: Iterator[Any] = iter(changes)
    return [
        next(remaining) if jnp.issubdtype(x.dtype, jnp.inexact) else np.zeros(x.shape, jax.dtypes.float0)
        for x in values
    ]
