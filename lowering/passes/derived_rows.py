"""Rows that a loop computes from other rows that it reads: not stored by the loop that has computed them first.

    a, b = scan: …, rows r and 1 - r             a = scan: …, rows r
    scan over rows r of a, s of b: … s …         scan over rows r of a: s = 1 - r; … s …

For the gradient of a loop JAX saves every factor of its derivatives, as y and 1 - y of a logistic function. A vertex of
the reading loop that computes one in passing spares a store and a load in each iteration, and the stack.
Input: the equations of a body. Output: equal ones; `dce` drops the stacks that nothing reads.
Limits: rows that are cheap to compute, and that nothing but elementwise equations read; stacks that are no views.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ipujax.lowering.jax_compat import Atom, ClosedJaxpr, JaxprEqn, Var
from ipujax.lowering.jaxpr import phase_of, scan_body, substituted, variables_read, with_scan_body
from ipujax.lowering.passes.repeat_cheap import MOST_EQNS
from ipujax.lowering.primitives import record_of


class _Stacked(NamedTuple):
    """A value of which a loop stores the rows of all iterations.

    Args:
        loop: number of the equation.
        value: the value in the loop's body.
    """

    loop: int
    value: Var


def with_derived_rows(eqns: Sequence[JaxprEqn]) -> list[JaxprEqn]:
    """Return equations of which no loop reads rows that it may compute from its other rows."""
    stacked: dict[Var, _Stacked] = {}
    rewritten: list[JaxprEqn] = []
    for number, eqn in enumerate(eqns):
        if eqn.primitive.name == "scan":
            for loop in {stacked[var].loop for var in variables_read(eqn) if var in stacked}:
                eqn = _deriving(eqn, eqns[loop], {var: x.value for var, x in stacked.items() if x.loop == loop})
            inside = scan_body(eqn.params)
            results = inside.jaxpr.jaxpr.outvars[inside.results.stacks]
            pairs = zip(eqn.outvars[inside.results.carries.stop :], results, strict=True)
            stacked.update((var, _Stacked(number, value)) for var, value in pairs if isinstance(value, Var))
        rewritten.append(eqn)
    return rewritten


def _deriving(scan: JaxprEqn, source: JaxprEqn, stored: Mapping[Var, Var]) -> JaxprEqn:
    """Return a loop that computes those rows of an earlier loop's stacks that follow from its other rows.

    Args:
        scan: the loop.
        source: the earlier loop.
        stored: for each of its stacks the value of its body.
    """
    inside = scan_body(scan.params)
    body = inside.jaxpr.jaxpr
    operands = zip(scan.invars[inside.operands.stacks], body.invars[inside.inputs.stacks], strict=True)
    rows: dict[Var, Var] = {stored[x]: row for x, row in operands if isinstance(x, Var) and x in stored}
    readers = _readers(body.eqns)
    makers = {var: eqn for eqn in scan_body(source.params).jaxpr.jaxpr.eqns for var in eqn.outvars}
    eqns: list[JaxprEqn] = []
    derived: set[Var] = set()
    for value in filter(rows.__contains__, makers):  # in order: a row that is derived may be an operand of later ones
        row = rows[value]
        reading = readers.get(row, [])
        if not reading or not all(map(_computes_in_passing, reading)):
            continue
        making = _equations_from_rows(value, makers, rows)
        if making and all(phase_of(eqn) == phase_of(reading[0]) for eqn in making):
            eqns += _copied(making, rows, reading[0])
            derived.add(row)
    if not derived:
        return scan
    numbers = [n for n, var in enumerate(body.invars) if var not in derived]
    names = body.debug_info.with_unknown_names()
    invars = [body.invars[n] for n in numbers]
    shorter = body.replace(invars=invars, eqns=[*eqns, *body.eqns], debug_info=names)
    params = with_scan_body(scan.params, ClosedJaxpr(shorter, inside.jaxpr.consts), 0)
    return scan.replace(invars=[scan.invars[n] for n in numbers], params=params)


def _readers(eqns: Sequence[JaxprEqn]) -> dict[Var, list[JaxprEqn]]:
    """Return the equations that read each variable."""
    readers: dict[Var, list[JaxprEqn]] = {}
    for eqn in eqns:
        for var in dict.fromkeys(variables_read(eqn)):
            readers.setdefault(var, []).append(eqn)
    return readers


def _computes_in_passing(reader: JaxprEqn) -> bool:
    """Return whether an equation may compute what it reads in its own vertex.

    XLA may round a value otherwise where it is computed again, so it is compared with none.
    """
    record = record_of(reader)
    return record.cost == "elementwise" and not record.compares


def _equations_from_rows(value: Var, makers: Mapping[Var, JaxprEqn], rows: Mapping[Var, Var]) -> list[JaxprEqn]:
    """Return the equations that compute a value from others that are rows, in order; none if it takes too many.

    Args:
        value: a value of a loop's body.
        makers: equation of each value of the body, in order.
        rows: values that the reading loop has as rows.
    """
    wanted = [value]
    for var in wanted:  # which grows
        eqn = makers.get(var)
        if eqn is None or len(wanted) > MOST_EQNS or not _is_derivable(eqn):
            return []
        wanted += [operand for operand in variables_read(eqn) if operand not in rows and operand not in wanted]
    return [eqn for var, eqn in makers.items() if var in wanted]


def _copied(eqns: Sequence[JaxprEqn], rows: Mapping[Var, Var], reader: JaxprEqn) -> list[JaxprEqn]:
    """Return equations of one loop's body for another's, whose rows they read and define, as a part of `reader`."""
    here: dict[Var, Atom] = dict(rows)
    copies: list[JaxprEqn] = []
    for eqn in eqns:
        invars = [substituted(atom, here) for atom in eqn.invars]
        outvars = [rows.get(var) or Var(var.aval) for var in eqn.outvars]
        here.update(zip(eqn.outvars, outvars, strict=True))
        copies.append(eqn.replace(invars=invars, outvars=outvars, source_info=reader.source_info))
    return copies


def _is_derivable(eqn: JaxprEqn) -> bool:
    """Return whether an equation is cheap, computes one value of others, and compares none."""
    record = record_of(eqn)
    return record.is_cheap and not record.compares and len(eqn.outvars) == 1 and bool(variables_read(eqn))
