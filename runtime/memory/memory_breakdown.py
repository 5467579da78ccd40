"""Memory of one tile as reports show it: live bytes at each step, and at the peak by variable, role, category and line.

Input: live ranges and the items of all tiles, each tile at its own peak. Output: `LiveBytes` of the fullest tile, whose
steps are those of the program itself: a call of a function counts with the peak of the function; and
`MemoryBreakdown`, whose rows add up, exactly, to the bytes of the fullest tile and to the mean of all tiles.
Source: the memory breakdown table of the TensorFlow Profiler, which lists what is in memory at the peak.
Limits: of neighbouring steps of long programs the fullest is listed, and gaps between variables come on top of its
bytes. Code, stacks and gaps have a category, no line. Arguments have "argument" and their name in place of a line.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Annotated

import numpy as np

from ipujax.runtime.errors import ArgumentValueError, shortened
from ipujax.runtime.files.figure_kinds import BYTES, Bytes, TileIndex
from ipujax.runtime.files.figure_records import Length
from ipujax.runtime.files.kinds import List
from ipujax.runtime.memory.contents import ItemOnTiles
from ipujax.runtime.memory.live import Occupancy
from ipujax.runtime.memory.live_item import LiveItem, readable_item, step_name
from ipujax.runtime.tensor import Origin, frozen
from ipujax.runtime.tensor.roles import UNKNOWN

MAX_STEPS = 2_000
_LISTED = "steps of the fullest tile"


@dataclass(frozen=True, slots=True, eq=False)
class LiveBytes:
    """Live bytes of one tile, step by step in program order.

    Args:
        tile: its number.
        steps: names of the listed steps.
        num_bytes: live bytes at each listed step, `always_bytes` included, int64[steps].
        always_bytes: bytes in use at every step.
        shown_of: number of steps of the program.
    """

    tile: TileIndex
    steps: Annotated[tuple[str, ...], Length(_LISTED)]
    num_bytes: Annotated[np.ndarray, List(BYTES, _LISTED)]
    always_bytes: Bytes
    shown_of: int

    @property
    def peak(self) -> int:
        """The number of the fullest listed step, the first of equal ones; 0 in a program without steps."""
        return int(self.num_bytes.argmax()) if len(self.num_bytes) else 0


def live_bytes(occupancy: Occupancy, tile: int, always_bytes: int) -> LiveBytes:
    """Return the live bytes of a tile at each step of the program; `always_bytes` are in use at every step."""
    frame = occupancy.frames.liveness[None]
    change = np.zeros(len(frame.steps) + 1, np.int64)  # difference to the step before, summed up below
    for interval in frame.intervals:
        size = occupancy.bytes_on_tile(interval.variable, tile)
        change[interval.first] += size
        change[interval.last + 1] -= size
    total = always_bytes + change.cumsum()[:-1]
    for position, step in enumerate(frame.steps):
        total[position] += sum(size for _, size in occupancy.buffers_on_tile(step, tile))
        functions = occupancy.frames.functions_during(None, step)
        total[position] += sum(int(occupancy.peak(function).total[tile]) for function in functions)
    # One step of each window of neighbours, the fullest, so that the peak is always listed.
    width = max(1, -(-len(total) // MAX_STEPS))
    listed = [n + int(total[n : n + width].argmax()) for n in range(0, len(total), width)]
    names = tuple(step_name(frame.steps[n])[0] for n in listed)
    return LiveBytes(tile, names, frozen(total[listed], np.int64), always_bytes, len(total))


COLUMNS = ("name", "role", "category", "line")


@dataclass(frozen=True, slots=True)
class BreakdownRow:
    """Bytes of all items that agree in some columns.

    Args:
        name: variable with dtype and shape, buffer of a step, or kind of code or gap; empty if the items may differ.
        role: one of `memory.ROLES`; empty if the items may differ.
        category: one of `memory.CATEGORIES`; empty if the items may differ.
        line: of the user's source, `file:line (function)`; empty for code, stacks and gaps, or if the items may differ.
        fullest_bytes: bytes on the fullest tile.
        mean_bytes: bytes on the mean tile, an exact fraction.
        num_items: number of items.
    """

    name: str
    role: str
    category: str
    line: str
    fullest_bytes: int
    mean_bytes: Fraction
    num_items: int

    @property
    def readable(self) -> str:
        """The name without JAX's transformations."""
        return readable_item(self.name)

    @property
    def description(self) -> str:
        """Name, role or category, and line."""
        # A role tells more than "variable" or "constant"; the other categories tell more than their roles.
        has_role = self.category in ("variable", "constant", "") and self.role not in ("", UNKNOWN)
        kind = self.role if has_role else self.category
        times = f"{self.num_items:,} × " if self.num_items > 1 and self.category else ""
        name = times + self.readable if self.name != self.category else ""
        return ", ".join(filter(None, (f"{name} ({kind})" if name and kind else name or kind, self.line)))

    def __str__(self) -> str:
        return f"{self.fullest_bytes:>12,} B  {float(self.mean_bytes):>14,.1f} B  {self.description}"


@dataclass(frozen=True, slots=True)
class MemoryBreakdown:
    """All that is in the memory of tiles, each at its own peak.

    Args:
        tile: the fullest tile.
        step: the step at which it is fullest.
        origin: of that step.
        num_tiles: number of all tiles.
        items: with bytes on the fullest tile and on all; most on the fullest tile first, then most on all.
    """

    tile: TileIndex
    step: str
    origin: Origin
    num_tiles: int
    items: tuple[LiveItem, ...]

    @property
    def rows(self) -> tuple[BreakdownRow, ...]:
        """A row for each variable, buffer and kind of code, in the order of `by`; those of equal columns are one."""
        return self.by(*COLUMNS)

    def by(self, *columns: str) -> tuple[BreakdownRow, ...]:
        """Return a row for each combination of values of some columns, most bytes on the fullest tile first.

        Args:
            columns: "name", "role", "category", "line".

        Raises:
            ArgumentValueError: another column.
        """
        for column in columns:
            if column not in COLUMNS:
                problem = "a memory breakdown has no such column"
                raise ArgumentValueError(problem, expected=f"some of {list(COLUMNS)}", got=shortened(column))
        sums: dict[tuple[str, str, str, str], tuple[int, int, int]] = {}
        for item in self.items:
            line = "" if item.origin == Origin() else str(item.origin)
            values = {"name": item.name, "role": item.role, "category": item.category, "line": line}
            name, role, category, line = (values[column] if column in columns else "" for column in COLUMNS)
            key = name, role, category, line
            fullest, total, count = sums.get(key, (0, 0, 0))
            sums[key] = fullest + item.num_bytes, total + item.total_bytes, count + 1
        rows = (
            BreakdownRow(name, role, category, line, fullest, Fraction(total, self.num_tiles), count)
            for (name, role, category, line), (fullest, total, count) in sums.items()
        )
        return tuple(sorted(rows, key=lambda row: (-row.fullest_bytes, -row.mean_bytes)))

    @property
    def total(self) -> BreakdownRow:
        """The sum of all rows: the bytes of the fullest tile, and the mean of all."""
        (total,) = self.by() or (BreakdownRow("", "", "", "", 0, Fraction(0), 0),)
        return total

    def largest(self, max_rows: int | None = None) -> tuple[BreakdownRow, ...]:
        """Return the rows, those after the first `max_rows` as one, and their sum."""
        rows = self.rows
        if omitted := rows[len(rows) if max_rows is None else max_rows :]:
            fullest = sum(row.fullest_bytes for row in omitted)
            mean = sum((row.mean_bytes for row in omitted), Fraction(0))
            num_items = sum(row.num_items for row in omitted)
            rows = (*rows[:max_rows], BreakdownRow(f"{len(omitted):,} more", "", "", "", fullest, mean, num_items))
        return *rows, replace(self.total, name="all")

    def lines(self, max_rows: int | None = None) -> Iterator[str]:
        """Yield a heading, and a line for each row of `largest`."""
        yield f"{'fullest':>12}    {'mean':>14}"
        yield from map(str, self.largest(max_rows))

    def __str__(self) -> str:
        return "\n".join(self.lines())


def memory_breakdown(
    items: Iterable[ItemOnTiles], tile: int, step: str, origin: Origin, num_tiles: int
) -> MemoryBreakdown:
    """Return the breakdown of the items of all tiles; arguments as of the result, which has one item for each."""
    sums: dict[LiveItem, tuple[int, int]] = {}
    for item, first, sizes in items:
        fullest, total = sums.get(item, (0, 0))
        tile_bytes = int(sizes[tile - first]) if first <= tile < first + len(sizes) else 0
        sums[item] = fullest + tile_bytes, total + int(sizes.sum())
    summed = (replace(item, num_bytes=fullest, total_bytes=total) for item, (fullest, total) in sums.items())
    ordered = sorted(summed, key=lambda item: (-item.num_bytes, -item.total_bytes, item.name))
    return MemoryBreakdown(tile, step, origin, num_tiles, tuple(ordered))
