"""Values of a jaxpr that may differ between replicas, and the check that results declared equal are equal.

Input: the function of one replica, and which of its inputs are split. Output: the results that may differ, and for each
the equation where it first differs.

Each value has the classes of replicas that agree on it (`runtime.analysis.agreement`). Replicas disagree on a part of
an argument, `axis_index`, a reading of the cycle counter, and what a collective gives each of them; those of a group
agree on a reduction over it. On what is computed from values they agree where they do on all of these, and under a
branch or loop condition where they do on the condition too. Loops are iterated to a fixpoint.
Limits: values that agree by chance count as different, and so do results of `io_callback`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ipujax.lowering.gcl import AXIS, COLLECTIVES, Form, axes_of, is_collective
from ipujax.lowering.jax_compat import ClosedJaxpr, JaxprEqn, Var, closed, eval_jaxpr, jaxprs_in_params
from ipujax.lowering.jaxpr import bodies, scan_body, while_body, while_condition
from ipujax.lowering.replicas.replicated_primitive import Replicated
from ipujax.lowering.replicas.stacked_eval import HOLDERS, has_collective
from ipujax.lowering.source_info import source_line
from ipujax.runtime.analysis import Classes, agreement
from ipujax.runtime.cache import remembered
from ipujax.runtime.errors import ArgumentError, GraphError
from ipujax.runtime.target import Target


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
    """Finds the results of a function of one replica that may differ between replicas, by its data flow.

    Refuses a collective under a loop or branch on which its replicas may disagree, as some might never reach it.

    Args:
        jaxpr: the function of one replica.
        inputs: for each input whether it is split, and so differs.
        replicas: number of replicas.
        axis: their axis; collectives over others, as of a mesh that each replica has, combine values of one replica.
    """
    analysis = _Analysis(replicas, axis)
    apart = agreement.apart(replicas)  # each replica in a class of its own
    classes = analysis.jaxpr(jaxpr, [apart if is_split else analysis.same for is_split in inputs])
    results = tuple(map(any, classes))  # where all replicas agree, all are in class 0
    producers = {var: eqn for eqn in jaxpr.jaxpr.eqns for var in eqn.outvars}
    reasons = tuple(
        producers.get(var) if differs and isinstance(var, Var) else None
        for var, differs in zip(jaxpr.jaxpr.outvars, results, strict=True)
    )
    return Varying(results, reasons)


@dataclass(slots=True)
class _Analysis:
    """Forward dataflow of the classes of replicas that agree on each value."""

    replicas: int
    axis: str = AXIS

    @property
    def same(self) -> Classes:
        return agreement.same(self.replicas)

    def common(self, *classes: Classes) -> Classes:
        return agreement.common(classes, self.replicas)

    def jaxpr(self, jaxpr: ClosedJaxpr, inputs: Sequence[Classes]) -> list[Classes]:
        return eval_jaxpr(jaxpr, inputs, self._equation, lambda _: self.same)

    def _equation(self, eqn: JaxprEqn, operands: list[Classes]) -> list[Classes]:
        """For each result of an equation the classes of replicas that agree on it, from those of each operand.

        Replicas agree on a result if they agree on all operands. Collectives make replicas of a group agree; host
        callbacks and counters of cycles let none agree.
        """
        name = eqn.primitive.name
        params = eqn.params
        if is_collective(eqn) and self.axis not in axes_of(eqn):
            return [self.common(*operands)] * len(eqn.outvars)
        if name == "shard_map":
            return self.jaxpr(closed(params["jaxpr"]), operands)
        if is_collective(eqn):
            form = COLLECTIVES[name](eqn, self.replicas)
            # `axis_index` and `axis_rank` have no operands.
            return [_of_collective(form, operand) for operand in operands or [self.same]]
        if name in HOLDERS:
            return self.jaxpr(closed(params[HOLDERS[name]]), operands)
        match name:
            case "cycle_count":  # the last result is the reading
                return [*operands, agreement.apart(self.replicas)]
            case "scan":
                return self._scan(eqn, operands)
            case "while":
                return self._while(eqn, operands)
            case "cond":
                return self._cond(eqn, operands)
        classes = agreement.apart(self.replicas) if name == "io_callback" else self.common(*operands)
        return [classes] * len(eqn.outvars)

    def _agree_on_both(self, values: Sequence[Classes], other_values: Sequence[Classes]) -> list[Classes]:
        """For each value and its other the classes of replicas that agree on both."""
        return [self.common(a, b) for a, b in zip(values, other_values, strict=True)]

    def _scan(self, eqn: JaxprEqn, operands: list[Classes]) -> list[Classes]:
        """For each result of a `scan` the classes of replicas that agree on it: a fixpoint over its iterations.

        An iteration may make replicas disagree on a carry, which splits its classes, until none splits any more.
        """
        body = scan_body(eqn.params)
        consts, carry, stacks = (operands[places] for places in body.operands)
        while True:
            results = self.jaxpr(body.jaxpr, [*consts, *carry, *stacks])
            next_carry = self._agree_on_both(carry, results[body.results.carries])
            if next_carry == carry:  # classes only split, so the iteration ends
                return [*carry, *results[body.results.stacks]]
            carry = next_carry

    def _while(self, eqn: JaxprEqn, operands: list[Classes]) -> list[Classes]:
        """Classes of replicas that agree on each carry of a `while`: a fixpoint over its iterations.

        Replicas that may leave the loop at different iterations agree on nothing that it changes.
        """
        condition = while_condition(eqn.params)
        body = while_body(eqn.params)
        carry = operands[body.operands.carries]
        while True:
            (decision,) = self.jaxpr(condition.jaxpr, [*operands[condition.operands.constants], *carry])
            results = self.jaxpr(body.jaxpr, [*operands[body.operands.constants], *carry])
            # Replicas that leave the loop at different iterations have different carries.
            next_carry = self._agree_on_both(carry, [self.common(x, decision) for x in results])
            if next_carry == carry:
                break
            carry = next_carry
        self._refuse_collectives(eqn, decision, "a loop's condition")
        return carry

    def _cond(self, eqn: JaxprEqn, operands: list[Classes]) -> list[Classes]:
        branches = [self.jaxpr(branch.jaxpr, branch.of_operands(operands)) for branch in bodies(eqn)]
        self._refuse_collectives(eqn, operands[0], "the choice of a branch")
        return [self.common(operands[0], *classes) for classes in zip(*branches, strict=True)]

    def _refuse_collectives(self, eqn: JaxprEqn, decision: Classes, condition: str) -> None:
        """Raises for a collective inside an equation if its replicas may disagree on whether they reach it.

        Args:
            eqn: the loop or branch.
            decision: classes of replicas that agree on its condition.
            condition: name of the condition, for the error.
        """
        for inner in _collectives_inside(eqn):
            if self.axis not in axes_of(inner):
                continue
            form = COLLECTIVES[inner.primitive.name](inner, self.replicas)
            groups = form.pairs if form.kind == "permute" else form.groups
            if form.kind != "index" and agreement.is_apart_in(decision, groups):
                raise GraphError(
                    f"replicas may disagree on {condition}, and would have to meet for {inner.primitive.name} inside"
                    " it",
                    where=source_line(inner) or source_line(eqn) or None,
                    expected="a value that is the same on all replicas",
                    hint=f'reduce it first, jax.lax.pmax(..., "{self.axis}"), or move the collective outside',
                )


def _of_collective(form: Form, operand: Classes) -> Classes:
    """Classes of replicas that agree on a collective's result, from those on its operand."""
    if form.kind == "index":
        return agreement.by_key(form.ranks)
    if form.kind == "permute":
        sender_of: dict[int, tuple[int, ...]] = {destination: (source,) for source, destination in form.pairs}
    else:
        sender_of = {replica: group for group in form.groups for replica in group}
    senders = [sender_of.get(replica, ()) for replica in range(len(operand))]
    return agreement.of_results(senders, operand, has_ranks=form.kind in ("reduce_scatter", "all_to_all"))


def _collectives_inside(eqn: JaxprEqn) -> Iterator[JaxprEqn]:
    for jaxpr in jaxprs_in_params(eqn.params):
        for inner in jaxpr.eqns:
            if is_collective(inner):
                yield inner
            elif has_collective(inner):
                yield from _collectives_inside(inner)


@remembered
def of_one_replica(target: Target, replicas: int) -> Target:
    """The target with the IPUs of one of several replicas; raises if there are fewer IPUs than replicas.

    IPUs that do not divide evenly stay unused.
    """
    if replicas > target.num_ipus:
        raise ArgumentError(
            f"{replicas} replicas do not fit {target.num_ipus} IPUs",
            expected=f"{replicas} IPUs or more, one at least for each replica",
            got=target.num_ipus,
            hint=f"device=ipu.IPUModel(num_ipus={1 << (replicas - 1).bit_length()})",
        )
    return target if replicas == 1 else target.replace(num_ipus=target.num_ipus // replicas)


def check_results(function: Replicated) -> None:
    """Raises for a result that `out_specs` declare equal on all replicas, but that may differ between them."""
    if function.replicas == 1 or function.is_checked:
        return
    are_split = [dim is not None for dim in function.in_dims]
    analysis = varying(function.jaxpr, are_split, function.replicas, function.axis_name)
    paths = function.jaxpr.jaxpr.debug_info.result_paths or ()
    for number, (differs, dim, eqn) in enumerate(
        zip(analysis.results, function.out_dims, analysis.reasons, strict=True)
    ):
        if differs and dim is None:
            path = paths[number] if number < len(paths) else f"[{number}]"
            raise GraphError(
                f"{str(path) or 'the result'} may differ between replicas, and out_specs say that all have the same",
                where=(source_line(eqn) or None) if eqn is not None else None,
                expected=f'P("{function.axis_name}"), which joins the parts of replicas, or a value that all have',
                got="P()",
                hint=f'reduce it before it is returned: jax.lax.pmean(x, "{function.axis_name}")',
            )
