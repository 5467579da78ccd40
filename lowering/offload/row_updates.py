"""Tables in streaming memory that are updated by rows, one update after the other, and read in between.

    u = scatter-add t …; s = gather t n; v = scatter u …      s = gather t n; u = scatter-add t …; v = scatter u …

Input: equations, and the inputs in streaming memory whose place results take. Output: the equations, in such an order
that what reads a table comes before its update; and the results of updates that stay in streaming memory, all in the
buffer of the table.
Limits: a table moves as a whole if it is a result beside the new one; if it is read otherwise than by rows between
updates or behind them; and if what reads it cannot come before its update: it needs the new one or another update, has
effects, or belongs to another phase.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ipujax.lowering.jax_compat import Atom, JaxprEqn, Var, without_axes
from ipujax.lowering.jaxpr import PARTS, VIEWS, variables_read
from ipujax.lowering.offload.row_access import takes_rows, writes_rows

_Steps = Sequence[tuple[JaxprEqn, int]]


def updates_in_place(
    steps: _Steps, outvars: Sequence[Atom], homes: Sequence[Var | None]
) -> tuple[_Steps, frozenset[Var]]:
    """The equations with reads of tables before updates of them, and the tables that updates leave in place.

    Args:
        steps: equations in an order in which they can run, each with its step.
        outvars: the results.
        homes: for each result the input in streaming memory whose place it takes, or None.
    """
    makers = {var: eqn for eqn, _ in steps for var in eqn.outvars}
    found = frozenset[Var]()
    for value, home in zip(outvars, homes, strict=True):
        updates = [] if home is None else _updates(value, home, makers)
        if updates and _is_apart(updates, steps, outvars, makers):
            ordered = _reads_first(updates, steps, makers, found)
            if ordered is not None:
                steps, found = ordered, found.union(*(eqn.outvars for eqn in updates))
    return steps, found


def is_view(eqn: JaxprEqn) -> bool:
    """Whether an equation shows a value, or parts of it, and nothing else."""
    return eqn.primitive.name in VIEWS | PARTS and len(variables_read(eqn)) <= 1


def viewed_value(var: Var, makers: Mapping[Var, JaxprEqn]) -> Var:
    """The variable that a view of a view of … shows."""
    while var in makers and is_view(makers[var]) and (shown := variables_read(makers[var])):
        var = shown[0]
    return var


def _updates(value: Atom, home: Var, makers: Mapping[Var, JaxprEqn]) -> list[JaxprEqn]:
    """The updates by rows that lead from an input to a result, in order; none if others do."""
    found = list[JaxprEqn]()
    while value is not home:
        eqn = makers.get(value) if isinstance(value, Var) else None
        if eqn is None or not writes_rows(eqn):
            return []
        found.insert(0, eqn)
        value = eqn.invars[0]
    return found


def _is_apart(
    updates: Sequence[JaxprEqn], steps: _Steps, outvars: Sequence[Atom], makers: Mapping[Var, JaxprEqn]
) -> bool:
    """Whether one result is the table, the last one, and what updates make is read by rows alone."""
    made = {eqn.outvars[0] for eqn in updates}
    table = {*made, updates[0].invars[0]}
    if sum(viewed_value(x, makers) in table for x in outvars if isinstance(x, Var)) != 1:
        return False
    users = (eqn for eqn, _ in steps if not made.isdisjoint(variables_read(eqn)))
    return all(_is_of_rows(eqn, made) and (not writes_rows(eqn) or eqn in updates) for eqn in users)


def _is_of_rows(eqn: JaxprEqn, tables: set[Var]) -> bool:
    """Whether an equation reads tables by rows, and as its first operand alone."""
    return takes_rows(eqn) and tables.isdisjoint(x for x in eqn.invars[1:] if isinstance(x, Var))


def _reads_first(
    updates: Iterable[JaxprEqn], steps: _Steps, makers: Mapping[Var, JaxprEqn], in_place: frozenset[Var]
) -> _Steps | None:
    """The equations with all that reads a table before its update; None if that cannot be."""
    for update in updates:
        start, step = next((n, step) for n, (eqn, step) in enumerate(steps) if eqn is update)
        needed, early, late = set[Var](), list[tuple[JaxprEqn, int]](), list[tuple[JaxprEqn, int]]()
        for eqn, own in reversed(steps[start + 1 :]):
            reads = not is_view(eqn) and any(viewed_value(x, makers) is update.invars[0] for x in variables_read(eqn))
            if not reads and needed.isdisjoint(eqn.outvars):
                late.append((eqn, own))
                continue
            if own != step or without_axes(eqn.effects) or not in_place.isdisjoint(eqn.outvars):
                return None
            early.append((eqn, own))
            needed.update(variables_read(eqn))
        if not needed.isdisjoint(update.outvars):
            return None
        steps = [*steps[:start], *early[::-1], (update, step), *late[::-1]]
    return steps
