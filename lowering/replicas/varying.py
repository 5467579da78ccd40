"""Analysis of the values of a jaxpr that may differ between replicas.

Input: the function of one replica, and which of its inputs are split. Output: the results that may differ, and for each
the equation where it first differs.

A value differs if it is computed from one that differs: a part of an argument, `axis_index`, or a collective with a
separate result for each replica. A reading of the cycle counter differs too. Values computed from equal values are
equal, and so are reductions over all replicas. Values under a branch or loop condition on which replicas may disagree
differ too. Loops are iterated to a fixpoint.
Limits: values that agree by chance count as different, and so do results of host functions of each replica.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ipujax.lowering.gcl import AXIS, COLLECTIVES, axis_of, is_collective
from ipujax.lowering.jax_compat import ClosedJaxpr, JaxprEqn, Var, closed, eval_jaxpr, jaxprs_in_params
from ipujax.lowering.replicas.stacked_eval import EVALUATED, has_collective
from ipujax.lowering.source_info import source_line
from ipujax.runtime.errors import GraphError

_HOST = ("io_callback", "pure_callback")


@dataclass(frozen=True, slots=True)
class Varying:
    """Results of a jaxpr that may differ between replicas.

    Args:
        results: True for each result that may differ.
        reasons: for each that may, the equation that computes it; None for an input.
    """

    results: tuple[bool, ...]
    reasons: tuple[JaxprEqn | None, ...]


def varying(jaxpr: ClosedJaxpr, inputs: Sequence[bool], replicas: int, axis: str = AXIS) -> Varying:
    """Finds the results of a jaxpr that may differ; refuses a collective that not all replicas may reach.

    Collectives over other axes, those of a mesh that each replica has, combine values of one replica.
    """
    analysis = _Analysis(replicas, axis)
    results = analysis.jaxpr(jaxpr, inputs)
    producers = {var: eqn for eqn in jaxpr.jaxpr.eqns for var in eqn.outvars}
    reasons = tuple(
        producers.get(var) if differs and isinstance(var, Var) else None
        for var, differs in zip(jaxpr.jaxpr.outvars, results, strict=True)
    )
    return Varying(tuple(results), reasons)


@dataclass(slots=True)
class _Analysis:
    """Forward dataflow: a flag for each value, true if it may differ."""

    replicas: int
    axis: str = AXIS

    def jaxpr(self, jaxpr: ClosedJaxpr, inputs: Sequence[bool]) -> list[bool]:
        return eval_jaxpr(jaxpr, inputs, self._equation, lambda _: False)

    def _equation(self, eqn: JaxprEqn, operands: list[bool]) -> list[bool]:
        """For each result whether replicas may differ, as for each operand."""
        name = eqn.primitive.name
        params = eqn.params
        if is_collective(eqn) and axis_of(eqn) != self.axis:
            return [any(operands) for _ in eqn.outvars]
        if name == "shard_map":
            return self.jaxpr(closed(params["jaxpr"]), operands)
        if is_collective(eqn):
            form = COLLECTIVES[name](eqn, self.replicas)
            if form.kind == "reduce" and not form.is_same:
                return operands
            return [not form.is_same for _ in eqn.outvars]
        if name in EVALUATED:
            return self.jaxpr(closed(params[EVALUATED[name]]), operands)
        match name:
            case "cycle_count":  # the last result is the reading
                return [*operands, True]
            case "scan":
                return self._scan(eqn, operands)
            case "while":
                return self._while(eqn, operands)
            case "cond":
                return self._cond(eqn, operands)
        return [any(operands) or name in _HOST for _ in eqn.outvars]

    def _scan(self, eqn: JaxprEqn, operands: list[bool]) -> list[bool]:
        params = eqn.params
        num_consts = params["num_consts"]
        first_stacked = params["num_consts"] + params["num_carry"]
        carry = operands[num_consts:first_stacked]
        while True:
            results = self.jaxpr(params["jaxpr"], [*operands[:num_consts], *carry, *operands[first_stacked:]])
            joined_carry = [a or b for a, b in zip(carry, results[: len(carry)], strict=True)]
            # Flags only change from false to true, so the iteration ends after at most one round for each carry.
            if joined_carry == carry:
                return [*carry, *results[len(carry) :]]
            carry = joined_carry

    def _while(self, eqn: JaxprEqn, operands: list[bool]) -> list[bool]:
        params = eqn.params
        num_cond_consts = params["cond_nconsts"]
        first_carry = params["cond_nconsts"] + params["body_nconsts"]
        carry = operands[first_carry:]
        while True:
            (may_disagree,) = self.jaxpr(params["cond_jaxpr"], [*operands[:num_cond_consts], *carry])
            results = self.jaxpr(params["body_jaxpr"], [*operands[num_cond_consts:first_carry], *carry])
            # Replicas that leave the loop at different iterations have different carries.
            joined_carry = [a or b or may_disagree for a, b in zip(carry, results, strict=True)]
            if joined_carry == carry:
                break
            carry = joined_carry
        if may_disagree:
            _refuse_collectives(eqn, "a loop's condition")
        return carry

    def _cond(self, eqn: JaxprEqn, operands: list[bool]) -> list[bool]:
        branches = [self.jaxpr(branch, operands[1:]) for branch in eqn.params["branches"]]
        if operands[0]:
            _refuse_collectives(eqn, "the choice of a branch")
        return [operands[0] or any(flags) for flags in zip(*branches, strict=True)]


def _refuse_collectives(eqn: JaxprEqn, condition: str) -> None:
    """Refuses collectives under a decision on which replicas may disagree."""
    inner = next(_collectives_inside(eqn), None)
    if inner is not None:
        raise GraphError(
            f"replicas may disagree on {condition}, and would have to meet for {inner.primitive.name} inside it",
            where=source_line(inner) or source_line(eqn) or None,
            expected="a value that is the same on all replicas",
            hint=f'reduce it first, jax.lax.pmax(..., "{axis_of(inner)}"), or move the collective outside',
        )


def _collectives_inside(eqn: JaxprEqn) -> Iterator[JaxprEqn]:
    for jaxpr in jaxprs_in_params(eqn.params):
        for inner in jaxpr.eqns:
            if is_collective(inner) and inner.primitive.name != "axis_index":
                yield inner
            elif has_collective(inner):
                yield from _collectives_inside(inner)
