"""Values of a jaxpr by plain JAX: of its results and of all variables, and the spread of their rounding errors.

Input: a jaxpr without Refs and meshes, and arrays of its inputs. Output: `JaxprValues`. Of replicas every variable has
the values of all, [replicas, …].
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from ipujax.checking.differences import SAMPLES, is_inexact, random_rounding
from ipujax.lowering.jax_compat import (
    ClosedJaxpr,
    DropVar,
    JaxprEqn,
    Var,
    eval_jaxpr,
    is_float0,
    is_on_host,
    is_token,
    jaxpr_as_fun,
    to_device,
    to_memory_of,
)
from ipujax.lowering.refs import is_ref
from ipujax.lowering.replicas import join, split, unwrapped
from ipujax.lowering.replicas.stacked_eval import Replicas, Rounded, equation_alone, stacked_eval
from ipujax.runtime.quick_jit import quick_jit
from ipujax.runtime.tensor import wide_dtype

# Results of equations by their primitive, parameters and operands; with the objects whose ids the key has.
Computed = dict[tuple[Any, ...], tuple[Any, Sequence[Any]]]


@dataclass(frozen=True, eq=False, slots=True)
class JaxprValues:
    """Values that a jaxpr computes, or sizes of their errors.

    Args:
        results: one for each result.
        variables: of the variables of its outermost equations, [replicas, …].
    """

    results: Sequence[Any]
    variables: Mapping[Var, Any]


def plain_results(jaxpr: ClosedJaxpr, operands: Sequence[Any]) -> Sequence[Any]:
    """Return the results of a jaxpr by `jax.jit`."""
    return list(jax.jit(partial(_results, jaxpr))(*operands))


def plain_values(
    with_calls: Sequence[ClosedJaxpr],
    jaxprs: Sequence[ClosedJaxpr],
    operands: Sequence[Any],
    *,
    one_by_one: bool = False,
) -> list[JaxprValues]:
    """Return the values of jaxprs of the same inputs.

    Args:
        with_calls: jaxprs before calls are inlined, of which only the results are returned: JAX does not promise that
            equations of calls with derivatives can be computed alone.
        jaxprs: others.
        operands: arrays of the inputs.
        one_by_one: whether XLA compiles each outermost equation by itself.
    """
    evaluations: list[Any] = [(lambda xs, _, jaxpr=jaxpr: (_results(jaxpr, *xs), []), []) for jaxpr in with_calls]
    evaluations += [_evaluation(jaxpr) for jaxpr in jaxprs]

    def run(arrays: Sequence[Any]) -> list[Any]:
        # Passes keep most equations: in one computation those that several jaxprs have are computed once.
        computed: Computed = {}
        return [evaluate(arrays, computed) for evaluate, _ in evaluations]

    values = (run if one_by_one else quick_jit(run))(operands)
    return [
        JaxprValues(results, dict(zip(variables, values, strict=True)))
        for (_, variables), (results, values) in zip(evaluations, values, strict=True)
    ]


def spreads(jaxpr: ClosedJaxpr, operands: Sequence[Any], seed: int = 0) -> JaxprValues:
    """Return for each value of a jaxpr how much random rounding errors of all equations change it.

    Returns:
        Of floats the largest change of each element; of others True for elements that change.
    """
    evaluate, variables = _evaluation(jaxpr)
    results, changes = quick_jit(lambda xs: spread_of(lambda rounded: evaluate(xs, None, rounded), seed))(operands)
    return JaxprValues(results, dict(zip(variables, changes, strict=True)))


def spread_of(evaluate: Callable[[Rounded | None], Any], seed: int = 0) -> Any:
    """Return the largest changes of a pytree that `evaluate` computes without and with rounding errors."""
    exact = evaluate(None)
    first = jax.tree.map(_no_change, exact)

    def sample(largest: Any, number: jax.Array) -> tuple[Any, None]:
        changed = evaluate(random_rounding(number * jnp.uint32(104729)))
        return jax.tree.map(lambda a, x, y: jnp.maximum(a, _change(x, y)), largest, exact, changed), None

    numbers = seed * SAMPLES + jnp.arange(1, 1 + SAMPLES, dtype=jnp.uint32)
    return jax.lax.scan(sample, first, numbers)[0]


def results_one_by_one(jaxpr: ClosedJaxpr, operands: Sequence[Any]) -> Sequence[Any]:
    """Return the results of a jaxpr whose outermost equations XLA compiles one by one."""
    evaluate, _ = _evaluation(jaxpr)
    return evaluate(operands, None)[0]


def _results(jaxpr: ClosedJaxpr, *operands: Any) -> list[Any]:
    typed = [to_memory_of(x, aval) for x, aval in zip(operands, jaxpr.in_avals, strict=True)]
    return list(map(to_device, jaxpr_as_fun(jaxpr)(*typed)))


def _evaluation(jaxpr: ClosedJaxpr) -> tuple[Callable[..., tuple[list[Any], list[Any]]], list[Var]]:
    """Return a function from operands to the results and the values of variables, and the variables."""
    function = unwrapped(jaxpr)
    body = function.jaxpr.jaxpr
    variables = [var for eqn in body.eqns for var in eqn.outvars if _is_array(var)]
    with_all = ClosedJaxpr(
        body.replace(outvars=[*body.outvars, *variables], debug_info=_unnamed(body)), function.jaxpr.consts
    )
    replicas = function.replicas

    def evaluate(
        operands: Sequence[Any], computed: Computed | None, rounded: Rounded | None = None
    ) -> tuple[list[Any], list[Any]]:
        if replicas == 1:
            typed = [to_memory_of(x, var.aval) for x, var in zip(operands, body.invars, strict=True)]
            equation = partial(_computed_once, computed=computed, rounded=rounded)
            one = eval_jaxpr(with_all, typed, equation, jnp.asarray)
            variables_of_one = [x[None] for x in one[len(body.outvars) :]]
            return list(map(to_device, one[: len(body.outvars)])), variables_of_one
        rows = [
            jnp.broadcast_to(x, (replicas, *jnp.shape(x))) if dim is None else split(jnp.asarray(x), dim, replicas)
            for x, dim in zip(operands, function.in_dims, strict=True)
        ]
        rows = [to_memory_of(x, var.aval) for x, var in zip(rows, body.invars, strict=True)]
        values = stacked_eval(with_all, rows, Replicas(replicas, rounded=rounded))
        results = list(map(to_device, values[: len(body.outvars)]))
        return [join(x, dim) for x, dim in zip(results, function.out_dims, strict=True)], values[len(body.outvars) :]

    return evaluate, variables


def _computed_once(
    eqn: JaxprEqn, operands: list[Any], computed: Computed | None, rounded: Rounded | None
) -> Sequence[Any]:
    """Return the results of an equation, those in `computed` if an equal one has been computed; it gets new ones."""
    if computed is None:
        return equation_alone(eqn, *operands, rounded=rounded)
    # A literal is a new array each time; passes that replace operands keep parameters and literals.
    sources = [x if isinstance(atom, Var) else atom for atom, x in zip(eqn.invars, operands, strict=True)]
    key = eqn.primitive, id(eqn.params), *map(id, sources)
    if key not in computed:
        computed[key] = (eqn.params, sources), equation_alone(eqn, *operands, rounded=rounded)
    return computed[key][1]


def _is_array(var: Var) -> bool:
    """Return whether a variable has a value that a function can return: one on the device, and no Ref or token."""
    aval: Any = var.aval
    is_other = is_ref(aval) or is_token(aval) or is_float0(aval) or is_on_host(aval)
    return not isinstance(var, DropVar) and not is_other


def _unnamed(body: Any) -> Any:
    return body.debug_info.with_unknown_names()


def _no_change(x: jax.Array) -> jax.Array:
    return jnp.zeros(x.shape, _change(x, x).dtype)


def _change(x: jax.Array, y: jax.Array) -> jax.Array:
    """Return absolute differences of floats, whether other values differ; NaN equals NaN."""
    if not is_inexact(x):
        differs = x != y
        return differs.any(tuple(range(x.ndim, differs.ndim))) if differs.ndim > x.ndim else differs
    wide = wide_dtype(x.dtype)
    difference = jnp.abs(x.astype(wide) - y.astype(wide))
    is_same = (x == y) | (jnp.isnan(x) & jnp.isnan(y))
    return jnp.where(is_same, 0, jnp.where(jnp.isnan(difference), jnp.inf, difference))
