"""Operations without a price: code of which nothing is known but its operands and results, or not its trip counts.

Input: an `Executable`, and the runs of each of its steps. Output: rows, in program order: vertices of codelets that are
not priced, and calls of Python functions, of which only the transfers have cycles.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ipujax.runtime.compile import Executable
from ipujax.runtime.graph import Execute, Leaf, Program, StreamOut
from ipujax.runtime.host import CallStream, HostCall
from ipujax.runtime.tensor import Origin


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
