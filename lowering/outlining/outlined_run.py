"""Equal runs of equations as a function and its calls.

Input: a jaxpr, and the positions of equal runs of its equations. Output: the function's jaxpr, and for each run
the equations that replace it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

from ipujax.lowering.jax_compat import (
    Atom,
    ClosedJaxpr,
    DropVar,
    Jaxpr,
    JaxprEqn,
    Literal,
    Var,
    eliminate_dead_code,
    new_jaxpr_eqn,
    part_of,
)
from ipujax.lowering.jaxpr import phase_of, stage_name
from ipujax.lowering.layer_notes import LayersOfRun, at_source_of, in_common
from ipujax.lowering.outlining.dataflow import is_view
from ipujax.lowering.outlining.function_call import fixed_operands, function_call_p
from ipujax.lowering.outlining.repeats import Repeat
from ipujax.lowering.source_info import common_function

_Slot = tuple[int, int]  # a variable of a run by its first mention: equation, position among operands and results


class Run:
    """Equal runs of a jaxpr; `last_uses` as `dataflow.last_uses` returns it."""

    def __init__(self, jaxpr: Jaxpr, repeat: Repeat, last_uses: Mapping[Var, int]) -> None:
        self._jaxpr = jaxpr
        self._last_uses = last_uses
        self._ends = [start + repeat.length for start in repeat.starts]
        self._runs = [jaxpr.eqns[start:end] for start, end in zip(repeat.starts, self._ends, strict=True)]
        self._slots = _slots(self._runs[0])
        self._values = [self._values_of(run) for run in self._runs]

    def calls(self) -> list[list[JaxprEqn]]:
        """Replacement of each run: a call, and views of the results that are read behind it."""
        params = {"jaxpr": self._function, "name": self._name, "fixed": fixed_operands(self._operands)}
        return [self._call(number, params) for number in range(len(self._runs))]

    def _call(self, number: int, params: Mapping[str, object]) -> list[JaxprEqn]:
        """Call in the place of a run, with its line and layer, and the views that are repeated behind it."""
        run = self._runs[number]
        values = self._values[number]
        needed, views = self._live_out[number]
        outvars = [
            values[slot] if slot in needed else DropVar(var.aval)
            for slot, var in zip(self._results, self._function.jaxpr.outvars, strict=True)
        ]
        call = new_jaxpr_eqn(list(self._operands[number]), outvars, function_call_p, dict(params), frozenset())
        layers = self._common_equations[1][number]
        call_at_line = at_source_of(call, run[0], run, "", layers)
        if _program_part(run[0]) != _program_part(call_at_line):
            # The common name stack has lost the stage or phase: keep the stack of the first equation.
            call_at_line = at_source_of(call, run[0], run[:1], "", layers)
        return [call_at_line, *(run[n] for n in sorted(views))]

    def _values_of(self, run: Sequence[JaxprEqn]) -> dict[_Slot, Var]:
        values: dict[_Slot, Var] = {}
        for eqn, slots in zip(run, self._slots, strict=True):
            for slot, atom in zip(slots, (*eqn.invars, *eqn.outvars), strict=True):
                if slot is not None:
                    assert not isinstance(atom, Literal) and values.setdefault(slot, atom) is atom, "runs differ"
        return values

    @cached_property
    def _live_out(self) -> list[tuple[set[_Slot], set[int]]]:
        """Results of each run that are read behind it, and the views that are repeated there."""
        return [self._live_out_of(values, end) for values, end in zip(self._values, self._ends, strict=True)]

    def _live_out_of(self, values: Mapping[_Slot, Var], end: int) -> tuple[set[_Slot], set[int]]:
        """Values of a run that equations from `end` on read: results the call returns, and views repeated after it."""
        needed: set[_Slot] = set()
        views: set[int] = set()

        def need(slot: _Slot) -> None:
            """Notes what makes a value known behind the run."""
            number, position = slot
            eqn = self._runs[0][number]
            if position < len(eqn.invars):  # an operand of the run
                return
            # A view is repeated behind the run, so the call returns only its operand.
            if is_view(eqn):
                views.add(number)
                for operand in self._slots[number][: len(eqn.invars)]:
                    if operand is not None:
                        need(operand)
            else:
                needed.add(slot)

        for slot, var in values.items():
            if self._last_uses.get(var, -1) >= end:
                need(slot)
        return needed, views

    @cached_property
    def _results(self) -> list[_Slot]:
        """Slots that are read behind any run."""
        return sorted(set().union(*(needed for needed, _ in self._live_out)))

    @cached_property
    def _common_equations(self) -> tuple[list[JaxprEqn], list[LayersOfRun]]:
        """Equations of the function, and the layers of each run."""
        return in_common(self._runs, self._name)

    @cached_property
    def _function_and_operands(self) -> tuple[ClosedJaxpr, list[_Slot]]:
        """The function, and the slots of its operands."""
        variables: dict[_Slot | None, Var] = {}
        eqns = []
        for eqn, slots in zip(self._common_equations[0], self._slots, strict=True):
            for slot, atom in zip(slots, (*eqn.invars, *eqn.outvars), strict=True):
                if slot is not None and slot not in variables:
                    variables[slot] = Var(atom.aval)
            count = len(eqn.invars)
            operands = [
                atom if slot is None else variables[slot] for slot, atom in zip(slots[:count], eqn.invars, strict=True)
            ]
            results = [variables[slot] for slot in slots[count:]]
            eqns.append(eqn.replace(invars=operands, outvars=results))
        operand_slots = [
            slot for slot in variables if slot is not None and slot[1] < len(self._runs[0][slot[0]].invars)
        ]
        results = [variables[slot] for slot in self._results]
        # No run may need all results of its equations.
        live = eliminate_dead_code(
            part_of(self._jaxpr, [variables[slot] for slot in operand_slots], results, eqns).jaxpr
        )
        used = {atom for eqn in live.eqns for atom in eqn.invars if isinstance(atom, Var)}
        operand_slots = [slot for slot in operand_slots if variables[slot] in used]
        return ClosedJaxpr(live.replace(invars=[variables[slot] for slot in operand_slots]), ()), operand_slots

    @cached_property
    def _name(self) -> str:
        """Name of the user's function that the equations come from."""
        return common_function(self._runs[0]) or "run"

    @property
    def _function(self) -> ClosedJaxpr:
        return self._function_and_operands[0]

    @cached_property
    def _operands(self) -> list[tuple[Atom, ...]]:
        return [tuple(values[slot] for slot in self._function_and_operands[1]) for values in self._values]


def _slots(run: Sequence[JaxprEqn]) -> list[list[_Slot | None]]:
    """Slot of each operand and result of each equation, None for literals."""
    slots: dict[Atom, _Slot] = {}
    return [
        [
            None if isinstance(atom, Literal) else slots.setdefault(atom, (n, position))
            for position, atom in enumerate((*eqn.invars, *eqn.outvars))
        ]
        for n, eqn in enumerate(run)
    ]


def _program_part(eqn: JaxprEqn) -> tuple[int | None, bool, int | None]:
    """Part of the program that an equation belongs to."""
    name = stage_name(eqn)
    return name.stage, name.is_backward, phase_of(eqn)
