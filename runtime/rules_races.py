"""Rules of the verifier on races: in a compute set no vertex writes what another vertex writes or reads.

One group is judged in O(rank): where every output index is one term with coefficient ±1, boxes of different blocks
along an axis are disjoint, so it suffices that every split axis appears in every output. Fields that share a variable
are judged by their whole tensors, and where these meet, exactly, by the contiguous runs of all their blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from ipujax.runtime.aliasing import surely_disjoint
from ipujax.runtime.errors import VerifyError
from ipujax.runtime.exchange_runs import Bases, Runs, flat_bases, ragged
from ipujax.runtime.rules_facts import Connection, Facts, access_runs, element_name, joined
from ipujax.runtime.variable import Variable
from ipujax.runtime.vertices import Dim, VertexGroup

ByVariable = dict[Variable, list[Connection]]


def write_race(facts: Facts) -> Iterator[VerifyError]:
    """No two vertices of a compute set write one element."""
    for connections in facts.connections.values():
        for connection in connections:
            if connection.field.is_written:
                yield from _within_group(connection)
        for variable, writers in _by_variable(connections).items():
            if len(writers) > 1 and not surely_disjoint([writer.access.tensor.node for writer in writers]):
                yield from _between(variable, writers)


def _within_group(connection: Connection) -> Iterator[VerifyError]:
    group, where = connection.group, connection.where
    named: set[int] = set()
    for dim in connection.access.dims:
        if dim.terms:
            named.update(term.axis for term in dim.terms)
            if not _is_one_to_one(dim, group):
                expected = "one term with coefficient 1 or −1, block numbers in mixed radix, or a constant"
                yield VerifyError("write-race", f"{connection} has an index of another form", where=where,
                                  expected=expected, got=str(dim))  # fmt: skip
    missing = tuple(number for number, axis in enumerate(group.axes) if axis.blocks > 1 and number not in named)
    if missing and np.any(np.sum(group.tile >= 0, axis=missing) > 1):
        names = ", ".join(group.axes[number].name for number in missing)
        yield VerifyError(
            "write-race",
            f"several vertices write one element of {connection.access.tensor!r} through {connection}",
            where=where,
            expected="every split axis in every output",
            got=f"no index along {names}",
            hint="write partial results, indexed by the block number of the axis, and reduce them",
        )


def _is_one_to_one(dim: Dim, group: VertexGroup) -> bool:
    """Whether different blocks have different indices: one plain term, or block numbers as digits of one number."""
    if dim.divisor != 1:
        return False
    if len(dim.terms) == 1:
        return abs(dim.terms[0].coeff) == 1
    weight = 1
    for term in sorted(dim.terms, key=lambda term: term.coeff):
        if term.unit != "block" or term.coeff != weight:
            return False
        weight *= group.axes[term.axis].blocks
    return True


def _by_variable(connections: Iterable[Connection]) -> ByVariable:
    """The fields of one compute set that write, by variable."""
    found: ByVariable = {}
    for connection in connections:
        if connection.field.is_written:
            for variable in connection.access.tensor.variables():
                found.setdefault(variable, []).append(connection)
    return found


def _between(variable: Variable, writers: Sequence[Connection]) -> Iterator[VerifyError]:
    """Refuses two fields that write one element of a variable."""
    bases = _bases(writers)
    runs = _runs_in(variable, writers, {}, bases)
    order = np.argsort(runs.start, kind="stable")
    start, end = runs.start[order], (runs.start + runs.length)[order]
    clash = np.flatnonzero(start[1:] < np.maximum.accumulate(end)[:-1])
    if clash.size:
        element = element_name(int(start[clash[0] + 1]), bases)
        names = " and ".join(dict.fromkeys(str(writer) for writer in writers))
        what = f"{element} is written twice, by {names}"
        yield VerifyError("write-race", what, where=writers[-1].where, expected="disjoint regions")


def read_write_race(facts: Facts) -> Iterator[VerifyError]:
    """No vertex of a compute set reads what another vertex of it writes."""
    for connections in facts.connections.values():
        written = _by_variable(connections)
        for reader in connections:
            if not reader.field.is_read:
                continue
            for variable in reader.access.tensor.variables():
                writers = written.get(variable, ())
                if not all(_same_region(reader, writer) or _apart(reader, writer) for writer in writers):
                    yield from _read_by_another(variable, reader, writers)


def _same_region(reader: Connection, writer: Connection) -> bool:
    """Whether every vertex surely reads just what it writes itself; by the rule on write races no other writes that."""
    if reader.group is not writer.group:
        return False
    a, b = reader.access, writer.access
    return a is b or (a.dims == b.dims and (a.tensor is b.tensor or a.tensor.node == b.tensor.node))


def _apart(reader: Connection, writer: Connection) -> bool:
    return surely_disjoint([reader.access.tensor.node, writer.access.tensor.node])


def _read_by_another(variable: Variable, reader: Connection, writers: Sequence[Connection]) -> Iterator[VerifyError]:
    """Refuses a read of an element of a variable that another vertex writes."""
    bases = _bases([reader, *writers])
    first: dict[VertexGroup, int] = {}
    written = _runs_in(variable, writers, first, bases)
    order = np.argsort(written.start)
    who, start, end = written.box[order], written.start[order], (written.start + written.length)[order]
    read = _runs_in(variable, [reader], first, bases)
    # Written runs are disjoint, so those that meet a run that is read are neighbours.
    low = np.searchsorted(end, read.start, side="right")
    high = np.searchsorted(start, read.start + read.length, side="left")
    row, within = ragged(np.maximum(high - low, 0))
    met = low[row] + within
    raced = np.flatnonzero(who[met] != read.box[row])
    if raced.size:
        element = element_name(int(max(start[met[raced[0]]], read.start[row[raced[0]]])), bases)
        writer = next(w for w in writers if w.group is not reader.group or not _same_region(reader, w))
        what = f"{element} is read through {reader} and written by another vertex through {writer}"
        hint = "do it in two compute sets, or write to another variable"
        yield VerifyError("read-write-race", what, where=reader.where, hint=hint)


def _bases(connections: Iterable[Connection]) -> Bases:
    return flat_bases(list(dict.fromkeys(v for c in connections for v in c.access.tensor.variables())))


def _runs_in(
    variable: Variable, connections: Iterable[Connection], first: dict[VertexGroup, int], bases: Bases
) -> Runs:
    """The runs that vertices touch in one variable; vertices of all groups numbered in one row, kept in `first`."""
    parts = []
    for connection in connections:
        group = connection.group
        if group not in first:
            first[group] = sum(each.tile.size for each in first)
        runs = access_runs(group, connection.access, bases)
        inside = (runs.start >= bases[variable]) & (runs.start < bases[variable] + variable.size)
        parts.append(Runs(runs.box[inside] + first[group], runs.start[inside], runs.length[inside]))
    return joined(parts)
