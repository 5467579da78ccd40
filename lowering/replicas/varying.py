"""Which values of a jaxpr may differ between replicas.

Input: what one replica computes, and which of its inputs are split. Output: for each result whether it may differ, and
the equation it first differs in.

A value differs where it comes from something that does: a part of an argument, `axis_index`, or a collective that gives
each replica something of its own. What is computed from equal values is equal; sums and the like over all replicas are.
What is computed under a decision on which replicas may disagree differs too. Loops are walked to a fixpoint.
Limits: values that agree by chance count as different, and so does what the host's functions return for each replica.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ipujax.lowering.gcl import COLLECTIVES, axis_of, is_collective
from ipujax.lowering.jax_compat import ClosedJaxpr, JaxprEqn, Var, closed, eval_jaxpr, jaxprs_in_params
from ipujax.lowering.replicas.stacked_eval import EVALUATED, meets
from ipujax.lowering.source_info import source_line
from ipujax.runtime.errors import GraphError

_HOST = ("io_callback", "pure_callback")


@dataclass(frozen=True, slots=True)
class Varying:
    """Which results of a jaxpr may differ between replicas.

    Args:
        results: for each result whether it may differ between replicas.
        reasons: for each that may, the equation it comes from; None where it is an input.
    """

    results: tuple[bool, ...]
    reasons: tuple[JaxprEqn | None, ...]


def varying(jaxpr: ClosedJaxpr, inputs: Sequence[bool], replicas: int) -> Varying:
    """Finds which results of a jaxpr may differ between replicas.

    Args:
        jaxpr: what one replica computes.
        inputs: for each input whether it differs.
        replicas: how many.

    Raises:
        GraphError: a collective under a decision on which replicas may disagree.
    """
    walk = _Walk(replicas)
    results = walk.jaxpr(jaxpr, inputs)
    made = {var: eqn for eqn in jaxpr.jaxpr.eqns for var in eqn.outvars}
    reasons = tuple(
        made.get(var) if differs and isinstance(var, Var) else None
        for var, differs in zip(jaxpr.jaxpr.outvars, results, strict=True)
    )
    return Varying(tuple(results), reasons)


@dataclass(slots=True)
class _Walk:
    """A walk through jaxprs."""

    replicas: int

    def jaxpr(self, jaxpr: ClosedJaxpr, inputs: Sequence[bool]) -> list[bool]:
        return eval_jaxpr(jaxpr, inputs, self._equation, lambda _: False)

    def _equation(self, eqn: JaxprEqn, operands: list[bool]) -> list[bool]:
        name, params = eqn.primitive.name, eqn.params
        if is_collective(eqn):
            form = COLLECTIVES[name](eqn, self.replicas)
            if form.kind == "reduce" and not form.is_same:
                return operands
            return [not form.is_same for _ in eqn.outvars]
        if name in EVALUATED:
            return self.jaxpr(closed(params[EVALUATED[name]]), operands)
        match name:
            case "scan":
                return self._scan(eqn, operands)
            case "while":
                return self._while(eqn, operands)
            case "cond":
                return self._cond(eqn, operands)
        return [any(operands) or name in _HOST for _ in eqn.outvars]

    def _scan(self, eqn: JaxprEqn, operands: list[bool]) -> list[bool]:
        params = eqn.params
        first, last = params["num_consts"], params["num_consts"] + params["num_carry"]
        carry = operands[first:last]
        while True:
            results = self.jaxpr(params["jaxpr"], [*operands[:first], *carry, *operands[last:]])
            after = [a or b for a, b in zip(carry, results[: len(carry)], strict=True)]
            if after == carry:
                return [*carry, *results[len(carry) :]]
            carry = after

    def _while(self, eqn: JaxprEqn, operands: list[bool]) -> list[bool]:
        params = eqn.params
        first, last = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
        carry = operands[last:]
        while True:
            (decides,) = self.jaxpr(params["cond_jaxpr"], [*operands[:first], *carry])
            results = self.jaxpr(params["body_jaxpr"], [*operands[first:last], *carry])
            after = [a or b or decides for a, b in zip(carry, results, strict=True)]
            if after == carry:
                break
            carry = after
        if decides:
            _refuse_meeting(eqn, "a loop's condition")
        return carry

    def _cond(self, eqn: JaxprEqn, operands: list[bool]) -> list[bool]:
        branches = [self.jaxpr(branch, operands[1:]) for branch in eqn.params["branches"]]
        if operands[0]:
            _refuse_meeting(eqn, "the choice of a branch")
        return [operands[0] or any(ends) for ends in zip(*branches, strict=True)]


def _refuse_meeting(eqn: JaxprEqn, what: str) -> None:
    """Refuses collectives under a decision on which replicas may disagree."""
    inner = next(_meetings(eqn), None)
    if inner is not None:
        raise GraphError(
            f"replicas may disagree on {what}, and would have to meet for {inner.primitive.name} inside it",
            where=source_line(inner) or source_line(eqn) or None,
            expected="a value that is the same on all replicas",
            hint=f'reduce it first, jax.lax.pmax(..., "{axis_of(inner)}"), or move the collective outside',
        )


def _meetings(eqn: JaxprEqn) -> Iterator[JaxprEqn]:
    for jaxpr in jaxprs_in_params(eqn.params):
        for inner in jaxpr.eqns:
            if is_collective(inner) and inner.primitive.name != "axis_index":
                yield inner
            elif meets(inner):
                yield from _meetings(inner)
