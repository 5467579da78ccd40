"""Rule of the verifier on undefined reads: nothing is read before it is written.

`EffectsOf` names the variables that may be read before they are written in full. Most programs have none but constants;
the others are followed through the program by the set of elements that are surely written, as sorted intervals: both
branches of a condition must write an element, a loop that may be skipped writes none. All operations on sets sort and
scan a few arrays, linear in the number of intervals.

Limits: a function is followed again at each call, because the variables written before it differ.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import reduce
from operator import and_

import numpy as np

from ipujax.runtime.errors import VerifyError
from ipujax.runtime.exchange import flat_bases
from ipujax.runtime.graph import Block, Branch, CrossReplicaCopy, Execute, Loop, Program, iteration
from ipujax.runtime.tensor import Tensor, Variable
from ipujax.runtime.verify.inventory import Connection, Inventory, access_runs, element_name, tensor_runs


@dataclass(frozen=True, eq=False, slots=True)
class Intervals:
    """Disjoint intervals [start, stop) in rising order that do not touch; made by `intervals`.

    Args:
        start: first element of each, int64[n].
        stop: one past its last element, int64[n].
    """

    start: np.ndarray
    stop: np.ndarray

    def __or__(self, other: Intervals) -> Intervals:
        """Return the union."""
        return intervals(np.append(self.start, other.start), np.append(self.stop, other.stop))

    def __and__(self, other: Intervals) -> Intervals:
        """Return the intersection."""
        bounds = np.concatenate([self.start, other.start, self.stop, other.stop])
        num_starts = len(self.start) + len(other.start)
        # A sweep over all bounds: where one interval starts as another stops, the overlap is empty and dropped below.
        step = np.where(np.arange(len(bounds)) < num_starts, 1, -1)
        order = np.argsort(bounds, kind="stable")
        overlap = np.flatnonzero(np.cumsum(step[order]) == 2)
        bounds = np.append(bounds[order], 0)
        return intervals(bounds[overlap], bounds[overlap + 1])

    def find_lacking(self, start: np.ndarray, stop: np.ndarray) -> int | None:
        """Return an element of some intervals, none empty, that is not in this set; None when all are."""
        # Intervals of this set do not touch, so one of them must contain each whole interval.
        number = np.searchsorted(self.start, start, side="right") - 1
        reach = np.append(self.stop, np.int64(-1))[number]
        lacking = np.flatnonzero(reach < stop)
        return int(max(reach[lacking[0]], start[lacking[0]])) if lacking.size else None


def intervals(start: np.ndarray, stop: np.ndarray) -> Intervals:
    """Return the set of all elements of some intervals in any order, which may overlap, touch or be empty."""
    filled = stop > start
    order = np.argsort(start[filled], kind="stable")
    start = start[filled][order]
    reach = np.maximum.accumulate(stop[filled][order])
    first = np.append(True, start[1:] > reach[:-1])[: len(start)]
    last = np.append(first[1:], True)[: len(start)]
    return Intervals(start[first], reach[last])


def empty_set() -> Intervals:
    return intervals(np.zeros(0, np.int64), np.zeros(0, np.int64))


# Flat elements that are surely written, of each variable that is followed.
State = dict[Variable, Intervals]


def undefined_read(inventory: Inventory) -> Iterator[VerifyError]:
    """No element is read before it is written."""
    doubtful = [v for v in inventory.effects(inventory.program).reads if not v.is_constant and v.size]
    if doubtful:
        yield from _Follower(inventory).follow(inventory.program, dict.fromkeys(doubtful, empty_set()))


class _Follower:
    """Follows the surely written elements through a program."""

    def __init__(self, inventory: Inventory) -> None:
        self._inventory = inventory
        self._touched: dict[tuple[object, Variable], Intervals] = {}

    def follow(self, node: Program, state: State) -> Iterator[VerifyError]:
        """Yield the undefined reads of a node, and add the elements that it surely writes to `state`."""
        match node:
            case Block():
                for child in node.children():
                    yield from self.follow(child, state)
            case Execute(compute_set):
                yield from self._check_compute_set(self._inventory.connections[compute_set], state)
            case Loop(test=None):
                # One iteration suffices: a later one finds more elements written, never fewer.
                if node.trips:
                    yield from self.follow(node.body, state)
            case Loop(test=Program() as test):
                yield from self.follow(test, state)
                yield from self._read(node, state)
                # The body may not run, so its writes count inside of it only.
                yield from self.follow(iteration(node), state.copy())
            case Branch():
                yield from self._read(node, state)
                yield from self._branches(node.children(), state)
            case _:
                yield from self._read(node, state)
                # A copy that writes in some replicas only leaves the others undefined.
                replicas = self._inventory.graph.replication_factor
                if not (isinstance(node, CrossReplicaCopy) and not node.reaches_all(replicas)):
                    for tensor in node.writes:
                        self._add(tensor, tensor, state)

    def _branches(self, branches: tuple[Program, ...], state: State) -> Iterator[VerifyError]:
        states = [state.copy() for _ in branches]
        for branch, end_state in zip(branches, states, strict=True):
            yield from self.follow(branch, end_state)
        for variable, before in state.items():
            after = [end_state[variable] for end_state in states]
            if any(written is not before for written in after):
                state[variable] = reduce(and_, after)

    def _check_compute_set(self, connections: Iterable[Connection], state: State) -> Iterator[VerifyError]:
        # All vertices read before any writes: two loops.
        for connection in connections:
            if connection.field.is_read:
                tensor = connection.access.tensor
                yield from self._undefined_reads(connection, tensor, state, str(connection), connection.origin)
        for connection in connections:
            if connection.field.is_written:
                self._add(connection, connection.access.tensor, state)

    def _read(self, node: Program, state: State) -> Iterator[VerifyError]:
        for tensor in node.reads:
            yield from self._undefined_reads(tensor, tensor, state, type(node).__name__, getattr(node, "origin", None))

    def _undefined_reads(
        self, user: Connection | Tensor, tensor: Tensor, state: State, name: str, where: object
    ) -> Iterator[VerifyError]:
        """Yield an error for the first element of each variable that is read and may not be written yet."""
        for variable in tensor.variables():
            if variable in state and not _is_full(state[variable], variable):
                touched = self._touched_elements(user, tensor, variable)
                element = state[variable].find_lacking(touched.start, touched.stop)
                if element is not None:
                    message = f"{element_name(element, {variable: 0})} is read before anything writes it, by {name}"
                    hint = "write it first, on every path through the program"
                    yield VerifyError("undefined-read", message, where=where, hint=hint)

    def _add(self, user: Connection | Tensor, tensor: Tensor, state: State) -> None:
        for variable in tensor.variables():
            if variable in state and not _is_full(state[variable], variable):
                state[variable] |= self._touched_elements(user, tensor, variable)

    def _touched_elements(self, user: Connection | Tensor, tensor: Tensor, variable: Variable) -> Intervals:
        """Return the elements of a variable that a field, or a whole tensor, touches; computed once."""
        if (user, variable) not in self._touched:
            bases = flat_bases(tensor.variables())
            if isinstance(user, Connection):
                runs = access_runs(user.group, user.access, bases)
            else:
                runs = tensor_runs(tensor, bases)
            start = runs.start - bases[variable]
            inside = (start >= 0) & (start < variable.size)
            self._touched[user, variable] = intervals(start[inside], (start + runs.length)[inside])
        return self._touched[user, variable]


def _is_full(written: Intervals, variable: Variable) -> bool:
    return len(written.start) == 1 and written.start[0] == 0 and written.stop[0] == variable.size
