"""Rules of the verifier on races: in a compute set no vertex writes an element that another vertex reads or writes.

A vertex may read the region that it writes if it does both in the same order, so that it can work in place.

One group is judged in O(rank): where every output index is one term with coefficient ±1, different blocks along
an axis write disjoint regions, so it suffices that every split axis appears in every output. Fields that share a
variable are compared as whole tensors and, where these overlap, exactly, by the contiguous runs of all their blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from ipujax.runtime.errors import VerifyError
from ipujax.runtime.exchange import Bases, Runs, concat_runs, flat_bases
from ipujax.runtime.graph import Dim, VertexGroup
from ipujax.runtime.tensor import Variable, surely_disjoint
from ipujax.runtime.verify.inventory import Connection, Inventory, access_runs, element_name

ByVariable = dict[Variable, list[Connection]]


def write_race(inventory: Inventory) -> Iterator[VerifyError]:
    """No two vertices of a compute set write one element."""
    for connections in inventory.connections.values():
        for connection in connections:
            if connection.field.is_written:
                yield from _within_group(connection)
        for variable, writers in _group_writers(connections).items():
            if len(writers) > 1 and not surely_disjoint([writer.access.tensor.node for writer in writers]):
                yield from _between_fields(variable, writers)


def _within_group(connection: Connection) -> Iterator[VerifyError]:
    """Yield an error unless the form of a field's indices shows that no two vertices of its group write one element."""
    group = connection.group
    where = connection.origin
    indexed_axes: set[int] = set()
    for dim in connection.access.dims:
        if dim.terms:
            indexed_axes.update(term.axis for term in dim.terms)
            if not _is_one_to_one(dim, group):
                expected = "one term with coefficient 1 or −1, block numbers in mixed radix, or a constant"
                yield VerifyError("write-race", f"{connection} has an index of another form", where=where,
                                  expected=expected, got=str(dim))  # fmt: skip
    missing = tuple(number for number, axis in enumerate(group.axes) if axis.blocks > 1 and number not in indexed_axes)
    # A grid may have one vertex only along a missing axis, and no vertex (tile −1) in its other blocks.
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
    """Return whether different blocks have different indices: one plain term, or block numbers in mixed radix."""
    if dim.divisor != 1:
        return False
    if len(dim.terms) == 1:
        return abs(dim.terms[0].coeff) == 1
    # Mixed radix: the coefficient of each term is the product of the block counts of the terms before it.
    weight = 1
    for term in sorted(dim.terms, key=lambda term: term.coeff):
        if term.unit != "block" or term.coeff != weight:
            return False
        weight *= group.axes[term.axis].blocks
    return True


def _group_writers(connections: Iterable[Connection]) -> ByVariable:
    """Group the written fields of a compute set by variable."""
    writers: ByVariable = {}
    for connection in connections:
        if connection.field.is_written:
            for variable in connection.access.tensor.variables():
                writers.setdefault(variable, []).append(connection)
    return writers


def _between_fields(variable: Variable, writers: Sequence[Connection]) -> Iterator[VerifyError]:
    """Yield an error if two fields write one element of a variable."""
    bases = _bases(writers)
    runs = _runs_in(variable, writers, {}, bases)
    order = np.argsort(runs.start, kind="stable")
    start = runs.start[order]
    end = (runs.start + runs.length)[order]
    # A run overlaps an earlier one iff it starts before the furthest end so far, which need not be its neighbour's.
    clash = np.flatnonzero(start[1:] < np.maximum.accumulate(end)[:-1])
    if clash.size:
        element = element_name(int(start[clash[0] + 1]), bases)
        names = " and ".join(dict.fromkeys(str(writer) for writer in writers))
        message = f"{element} is written twice, by {names}"
        yield VerifyError("write-race", message, where=writers[-1].origin, expected="disjoint regions")


def read_write_race(inventory: Inventory) -> Iterator[VerifyError]:
    """No vertex of a compute set reads an element that another writes, nor one of its results, unless in place."""
    for connections in inventory.connections.values():
        writers_of = _group_writers(connections)
        for reader in connections:
            if not reader.field.is_read:
                continue
            for variable in reader.access.tensor.variables():
                writers = [writer for writer in writers_of.get(variable, ()) if not _in_place(reader, writer)]
                if not all(surely_disjoint([reader.access.tensor.node, w.access.tensor.node]) for w in writers):
                    yield from _between_reader_and_writers(variable, reader, writers)


def _in_place(reader: Connection, writer: Connection) -> bool:
    # Every vertex surely reads the region that it writes; no other vertex writes that, by the rule "write-race".
    return reader.group is writer.group and reader.access.is_same(writer.access)


def _between_reader_and_writers(
    variable: Variable, reader: Connection, writers: Sequence[Connection]
) -> Iterator[VerifyError]:
    """Yield an error if a field reads an element of a variable that other fields write."""
    bases = _bases([reader, *writers])
    first_vertices: dict[VertexGroup, int] = {}
    parts = [_runs_in(variable, [writer], first_vertices, bases) for writer in writers]
    written = concat_runs(parts)
    writer_of_run = np.repeat(np.arange(len(parts)), [len(part.block) for part in parts])
    order = np.argsort(written.start)
    start = written.start[order]
    end = (written.start + written.length)[order]
    read = _runs_in(variable, [reader], first_vertices, bases)
    # Written runs are disjoint, so those that meet a run that is read are neighbours.
    low = np.searchsorted(end, read.start, side="right")
    high = np.searchsorted(start, read.start + read.length, side="left")
    raced = np.flatnonzero(high > low)
    if raced.size:
        row = raced[0]
        run = order[low[row]]
        element = element_name(int(max(written.start[run], read.start[row])), bases)
        is_same_vertex = written.block[run] == read.block[row]
        vertex = "the same vertex" if is_same_vertex else "another vertex"
        message = f"{element} is read through {reader} and written by {vertex} through {writers[writer_of_run[run]]}"
        hint = "do it in two compute sets, or write to another variable"
        if is_same_vertex:
            hint += "; to update in place, use one in-out field, or an input and an output of the same region"
        yield VerifyError("read-write-race", message, where=reader.origin, hint=hint)


def _bases(connections: Iterable[Connection]) -> Bases:
    return flat_bases(list(dict.fromkeys(v for c in connections for v in c.access.tensor.variables())))


def _runs_in(
    variable: Variable, connections: Iterable[Connection], first_vertices: dict[VertexGroup, int], bases: Bases
) -> Runs:
    """List the runs of elements that vertices touch in one variable.

    `first_vertices` has the number of each group's first vertex, and grows: the runs of several calls that share it
    have one number for one vertex, so that a vertex is told from others that write what it reads.
    """
    parts = []
    for connection in connections:
        group = connection.group
        if group not in first_vertices:
            first_vertices[group] = sum(each.tile.size for each in first_vertices)
        runs = access_runs(group, connection.access, bases)
        inside = (runs.start >= bases[variable]) & (runs.start < bases[variable] + variable.size)
        parts.append(Runs(runs.block[inside] + first_vertices[group], runs.start[inside], runs.length[inside]))
    return concat_runs(parts)
