"""Rules of the verifier on races: in a compute set no vertex writes what another vertex writes or reads.

A vertex itself may read what it writes if both are the same region in the same order, so that it can work in place.

One group is judged in O(rank): where every output index is one term with coefficient ±1, boxes of different blocks
along an axis are disjoint, so it suffices that every split axis appears in every output. Fields that share a variable
are judged by their whole tensors, and where these meet, exactly, by the contiguous runs of all their blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from ipujax.runtime.errors import VerifyError
from ipujax.runtime.exchange import Bases, Runs, concat_runs, flat_bases
from ipujax.runtime.graph import Dim, VertexGroup
from ipujax.runtime.tensor import Variable, surely_disjoint
from ipujax.runtime.verify.facts import Connection, Facts, access_runs, element_name

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
    """Whether different blocks have different indices: one plain term, or block numbers in mixed radix."""
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
    """No vertex of a compute set reads what another writes, nor what it writes itself, unless element by element."""
    for connections in facts.connections.values():
        written = _by_variable(connections)
        for reader in connections:
            if not reader.field.is_read:
                continue
            for variable in reader.access.tensor.variables():
                writers = [writer for writer in written.get(variable, ()) if not _in_place(reader, writer)]
                if not all(surely_disjoint([reader.access.tensor.node, w.access.tensor.node]) for w in writers):
                    yield from _read_and_written(variable, reader, writers)


def _in_place(reader: Connection, writer: Connection) -> bool:
    """Whether every vertex surely reads just what it writes itself; by the rule on write races no other writes that."""
    return reader.group is writer.group and reader.access.is_same(writer.access)


def _read_and_written(variable: Variable, reader: Connection, writers: Sequence[Connection]) -> Iterator[VerifyError]:
    """Refuses a read of an element of a variable that is written through a field of another region."""
    bases = _bases([reader, *writers])
    first: dict[VertexGroup, int] = {}
    parts = [_runs_in(variable, [writer], first, bases) for writer in writers]
    written, by = concat_runs(parts), np.repeat(np.arange(len(parts)), [len(part.block) for part in parts])
    order = np.argsort(written.start)
    start, end = written.start[order], (written.start + written.length)[order]
    read = _runs_in(variable, [reader], first, bases)
    # Written runs are disjoint, so those that meet a run that is read are neighbours.
    low = np.searchsorted(end, read.start, side="right")
    high = np.searchsorted(start, read.start + read.length, side="left")
    raced = np.flatnonzero(high > low)
    if raced.size:
        row, met = raced[0], order[low[raced[0]]]
        element = element_name(int(max(written.start[met], read.start[row])), bases)
        itself = written.block[met] == read.block[row]
        who = "the same vertex" if itself else "another vertex"
        what = f"{element} is read through {reader} and written by {who} through {writers[by[met]]}"
        hint = "do it in two compute sets, or write to another variable"
        if itself:
            hint += "; what is updated in place is one in-out field, or an input and an output of the same region"
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
        parts.append(Runs(runs.block[inside] + first[group], runs.start[inside], runs.length[inside]))
    return concat_runs(parts)
