"""Equations with the loads and stores of values in streaming memory.

    argument    loaded before an equation that reads it; the result that replaces it is stored where it is computed
    spilled     a value that is read later than in the next step: stored where it is computed, loaded there
    view        repeated in each step that reads it
    put         a value that the user puts on the host: stored there, loaded before it is read; rows of it by themselves

Input: equations in order, each with its step, see `phase_steps`. Output: equations, results, and the step of each.
A recently loaded value is not loaded again. Values that the user has on the host enter loops and branches unloaded,
whose bodies load and store them, see `control_flow`; other arguments are loaded before them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from math import prod
from typing import Any, cast

from ipujax.lowering.jax_compat import Atom, DropVar, JaxprEqn, Var, new_equation, shape_of
from ipujax.lowering.jaxpr import scan_body, variables, variables_read
from ipujax.lowering.offload.control_flow import BodyRewrite, rewrite_control_flow, uses_streaming_memory
from ipujax.lowering.offload.primitives import host_put_p, remote_empty_p, remote_load_p, remote_put_p, remote_store_p
from ipujax.lowering.offload.row_access import accesses_rows, is_slice_of_rows, row_access, writes_rows
from ipujax.lowering.offload.row_updates import is_view, viewed_value

_MAX_RECENT_LOADS = 4  # loads after which an earlier one is dropped: an optimiser reads two or three values together
_MIN_ELEMENTS = 2  # of a spilled value, as of arguments that are offloaded


class Moves:
    """The equations with loads and stores, their steps, and the results.

    Args:
        remote: inputs in streaming memory, with whether their columns are in channel groups on tiles.
        destinations: for each result the input in streaming memory whose buffer it takes, or None.
        is_sent: for each other result whether it goes off chip as soon as it is computed.
        in_place: results of updates by rows that stay in streaming memory, see `row_updates`.
        is_put: for each result whether the user has put it on the host.
    """

    def __init__(
        self,
        steps: Sequence[tuple[JaxprEqn, int]],
        outvars: Sequence[Atom],
        remote: Mapping[Var, bool],
        destinations: Sequence[Var | None],
        is_sent: Sequence[bool],
        in_place: frozenset[Var],
        hosted: Collection[Var],
        is_put: Sequence[bool],
        rewrite_body: BodyRewrite,
    ) -> None:
        self.eqns: list[JaxprEqn] = []
        self.steps: list[int] = []
        self.outvars = list(outvars)
        self._remote = dict(remote)
        self._destinations = destinations
        self._input_eqns = [eqn for eqn, _ in steps]
        self._step_of = [step for _, step in steps]
        self._definition = {var: n for n, eqn in enumerate(self._input_eqns) for var in eqn.outvars}
        self._defining_eqn = {var: eqn for eqn in self._input_eqns for var in eqn.outvars}
        self._in_place = in_place
        self._hosted = set(hosted)
        self._is_put = is_put
        self._rewrite_body = rewrite_body
        self._alias: dict[Var, Var] = {}  # from a put value to the variable that stands for it in streaming memory
        self._buffer: dict[Var, Var] = {}  # from a value there to the first variable in its buffer
        self._new_buffers: set[Var] = set()  # values in buffers of no argument
        self._settled: set[int] = set()  # results in their final place
        self._last = self._last_read()
        self._loaded: dict[Var, Var] = {}  # recent loads, in order
        self._viewed: dict[tuple[Var, int], Var] = {}
        self._emitted_views: set[Var] = set()
        self._handles: dict[Var, Var] = {}  # from a spilled value to its variable in streaming memory
        self._spilled = self._to_spill()
        moves = self._results_due(is_sent)
        self._store(moves.get(-1, ()), 0)
        for number, (eqn, step) in enumerate(steps):
            if not is_view(eqn):
                self._add(eqn, number, step)
            self._store(moves.get(number, ()), step)
        last_step = max(self._step_of, default=0)
        for number, value in enumerate(outvars):
            if self.outvars[number] is value and destinations[number] is not value and not self._is_settled(number):
                self.outvars[number] = self.on_chip(value, last_step, None)
        self._store(moves.get(len(steps), ()), last_step)

    def _to_spill(self) -> set[Var]:
        spilled = set[Var]()
        for eqn, step in zip(self._input_eqns, self._step_of, strict=True):
            if not is_view(eqn):
                for var in variables_read(eqn):
                    value = viewed_value(var, self._defining_eqn)
                    index = self._definition.get(value)
                    if index is not None and step > self._step_of[index] + 1 and _is_large(value):
                        spilled.add(value)
        return spilled - self._in_place

    def _results_due(self, is_sent: Sequence[bool]) -> dict[int, list[int]]:
        """Results to store after each equation; −1 is before all of them, and their number after all."""
        end = len(self._input_eqns)
        due: dict[int, list[int]] = {}
        for number, (value, destination) in enumerate(zip(self.outvars, self._destinations, strict=True)):
            definition = self._definition.get(value, -1) if isinstance(value, Var) else -1
            if destination is not None and value is not destination and value not in self._in_place:
                is_old = isinstance(value, Var) and viewed_value(value, self._defining_eqn) in self._remote
                due.setdefault(end if is_old else max(definition, self._last.get(destination, -1)), []).append(number)
            elif destination is None and self._is_put[number]:
                due.setdefault(end if definition < 0 else definition, []).append(number)
            elif destination is None and is_sent[number] and definition >= 0 and _is_large(value):
                due.setdefault(definition, []).append(number)
        return due

    def _last_read(self) -> dict[Var, int]:
        """Return the index of the last equation that reads each value or a view of it; a result is read after all."""
        # A put value may still be in the buffer it was fetched from, so both have the same last read.
        last_read = {var: n for n, eqn in enumerate(self._input_eqns) for var in variables_read(eqn)}
        pairs = zip(self.outvars, self._destinations, strict=True)
        changed_results = [x for x, destination in pairs if x is not destination]
        last_read.update(dict.fromkeys(variables(changed_results), len(self._input_eqns)))
        for eqn in reversed(self._input_eqns):
            if is_view(eqn) or eqn.primitive is host_put_p:
                number = max((last_read.get(var, -1) for var in eqn.outvars), default=-1)
                last_read.update((var, max(last_read.get(var, -1), number)) for var in variables_read(eqn))
        return last_read

    def _store(self, results: Sequence[int], step: int) -> None:
        for number in results:
            if self._is_settled(number):
                continue
            value = self.outvars[number]
            destination = self._destinations[number]
            local = self.on_chip(value, step, None)
            index = self._definition.get(value) if isinstance(value, Var) else None
            like = None if index is None else self._input_eqns[index]
            if destination is None:
                self.outvars[number] = self._put(local, step, like, is_result=not self._is_put[number])
            else:
                self.outvars[number] = self._store_in(destination, local, step, like)
            self._settled.add(number)

    def _store_in(self, destination: Var, value: Atom, step: int, like: JaxprEqn | None) -> Var:
        stored = Var(destination.aval)
        self._emit(new_equation(remote_store_p, [destination, value], [stored], {}, like), step)
        return stored

    def _put(self, value: Atom, step: int, like: JaxprEqn | None, *, is_result: bool = False) -> Var:
        """Stores a value in a new buffer; returns the variable that stands for it there."""
        handle = Var(value.aval)
        self._emit(new_equation(remote_put_p, [value], [handle], {"is_result": is_result}, like), step)
        self._remote[handle] = False
        return handle

    def _is_settled(self, number: int) -> bool:
        """True if a result is in its final place: in a buffer of streaming memory that no other result has."""
        value = self._resolved(self.outvars[number])
        if number in self._settled or not isinstance(value, Var) or value not in self._hosted:
            return number in self._settled
        memory = self._buffer.get(value, value)
        destination = self._destinations[number]
        taken_buffers = [*self._destinations, *(self._memory(self.outvars[n]) for n in self._settled)]
        is_free = memory not in taken_buffers
        if memory is destination or (destination is None and self._is_put[number] and is_free):
            self.outvars[number] = value
            self._settled.add(number)
        return number in self._settled

    def _memory(self, atom: Atom) -> Var | None:
        value = self._resolved(atom)
        return self._buffer.get(value, value) if isinstance(value, Var) else None

    def mark_hosted(self, var: Var, memory: Var | None = None) -> Var:
        """Notes that the user has put a value on the host, in the buffer of an earlier value or (None) a new one."""
        self._remote[var] = False
        self._hosted.add(var)
        if memory is None:
            self._new_buffers.add(var)
        else:
            self._buffer[var] = self._buffer.get(memory, memory)
            if memory in self._new_buffers:
                self._new_buffers.add(var)
        return var

    def _add_put(self, eqn: JaxprEqn, number: int, step: int) -> None:
        (value,) = eqn.invars
        (handle,) = eqn.outvars
        if isinstance(value, Var) and value in self._hosted:
            self._alias[handle] = value
            self._last[value] = max(self._last.get(value, -1), self._last.get(handle, -1))
            return
        local = self.on_chip(value, step, eqn)
        destination = self._destination_of(handle, number)
        if destination is None:
            stored = self.mark_hosted(self._put(local, step, eqn))
        else:
            stored = self.mark_hosted(self._store_in(destination, local, step, eqn), destination)
        self._alias[handle] = stored
        self._last[stored] = self._last.get(handle, -1)

    def _destination_of(self, value: Var, number: int) -> Var | None:
        """The argument whose buffer a value takes as a result, if nothing reads that after equation `number`."""
        pairs = zip(self.outvars, self._destinations, strict=True)
        destination = next((home for x, home in pairs if x is value and home is not None), None)
        return destination if destination is not None and self._last.get(destination, -1) <= number else None

    def memory_for_state(self, initial: Atom, result: Var, eqn: JaxprEqn, number: int, step: int) -> Var:
        """A buffer that a loop may overwrite, with its first value: the first value itself, or a copy."""
        if isinstance(initial, Var) and initial in self._hosted and self._last.get(initial, -1) <= number:
            memory = self._buffer.get(initial, initial)
            buffers_read = [self._memory(viewed_value(var, self._defining_eqn)) for var in variables_read(eqn)]
            is_free = initial in self._new_buffers or self._destination_of(result, number) is memory
            if is_free and buffers_read.count(memory) == 1:
                return initial
        return self.mark_hosted(self._put(self.on_chip(initial, step, eqn), step, eqn))

    def memory_for_result(self, result: Var, number: int, step: int, eqn: JaxprEqn) -> Var:
        """A buffer for a result of branches: that of the argument it replaces, or a new one."""
        destination = self._destination_of(result, number)
        if destination is not None and destination in self._hosted:
            return destination
        memory = Var(result.aval)
        aval = cast("Any", result.aval)
        params = {"shape": shape_of(result), "dtype": aval.dtype}
        self._emit(new_equation(remote_empty_p, [], [memory], params, eqn), step)
        return self.mark_hosted(memory)

    def is_hosted(self, atom: Atom) -> bool:
        """True if a value is in streaming memory because the user has put it there."""
        return isinstance(atom, Var) and atom in self._hosted

    def _resolved(self, atom: Atom) -> Atom:
        return self._alias.get(atom, atom) if isinstance(atom, Var) else atom

    def _add(self, eqn: JaxprEqn, number: int, step: int) -> None:
        """Adds an equation, with loads of its operands."""
        eqn = eqn.replace(invars=[self._resolved(x) for x in eqn.invars])
        if eqn.primitive is host_put_p:
            self._add_put(eqn, number, step)
            return
        if uses_streaming_memory(eqn, self.is_hosted):
            self._emit(rewrite_control_flow(eqn, self, number, step, self._rewrite_body), step)
        else:
            self._add_computing(eqn, step)
        for var in eqn.outvars:
            if var in self._spilled and var not in self._remote:
                self._handles[var] = self._put(var, step, eqn)

    def _add_computing(self, eqn: JaxprEqn, step: int) -> None:
        is_off_chip = self.stays_off_chip(eqn)
        operands = [x if is_off_chip[n] else self.on_chip(x, step, eqn) for n, x in enumerate(eqn.invars)]
        local_eqn = eqn.replace(invars=operands)
        for row_eqn in row_access(local_eqn) if any(is_off_chip) and accesses_rows(eqn) else [local_eqn]:
            self._emit(row_eqn, step)

    def stays_off_chip(self, eqn: JaxprEqn) -> list[bool]:
        """For each operand whether it stays off chip: a table whose rows move, or a stack that a loop reads by rows."""
        by_rows = [False] * len(eqn.invars)
        if eqn.primitive.name == "scan":
            constants, carries, stacks = (eqn.invars[places] for places in scan_body(eqn.params).operands)
            unstacked = [*constants, *carries]
            by_rows = [*[False] * len(unstacked), *(not any(x is other for other in unstacked) for x in stacks)]
        elif accesses_rows(eqn):
            by_rows[0] = not writes_rows(eqn) or eqn.outvars[0] in self._in_place
        pairs = zip(by_rows, eqn.invars, strict=True)
        return [is_by_rows and (x in self._remote or x in self._in_place) for is_by_rows, x in pairs]

    def on_chip(self, atom: Atom, step: int, user: JaxprEqn | None) -> Atom:
        """The variable on chip that stands for another in a step."""
        atom = self._resolved(atom)
        if not isinstance(atom, Var):
            return atom
        if atom in self._remote:
            return self._load(atom, step, user)
        definition = self._definition.get(atom)
        if definition is not None and is_view(self._input_eqns[definition]):
            is_slice = self._emits_slice_on_host(atom, step)
            return self._load(atom, step, user) if is_slice else self._view(atom, step, user)
        if atom in self._handles and definition is not None and step > self._step_of[definition] + 1:
            return self._load(self._handles[atom], step, user)
        return atom

    def _emits_slice_on_host(self, atom: Var, step: int) -> bool:
        """Emits a view that slices entire rows of a value on the host, and marks it as there; False for other views."""
        eqn = self._input_eqns[self._definition[atom]]
        source = self._resolved(eqn.invars[0])
        if not is_slice_of_rows(eqn) or not isinstance(source, Var) or source not in self._hosted:
            return False
        self._emit(eqn.replace(invars=[source]), step)
        self._remote[atom] = False
        return True

    def _view(self, atom: Var, step: int, user: JaxprEqn | None) -> Var:
        if (atom, step) not in self._viewed:
            eqn = self._input_eqns[self._definition[atom]]
            outvars = eqn.outvars
            if atom in self._emitted_views:
                outvars = [x if isinstance(x, DropVar) else Var(x.aval) for x in eqn.outvars]
            self._emitted_views.update(eqn.outvars)
            invars = [self.on_chip(x, step, user) for x in eqn.invars]
            self._emit(eqn.replace(invars=invars, outvars=outvars), step)
            self._viewed.update(((original, step), view) for original, view in zip(eqn.outvars, outvars, strict=True))
        return self._viewed[atom, step]

    def _load(self, remote: Var, step: int, user: JaxprEqn | None) -> Var:
        """A value on chip: from a recent load, or loaded now."""
        if remote not in self._loaded:
            loaded = Var(remote.aval)
            params = {"in_groups": self._remote[remote]}
            self._emit(new_equation(remote_load_p, [remote], [loaded], params, user), step)
            self._loaded[remote] = loaded
            while len(self._loaded) > _MAX_RECENT_LOADS:
                self._loaded.pop(next(iter(self._loaded)))
        return self._loaded[remote]

    def _emit(self, eqn: JaxprEqn, step: int) -> None:
        self.eqns.append(eqn)
        self.steps.append(step)


def _is_large(atom: Atom) -> bool:
    return prod(shape_of(atom)) >= _MIN_ELEMENTS
