"""Tables in streaming memory that are updated by rows, one update after the other, with reads in between.

    u = scatter-add t …; s = gather t n; v = scatter u …      s = gather t n; u = scatter-add t …; v = scatter u …

Input: equations, and the inputs in streaming memory that results replace. Output: the equations, reordered so that
reads of a table come before its update; and the results of updates that stay in streaming memory, all in the buffer of
the table.
Limits: a table moves entirely if it is a result besides the new one; if it is read other than by rows between updates
or after them; and if a read of it cannot come before its update: because the read needs the new table or another
update, has effects, or belongs to another phase.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import NamedTuple

from ipujax.lowering.jax_compat import Atom, JaxprEqn, Var, shape_of, without_axes
from ipujax.lowering.jaxpr import variables_read
from ipujax.lowering.offload.row_access import accesses_rows, writes_rows
from ipujax.lowering.primitives import record_of


class StagedEquation(NamedTuple):
    """An equation and its step, see `phase_steps`."""

    eqn: JaxprEqn
    step: int


def updates_in_place(
    steps: Sequence[StagedEquation], outvars: Sequence[Atom], destinations: Sequence[Var | None]
) -> tuple[Sequence[StagedEquation], frozenset[Var]]:
    """The equations with reads of tables before their updates, and the results of updates in place.

    Args:
        steps: the equations in order.
        outvars: results.
        destinations: for each result the input in streaming memory whose buffer it takes, or None.
    """
    definitions = {var: eqn for eqn, _ in steps for var in eqn.outvars}
    in_place = frozenset[Var]()
    for value, destination in zip(outvars, destinations, strict=True):
        updates = [] if destination is None else _updates_of_table(value, destination, definitions)
        if updates and _is_read_by_rows_alone(updates, steps, outvars, definitions):
            ordered = _with_reads_first(updates, steps, definitions, in_place)
            if ordered is not None:
                steps = ordered
                in_place = in_place.union(*(eqn.outvars for eqn in updates))
    return steps, in_place


def is_view(eqn: JaxprEqn) -> bool:
    """True if an equation only views a value, or parts of it."""
    return record_of(eqn).cost in ("view", "part") and len(variables_read(eqn)) <= 1


def is_reshape(eqn: JaxprEqn) -> bool:
    """True if an equation only changes the shape of a value, not the order of its elements."""
    if len(eqn.invars) != 1 or not record_of(eqn).is_in_order:
        return False
    return prod(shape_of(eqn.invars[0])) == prod(shape_of(eqn.outvars[0]))  # else a broadcast repeats them


def viewed_value(var: Var, definitions: Mapping[Var, JaxprEqn]) -> Var:
    """The variable that a view, or a view of a view, shows."""
    while var in definitions and is_view(definitions[var]) and (operands := variables_read(definitions[var])):
        var = operands[0]
    return var


def _updates_of_table(value: Atom, destination: Var, definitions: Mapping[Var, JaxprEqn]) -> list[JaxprEqn]:
    """The updates by rows from an input to a result, in order; empty if there are other equations."""
    updates = list[JaxprEqn]()
    while value is not destination:
        eqn = definitions.get(value) if isinstance(value, Var) else None
        if eqn is None or not writes_rows(eqn):
            return []
        updates.insert(0, eqn)
        value = eqn.invars[0]
    return updates


def _is_read_by_rows_alone(
    updates: Sequence[JaxprEqn],
    steps: Sequence[StagedEquation],
    outvars: Sequence[Atom],
    definitions: Mapping[Var, JaxprEqn],
) -> bool:
    """True if of a table and its updates the last alone is a result, and results of updates are read by rows only.

    Then no equation needs a table that a later update has overwritten in the one buffer, see `_with_reads_first`.
    """
    new_tables = {eqn.outvars[0] for eqn in updates}
    tables = {*new_tables, updates[0].invars[0]}
    if sum(viewed_value(x, definitions) in tables for x in outvars if isinstance(x, Var)) != 1:
        return False
    users = (eqn for eqn, _ in steps if not new_tables.isdisjoint(variables_read(eqn)))
    return all(_is_of_rows(eqn, new_tables) and (not writes_rows(eqn) or eqn in updates) for eqn in users)


def _is_of_rows(eqn: JaxprEqn, tables: set[Var]) -> bool:
    """True if an equation reads tables by rows, and as its first operand only."""
    return accesses_rows(eqn) and tables.isdisjoint(x for x in eqn.invars[1:] if isinstance(x, Var))


def _with_reads_first(
    updates: Iterable[JaxprEqn],
    steps: Sequence[StagedEquation],
    definitions: Mapping[Var, JaxprEqn],
    in_place: frozenset[Var],
) -> Sequence[StagedEquation] | None:
    """The equations with all reads of a table, and all that these need, before its update; None if impossible.

    Args:
        updates: updates of one table, in order.
        steps: all equations, in order.
        definitions: the equation that defines each value.
        in_place: results of updates of other tables, which must not move: their reads are in order already.
    """
    # Afterwards all later readers see the new table, which overwrites the old one in its buffer.
    for update in updates:
        start = next(n for n, staged in enumerate(steps) if staged.eqn is update)
        needed: set[Var] = set()  # operands of the equations that come before the update
        # In reverse order, so that an equation is seen after all that need its results.
        early: list[StagedEquation] = []
        late: list[StagedEquation] = []
        for staged in reversed(steps[start + 1 :]):
            eqn = staged.eqn
            values_read = (viewed_value(x, definitions) for x in variables_read(eqn))
            reads_table = not is_view(eqn) and any(value is update.invars[0] for value in values_read)
            if not reads_table and needed.isdisjoint(eqn.outvars):
                late.append(staged)
                continue
            if staged.step != steps[start].step or without_axes(eqn.effects) or not in_place.isdisjoint(eqn.outvars):
                return None
            early.append(staged)
            needed.update(variables_read(eqn))
        if not needed.isdisjoint(update.outvars):  # a read of the old table needs the new one
            return None
        steps = [*steps[:start], *early[::-1], steps[start], *late[::-1]]
    return steps
