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

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, cast

from ipujax.lowering.jax_compat import Atom, DropVar, JaxprEqn, Var, new_equation, shape_of
from ipujax.lowering.jaxpr import scan_body, substituted, variables_read
from ipujax.lowering.offload.control_flow import BodyRewrite, rewrite_control_flow, uses_streaming_memory
from ipujax.lowering.offload.move_plan import BEFORE_ALL, MovePlan, StagedValues, plan_moves
from ipujax.lowering.offload.primitives import host_put_p, remote_empty_p, remote_load_p, remote_put_p, remote_store_p
from ipujax.lowering.offload.row_access import accesses_rows, is_slice_of_rows, row_access, writes_rows
from ipujax.lowering.offload.row_updates import is_view, viewed_value

_MAX_RECENT_LOADS = 4  # loads after which an earlier one is dropped: an optimiser reads two or three values together


@dataclass(frozen=True, slots=True)
class Moved:
    """Equations with loads and stores, the step of each, and the results, some of which are in streaming memory."""

    eqns: list[JaxprEqn]
    steps: list[int]
    outvars: list[Atom]


def with_moves(values: StagedValues, rewrite_body: BodyRewrite) -> Moved:
    """Returns the equations with loads of values in streaming memory before they are read, and stores of due results.

    `rewrite_body` adds those of bodies of loops and branches.
    """
    plan = plan_moves(values)
    emission = _Emission(plan, rewrite_body)
    emission.store(plan.due.get(BEFORE_ALL, ()), step=0)
    for number, (eqn, step) in enumerate(values.steps):
        if not is_view(eqn):
            emission.add_equation(eqn, number, step)
        emission.store(plan.due.get(number, ()), step)
    last_step = max((step for _, step in values.steps), default=0)
    emission.fetch_results(last_step)
    emission.store(plan.due.get(len(values.steps), ()), last_step)
    return emission.moved


class _HostedValues:
    """Values that the user has put on the host: what stands for them there, and in whose buffers they are."""

    def __init__(self, plan: MovePlan) -> None:
        self._hosted = set(plan.values.hosted)
        self._alias: dict[Var, Var] = {}  # from a put value to the variable that stands for it in streaming memory
        self._buffer: dict[Var, Var] = {}  # from a value there to the first variable in its buffer
        self._new_buffers: set[Var] = set()  # values in buffers of no argument
        self._last_read = dict(plan.last_read)

    def __contains__(self, atom: Atom) -> bool:
        return isinstance(atom, Var) and atom in self._hosted

    def add(self, var: Var, memory: Var | None) -> None:
        """Notes that a value is on the host: in the buffer of the value `memory`, or (None) in a new buffer."""
        self._hosted.add(var)
        if memory is None:
            self._new_buffers.add(var)
        else:
            self._buffer[var] = self._buffer.get(memory, memory)
            if memory in self._new_buffers:
                self._new_buffers.add(var)

    def stand_in(self, var: Var, handle: Var) -> None:
        """Notes that `var` stands for the value of `handle`, and is read as long."""
        self._alias[handle] = var
        self._last_read[var] = max(self._last_read.get(var, BEFORE_ALL), self._last_read.get(handle, BEFORE_ALL))

    def resolved(self, atom: Atom) -> Atom:
        """The variable that stands for a value."""
        return substituted(atom, self._alias)

    def buffer(self, atom: Atom) -> Var | None:
        """The first variable in the buffer of a value, None for a literal."""
        value = self.resolved(atom)
        return self._buffer.get(value, value) if isinstance(value, Var) else None

    def is_in_new_buffer(self, var: Var) -> bool:
        """True if a value is in the buffer of no argument."""
        return var in self._new_buffers

    def is_read_after(self, var: Var, number: int) -> bool:
        """True if an equation after equation `number` reads a value."""
        return self._last_read.get(var, BEFORE_ALL) > number


class _Emission:
    """Emission of equations with moves, in order; the `OuterMoves` of loops and branches, see `control_flow`."""

    def __init__(self, plan: MovePlan, rewrite_body: BodyRewrite) -> None:
        """Begins the emission: no equation yet, `moved`, and arguments alone in streaming memory."""
        self.moved = Moved([], [], list(plan.values.outvars))
        self._plan = plan
        self._rewrite_body = rewrite_body
        # Values in streaming memory by now, each with whether its columns are in channel groups on tiles.
        self._off_chip = dict(plan.values.remote)
        self._hosted = _HostedValues(plan)
        self._settled: set[int] = set()  # results in their final place
        self._recent_loads: dict[Var, Var] = {}  # loaded variables by those in streaming memory, oldest first
        self._views: dict[tuple[Var, int], Var] = {}  # from a view and a step to its variable in that step
        self._emitted_views: set[Var] = set()  # results of views as named in the plan: later steps need other names
        self._handles: dict[Var, Var] = {}  # from a spilled value to its variable in streaming memory

    def store(self, results: Collection[int], step: int) -> None:
        """Stores results that are due, each in the buffer of its destination or a new one."""
        for number in results:
            if self._settle_result(number):
                continue
            value = self.moved.outvars[number]
            destination = self._plan.values.destinations[number]
            local = self.on_chip(value, step, user=None)
            like = self._plan.defining.get(value) if isinstance(value, Var) else None
            if destination is None:
                is_result = not self._plan.values.is_put[number]
                self.moved.outvars[number] = self._put_in_new_buffer(local, step, like, is_result=is_result)
            else:
                self.moved.outvars[number] = self._store_in(destination, local, step, like)
            self._settled.add(number)

    def fetch_results(self, step: int) -> None:
        """Loads the results that are on chip after the last step."""
        for number, value in enumerate(self._plan.values.outvars):
            is_unchanged = self.moved.outvars[number] is value
            if is_unchanged and self._plan.values.destinations[number] is not value and not self._settle_result(number):
                self.moved.outvars[number] = self.on_chip(value, step, user=None)

    def _store_in(self, destination: Var, value: Atom, step: int, like: JaxprEqn | None) -> Var:
        stored = Var(destination.aval)
        self._emit(new_equation(remote_store_p, [destination, value], [stored], {}, like), step)
        return stored

    def _put_in_new_buffer(self, value: Atom, step: int, like: JaxprEqn | None, *, is_result: bool = False) -> Var:
        """Stores a value in a new buffer; returns the variable that stands for it there."""
        handle = Var(value.aval)
        self._emit(new_equation(remote_put_p, [value], [handle], {"is_result": is_result}, like), step)
        self._off_chip[handle] = False
        return handle

    def _settle_result(self, number: int) -> bool:
        """Notes that a result is in its final place if it is: True if so.

        That is the buffer of its destination, or for a put result without one a buffer that no other result has.
        """
        outvars = self.moved.outvars
        destinations = self._plan.values.destinations
        value = self._hosted.resolved(outvars[number])
        if number in self._settled or value not in self._hosted:  # one on chip has to be stored
            return number in self._settled
        buffer = self._hosted.buffer(value)
        buffers_of_results = [*destinations, *(self._hosted.buffer(outvars[n]) for n in self._settled)]
        is_free_put = destinations[number] is None and self._plan.values.is_put[number]
        if buffer is destinations[number] or (is_free_put and buffer not in buffers_of_results):
            outvars[number] = value
            self._settled.add(number)
        return number in self._settled

    def mark_hosted(self, var: Var, memory: Var | None = None) -> Var:
        """Notes that the user has put a value on the host, in the buffer of an earlier value or (None) a new one."""
        self._off_chip[var] = False
        self._hosted.add(var, memory)
        return var

    def _put_on_host(self, eqn: JaxprEqn, number: int, step: int) -> None:
        """Stores the value of a `host_put`, equation `number`, unless it is on the host already."""
        (value,) = eqn.invars
        (handle,) = eqn.outvars
        if isinstance(value, Var) and value in self._hosted:
            self._hosted.stand_in(value, handle)
            return
        local = self.on_chip(value, step, eqn)
        destination = self._destination_of(handle, number)
        if destination is None:
            stored = self.mark_hosted(self._put_in_new_buffer(local, step, eqn))
        else:
            stored = self.mark_hosted(self._store_in(destination, local, step, eqn), destination)
        self._hosted.stand_in(stored, handle)

    def _destination_of(self, value: Var, number: int) -> Var | None:
        """The argument whose buffer a value takes as a result, if nothing reads that after equation `number`."""
        pairs = zip(self.moved.outvars, self._plan.values.destinations, strict=True)
        destination = next((home for x, home in pairs if x is value and home is not None), None)
        return None if destination is None or self._hosted.is_read_after(destination, number) else destination

    def memory_for_state(self, initial: Atom, result: Var, eqn: JaxprEqn, number: int, step: int) -> Var:
        """A buffer that a loop may overwrite, with its first value: the first value itself, or a copy."""
        if isinstance(initial, Var) and initial in self._hosted and not self._hosted.is_read_after(initial, number):
            memory = self._hosted.buffer(initial)
            values_read = [viewed_value(var, self._plan.defining) for var in variables_read(eqn)]
            buffers_read = [self._hosted.buffer(value) for value in values_read]
            may_overwrite = self._hosted.is_in_new_buffer(initial) or self._destination_of(result, number) is memory
            if may_overwrite and buffers_read.count(memory) == 1:  # no other operand is in the buffer
                return initial
        return self.mark_hosted(self._put_in_new_buffer(self.on_chip(initial, step, eqn), step, eqn))

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
        return atom in self._hosted

    def add_equation(self, eqn: JaxprEqn, number: int, step: int) -> None:
        """Adds an equation, with loads of its operands, and stores of its results that are spilled."""
        eqn = eqn.replace(invars=list(map(self._hosted.resolved, eqn.invars)))
        if eqn.primitive is host_put_p:
            self._put_on_host(eqn, number, step)
            return
        if uses_streaming_memory(eqn, self.is_hosted):
            self._emit(rewrite_control_flow(eqn, self, number, step, self._rewrite_body), step)
        else:
            self._add_with_loads(eqn, step)
        for var in eqn.outvars:
            if var in self._plan.spilled and var not in self._off_chip:
                self._handles[var] = self._put_in_new_buffer(var, step, eqn)

    def _add_with_loads(self, eqn: JaxprEqn, step: int) -> None:
        """Adds an equation after loads of its operands; one that accesses rows of a table off chip moves these."""
        is_off_chip = self.stays_off_chip(eqn)
        operands = [x if is_off_chip[n] else self.on_chip(x, step, eqn) for n, x in enumerate(eqn.invars)]
        local_eqn = eqn.replace(invars=operands)
        for row_eqn in row_access(local_eqn) if any(is_off_chip) and accesses_rows(eqn) else [local_eqn]:
            self._emit(row_eqn, step)

    def stays_off_chip(self, eqn: JaxprEqn) -> list[bool]:
        """For each operand whether it stays off chip: a table whose rows move, or a stack that a loop reads by rows."""
        in_place = self._plan.values.in_place
        pairs = zip(_operands_by_rows(eqn, in_place), eqn.invars, strict=True)
        return [is_by_rows and (x in self._off_chip or x in in_place) for is_by_rows, x in pairs]

    def on_chip(self, atom: Atom, step: int, user: JaxprEqn | None) -> Atom:
        """The variable on chip that stands for a value in a step, loaded or viewed there if need be.

        Args:
            atom: the value.
            step: the step that reads it.
            user: equation that reads it, at whose source a load is; None for a result.
        """
        atom = self._hosted.resolved(atom)
        if not isinstance(atom, Var):
            return atom
        if atom in self._off_chip:
            return self._load_to_chip(atom, step, user)
        definition = self._plan.defining.get(atom)
        if definition is not None and is_view(definition):
            is_slice = self._emits_slice_on_host(atom, definition, step)
            return self._load_to_chip(atom, step, user) if is_slice else self._emit_view(atom, definition, step, user)
        # A spilled value is on chip still in the step that computes it and in the next one.
        if atom in self._handles and step > self._plan.values.steps[self._plan.number_of[atom]].step + 1:
            return self._load_to_chip(self._handles[atom], step, user)
        return atom

    def _emits_slice_on_host(self, atom: Var, view: JaxprEqn, step: int) -> bool:
        """Emits a view that slices entire rows of a value on the host, and marks it as there; False for other views."""
        source = self._hosted.resolved(view.invars[0])
        if not is_slice_of_rows(view) or source not in self._hosted:
            return False
        self._emit(view.replace(invars=[source]), step)
        self._off_chip[atom] = False
        return True

    def _emit_view(self, atom: Var, view: JaxprEqn, step: int, user: JaxprEqn | None) -> Var:
        """A view of a value on chip, repeated in each step because the value may be loaded anew."""
        if (atom, step) not in self._views:
            outvars = view.outvars
            if atom in self._emitted_views:
                outvars = [x if isinstance(x, DropVar) else Var(x.aval) for x in view.outvars]
            self._emitted_views.update(view.outvars)
            invars = [self.on_chip(x, step, user) for x in view.invars]
            self._emit(view.replace(invars=invars, outvars=outvars), step)
            self._views.update(((original, step), new) for original, new in zip(view.outvars, outvars, strict=True))
        return self._views[atom, step]

    def _load_to_chip(self, remote: Var, step: int, user: JaxprEqn | None) -> Var:
        """A value on chip: from a recent load, or loaded now at the source of `user`.

        A value occupies tiles from its load to its last reader, so older loads are not read again, but repeated.
        """
        if remote not in self._recent_loads:
            loaded = Var(remote.aval)
            params = {"in_groups": self._off_chip[remote]}
            self._emit(new_equation(remote_load_p, [remote], [loaded], params, user), step)
            self._recent_loads[remote] = loaded
            if len(self._recent_loads) > _MAX_RECENT_LOADS:
                oldest = next(iter(self._recent_loads))
                del self._recent_loads[oldest]
        return self._recent_loads[remote]

    def _emit(self, eqn: JaxprEqn, step: int) -> None:
        self.moved.eqns.append(eqn)
        self.moved.steps.append(step)


def _operands_by_rows(eqn: JaxprEqn, in_place: Collection[Var]) -> Sequence[bool]:
    """For each operand whether an equation reads or writes it by rows, so that it need not be on chip entirely."""
    if eqn.primitive.name == "scan":
        constants, carries, stacks = (eqn.invars[places] for places in scan_body(eqn.params).operands)
        unstacked = [*constants, *carries]
        return [*[False] * len(unstacked), *(not any(x is other for other in unstacked) for x in stacks)]
    is_table = accesses_rows(eqn) and (not writes_rows(eqn) or eqn.outvars[0] in in_place)
    return [is_table and n == 0 for n in range(len(eqn.invars))]
