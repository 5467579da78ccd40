"""Evaluates the function of one replica for all replicas at once, in plain JAX: every value is [replicas, …].

Equations without collectives are mapped over that axis, without a name for it; collectives are operations on it
(`gcl.stacked`). Control flow with collectives inside stays control flow: the values of all replicas are computed while
one is *active* in the loop or branch, and the others keep theirs. Replicas of a group must agree on reaching its
collective, as on the machine.

Limits: ordered effects cannot be mapped (JAX raises).

A host function that several replicas call together, as they all have its operands, is a primitive:

    results = call_once_p.bind(*operands, jaxpr=…, sharing=…)

`jaxpr` is of one equation, the call. Replicas are taken in groups of `sharing`, one after the other: the first replica
of each calls, and all of the group get the results. Devices of a mesh do so, as those of `jax.jit`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ipujax.lowering.gcl import AXIS, COLLECTIVES, is_collective
from ipujax.lowering.jax_compat import (
    CALLEES,
    ClosedJaxpr,
    JaxprEqn,
    closed,
    eval_equation,
    eval_jaxpr,
    jaxpr_as_fun,
    jaxprs_in_params,
    make_holding_primitive,
    trace_over_axis,
)
from ipujax.lowering.jaxpr import equations_inside, scan_body, while_body, while_condition
from ipujax.lowering.replicas.custom_rules import CUSTOM_RULES, CustomRule
from ipujax.lowering.source_info import naming_line
from ipujax.runtime.host import ALONE, Instances

HOST_CALLS = frozenset({"pure_callback", "io_callback", "debug_callback", "debug_print"})


def call_once(eqn: JaxprEqn, operands: Sequence[jax.Array], sharing: int) -> list[jax.Array]:
    """Results of a host call that each run of `sharing` replicas makes once, as all of them have its operands."""
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


Values = list[jax.Array]
Rounded = Callable[[JaxprEqn, Sequence[jax.Array], Sequence[jax.Array]], Sequence[jax.Array]]

# Primitives that only evaluate a jaxpr, and the parameter that has it.
EVALUATED = {**CALLEES, "function_call": "jaxpr", "ipu_staged_pipeline": "loop"}
_FROM_START_VALUES = frozenset({"reduce", "reduce_window"})  # of which JAX has no batches
HOLDERS = {**EVALUATED, "fused": "jaxpr"}


@dataclass(frozen=True, slots=True)
class Replicas:
    """Replicas that are evaluated.

    Args:
        count: number of replicas of all instances.
        instances: processes that share the replicas; the local ones are the leading axis of every value.
        rounded: maps an equation that holds no others, its operands and its results, of one replica, to the results
            that are used in their place; None for those of the equation.
        active: local replicas that run the equation, bool[local replicas]; None for all.
        axis: name of the axis of replicas, over which rules of derivatives are traced.
    """

    count: int
    instances: Instances = ALONE
    rounded: Rounded | None = None
    active: jax.Array | None = None
    axis: str = AXIS

    @property
    def num_local(self) -> int:
        """Number of local replicas."""
        return self.instances.count_local(self.count)

    def only(self, chosen: jax.Array) -> Replicas:
        """Those of the active replicas that are chosen."""
        return replace(self, active=chosen if self.active is None else chosen & self.active)

    def any_active(self) -> jax.Array:
        """Whether a replica of any instance is active, bool[]."""
        assert self.active is not None, "replicas of a decision"
        return self.instances.gather(self.active).any()

    def of_active(self, new: Values, old: Values) -> Values:
        """New values of the active replicas, and old ones of the others."""
        assert self.active is not None, "replicas of a decision"
        return _selected(self.active, new, old)

    def rows_of_active(self, values: Values) -> Values:
        """Values in which the replicas that are not active have those of one that is."""
        if self.active is None:
            return values
        rows = jnp.where(self.active, jnp.arange(self.num_local), jnp.argmax(self.active))
        return [x[rows] for x in values]


def stacked_eval(jaxpr: ClosedJaxpr, operands: Sequence[jax.Array], replicas: Replicas) -> Values:
    """Results of all local replicas, from operands [local replicas, …] of the jaxpr of one replica."""
    equation = partial(_named_equation, replicas=replicas)
    constant = partial(_for_all, replicas=replicas)
    return eval_jaxpr(jaxpr, operands, equation, constant)


def has_collective(eqn: JaxprEqn) -> bool:
    """True for a collective, and for an equation with one inside."""
    if is_collective(eqn):
        return True
    return any(has_collective(inner) for jaxpr in jaxprs_in_params(eqn.params) for inner in jaxpr.eqns)


def _named_equation(eqn: JaxprEqn, operands: Values, replicas: Replicas) -> Values:
    with naming_line(eqn):
        return stacked_equation(eqn, operands, replicas)


def stacked_equation(eqn: JaxprEqn, operands: Values, replicas: Replicas) -> Values:
    """Evaluates one equation on all local replicas at once; operands and results are [local replicas, …].

    A collective is an operation on the leading axis, together with other processes if there are any. An equation
    without collectives is mapped over the replicas (`jax.vmap`), or computed for each where that changes its numbers or
    JAX cannot; one with some inside, as a loop, is evaluated by its
    bodies.
    """
    name = eqn.primitive.name
    if is_collective(eqn):
        instances = replicas.instances
        form = COLLECTIVES[name](eqn, replicas.count)
        if form.is_sum and instances.count > 1:
            results = [instances.sum(x) for x in operands]
        else:
            all_operands = [instances.gather(x) for x in operands]
            results = [instances.take_local(x) for x in form.compute(all_operands, replicas.count)]
        # Sums of all replicas round with the magnitudes of all: those of each replica are not enough.
        return results if replicas.rounded is None else list(replicas.rounded(eqn, operands, results))
    # A call that several neighbouring replicas share is run once for each group of them.
    if eqn.primitive is call_once_p and operands:
        return calls_of_groups(operands, **eqn.params)
    if name == "linear_call" and replicas.rounded is None:
        return _linear_call(eqn, operands, replicas)
    if replicas.count == 1 and not has_collective(eqn) and not _has_rule(eqn):
        return [x[None] for x in equation_alone(eqn, *(x[0] for x in operands), rounded=replicas.rounded)]
    if not has_collective(eqn):
        # A loop runs until the last replica leaves it: it must end for those that are not active, too.
        operands = replicas.rows_of_active(operands) if _has_loop(eqn) else operands
        alone = partial(equation_alone, eqn, rounded=replicas.rounded)
        if name in _FROM_START_VALUES or _draws_from_first_key(eqn):
            rows = [alone(*(x[n] for x in operands)) for n in range(replicas.num_local)]
            return [jnp.stack(values) for values in zip(*rows, strict=True)]
        # A rule of a derivative inside may have collectives, which JAX traces for the derivative alone.
        names_axis = replicas.instances.count == 1
        named = jax.vmap(alone, axis_size=replicas.num_local, axis_name=replicas.axis if names_axis else None)
        return list(named(*operands))
    if name in CUSTOM_RULES and replicas.rounded is None:
        return _with_custom_rule(eqn, operands, replicas)
    if name in EVALUATED:
        return stacked_eval(closed(eqn.params[EVALUATED[name]]), operands, replicas)
    if name == "custom_linear_solve":
        return _linear_solve(eqn, operands, replicas)
    return _CONTROL[name](eqn, operands, replicas)


def _with_custom_rule(eqn: JaxprEqn, operands: Values, replicas: Replicas) -> Values:
    """Evaluates an equation whose derivative is the user's own."""
    # As an operand: a derivative is taken where no other values of the trace are known.
    active = [] if replicas.active is None else [replicas.active]

    def evaluate(jaxpr: ClosedJaxpr, values: Sequence[jax.Array], active: Sequence[jax.Array]) -> Values:
        return stacked_eval(jaxpr, values, replace(replicas, active=active[0] if active else None))

    return CustomRule(eqn, evaluate, replicas.axis, replicas.count)(operands, active)


def _has_rule(eqn: JaxprEqn) -> bool:
    """True if an equation is, or holds, a function with a rule of derivatives of the user's."""
    return any(each.primitive.name in CUSTOM_RULES for each in (eqn, *equations_inside(eqn)))


def _draws_from_first_key(eqn: JaxprEqn) -> bool:
    """True if `jax.vmap` of an equation draws from the first of several keys alone, as by XLA's own generator."""
    return any(
        each.primitive.name == "rng_bit_generator"
        or (
            each.primitive.name.startswith("random_") and str(getattr(x.aval, "dtype", "")) in ("key<rbg>", "key<urbg>")
        )
        for each in (eqn, *equations_inside(eqn))
        for x in each.invars
    )


def equation_alone(eqn: JaxprEqn, *operands: jax.Array, rounded: Rounded | None = None) -> Sequence[jax.Array]:
    """Evaluates an equation without collectives on one replica.

    `rounded`, if given, replaces the results of each equation by rounded ones, see `Replicas`. Then an equation that
    holds others, as a loop, is evaluated by those, one by one, so that each is rounded.
    """
    if rounded is None:
        return list(eval_equation(eqn, *operands))
    single = Replicas(1, rounded=rounded)
    name = eqn.primitive.name
    rows = [x[None] for x in operands]
    if name in HOLDERS:
        return [x[0] for x in stacked_eval(closed(eqn.params[HOLDERS[name]]), rows, single)]
    if name in _CONTROL:
        return [x[0] for x in _CONTROL[name](eqn, rows, single)]
    return list(rounded(eqn, operands, list(eval_equation(eqn, *operands))))


def _for_all(x: Any, replicas: Replicas) -> jax.Array:
    return jnp.broadcast_to(x, (replicas.num_local, *jnp.shape(x)))


def _scan(eqn: JaxprEqn, operands: Values, replicas: Replicas) -> Values:
    """Evaluates a `scan` on all local replicas, in one loop; operands and results are [local replicas, …]."""
    params = eqn.params
    body = scan_body(params)
    consts, carry, stacks = (operands[places] for places in body.operands)

    def run(carry: Values, slices: Values) -> tuple[Values, Values]:
        results = stacked_eval(body.jaxpr, [*consts, *carry, *slices], replicas)
        return results[body.results.carries], results[body.results.stacks]

    rows = [jnp.moveaxis(x, 1, 0) for x in stacks]  # the loop goes along dimension 0, replicas come second
    carry, pushed = lax.scan(run, carry, rows, length=params["length"], reverse=params["reverse"])
    return [*carry, *(jnp.moveaxis(x, 0, 1) for x in pushed)]


def _while(eqn: JaxprEqn, operands: Values, replicas: Replicas) -> Values:
    """Evaluates a `while` on all local replicas: one loop while any is in it; those that have left keep their values.

    Operands and results are [local replicas, …]. Replicas of other processes run along: collectives inside must meet.
    A loop over a batch, of `jax.vmap`, has a predicate for each element of it: a replica is in the loop while any is
    true, and the others' elements keep their values.
    """
    condition = while_condition(eqn.params)
    body = while_body(eqn.params)

    def state_of(carry: Values) -> tuple[jax.Array, jax.Array, Values]:
        """Replicas that are to run another iteration, whether any active one is, and the carry."""
        (predicates,) = stacked_eval(condition.jaxpr, [*operands[condition.operands.constants], *carry], replicas)
        return predicates, replicas.only(_any_of_batch(predicates)).any_active(), carry

    def run(state: tuple[jax.Array, jax.Array, Values]) -> tuple[jax.Array, jax.Array, Values]:
        predicates, _, carry = state
        running = replicas.only(_any_of_batch(predicates))
        results = stacked_eval(body.jaxpr, [*operands[body.operands.constants], *carry], running)
        return state_of(running.of_active(_selected(predicates, results, carry), carry))

    *_, results = lax.while_loop(lambda state: state[1], run, state_of(operands[body.operands.carries]))
    return results


def _linear_call(eqn: JaxprEqn, operands: Values, replicas: Replicas) -> Values:
    """Evaluates a `linear_call` on all local replicas, whose transpose is the user's own."""
    num_constants = eqn.params["num_callee_consts"]
    num_fixed = num_constants + eqn.params["num_res"]

    def function(fixed: Values, values: Values) -> Values:
        return list(stacked_eval(eqn.params["callee"], [*fixed, *values], replicas))

    def transpose(fixed: Values, cotangents: Values) -> Values:
        rules: list[Any] = []
        # JAX traces the rule at its first use: here, over the axis that its collectives name.
        trace_over_axis(lambda: rules.append(eqn.params["transpose_thunk"]()), [], replicas.axis, replicas.count)
        [(rule, constants)] = rules
        of_all = [_for_all(x, replicas) for x in constants]
        return list(stacked_eval(rule, [*of_all, *fixed[num_constants:], *cotangents], replicas))

    linear_call = jax.custom_derivatives.linear_call
    return list(linear_call(function, transpose, list(operands[:num_fixed]), list(operands[num_fixed:])))


def _linear_solve(eqn: JaxprEqn, operands: Values, replicas: Replicas) -> Values:
    """Evaluates a `custom_linear_solve` on all local replicas, whose functions define its derivatives as well."""
    jaxprs = eqn.params["jaxprs"]
    ends = list(accumulate(eqn.params["const_lengths"], initial=0))
    constants = {name: operands[a:b] for name, a, b in zip(jaxprs._fields, ends, ends[1:], strict=False)}
    right_sides = operands[ends[-1] :]

    def function(name: str, values: Values) -> Values:
        return stacked_eval(getattr(jaxprs, name), [*constants[name], *values], replicas)

    def solve(name: str, values: Values) -> Any:
        results = function(name, values)
        solution, further = results[: len(values)], results[len(values) :]
        return (solution, further) if further else solution

    transposed = None if jaxprs.transpose_solve is None else (lambda _, values: solve("transpose_solve", values))
    solved = lax.custom_linear_solve(
        partial(function, "matvec"),
        right_sides,
        lambda _, values: solve("solve", values),
        transposed,
        symmetric=jaxprs.vecmat is jaxprs.matvec,
        has_aux=len(jaxprs.solve.out_avals) > len(right_sides),
    )
    return list(jax.tree.leaves(solved))


def _any_of_batch(predicates: jax.Array) -> jax.Array:
    """Any predicate of each replica is true, bool[replicas]."""
    return predicates.reshape(len(predicates), -1).any(1)


def _selected(flags: jax.Array, new: Values, old: Values) -> Values:
    """New values where flags, along their first dimensions, are true, and old ones elsewhere."""
    return [
        jnp.where(flags.reshape(*flags.shape, *(1 for _ in x.shape[flags.ndim :])), x, y)
        for x, y in zip(new, old, strict=True)
    ]


def _cond(eqn: JaxprEqn, operands: Values, replicas: Replicas) -> Values:
    """Evaluates a `cond` on all local replicas; operands and results are [local replicas, …].

    If all replicas choose one branch it runs alone; else each branch in turn, for the replicas that choose it.
    """
    index, *values = operands
    branches = eqn.params["branches"]
    chosen = jnp.clip(index, 0, len(branches) - 1)

    def run_branch(jaxpr: ClosedJaxpr, *inner: jax.Array) -> Values:
        return stacked_eval(jaxpr, inner, replicas)

    def run_each_for_some(*inner: jax.Array) -> Values:
        """Runs each branch that some replica chooses, and keeps its results for these."""
        results = [jnp.zeros((replicas.num_local, *aval.shape), aval.dtype) for aval in branches[0].out_avals]
        for number, jaxpr in enumerate(branches):
            running = replicas.only(chosen == number)

            def run_active(results: Values, running: Replicas = running, jaxpr: ClosedJaxpr = jaxpr) -> Values:
                return running.of_active(stacked_eval(jaxpr, inner, running), results)

            results = lax.cond(running.any_active(), run_active, lambda results: results, results)
        return results

    all_chosen = replicas.instances.gather(chosen)
    agree = (all_chosen == all_chosen[0]).all()
    # With the one branch that all choose, gradients pass through no branch that was not run.
    number = jnp.where(agree, all_chosen[0], len(branches))
    run_branches = [partial(run_branch, jaxpr) for jaxpr in branches]
    return list(lax.switch(number, [*run_branches, run_each_for_some], *values))


def _has_loop(eqn: JaxprEqn) -> bool:
    inner = (inner for jaxpr in jaxprs_in_params(eqn.params) for inner in jaxpr.eqns)
    return eqn.primitive.name == "while" or any(map(_has_loop, inner))


def holds_equations(eqn: JaxprEqn) -> bool:
    """True for an equation that computes by those inside of it, which `Replicas.rounded` gets one by one."""
    return eqn.primitive.name in HOLDERS or eqn.primitive.name in _CONTROL


_CONTROL: dict[str, Callable[[JaxprEqn, Values, Replicas], Values]] = {"scan": _scan, "while": _while, "cond": _cond}
