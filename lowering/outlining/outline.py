"""Pass `outline`: runs of equations that a jaxpr repeats become functions, lowered once.

    h1 = tanh(x @ w1); y1 = x + tanh(h1 @ w1)        y1 = function_call[layer](w1, x)
    h2 = tanh(y1 @ w2); y2 = y1 + tanh(h2 @ w2)      y2 = function_call[layer](w2, y1)

Typical runs are layers written by Python loops or calls, their gradients, and recomputation of a checkpoint. Each
jaxpr is searched by itself, see `repeats`; a run becomes a function where that saves cycles, see `function_call`.
No run has effects or collectives, or spans two stages or a forward and a backward part. Equations without a stage,
as an optimiser's, are placed first and then outlined by `outline_placed`. The equations of a function have the
common beginning and end of its callers' name stacks, and the source lines of the first run.

Input of a run: a jaxpr, and the positions of equal runs of its equations. Output: the function's jaxpr, and for each
run the equations that replace it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from ipujax.lowering.gcl import is_collective
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
from ipujax.lowering.jaxpr import (
    EquationNumbers,
    Rewrite,
    equations_inside,
    has_stages,
    once,
    phase_of,
    stage_name,
    stages_inside,
    with_equations,
    with_inner,
)
from ipujax.lowering.layer_notes import LayersOfRun, at_source_of, common_equations
from ipujax.lowering.offload import MOVES
from ipujax.lowering.outlining.function_call import CallCosts, fixed_operands, function_call_p
from ipujax.lowering.outlining.repeats import (
    Dataflow,
    Repeat,
    find_repeats,
    is_repeated_behind,
    last_uses,
    widening_bytes,
)
from ipujax.lowering.source_info import common_function


class _Slot(NamedTuple):
    """A variable of a run, by its first mention: equal for the variables that equal runs have in one place."""

    equation: int  # number in the run
    position: int  # among operands and results


class _LiveOut(NamedTuple):
    """What makes the values of a run known behind it.

    Args:
        returned: results that the call returns.
        repeated: views and casts behind the call, by their number in the run.
    """

    returned: set[_Slot]
    repeated: set[int]


class _Function(NamedTuple):
    """Function of equal runs, and the slots of its operands."""

    jaxpr: ClosedJaxpr
    operand_slots: list[_Slot]


class Run:
    """Equal runs of a jaxpr.

    Casts are on the side of a call's boundary on which fewer bytes are copied.

    Args:
        jaxpr: all equations.
        repeat: positions of the runs.
        last_uses: last equation that needs each variable, as `repeats.last_uses` returns it.
        definitions: equation that computes each variable.
    """

    def __init__(
        self, jaxpr: Jaxpr, repeat: Repeat, last_uses: Mapping[Var, int], definitions: Mapping[Var, JaxprEqn]
    ) -> None:
        """Takes equal runs of equations, and the variable of each run in each slot, a place that is alike in all."""
        self._jaxpr = jaxpr
        self._last_uses = last_uses
        self._definitions = definitions
        self._ends = [start + repeat.length for start in repeat.starts]
        self._runs = [jaxpr.eqns[start:end] for start, end in zip(repeat.starts, self._ends, strict=True)]
        self._slots = _slots_of_run(self._runs[0])
        self._values = [self._values_of(run) for run in self._runs]

    def calls(self) -> list[list[JaxprEqn]]:
        """Replacement of each run: casts of its operands, a call, and views and casts of results read behind it."""
        params = {
            "jaxpr": self._function.jaxpr,
            "name": self._function_name,
            "fixed": fixed_operands(self._operands_of_calls),
        }
        return [self._call_in_place_of(number, params) for number in range(len(self._runs))]

    def _call_in_place_of(self, number: int, params: Mapping[str, object]) -> list[JaxprEqn]:
        """Equations in the place of one run: casts of operands, a call of the function, and views and casts of results.

        Args:
            number: number of the run, among equal ones.
            params: parameters of the call.
        """
        run = self._runs[number]
        values = self._values[number]
        live_out = self._live_out[number]
        outvars = [
            values[slot] if slot in live_out.returned else DropVar(var.aval)
            for slot, var in zip(self._result_slots, self._function.jaxpr.jaxpr.outvars, strict=True)
        ]
        call = new_jaxpr_eqn(list(self._operands_of_calls[number]), outvars, function_call_p, dict(params), frozenset())
        _, layers_of_runs = self._common_equations
        # The call has the line of the run's first equation, the name scopes that all of its equations share, and notes
        # of the layers (modules of the user's) that they belong to, by which profiles attribute its cycles.
        layers = layers_of_runs[number]
        call_at_line = at_source_of(call, run[0], run, name="", layers=layers)
        if _program_part(run[0]) != _program_part(call_at_line):
            # The scopes in common have lost the stage or phase, which is a scope too: those of the first equation.
            call_at_line = at_source_of(call, run[0], run[:1], name="", layers=layers)
        before = [run[n] for n in sorted(self._casts_before)]
        return [*before, call_at_line, *(run[n] for n in sorted(live_out.repeated))]

    def _values_of(self, run: Sequence[JaxprEqn]) -> dict[_Slot, Var]:
        """Variable of a run in each slot, the place (equation, position) where each of these runs mentions it first."""
        values: dict[_Slot, Var] = {}
        for eqn, slots in zip(run, self._slots, strict=True):
            for slot, atom in zip(slots, (*eqn.invars, *eqn.outvars), strict=True):
                if slot is not None:
                    assert not isinstance(atom, Literal) and values.setdefault(slot, atom) is atom, "runs differ"
        return values

    @cached_property
    def _live_out(self) -> list[_LiveOut]:
        return [self._live_out_of(values, end) for values, end in zip(self._values, self._ends, strict=True)]

    def _live_out_of(self, values: Mapping[_Slot, Var], end: int) -> _LiveOut:
        """What a call in place of a run must return, and what is computed again behind it, for the equations after it.

        Args:
            values: variables of the run, by slot.
            end: number of the first equation after the run.
        """
        live_out = _LiveOut(set(), set())
        pending = [slot for slot, var in values.items() if self._last_uses.get(var, -1) >= end]
        while pending:
            slot = pending.pop()
            eqn = self._runs[0][slot.equation]
            if self._is_operand(slot):  # known without the call
                continue
            if is_repeated_behind(eqn):  # a view or a widening cast: its operands are needed in its place
                live_out.repeated.add(slot.equation)
                pending += [x for x in self._slots[slot.equation][: len(eqn.invars)] if x is not None]
            else:
                live_out.returned.add(slot)
        return live_out

    @cached_property
    def _casts_before(self) -> set[int]:
        """Numbers in the run of casts to fewer bytes that run before the call, which copies as many bytes less.

        Each is the only reader of an operand; an operand that is one value at every call is not copied at all.
        """
        run = self._runs[0]
        readers: dict[_Slot, set[int]] = {}
        for number, (eqn, slots) in enumerate(zip(run, self._slots, strict=True)):
            for slot in slots[: len(eqn.invars)]:
                if slot is not None:
                    readers.setdefault(slot, set()).add(number)
        casts = set()
        for number, eqn in enumerate(run):
            operand = self._slots[number][0]
            # Its operand is first mentioned here, so it comes from outside of the run.
            if widening_bytes(eqn) < 0 and operand == _Slot(number, position=0) and readers[operand] == {number}:
                is_fixed = len({values[operand] for values in self._values}) == 1
                casts |= set() if is_fixed else {number}
        return casts

    @cached_property
    def _result_slots(self) -> list[_Slot]:
        """Slots that are read behind any run."""
        return sorted(set().union(*(live_out.returned for live_out in self._live_out)))

    @cached_property
    def _common_equations(self) -> tuple[list[JaxprEqn], list[LayersOfRun]]:
        """Equations of the function, and the layers of each run."""
        return common_equations(self._runs, self._function_name)

    def _inner_equations(self, variables: dict[_Slot, Var]) -> list[JaxprEqn]:
        """Equations of the function that equal runs become, on variables of its own, without casts before the call.

        Args:
            variables: variables of the function, by slot (first mention in a run); updated: gets all of them.
        """
        common, _ = self._common_equations
        eqns: list[JaxprEqn] = []
        for number, (eqn, slots) in enumerate(zip(common, self._slots, strict=True)):
            if number in self._casts_before:
                continue
            for slot, atom in zip(slots, (*eqn.invars, *eqn.outvars), strict=True):
                if slot is not None:
                    variables.setdefault(slot, Var(atom.aval))
            count = len(eqn.invars)
            pairs = zip(slots[:count], eqn.invars, strict=True)
            operands = [atom if slot is None else variables[slot] for slot, atom in pairs]
            results = [variables[slot] for slot in slots[count:] if slot is not None]  # literals alone have None
            eqns.append(eqn.replace(invars=operands, outvars=results))
        return eqns

    @cached_property
    def _function(self) -> _Function:
        """The function that is called in place of equal runs.

        It has casts of its operands to more bytes, so that calls copy fewer, then the equations that its results need.
        """
        # A slot is the first mention of a variable in a run; equal runs have equal slots.
        variables: dict[_Slot, Var] = {}
        eqns = self._inner_equations(variables)
        operand_slots = [slot for slot in variables if self._is_operand(slot)]
        results = [variables[slot] for slot in self._result_slots]
        # No run may need all results of its equations.
        live = eliminate_dead_code(
            part_of(self._jaxpr, [variables[slot] for slot in operand_slots], results, eqns).jaxpr
        )
        readers = {atom: eqn for eqn in reversed(live.eqns) for atom in eqn.invars if isinstance(atom, Var)}
        operand_slots = [slot for slot in operand_slots if variables[slot] in readers]
        casts: list[JaxprEqn] = []
        for slot in operand_slots:
            for cast in self._casts_inside(slot)[:1]:  # equal for all runs
                wide = variables[slot]
                variables[slot] = Var(cast.invars[0].aval)
                source = readers[wide].source_info
                casts.append(cast.replace(invars=[variables[slot]], outvars=[wide], source_info=source))
        invars = [variables[slot] for slot in operand_slots]
        return _Function(ClosedJaxpr(live.replace(invars=invars, eqns=[*casts, *live.eqns]), ()), operand_slots)

    def _casts_inside(self, slot: _Slot) -> list[JaxprEqn]:
        """The widening casts that compute an operand of all runs, which the function repeats; empty without."""
        casts = [self._definitions.get(values[slot]) for values in self._values]
        widening = [cast for cast in casts if cast is not None and widening_bytes(cast) > 0]
        narrow = {str(cast.invars[0].aval) for cast in widening}
        return widening if len(widening) == len(casts) and len(narrow) == 1 else []

    def _is_operand(self, slot: _Slot) -> bool:
        """True if a value is known before the call."""
        return slot.equation in self._casts_before or slot.position < len(self._runs[0][slot.equation].invars)

    @cached_property
    def _function_name(self) -> str:
        """Name of the user's function that the equations come from."""
        return common_function(self._runs[0]) or "run"

    @cached_property
    def _operands_of_calls(self) -> list[tuple[Atom, ...]]:
        """Operands of the call in the place of each run."""
        by_slot = [
            [cast.invars[0] for cast in self._casts_inside(slot)] or [values[slot] for values in self._values]
            for slot in self._function.operand_slots
        ]
        return list(zip(*by_slot, strict=True)) if by_slot else [()] * len(self._runs)


def _slots_of_run(run: Sequence[JaxprEqn]) -> list[list[_Slot | None]]:
    """Slot of each operand and result of each equation of a run, None for literals: where the run first mentions it.

    Equal runs have equal slots, whatever their variables, so a slot names the same value in each.
    """
    slots: dict[Atom, _Slot] = {}
    return [
        [
            None if isinstance(atom, Literal) else slots.setdefault(atom, _Slot(n, position))
            for position, atom in enumerate((*eqn.invars, *eqn.outvars))
        ]
        for n, eqn in enumerate(run)
    ]


class _ProgramPart(NamedTuple):
    """Part of a program that equations of one run belong to."""

    stage: int | None
    is_backward: bool
    phase: int | None


def _program_part(eqn: JaxprEqn) -> _ProgramPart:
    name = stage_name(eqn)
    return _ProgramPart(name.stage, name.is_backward, phase_of(eqn))


_COSTS = CallCosts()
_FUSED = "fused"  # the primitive of pass `fuse`: one vertex, which calls nothing


def outline(jaxpr: ClosedJaxpr, costs: CallCosts = _COSTS) -> ClosedJaxpr:
    """Returns an equal jaxpr with functions for repeated runs."""
    return outliner(costs)(jaxpr)


def outliner(costs: CallCosts = _COSTS) -> Rewrite:
    """Returns the pass `outline`, which puts repeated equations into functions, for several jaxprs.

    A jaxpr that several of them contain stays one object.

    Args:
        costs: of code and of copies.
    """
    numbers = EquationNumbers()  # which equal equations share, in all of these jaxprs

    def with_outlined(jaxpr: ClosedJaxpr, eqns: Sequence[JaxprEqn]) -> ClosedJaxpr:
        """The jaxpr with other equations, and jaxprs inside of these outlined."""
        rewritten = [
            eqn
            if eqn.primitive.name == _FUSED
            else with_inner(eqn, rewrite_function if eqn.primitive is function_call_p else rewrite_body)
            for eqn in eqns
        ]
        return with_equations(jaxpr, rewritten)

    @once
    def rewrite_body(jaxpr: ClosedJaxpr) -> ClosedJaxpr:
        eqns, _ = _with_calls(jaxpr.jaxpr, _groups_of_equations(jaxpr.jaxpr), numbers, costs)
        return with_outlined(jaxpr, eqns)

    @once
    def rewrite_function(jaxpr: ClosedJaxpr) -> ClosedJaxpr:
        """Outlines only loops of a function: its own code exists once."""
        return with_outlined(jaxpr, jaxpr.eqns)

    return rewrite_body


def outline_placed(jaxpr: Jaxpr, places: Sequence[int | None], costs: CallCosts = _COSTS) -> tuple[Jaxpr, list[int]]:
    """Puts repeated equations of a jaxpr with stages into functions, once it is known which IPU runs each equation.

    Before, the pass `outline` leaves out equations without a stage: only those of one IPU can be one function.

    Args:
        jaxpr: equations with stages, and without.
        places: IPU of each equation, None for one that runs on several.
        costs: of code and of copies.

    Returns:
        The jaxpr with calls, and for each of its equations the number of one that it replaces.
    """
    groups = np.full(len(jaxpr.eqns), -1)
    for n, (eqn, place) in enumerate(zip(jaxpr.eqns, places, strict=True)):
        if place is not None and not _is_never_outlined(eqn):
            groups[n] = place
    # New numbers, which equal equations share: they are compared within this jaxpr alone.
    eqns, sources = _with_calls(jaxpr, groups, numbers=EquationNumbers(), costs=costs)
    return jaxpr.replace(eqns=list(eqns)), sources


class _Replacement(NamedTuple):
    """Equations in the place of a run of some length."""

    length: int
    eqns: list[JaxprEqn]


def _with_calls(
    jaxpr: Jaxpr, groups: np.ndarray, numbers: EquationNumbers, costs: CallCosts
) -> tuple[Sequence[JaxprEqn], list[int]]:
    """Equations of a jaxpr with calls of functions in place of repeated runs of equations.

    Args:
        jaxpr: all equations.
        groups: number of the group of each equation, −1 for none; a run has equations of one group.
        numbers: numbers that equal equations share.
        costs: of code and of copies.

    Returns:
        The equations, and for each the number of an equation that it replaces.
    """
    if np.count_nonzero(groups >= 0) < 2:
        return jaxpr.eqns, list(range(len(jaxpr.eqns)))
    calls: dict[int, _Replacement] = {}  # by the first equation of a run
    uses = last_uses(jaxpr)
    definitions = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}
    for repeat in find_repeats(Dataflow(jaxpr, numbers), groups, costs):
        for start, eqns in zip(repeat.starts, Run(jaxpr, repeat, uses, definitions).calls(), strict=True):
            calls[start] = _Replacement(repeat.length, eqns)
    rewritten: list[JaxprEqn] = []
    sources: list[int] = []
    position = 0
    while position < len(jaxpr.eqns):
        replacement = calls.get(position) or _Replacement(length=1, eqns=[jaxpr.eqns[position]])
        rewritten += replacement.eqns
        sources += [position] * len(replacement.eqns)
        position += replacement.length
    return (rewritten if calls else jaxpr.eqns), sources


def _groups_of_equations(jaxpr: Jaxpr) -> np.ndarray:
    """For each equation the number of its part of the program (stage, phase), −1 for none, int64[equations].

    Only equations of one part may be outlined together. In a jaxpr with stages those without one are in no part, as
    they are not on an IPU yet: see `outline_placed`.
    """
    staged = has_stages(jaxpr)
    group_numbers: dict[_ProgramPart, int] = {}
    groups = np.full(len(jaxpr.eqns), -1)
    for n, eqn in enumerate(jaxpr.eqns):
        name = stage_name(eqn)
        has_no_ipu = staged and (name.stage is None or stages_inside(eqn))
        if not has_no_ipu and not _is_never_outlined(eqn):
            groups[n] = group_numbers.setdefault(_program_part(eqn), len(group_numbers))
    return groups


def _is_never_outlined(eqn: JaxprEqn) -> bool:
    """True if no run that becomes a function has an equation: one with effects, or that moves data off the IPU.

    Such moves are to other replicas, or to streaming memory.
    """
    return bool(eqn.effects) or is_collective(eqn) or any(x.primitive in MOVES for x in (eqn, *equations_inside(eqn)))
