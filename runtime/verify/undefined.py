"""Rule of the verifier on undefined reads: nothing is read before it is written.

`EffectsOf` names the variables that may be read before they are written in full. Most programs have none but constants;
the others are followed through the program by the set of elements that are surely written: both branches of a condition
must write an element, a loop that may be skipped writes none.

Limits: a function is followed anew at each call, since what is written differs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import reduce
from operator import and_

from ipujax.runtime.analysis import Intervals, nothing
from ipujax.runtime.analysis.intervals import intervals
from ipujax.runtime.errors import VerifyError
from ipujax.runtime.exchange import flat_bases
from ipujax.runtime.graph import (
    Block,
    Branch,
    CrossReplicaCopy,
    Execute,
    Loop,
    Program,
    iteration,
)
from ipujax.runtime.tensor import Tensor, Variable
from ipujax.runtime.verify.facts import Connection, Facts, access_runs, element_name, tensor_runs

# What is surely written of each variable that is followed: flat elements.
State = dict[Variable, Intervals]


def undefined_read(facts: Facts) -> Iterator[VerifyError]:
    """No element is read before something wrote it."""
    doubtful = [v for v in facts.effects(facts.program).reads if not v.is_constant and v.size]
    if doubtful:
        yield from _Follower(facts).follow(facts.program, dict.fromkeys(doubtful, nothing()))


class _Follower:
    """Follows what is surely written through a program.

    Args:
        facts: the program.
    """

    def __init__(self, facts: Facts) -> None:
        self._facts = facts
        self._touches: dict[tuple[object, Variable], Intervals] = {}

    def follow(self, node: Program, state: State) -> Iterator[VerifyError]:
        """Yields the undefined reads of a node and adds to `state` what it surely writes."""
        match node:
            case Block():
                for child in node.children():
                    yield from self.follow(child, state)
            case Execute(compute_set):
                yield from self._execute(self._facts.connections[compute_set], state)
            case Loop(test=None):
                if node.trips:
                    yield from self.follow(node.body, state)
            case Loop(test=Program() as test):
                yield from self.follow(test, state)
                yield from self._read(node, state)
                yield from self.follow(iteration(node), state.copy())
            case Branch():
                yield from self._read(node, state)
                yield from self._branches(node.children(), state)
            case _:
                yield from self._read(node, state)
                replicas = self._facts.graph.replication_factor
                if not (isinstance(node, CrossReplicaCopy) and None in node.sources(replicas)):
                    for tensor in node.writes:
                        self._add(tensor, tensor, state)

    def _branches(self, branches: tuple[Program, ...], state: State) -> Iterator[VerifyError]:
        ends = [state.copy() for _ in branches]
        for branch, end in zip(branches, ends, strict=True):
            yield from self.follow(branch, end)
        for variable, before in state.items():
            after = [end[variable] for end in ends]
            if any(end is not before for end in after):
                state[variable] = reduce(and_, after)

    def _execute(self, connections: Iterable[Connection], state: State) -> Iterator[VerifyError]:
        for connection in connections:
            if connection.field.is_read:
                yield from self._lacking(connection, connection.access.tensor, state, str(connection), connection.where)
        for connection in connections:
            if connection.field.is_written:
                self._add(connection, connection.access.tensor, state)

    def _read(self, node: Program, state: State) -> Iterator[VerifyError]:
        for tensor in node.reads:
            yield from self._lacking(tensor, tensor, state, type(node).__name__, getattr(node, "origin", None))

    def _lacking(
        self, what: Connection | Tensor, tensor: Tensor, state: State, name: str, where: object
    ) -> Iterator[VerifyError]:
        for variable in tensor.variables():
            if variable in state and not _is_full(state[variable], variable):
                touch = self._touched(what, tensor, variable)
                element = state[variable].first_lacking(touch.start, touch.stop)
                if element is not None:
                    message = f"{element_name(element, {variable: 0})} is read before anything writes it, by {name}"
                    hint = "write it first, on every way through the program"
                    yield VerifyError("undefined-read", message, where=where, hint=hint)

    def _add(self, what: Connection | Tensor, tensor: Tensor, state: State) -> None:
        for variable in tensor.variables():
            if variable in state and not _is_full(state[variable], variable):
                state[variable] |= self._touched(what, tensor, variable)

    def _touched(self, what: Connection | Tensor, tensor: Tensor, variable: Variable) -> Intervals:
        """The elements of a variable that a field, or a whole tensor, touches; found once."""
        if (what, variable) not in self._touches:
            bases = flat_bases(tensor.variables())
            if isinstance(what, Connection):
                runs = access_runs(what.group, what.access, bases)
            else:
                runs = tensor_runs(tensor, bases)
            start = runs.start - bases[variable]
            inside = (start >= 0) & (start < variable.size)
            self._touches[what, variable] = intervals(start[inside], (start + runs.length)[inside])
        return self._touches[what, variable]


def _is_full(written: Intervals, variable: Variable) -> bool:
    return len(written.start) == 1 and written.start[0] == 0 and written.stop[0] == variable.size
