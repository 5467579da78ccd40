"""Values of a jaxpr that move between tiles and streaming memory, planned before a load or store is emitted.

Input: equations in order, each with its step, see `phase_steps`, the inputs in streaming memory and where results go.
Output: the values that are spilled, the last equation that reads each value, and the results that are stored after each
equation.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from ipujax.lowering.jax_compat import Atom, JaxprEqn, Var, shape_of
from ipujax.lowering.jaxpr import variables, variables_read
from ipujax.lowering.offload.primitives import host_put_p
from ipujax.lowering.offload.row_updates import StagedEquation, is_view, viewed_value

BEFORE_ALL = -1  # in place of the number of an equation
_MIN_ELEMENTS = 2  # of a spilled value, as of arguments that are offloaded


@dataclass(frozen=True, slots=True)
class StagedValues:
    """Equations in their steps, with what is in streaming memory before and after them.

    Args:
        steps: the equations in order, each with its step.
        outvars: results.
        remote: inputs in streaming memory, with whether their columns are in channel groups on tiles.
        hosted: those of them that the user has put on the host.
        destinations: for each result the input in streaming memory whose buffer it takes, or None.
        is_put: for each result whether the user has put it on the host.
        is_sent: for each other result whether it goes off chip as soon as it is computed.
        in_place: results of updates by rows that stay in streaming memory, see `row_updates`.
    """

    steps: Sequence[StagedEquation]
    outvars: Sequence[Atom]
    remote: Mapping[Var, bool]
    hosted: Collection[Var]
    destinations: Sequence[Var | None]
    is_put: Sequence[bool]
    is_sent: Sequence[bool]
    in_place: frozenset[Var]

    @property
    def eqns(self) -> list[JaxprEqn]:
        """The equations."""
        return [eqn for eqn, _ in self.steps]


@dataclass(frozen=True, slots=True)
class MovePlan:
    """Moves that follow from where values are defined and read.

    Args:
        values: equations and values.
        number_of: number of the equation that defines each value.
        defining: the equation that defines each value.
        last_read: number of the last equation that reads each value or a view of it; results are read after all.
        spilled: values that are read later than in the next step: stored where they are computed, loaded there.
        due: numbers of the results to store after each equation, by its number; those to store before the first one
            under `BEFORE_ALL`, those after the last one under the number of equations.
    """

    values: StagedValues
    number_of: Mapping[Var, int]
    defining: Mapping[Var, JaxprEqn]
    last_read: Mapping[Var, int]
    spilled: Collection[Var]
    due: Mapping[int, Sequence[int]]


def plan_moves(values: StagedValues) -> MovePlan:
    """Plans loads and stores of streaming memory: which values are spilled there, and when results are stored."""
    number_of = {var: n for n, eqn in enumerate(values.eqns) for var in eqn.outvars}
    defining = {var: eqn for eqn in values.eqns for var in eqn.outvars}
    last_read = _last_reads(values)
    spilled = _spilled_values(values, number_of, defining)
    due = _due_results(values, number_of, defining, last_read)
    return MovePlan(values, number_of, defining, last_read, spilled, due)


def _last_reads(values: StagedValues) -> dict[Var, int]:
    """The last equation that reads each value or a view of it: after it, its buffer is free for another value.

    Results count as read behind all equations, but for an input that is returned in its own buffer.
    """
    # A put value may still be in the buffer it was fetched from, so both have the same last read.
    last_read = {var: n for n, eqn in enumerate(values.eqns) for var in variables_read(eqn)}
    pairs = zip(values.outvars, values.destinations, strict=True)
    changed_results = [x for x, destination in pairs if x is not destination]
    last_read.update(dict.fromkeys(variables(changed_results), len(values.steps)))
    for eqn in reversed(values.eqns):
        if is_view(eqn) or eqn.primitive is host_put_p:
            number = max((last_read.get(var, BEFORE_ALL) for var in eqn.outvars), default=BEFORE_ALL)
            last_read.update((var, max(last_read.get(var, BEFORE_ALL), number)) for var in variables_read(eqn))
    return last_read


def _spilled_values(values: StagedValues, number_of: Mapping[Var, int], defining: Mapping[Var, JaxprEqn]) -> set[Var]:
    """Values that are read in a later step than the next one, and would take memory of tiles until then.

    Args:
        values: the equations, with the step of each.
        number_of: number of the equation that defines each value.
        defining: the equation that defines each value.
    """
    spilled = set[Var]()
    for eqn, step in values.steps:
        if not is_view(eqn):
            for var in variables_read(eqn):
                value = viewed_value(var, defining)
                number = number_of.get(value)
                if number is not None and step > values.steps[number].step + 1 and _is_large(value):
                    spilled.add(value)
    return spilled - values.in_place


def _due_results(
    values: StagedValues,
    number_of: Mapping[Var, int],
    defining: Mapping[Var, JaxprEqn],
    last_read: Mapping[Var, int],
) -> dict[int, list[int]]:
    """Results to store after each equation, as `MovePlan.due`.

        takes the buffer of an input        once it is defined, and that input is not read again; after all equations if
                                            it is an input in streaming memory itself, whose buffer others may need
        put on the host by the user         once it is defined, in a new buffer; an input after all equations
        sent off chip                       once it is defined

    An input that is returned in its own buffer, and a table that is updated there, need no store.
    """
    end = len(values.steps)
    due: dict[int, list[int]] = {}
    for number, (value, destination) in enumerate(zip(values.outvars, values.destinations, strict=True)):
        definition = number_of.get(value, BEFORE_ALL) if isinstance(value, Var) else BEFORE_ALL
        if destination is not None and value is not destination and value not in values.in_place:
            is_remote_input = isinstance(value, Var) and viewed_value(value, defining) in values.remote
            free = max(definition, last_read.get(destination, BEFORE_ALL))
            due.setdefault(end if is_remote_input else free, []).append(number)
        elif destination is None and values.is_put[number]:
            due.setdefault(end if definition == BEFORE_ALL else definition, []).append(number)
        elif destination is None and values.is_sent[number] and definition != BEFORE_ALL and _is_large(value):
            due.setdefault(definition, []).append(number)
    return due


def _is_large(atom: Atom) -> bool:
    return prod(shape_of(atom)) >= _MIN_ELEMENTS
