"""Equations that a program computes several times on purpose, with the reason of each.

Input: the jaxpr after all passes, and those that `cse` has left for the bytes of a longer life. Output: rows for the
profile. A fused equation counts as the equations inside, as for the vertex that computes them one after the other.
Limits: views cost nothing and have no rows. The stages of a pipeline are not searched.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from ipujax.lowering.jax_compat import Atom, ClosedJaxpr, JaxprEqn, Var, closed
from ipujax.lowering.jaxpr import HOLDERS, distinct_jaxprs, phase_of, stage_name, substituted
from ipujax.lowering.layer_notes import origin_of
from ipujax.lowering.passes.cse import checkpoints, constants_of, earlier_equals
from ipujax.lowering.primitives import record_of
from ipujax.lowering.source_info import name_stack, source_line
from ipujax.runtime.graph import ComputedAgain, ReasonToRepeat
from ipujax.runtime.tensor import Origin

_FREE = frozenset(("view", "part", "joined", "none"))


def computed_again(jaxpr: ClosedJaxpr, kept_apart: Collection[JaxprEqn]) -> tuple[ComputedAgain, ...]:
    """Lists the computations that a program repeats on purpose, for its profile.

    Args:
        jaxpr: the program after all passes.
        kept_apart: equations that `cse` has not joined with equal ones, as their results would live longer.

    Returns:
        A row for each operation, reason and source line, with the number of equations that are equal to an earlier one
        of the same body.
    """
    places = set(map(_place, kept_apart))
    rows = Counter[ComputedAgain]()
    for body in distinct_jaxprs(jaxpr, HOLDERS):
        members = list(_expanded(body.jaxpr.eqns, {}))
        eqns = [member.eqn for member in members]
        runs = checkpoints(eqns)
        # Nothing else must be equal: what separates two equations is the reason that both are there.
        for number, first in earlier_equals(eqns, constants_of(body), lambda _: True).items():
            eqn = eqns[number]
            if record_of(eqn).cost in _FREE:
                continue
            reason = _separation(eqns[first], eqn)  # another stage or phase of execution
            if reason is None and runs[first] != runs[number]:
                reason = "recomputation"
            # `narrow` and `fuse` let readers compute cheap values, in another part or another vertex.
            is_other_part = stage_name(eqns[first]).is_backward != stage_name(eqn).is_backward
            is_apart = members[first].vertex != members[number].vertex or is_other_part
            if reason is None and (_place(eqn) in places or (is_apart and record_of(eqn).is_cheap)):
                reason = "memory"
            if reason is not None:
                rows[ComputedAgain(eqn.primitive.name, reason, 1, origin_of(eqn, Origin()))] += 1
    return tuple(replace(row, count=count) for row, count in rows.items())


def _separation(first: JaxprEqn, eqn: JaxprEqn) -> ReasonToRepeat | None:
    if stage_name(first).stage != stage_name(eqn).stage:
        return "stage"
    return "phase" if phase_of(first) != phase_of(eqn) else None


def _place(eqn: JaxprEqn) -> tuple[str, str, str]:
    """What of an equation passes keep, by which one after all passes is found among those of `cse`."""
    return eqn.primitive.name, name_stack(eqn), source_line(eqn)


class _Member(NamedTuple):
    """An equation of a body, also one inside of a vertex or a function.

    Args:
        eqn: the equation.
        vertex: identity of the original equation that is its vertex: one for all equations that are fused to it, and
            for all calls of the function that it is in.
    """

    eqn: JaxprEqn
    vertex: int


def _expanded(eqns: Sequence[JaxprEqn], table: dict[Var, Atom], vertex: int | None = None) -> Iterator[_Member]:
    """Yields equations with fused ones and calls of functions replaced by the equations inside, on new variables.

    So equal computations are found wherever passes have put them.

    Args:
        eqns: equations of a body.
        table: atom that replaces each variable of the body; results are added.
        vertex: identity of the fused equation that all are in, and so one vertex; None if each is a vertex.
    """
    for eqn in eqns:
        invars = [substituted(atom, table) for atom in eqn.invars]
        name = eqn.primitive.name
        if name in ("fused", "function_call"):
            callee = closed(eqn.params["jaxpr"]).jaxpr
            inner = dict[Var, Atom](zip(callee.invars, invars, strict=True))
            yield from _expanded(callee.eqns, inner, vertex=id(eqn) if name == "fused" else None)
            table.update(zip(eqn.outvars, [substituted(atom, inner) for atom in callee.outvars], strict=True))
        else:
            outvars = [Var(var.aval) for var in eqn.outvars]  # a function is called several times
            table.update(zip(eqn.outvars, outvars, strict=True))
            yield _Member(eqn.replace(invars=invars, outvars=outvars), id(eqn) if vertex is None else vertex)
