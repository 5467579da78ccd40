"""Operations of which reports warn: slower than the machine's own code, or without a price.

Input: an executable; for operations without a price also the runs of each of its steps. Output: rows, in program order:
for each operation that runs as one vertex, for each line and dtype that the machine lacks, for each line, operation and
reason of a slow path of rows, and for each operation of which nothing is known but its operands and results, or not its
trip counts: vertices of codelets that are not priced, and calls of Python functions, of which only the transfers have
cycles.
Codelets that only move elements compute in no dtype, as any is moved as words; nor do random number generators, and
integers that are indices.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from ipujax.runtime.compile import Executable
from ipujax.runtime.cost import ComputeSetCost, CopyCost
from ipujax.runtime.graph import ComputeSet, Execute, Leaf, Program, StreamOut
from ipujax.runtime.host import CallStream, HostCall
from ipujax.runtime.tensor import Origin, dtype_name, is_key_dtype


@dataclass(frozen=True, slots=True)
class Emulated:
    """The operations of one line of source on one dtype that the target computes with others.

    Args:
        dtype: its name.
        operations: the codelets, in program order.
        cycles: cycles of one run of each of their compute sets, on its slowest tile.
        origin: the line.
    """

    dtype: str
    operations: tuple[str, ...]
    cycles: int
    origin: Origin


def emulated(executable: Executable) -> tuple[Emulated, ...]:
    """Return the arithmetic in dtypes that are not among the target's `native_dtypes`, in program order."""
    rows: dict[tuple[str, str], Emulated] = {}
    for leaf, cost in executable.costs.items():
        if isinstance(leaf, Execute) and isinstance(cost, ComputeSetCost):
            origin = leaf.compute_set.origin
            cycles = int(cost.compute_cycles.max())
            for dtype, operations in _emulated_codelets(executable, leaf.compute_set).items():
                row = rows.get((dtype, str(origin)), Emulated(dtype, (), 0, origin))
                names = tuple(dict.fromkeys((*row.operations, *operations)))
                rows[dtype, str(origin)] = replace(row, operations=names, cycles=row.cycles + cycles)
    return tuple(rows.values())


def _emulated_codelets(executable: Executable, compute_set: ComputeSet) -> dict[str, list[str]]:
    """Return the codelets of a compute set that compute in dtypes the target lacks, by dtype."""
    codelets: dict[str, list[str]] = {}
    for group in executable.graph.groups[compute_set]:
        if not group.codelet.moves:
            names = [dtype_name(item.dtype) for item in group.codelet.fields if not is_key_dtype(item.dtype)]
            for dtype in dict.fromkeys(names):
                if dtype not in executable.target.native_dtypes:
                    codelets.setdefault(dtype, []).append(group.codelet.name)
    return codelets


@dataclass(frozen=True, slots=True)
class SlowOperation:
    """An operation whose code or copies take a slower form, because rows are no whole number of vectors.

    Args:
        operation: its codelet, or the name of a copy.
        reason: what is slow, and why: "C++ because the row length 197 is no multiple of 4".
        cycles: cycles of one run of each of its steps beyond those of rows of whole vectors, on the tile that takes
            longest; of copies all cycles.
        origin: the line.
    """

    operation: str
    reason: str
    cycles: int
    origin: Origin


def slow_operations(executable: Executable) -> tuple[SlowOperation, ...]:
    """Return the slow paths of a program by operation, reason and line, most cycles first."""
    rows: dict[tuple[str, str, str], SlowOperation] = {}
    for leaf, cost in executable.costs.items():
        for row in _slow_paths(executable, leaf, cost):
            key = row.operation, row.reason, str(row.origin)
            earlier = rows.get(key, replace(row, cycles=0))
            rows[key] = replace(earlier, cycles=earlier.cycles + row.cycles)
    return tuple(sorted(rows.values(), key=lambda row: -row.cycles))


def _slow_paths(executable: Executable, leaf: Leaf, cost: object) -> Iterator[SlowOperation]:
    """Yield the slow paths of one step, with the cycles of one execution."""
    if isinstance(leaf, Execute) and isinstance(cost, ComputeSetCost):
        groups = executable.graph.groups[leaf.compute_set]
        for number, reason, cycles in cost.slow_paths:
            group = groups[number]
            origin = group.origin if group.origin.line else leaf.compute_set.origin
            yield SlowOperation(group.codelet.name, str(reason), cycles, origin)
    elif isinstance(cost, CopyCost) and cost.slow_path is not None:
        yield SlowOperation(getattr(leaf, "name", ""), str(cost.slow_path), int(cost.copy_cycles.max()), leaf.origin)


@dataclass(frozen=True, slots=True)
class Fallback:
    """An operation without a tile-parallel rule, which runs as one vertex.

    Args:
        operation: its name.
        name: its compute set.
        cycles: cycles of one run of its slowest tile.
        borrowed_tiles: tiles over which its buffers are spread, 1 when they fit its own.
        origin: origin of the compute set.
    """

    operation: str
    name: str
    cycles: int
    borrowed_tiles: int
    origin: Origin


_GATHERED = "gathered: no partition rule, every IPU of the mesh computes it whole"


def fallbacks(executable: Executable, borrowed_tiles: Mapping[str, int]) -> tuple[Fallback, ...]:
    """Return the operations that run as one vertex, in program order, then those that all IPUs of a mesh compute whole.

    Args:
        executable: the compiled program.
        borrowed_tiles: tiles over which the buffers of a compute set are spread, by its name.
    """
    notes = executable.graph.notes
    rows: dict[ComputeSet, Fallback] = {}  # by compute set: one that runs at several places is one row
    for leaf, cost in executable.costs.items():
        if isinstance(leaf, Execute) and isinstance(cost, ComputeSetCost) and leaf.compute_set in notes.fallbacks:
            name = leaf.compute_set.name
            cycles = int(cost.compute_cycles.max())
            operation = notes.fallbacks[leaf.compute_set]
            origin = leaf.compute_set.origin
            rows[leaf.compute_set] = Fallback(operation, name, cycles, borrowed_tiles.get(name, 1), origin)
    gathered = [Fallback(operation, _GATHERED, 0, 1, Origin(line=line)) for operation, line in notes.gathered]
    return (*rows.values(), *gathered)


@dataclass(frozen=True, slots=True)
class Unpriced:
    """An operation whose work is unknown, so that the cycles of a run do not count it.

    Args:
        operation: its name.
        place: "tiles" for code on the chip, "host" for a Python function that the program waits for.
        runs: how often it runs; None if that depends on data.
        origin: origin of its first step.
    """

    operation: str
    place: Literal["tiles", "host"]
    runs: int | None
    origin: Origin


def unpriced(executable: Executable, runs: Mapping[Program, int] | None) -> tuple[Unpriced, ...]:
    """Return the operations of a program that have no price; with runs by step, None if a trip count is data."""
    rows: dict[object, Unpriced] = {}  # by what runs: a compute set at several places, a call with several operands
    graph = executable.graph
    for leaf in executable.costs:
        count = None if runs is None else runs.get(leaf, 0)
        if isinstance(leaf, Execute):
            key: object = leaf.compute_set
            name = graph.notes.fallbacks.get(leaf.compute_set, leaf.compute_set.name)
            row = Unpriced(name, "tiles", count, leaf.compute_set.origin)
            is_priced = all(group.codelet.is_priced for group in graph.groups[leaf.compute_set])
        else:
            call = _first_transfer(leaf)
            key = call
            row = Unpriced(call.name if call else "", "host", count, leaf.origin)
            is_priced = call is None
        if not is_priced:
            rows[key] = row if key not in rows else _together(rows[key], row)
    return tuple(rows.values())


def unpriced_section(rows: Sequence[Unpriced]) -> dict[str, Any]:
    """Return the section of the execution profile; without rows none."""
    names = ("operation", "place", "runs")
    data = [{name: getattr(row, name) for name in names} | {"location": str(row.origin)} for row in rows]
    return {"unpriced": data} if data else {}


def _first_transfer(leaf: Leaf) -> HostCall | None:
    """The call whose first operand a step sends, so that each run of the call is counted once."""
    stream = leaf.stream if isinstance(leaf, StreamOut) else None
    return stream.call if isinstance(stream, CallStream) and stream.number == 0 else None


def _together(first: Unpriced, other: Unpriced) -> Unpriced:
    runs = None if first.runs is None or other.runs is None else first.runs + other.runs
    return Unpriced(first.operation, first.place, runs, first.origin)
