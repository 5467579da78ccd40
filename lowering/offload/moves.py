"""Equations with the loads and stores of what lies in streaming memory.

    argument    loaded before an equation that reads it; what takes its place is stored where it is made
    spilled     a value that a later step than the next reads: stored where it is made, loaded there
    view        made anew in each step that reads it, of what it views

Input: equations in order, each with its step, see `phase_steps`. Output: equations, results, and the step of each.
What was loaded a moment ago is not loaded again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

from ipujax.lowering.jax_compat import Atom, DropVar, JaxprEqn, Var, new_equation, shape_of
from ipujax.lowering.jaxpr import variables, variables_read
from ipujax.lowering.offload.primitives import remote_load_p, remote_put_p, remote_store_p
from ipujax.lowering.offload.row_access import row_access, takes_rows, writes_rows
from ipujax.lowering.offload.row_updates import is_view, viewed_value

_FEW = 4  # values that are loaded between two uses of one that is kept: an optimiser reads two or three together
_LEAST_ELEMENTS = 2  # of what is spilled, as of what is offloaded


class Moves:
    """The equations with loads and stores.

    Args:
        steps: the equations, in order of their steps, each with its step.
        outvars: the results.
        remote: inputs in streaming memory, and whether tiles keep them with columns in groups.
        homes: for each result the input in streaming memory that it replaces, or None.
        is_sent: for each other result whether it goes off chip as soon as it is made.
        in_place: results of updates by rows that stay in streaming memory, see `row_updates`.
    """

    def __init__(
        self,
        steps: Sequence[tuple[JaxprEqn, int]],
        outvars: Sequence[Atom],
        remote: Mapping[Var, bool],
        homes: Sequence[Var | None],
        is_sent: Sequence[bool],
        in_place: frozenset[Var],
    ) -> None:
        self.eqns, self.steps, self.outvars = list[JaxprEqn](), list[int](), list(outvars)
        self._remote, self._homes = dict(remote), homes
        self._all, self._step_of = [eqn for eqn, _ in steps], [step for _, step in steps]
        self._maker = {var: n for n, eqn in enumerate(self._all) for var in eqn.outvars}
        self._made_by = {var: eqn for eqn in self._all for var in eqn.outvars}
        self._in_place = in_place
        self._loaded: dict[Var, Var] = {}  # what was loaded last, in the order of the loads
        self._viewed: dict[tuple[Var, int], Var] = {}
        self._shown = set[Var]()  # views that are made already
        self._handles: dict[Var, Var] = {}  # of what is spilled, where it lies
        self._spilled = self._to_spill()
        moves = self._results_due(is_sent)
        self._store(moves.get(-1, ()), 0)
        for number, (eqn, step) in enumerate(steps):
            if not is_view(eqn):
                self._add(eqn, step)
            self._store(moves.get(number, ()), step)
        last = max(self._step_of, default=0)
        for number, value in enumerate(outvars):
            if self.outvars[number] is value and homes[number] is not value:
                self.outvars[number] = self._here(value, last, None)
        self._store(moves.get(len(steps), ()), last)

    # --- what is stored ---

    def _to_spill(self) -> set[Var]:
        found = set[Var]()
        for eqn, step in zip(self._all, self._step_of, strict=True):
            if not is_view(eqn):
                for var in variables_read(eqn):
                    value = viewed_value(var, self._made_by)
                    if value in self._maker and step > self._step_of[self._maker[value]] + 1 and _is_large(value):
                        found.add(value)
        return found - self._in_place

    def _results_due(self, is_sent: Sequence[bool]) -> dict[int, list[int]]:
        """Results to be stored behind each equation; −1 before all of them, and their number behind all."""
        end, last_read = len(self._all), self._last_read()
        due: dict[int, list[int]] = {}
        for number, (value, home) in enumerate(zip(self.outvars, self._homes, strict=True)):
            made = self._maker.get(value, -1) if isinstance(value, Var) else -1
            if home is not None and value is not home and value not in self._in_place:
                is_old = isinstance(value, Var) and viewed_value(value, self._made_by) in self._remote
                due.setdefault(end if is_old else max(made, last_read.get(home, -1)), []).append(number)
            elif home is None and is_sent[number] and made >= 0 and _is_large(value):
                due.setdefault(made, []).append(number)
        return due

    def _last_read(self) -> dict[Var, int]:
        """The last equation that reads a value or a view of it; their number if a result is one of these."""
        last = {var: n for n, eqn in enumerate(self._all) for var in variables_read(eqn)}
        given = (x for x, home in zip(self.outvars, self._homes, strict=True) if x is not home)
        last.update(dict.fromkeys(variables(list(given)), len(self._all)))
        for var, number in [*last.items()]:
            viewed = viewed_value(var, self._made_by)
            last[viewed] = max(last.get(viewed, -1), number)
        return last

    def _store(self, results: Sequence[int], step: int) -> None:
        for number in results:
            value, home = self.outvars[number], self._homes[number]
            here = self._here(value, step, None)
            like = self._all[self._maker[value]] if value in self._maker and isinstance(value, Var) else None
            if home is None:
                self.outvars[number] = self._put(here, step, like, is_result=True)
            else:
                stored = Var(home.aval)
                self._emit(new_equation(remote_store_p, [home, here], [stored], {}, like), step)
                self.outvars[number] = stored

    def _put(self, value: Atom, step: int, like: JaxprEqn | None, *, is_result: bool = False) -> Var:
        """Stores a value in a buffer of its own; returns what stands for it there."""
        handle = Var(value.aval)
        self._emit(new_equation(remote_put_p, [value], [handle], {"is_result": is_result}, like), step)
        self._remote[handle] = False
        return handle

    # --- what is read ---

    def _add(self, eqn: JaxprEqn, step: int) -> None:
        """Adds an equation, with loads of what it reads."""
        stays = self._stays(eqn)
        read = [x if stays[n] else self._here(x, step, eqn) for n, x in enumerate(eqn.invars)]
        own = eqn.replace(invars=read)
        for each in row_access(own) if any(stays) and takes_rows(eqn) else [own]:
            self._emit(each, step)
        for var in eqn.outvars:
            if var in self._spilled:
                self._handles[var] = self._put(var, step, eqn)

    def _stays(self, eqn: JaxprEqn) -> list[bool]:
        """For each operand whether it stays off chip: a table of which rows move, what a loop reads row by row."""
        by_rows = [False] * len(eqn.invars)
        if eqn.primitive.name == "scan":
            first = eqn.params["num_consts"] + eqn.params["num_carry"]
            whole = eqn.invars[:first]
            by_rows[first:] = [not any(x is other for other in whole) for x in eqn.invars[first:]]
        elif takes_rows(eqn):
            by_rows[0] = not writes_rows(eqn) or eqn.outvars[0] in self._in_place
        return [row and (x in self._remote or x in self._in_place) for row, x in zip(by_rows, eqn.invars, strict=True)]

    def _here(self, atom: Atom, step: int, user: JaxprEqn | None) -> Atom:
        """What to read for a variable in a step."""
        if not isinstance(atom, Var):
            return atom
        if atom in self._remote:
            return self._load(atom, step, user)
        maker = self._maker.get(atom)
        if maker is not None and is_view(self._all[maker]):
            return self._view(atom, step, user)
        if atom in self._handles and maker is not None and step > self._step_of[maker] + 1:
            return self._load(self._handles[atom], step, user)
        return atom

    def _view(self, atom: Var, step: int, user: JaxprEqn | None) -> Var:
        if (atom, step) not in self._viewed:
            eqn = self._all[self._maker[atom]]
            outvars = eqn.outvars
            if atom in self._shown:
                outvars = [x if isinstance(x, DropVar) else Var(x.aval) for x in eqn.outvars]
            self._shown.update(eqn.outvars)
            invars = [self._here(x, step, user) for x in eqn.invars]
            self._emit(eqn.replace(invars=invars, outvars=outvars), step)
            self._viewed.update(((old, step), new) for old, new in zip(eqn.outvars, outvars, strict=True))
        return self._viewed[atom, step]

    def _load(self, remote: Var, step: int, user: JaxprEqn | None) -> Var:
        """A value on chip: as it was loaded a moment ago, or loaded now."""
        if remote not in self._loaded:
            loaded = Var(remote.aval)
            params = {"in_groups": self._remote[remote]}
            self._emit(new_equation(remote_load_p, [remote], [loaded], params, user), step)
            self._loaded[remote] = loaded
            while len(self._loaded) > _FEW:
                self._loaded.pop(next(iter(self._loaded)))
        return self._loaded[remote]

    def _emit(self, eqn: JaxprEqn, step: int) -> None:
        self.eqns.append(eqn)
        self.steps.append(step)


def _is_large(atom: Atom) -> bool:
    return prod(shape_of(atom)) >= _LEAST_ELEMENTS
