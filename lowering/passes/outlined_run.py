"""Equal runs of equations as a function and its calls.

Input: a jaxpr, and where equal runs of its equations are. Output: the function's jaxpr, and for each run the equations
that take its place.
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
from ipujax.lowering.passes.dataflow import is_view
from ipujax.lowering.passes.function_call import fixed_operands, function_call_p
from ipujax.lowering.passes.repeats import Repeat
from ipujax.lowering.source_info import LayersOfRun, at_source_of, common_function, in_common

_Slot = tuple[int, int]  # a variable of a run, by where it is mentioned first: equation, and place among its variables


class Run:
    """Equal runs.

    Args:
        jaxpr: what has them.
        repeat: where they are.
        last_uses: the last equation that reads each variable of the jaxpr; for its results one behind the last.
    """

    def __init__(self, jaxpr: Jaxpr, repeat: Repeat, last_uses: Mapping[Var, int]) -> None:
        self._jaxpr, self._last_uses = jaxpr, last_uses
        self._ends = [start + repeat.length for start in repeat.starts]
        self._runs = [jaxpr.eqns[start:end] for start, end in zip(repeat.starts, self._ends, strict=True)]
        self._slots = _slots(self._runs[0])
        self._values = [self._values_of(run) for run in self._runs]

    def calls(self) -> list[list[JaxprEqn]]:
        """For each run the equations in its place: a call, and views of what it leaves."""
        params = {"jaxpr": self._function, "name": self._name, "fixed": fixed_operands(self._operands)}
        return [self._call(number, params) for number in range(len(self._runs))]

    def _call(self, number: int, params: Mapping[str, object]) -> list[JaxprEqn]:
        run, values, (needed, views) = self._runs[number], self._values[number], self._left[number]
        outvars = [
            values[slot] if slot in needed else DropVar(var.aval)
            for slot, var in zip(self._results, self._function.jaxpr.outvars, strict=True)
        ]
        call = new_jaxpr_eqn(list(self._operands[number]), outvars, function_call_p, dict(params), frozenset())
        layers = self._in_common[1][number]
        placed = at_source_of(call, run[0], run, "", layers)
        if _place(run[0]) != _place(placed):  # name stacks do not begin with it
            placed = at_source_of(call, run[0], run[:1], "", layers)
        return [placed, *(run[n] for n in sorted(views))]

    # --- what is read and left ---

    def _values_of(self, run: Sequence[JaxprEqn]) -> dict[_Slot, Var]:
        """The variables of a run."""
        values: dict[_Slot, Var] = {}
        for eqn, slots in zip(run, self._slots, strict=True):
            for slot, atom in zip(slots, (*eqn.invars, *eqn.outvars), strict=True):
                if slot is not None:
                    assert not isinstance(atom, Literal) and values.setdefault(slot, atom) is atom, "runs differ"
        return values

    @cached_property
    def _left(self) -> list[tuple[set[_Slot], set[int]]]:
        """For each run what it makes that is needed behind it, and the views that are repeated there."""
        return [self._left_by(values, end) for values, end in zip(self._values, self._ends, strict=True)]

    def _left_by(self, values: Mapping[_Slot, Var], end: int) -> tuple[set[_Slot], set[int]]:
        needed, views = set[_Slot](), set[int]()

        def need(slot: _Slot) -> None:
            eqn, slots = self._runs[0][slot[0]], self._slots[slot[0]]
            if slot[1] < len(eqn.invars):  # read from outside
                return
            if is_view(eqn):
                views.add(slot[0])
                for operand in slots[: len(eqn.invars)]:
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
        """What is needed behind any run."""
        return sorted(set().union(*(needed for needed, _ in self._left)))

    # --- the function ---

    @cached_property
    def _in_common(self) -> tuple[list[JaxprEqn], list[LayersOfRun]]:
        return in_common(self._runs, self._name)

    @cached_property
    def _whole(self) -> tuple[ClosedJaxpr, list[_Slot]]:
        """The function, and what it reads."""
        own: dict[_Slot | None, Var] = {}
        eqns = []
        for eqn, slots in zip(self._in_common[0], self._slots, strict=True):
            for slot, atom in zip(slots, (*eqn.invars, *eqn.outvars), strict=True):
                if slot is not None and slot not in own:
                    own[slot] = Var(atom.aval)
            count = len(eqn.invars)
            operands = [
                atom if slot is None else own[slot] for slot, atom in zip(slots[:count], eqn.invars, strict=True)
            ]
            results = [own[slot] for slot in slots[count:]]
            eqns.append(eqn.replace(invars=operands, outvars=results))
        read = [slot for slot in own if slot is not None and slot[1] < len(self._runs[0][slot[0]].invars)]
        results = [own[slot] for slot in self._results]
        live = eliminate_dead_code(part_of(self._jaxpr, [own[slot] for slot in read], results, eqns).jaxpr)
        used = {atom for eqn in live.eqns for atom in eqn.invars if isinstance(atom, Var)}
        read = [slot for slot in read if own[slot] in used]
        return ClosedJaxpr(live.replace(invars=[own[slot] for slot in read]), ()), read

    @cached_property
    def _name(self) -> str:
        """The function of the user's that its equations come from."""
        return common_function(self._runs[0]) or "run"

    @property
    def _function(self) -> ClosedJaxpr:
        return self._whole[0]

    @cached_property
    def _operands(self) -> list[tuple[Atom, ...]]:
        """What each call reads."""
        return [tuple(values[slot] for slot in self._whole[1]) for values in self._values]


def _slots(run: Sequence[JaxprEqn]) -> list[list[_Slot | None]]:
    """The slot of each operand and result of each equation, None for literals."""
    known: dict[Atom, _Slot] = {}
    return [
        [
            None if isinstance(atom, Literal) else known.setdefault(atom, (n, place))
            for place, atom in enumerate((*eqn.invars, *eqn.outvars))
        ]
        for n, eqn in enumerate(run)
    ]


def _place(eqn: JaxprEqn) -> tuple[int | None, bool, int | None]:
    """The part of the program that an equation belongs to."""
    name = stage_name(eqn)
    return name.stage, name.is_backward, phase_of(eqn)
