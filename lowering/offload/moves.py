"""Equations with the loads and stores of what lies in streaming memory.

    argument    loaded before an equation that reads it; what takes its place is stored where it is made
    spilled     a value that a later step than the next reads: stored where it is made, loaded there
    view        made anew in each step that reads it, of what it views
    put         what the user puts on the host: stored there, loaded where it is read; rows of it by themselves

Input: equations in order, each with its step, see `phase_steps`. Output: equations, results, and the step of each.
What was loaded a moment ago is not loaded again. What the user has on the host goes into loops and branches as it is:
they load and store it themselves, see `control_flow`; other arguments are loaded before them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from math import prod
from typing import Any, cast

from ipujax.lowering.jax_compat import Atom, DropVar, JaxprEqn, Var, new_equation, shape_of
from ipujax.lowering.jaxpr import variables, variables_read
from ipujax.lowering.offload.control_flow import Inside, rewritten, streams
from ipujax.lowering.offload.primitives import host_put_p, remote_empty_p, remote_load_p, remote_put_p, remote_store_p
from ipujax.lowering.offload.row_access import is_slice_of_rows, row_access, takes_rows, writes_rows
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
        hosted: those of the inputs that the user has on the host.
        stays: for each result whether the user has put it there.
        inside: rewrites the bodies of loops and branches.
    """

    def __init__(
        self,
        steps: Sequence[tuple[JaxprEqn, int]],
        outvars: Sequence[Atom],
        remote: Mapping[Var, bool],
        homes: Sequence[Var | None],
        is_sent: Sequence[bool],
        in_place: frozenset[Var],
        hosted: Collection[Var],
        stays: Sequence[bool],
        inside: Inside,
    ) -> None:
        self.eqns, self.steps, self.outvars = list[JaxprEqn](), list[int](), list(outvars)
        self._remote, self._homes = dict(remote), homes
        self._all, self._step_of = [eqn for eqn, _ in steps], [step for _, step in steps]
        self._maker = {var: n for n, eqn in enumerate(self._all) for var in eqn.outvars}
        self._made_by = {var: eqn for eqn in self._all for var in eqn.outvars}
        self._in_place, self._hosted, self._stays_there, self._inside = in_place, set(hosted), stays, inside
        self._alias: dict[Var, Var] = {}  # of what is put, where it lies
        self._buffer: dict[Var, Var] = {}  # what first stood for the memory of what is there
        self._own = set[Var]()  # what lies in memory that no argument has
        self._settled = set[int]()  # results that are where they belong
        self._last = self._last_read()
        self._loaded: dict[Var, Var] = {}  # what was loaded last, in the order of the loads
        self._viewed: dict[tuple[Var, int], Var] = {}
        self._shown = set[Var]()  # views that are made already
        self._handles: dict[Var, Var] = {}  # of what is spilled, where it lies
        self._spilled = self._to_spill()
        moves = self._results_due(is_sent)
        self._store(moves.get(-1, ()), 0)
        for number, (eqn, step) in enumerate(steps):
            if not is_view(eqn):
                self._add(eqn, number, step)
            self._store(moves.get(number, ()), step)
        last = max(self._step_of, default=0)
        for number, value in enumerate(outvars):
            if self.outvars[number] is value and homes[number] is not value and not self._is_settled(number):
                self.outvars[number] = self.here(value, last, None)
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
        end = len(self._all)
        due: dict[int, list[int]] = {}
        for number, (value, home) in enumerate(zip(self.outvars, self._homes, strict=True)):
            made = self._maker.get(value, -1) if isinstance(value, Var) else -1
            if home is not None and value is not home and value not in self._in_place:
                is_old = isinstance(value, Var) and viewed_value(value, self._made_by) in self._remote
                due.setdefault(end if is_old else max(made, self._last.get(home, -1)), []).append(number)
            elif home is None and self._stays_there[number]:
                due.setdefault(end if made < 0 else made, []).append(number)
            elif home is None and is_sent[number] and made >= 0 and _is_large(value):
                due.setdefault(made, []).append(number)
        return due

    def _last_read(self) -> dict[Var, int]:
        """The last equation that reads a value or a view of it; their number if a result is one of these.

        What is put may be where it was fetched from, and is read with it.
        """
        last = {var: n for n, eqn in enumerate(self._all) for var in variables_read(eqn)}
        given = (x for x, home in zip(self.outvars, self._homes, strict=True) if x is not home)
        last.update(dict.fromkeys(variables(list(given)), len(self._all)))
        for eqn in reversed(self._all):
            if is_view(eqn) or eqn.primitive is host_put_p:
                number = max((last.get(var, -1) for var in eqn.outvars), default=-1)
                last.update((var, max(last.get(var, -1), number)) for var in variables_read(eqn))
        return last

    def _store(self, results: Sequence[int], step: int) -> None:
        for number in results:
            if self._is_settled(number):
                continue
            value, home = self.outvars[number], self._homes[number]
            here = self.here(value, step, None)
            like = self._all[self._maker[value]] if value in self._maker and isinstance(value, Var) else None
            if home is None:
                self.outvars[number] = self._put(here, step, like, is_result=not self._stays_there[number])
            else:
                self.outvars[number] = self._store_in(home, here, step, like)
            self._settled.add(number)

    def _store_in(self, home: Var, value: Atom, step: int, like: JaxprEqn | None) -> Var:
        stored = Var(home.aval)
        self._emit(new_equation(remote_store_p, [home, value], [stored], {}, like), step)
        return stored

    def _put(self, value: Atom, step: int, like: JaxprEqn | None, *, is_result: bool = False) -> Var:
        """Stores a value in a buffer of its own; returns what stands for it there."""
        handle = Var(value.aval)
        self._emit(new_equation(remote_put_p, [value], [handle], {"is_result": is_result}, like), step)
        self._remote[handle] = False
        return handle

    def _is_settled(self, number: int) -> bool:
        """Whether a result is where it belongs: it lies there, in memory that no other result has."""
        value = self._resolved(self.outvars[number])
        if number in self._settled or not isinstance(value, Var) or value not in self._hosted:
            return number in self._settled
        memory, home = self._buffer.get(value, value), self._homes[number]
        others = [*self._homes, *(self._memory(self.outvars[n]) for n in self._settled)]
        is_free = memory not in others
        if memory is home or (home is None and self._stays_there[number] and is_free):
            self.outvars[number] = value
            self._settled.add(number)
        return number in self._settled

    def _memory(self, atom: Atom) -> Var | None:
        value = self._resolved(atom)
        return self._buffer.get(value, value) if isinstance(value, Var) else None

    # --- what the user puts on the host ---

    def mark_hosted(self, var: Var, memory: Var | None = None) -> Var:
        """Notes that a value is in streaming memory at the user's wish, and returns it.

        Args:
            var: the value.
            memory: an earlier value in the same buffer; the value has a buffer of its own if None.
        """
        self._remote[var] = False
        self._hosted.add(var)
        if memory is None:
            self._own.add(var)
        else:
            self._buffer[var] = self._buffer.get(memory, memory)
            if memory in self._own:
                self._own.add(var)
        return var

    def _add_put(self, eqn: JaxprEqn, number: int, step: int) -> None:
        (value,), (there,) = eqn.invars, eqn.outvars
        if isinstance(value, Var) and value in self._hosted:
            self._alias[there] = value
            self._last[value] = max(self._last.get(value, -1), self._last.get(there, -1))
            return
        here = self.here(value, step, eqn)
        home = self._home_of(there, number)
        if home is None:
            stored = self.mark_hosted(self._put(here, step, eqn))
        else:
            stored = self.mark_hosted(self._store_in(home, here, step, eqn), home)
        self._alias[there] = stored
        self._last[stored] = self._last.get(there, -1)

    def _home_of(self, value: Var, number: int) -> Var | None:
        """The argument whose place a value takes as a result, if nothing reads that behind an equation."""
        homes = (home for x, home in zip(self.outvars, self._homes, strict=True) if x is value and home is not None)
        home = next(homes, None)
        return home if home is not None and self._last.get(home, -1) <= number else None

    def memory_for_state(self, first: Atom, result: Var, eqn: JaxprEqn, number: int, step: int) -> Var:
        """A value in streaming memory that a loop may overwrite: the first value itself, or a copy.

        Args:
            first: where the loop starts.
            result: where it ends.
            eqn: the loop.
            number: its place.
            step: its step.
        """
        if isinstance(first, Var) and first in self._hosted and self._last.get(first, -1) <= number:
            memory = self._buffer.get(first, first)
            read = [self._memory(viewed_value(var, self._made_by)) for var in variables_read(eqn)]
            if read.count(memory) == 1 and (first in self._own or self._home_of(result, number) is memory):
                return first
        return self.mark_hosted(self._put(self.here(first, step, eqn), step, eqn))

    def memory_for_result(self, result: Var, number: int, step: int, eqn: JaxprEqn) -> Var:
        """Memory for what branches leave there: that of the argument whose place it takes, or new."""
        home = self._home_of(result, number)
        if home is not None and home in self._hosted:
            return home
        memory, aval = Var(result.aval), cast("Any", result.aval)
        params = {"shape": shape_of(result), "dtype": aval.dtype}
        self._emit(new_equation(remote_empty_p, [], [memory], params, eqn), step)
        return self.mark_hosted(memory)

    def is_hosted(self, atom: Atom) -> bool:
        """Whether a value lies in streaming memory because the user wants it there."""
        return isinstance(atom, Var) and atom in self._hosted

    def _resolved(self, atom: Atom) -> Atom:
        return self._alias.get(atom, atom) if isinstance(atom, Var) else atom

    # --- what is read ---

    def _add(self, eqn: JaxprEqn, number: int, step: int) -> None:
        """Adds an equation, with loads of what it reads."""
        eqn = eqn.replace(invars=[self._resolved(x) for x in eqn.invars])
        if eqn.primitive is host_put_p:
            self._add_put(eqn, number, step)
            return
        if streams(eqn, self.is_hosted):
            self._emit(rewritten(eqn, self, number, step, self._inside), step)
        else:
            self._add_computing(eqn, step)
        for var in eqn.outvars:
            if var in self._spilled and var not in self._remote:
                self._handles[var] = self._put(var, step, eqn)

    def _add_computing(self, eqn: JaxprEqn, step: int) -> None:
        stays = self.stays(eqn)
        read = [x if stays[n] else self.here(x, step, eqn) for n, x in enumerate(eqn.invars)]
        own = eqn.replace(invars=read)
        for each in row_access(own) if any(stays) and takes_rows(eqn) else [own]:
            self._emit(each, step)

    def stays(self, eqn: JaxprEqn) -> list[bool]:
        """For each operand whether it stays off chip: a table of which rows move, what a loop reads row by row."""
        by_rows = [False] * len(eqn.invars)
        if eqn.primitive.name == "scan":
            first = eqn.params["num_consts"] + eqn.params["num_carry"]
            whole = eqn.invars[:first]
            by_rows[first:] = [not any(x is other for other in whole) for x in eqn.invars[first:]]
        elif takes_rows(eqn):
            by_rows[0] = not writes_rows(eqn) or eqn.outvars[0] in self._in_place
        return [row and (x in self._remote or x in self._in_place) for row, x in zip(by_rows, eqn.invars, strict=True)]

    def here(self, atom: Atom, step: int, user: JaxprEqn | None) -> Atom:
        """What to read for a variable in a step."""
        atom = self._resolved(atom)
        if not isinstance(atom, Var):
            return atom
        if atom in self._remote:
            return self._load(atom, step, user)
        maker = self._maker.get(atom)
        if maker is not None and is_view(self._all[maker]):
            is_there = self._emits_slice_on_host(atom, step)
            return self._load(atom, step, user) if is_there else self._view(atom, step, user)
        if atom in self._handles and maker is not None and step > self._step_of[maker] + 1:
            return self._load(self._handles[atom], step, user)
        return atom

    def _emits_slice_on_host(self, atom: Var, step: int) -> bool:
        """Emits a view that slices whole rows of a value on the host, and marks it as there; False for other views."""
        eqn = self._all[self._maker[atom]]
        source = self._resolved(eqn.invars[0])
        if not is_slice_of_rows(eqn) or not isinstance(source, Var) or source not in self._hosted:
            return False
        self._emit(eqn.replace(invars=[source]), step)
        self._remote[atom] = False
        return True

    def _view(self, atom: Var, step: int, user: JaxprEqn | None) -> Var:
        if (atom, step) not in self._viewed:
            eqn = self._all[self._maker[atom]]
            outvars = eqn.outvars
            if atom in self._shown:
                outvars = [x if isinstance(x, DropVar) else Var(x.aval) for x in eqn.outvars]
            self._shown.update(eqn.outvars)
            invars = [self.here(x, step, user) for x in eqn.invars]
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
