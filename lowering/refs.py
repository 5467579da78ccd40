"""Pass `discharge`: replaces Refs, the arrays that change (`jax.new_ref`), by values; loops carry them.

Input: a traced jaxpr. Output: an equal one that reads and writes no Ref. The rules for each primitive are JAX's own:
`pallas.run_state` runs a function of Refs, and its implementation discharges the function's reads and writes. Refs from
outside, arguments or closed over, first become Refs made inside, of values that are inputs and results: see
`with_state`.

Source: `jax.new_ref`, jax 0.10. Limits: functions that `jax.jit` cannot run are refused, such as a `custom_jvp`
function that makes a Ref; and a `while` whose condition reads a Ref that its body changes, which `jax.jit` never ends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import jax
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from ipujax.lowering.jax_compat import (
    Atom,
    ClosedJaxpr,
    Jaxpr,
    JaxprEqn,
    Literal,
    Var,
    constants_as_inputs,
    eliminate_dead_code,
    eval_equation,
    eval_jaxpr,
    is_on_host,
    jaxpr_as_fun,
    used_inputs,
)
from ipujax.lowering.jaxpr import (
    Rewrite,
    equations,
    everywhere,
    substituted,
    variables,
    while_body,
    while_condition,
    with_inner,
)
from ipujax.lowering.source_info import source_line
from ipujax.runtime.errors import ArgumentError, GraphError

_MAKES_REF = "InternalMutableArrayEffect"  # JAX's effect of making a Ref, also of equations with such an effect inside
_CHANGES = frozenset({"WriteEffect", "AccumEffect"})
_OF_INDICES = frozenset(
    {"lt", "add", "select_n", "convert_element_type"}
)  # JAX's operations on an index that may be negative
_RESULT = "ipu_result"  # name of a weakly typed result until Refs are discharged
_NO_AXES: Mapping[str, int] = MappingProxyType({})


def is_ref(aval: Any) -> bool:
    """True for the abstract value of a Ref."""
    return isinstance(aval, jax.ref.AbstractRef)


def with_state(jaxpr: ClosedJaxpr) -> tuple[ClosedJaxpr, list[jax.Ref]]:
    """Jaxpr of arrays for one that has Refs (JAX's mutable arrays) as arguments, or closes over some.

    It makes these Refs inside, from values that the caller passes, and returns their new values.

    Returns:
        The jaxpr, with the value of each Ref as input, those closed over last, and its new value as a further result in
        the same order; and the Refs closed over. The jaxpr itself and none if it has no Refs from outside.
    """
    # Refs that JAX does not pass as arguments, of an enclosing scope, are among the constants.
    closed_over = [value for value in jaxpr.consts if isinstance(value, jax.Ref)]
    avals = [*jaxpr.in_avals, *map(jax.typeof, closed_over)]
    if not any(map(is_ref, avals)):
        return jaxpr, []
    opened, consts = constants_as_inputs(jaxpr)
    inner: Any = jaxpr_as_fun(opened)

    def run(*values: jax.Array) -> list[jax.Array]:
        state: list[Any] = [jax.new_ref(x) if is_ref(aval) else x for x, aval in zip(values, avals, strict=True)]
        arguments = state[: len(jaxpr.in_avals)]
        closed_over_refs = iter(state[len(jaxpr.in_avals) :])
        results = inner(*(next(closed_over_refs) if isinstance(x, jax.Ref) else x for x in consts), *arguments)
        return [*results, *(jax.freeze(x) for x, aval in zip(state, avals, strict=True) if is_ref(aval))]

    return jax.make_jaxpr(run)(*map(_aval_of_value, avals)), closed_over


def discharge(jaxpr: ClosedJaxpr, axes: Mapping[str, int] = _NO_AXES) -> ClosedJaxpr:
    """Returns an equal jaxpr without Refs (JAX's mutable arrays), whose values are carried in their place.

    Args:
        jaxpr: a jaxpr that has no Ref among its arguments.
        axes: sizes of the named axes around it, except those of a function that is being traced.
    """
    if not any(map(_has_refs, jaxpr.jaxpr.eqns)):
        return jaxpr
    _check_conditions(jaxpr.jaxpr)
    return _trace_without_refs(jaxpr, axes)


def refuse_refs(who: str, how: str, values: Sequence[Any]) -> None:
    """Refuses Refs (mutable arrays) among values of a function that runs in parts: micro-batches, replicas or tiles.

    Args:
        who: name of the function.
        how: how it gets the values: "is given", "closes over".
        values: the values.
    """
    for value in values:
        if isinstance(value, jax.Ref) or is_ref(jax.typeof(value)):
            raise ArgumentError(
                f"{who} {how} a Ref, an array that changes",
                expected="arrays: a Ref would be shared by all micro-batches, replicas or tiles",
                got=jax.typeof(value).str_short(),
                hint="ref[...] as an argument, the new value as a result, and ref[...] = result outside",
            )


def discharged_body(jaxpr: ClosedJaxpr, who: str, axes: Mapping[str, int] = _NO_AXES) -> ClosedJaxpr:
    """Returns the function of a call without Refs, for equations that hold it; refuses closed-over Refs."""
    refuse_refs(who, "closes over", jaxpr.consts)
    return discharge(jaxpr, axes)


def _check_conditions(jaxpr: Jaxpr) -> None:
    """Refuses a `while` whose condition reads a Ref (mutable array) that its body changes.

    JAX's rule, which replaces Refs by values, passes the condition the value before the loop in all iterations.
    """
    for eqn in equations(jaxpr):
        if eqn.primitive.name == "while":
            body = while_body(eqn.params)
            changed = {id(effect.input) for effect in body.jaxpr.effects if type(effect).__name__ in _CHANGES}
            operands = zip(body.of_operands(eqn.invars), body.jaxpr.jaxpr.invars, strict=True)
            tested = variables(eqn.invars[while_condition(eqn.params).operands.constants])
            if any(outer in tested for outer, inner in operands if id(inner) in changed):
                raise GraphError(
                    "the condition of a loop reads a Ref that the loop changes",
                    where=source_line(eqn) or None,
                    expected="a condition on values in the carry: jax.jit would read one value in all iterations",
                    hint="read the Ref at the end of each iteration, and carry its value",
                )


def _has_refs(eqn: JaxprEqn) -> bool:
    atoms: Sequence[Atom] = (*eqn.invars, *eqn.outvars)
    return any(is_ref(atom.aval) for atom in atoms) or any(
        type(effect).__name__ == _MAKES_REF for effect in eqn.effects
    )


def _check_memories(jaxpr: ClosedJaxpr) -> None:
    """Refuses Refs together with arguments or results on the host: JAX's rules for Refs have one memory."""
    if any(map(is_on_host, (*jaxpr.in_avals, *jaxpr.out_avals))):
        lines = (source_line(eqn) for eqn in equations(jaxpr.jaxpr) if _has_refs(eqn))
        raise GraphError(
            "a function with Refs has arguments or results on the host",
            where=next(filter(None, lines), None),
            expected="Refs, or arrays in memory of the host, in one function",
            hint="pass the value of the Ref as a donated array; or fetch by jax.device_put outside of ipu.jit",
        )


def _trace_without_refs(jaxpr: ClosedJaxpr, axes: Mapping[str, int]) -> ClosedJaxpr:
    """Returns the jaxpr with JAX's rules applied that replace Refs (mutable arrays) by values.

    `run_state` turns a function of Refs into one of values. So the jaxpr is run in a function that gets Refs of its
    inputs and results; then the equations that the implementation of `run_state` consists of are traced.
    """
    from jax.experimental.pallas import run_state  # a slow import, and few programs have Refs

    opened, consts = constants_as_inputs(jaxpr)
    _check_memories(opened)
    inner: Any = jaxpr_as_fun(opened)

    def run(inputs: Sequence[Any], initial_results: Sequence[Any]) -> Sequence[Any]:
        def write_results(refs: tuple[Sequence[Any], Sequence[Any]]) -> None:
            input_refs, result_refs = refs
            for result_ref, value in zip(result_refs, inner(*(ref[...] for ref in input_refs)), strict=True):
                # A Ref has strong types: weakly typed results are marked, and taken as computed, see below.
                result_ref[...] = checkpoint_name(value, _RESULT) if jax.typeof(value).weak_type else value

        _, results = run_state(write_results)((inputs, initial_results))
        return results

    def of_values(*values: Any) -> list[Any]:
        # `run_state` by its implementation, whose equations have no Refs.
        return eval_jaxpr(staged, values, lambda eqn, xs: eqn.primitive.impl(*xs, **eqn.params), constant=lambda x: x)

    make = partial(jax.make_jaxpr, axis_env=list(axes.items()))
    in_avals: list[Any] = opened.in_avals
    try:
        staged = make(run)(in_avals, opened.out_avals)
        traced = make(of_values)(*in_avals, *opened.out_avals)
    except NotImplementedError as error:
        raise _refusal(jaxpr.jaxpr, error) from error
    # The last inputs of the trace are initial values of results, which nothing reads.
    body = eliminate_dead_code(_with_results_as_computed(traced.jaxpr))
    assert not any(used_inputs(body)[len(in_avals) :]), "initial values of results are overwritten"
    body = body.replace(
        invars=body.invars[len(consts) : len(in_avals)],
        constvars=[*body.invars[: len(consts)], *body.constvars],
        debug_info=jaxpr.jaxpr.debug_info,
    )
    return everywhere(_fold_indices)(ClosedJaxpr(body, [*consts, *traced.consts]))


def _with_results_as_computed(jaxpr: Jaxpr) -> Jaxpr:
    """Returns the jaxpr with weakly typed results in place of their copies in Refs, which are strongly typed.

    `_trace_without_refs` has marked such a copy by an equation `name` of `_RESULT`, which `convert_element_type` may
    follow. So results have the types that `jax.jit` gives them.
    """
    producers: dict[Atom, JaxprEqn] = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}

    def operand_of(primitive: str, atom: Atom) -> Atom | None:
        eqn = producers.get(atom) if isinstance(atom, Var) else None
        return eqn.invars[0] if eqn is not None and eqn.primitive.name == primitive else None

    def named_value(atom: Atom) -> Atom | None:
        is_result = isinstance(atom, Var) and atom in producers and producers[atom].params.get("name") == _RESULT
        return operand_of("name", atom) if is_result else None

    def weak_result(atom: Atom) -> Atom:
        cast_operand = operand_of("convert_element_type", atom)
        return named_value(atom) or (named_value(cast_operand) if cast_operand is not None else None) or atom

    return jaxpr.replace(outvars=[weak_result(atom) for atom in jaxpr.outvars])


def _fold_indices(jaxpr: ClosedJaxpr, rewrite_inner: Rewrite) -> ClosedJaxpr:
    """Computes the index arithmetic on literals in a jaxpr: a slice with a constant start is a view.

    Args:
        jaxpr: the jaxpr.
        rewrite_inner: this rewrite, for the jaxprs inside its equations.
    """
    literals: dict[Var, Atom] = {}
    eqns: list[JaxprEqn] = []
    for eqn in jaxpr.jaxpr.eqns:
        eqn = eqn.replace(invars=[substituted(atom, literals) for atom in eqn.invars])
        values = [atom.val for atom in eqn.invars if isinstance(atom, Literal)]
        if eqn.primitive.name in _OF_INDICES and len(values) == len(eqn.invars):
            # Also correct while a transformation traces this pass.
            with jax.ensure_compile_time_eval():
                (value,) = eval_equation(eqn, *values)
            literals[eqn.outvars[0]] = Literal(np.asarray(value), eqn.outvars[0].aval)
        else:
            eqns.append(with_inner(eqn, rewrite_inner))
    outvars = [substituted(atom, literals) for atom in jaxpr.jaxpr.outvars]
    return ClosedJaxpr(jaxpr.jaxpr.replace(eqns=eqns, outvars=outvars), jaxpr.consts)


def _refusal(jaxpr: Jaxpr, error: NotImplementedError) -> GraphError:
    """Error for a Ref that JAX has no rule to replace, at the line that uses it."""
    users = [eqn for eqn in equations(jaxpr) if _has_refs(eqn)]
    # JAX ends its message with the primitive that has no rule.
    candidates = [eqn for eqn in users if str(error).endswith(f": {eqn.primitive}")] or users
    line = next((line for eqn in candidates if (line := source_line(eqn))), None)
    return GraphError(
        f"JAX cannot replace the Ref that {candidates[0].primitive} uses by values"
        if candidates
        else "JAX cannot replace a Ref by values",
        where=line,
        got=str(error) or None,
        hint="read the Ref before this operation and write it after, or return the new value, in a loop as its carry",
    )


def _aval_of_value(aval: Any) -> Any:
    return aval.inner_aval if is_ref(aval) else aval
