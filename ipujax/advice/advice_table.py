"""Table of changes that `ipu.advise` has compiled: rows as plain data, as text, HTML and comma-separated values.

Input: rows. Output: `Advice`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields

from ipujax.runtime.causes import AdviceRow
from ipujax.runtime.errors import ArgumentError
from ipujax.runtime.markup import table
from ipujax.runtime.report import Profile, write_csv

_HEAD = ("Change", "Cycles", "Saves", "Worst tile", "Saves", "")


@dataclass(frozen=True, slots=True)
class Advice:
    """Changes of a function, best first; its text is a table.

    Args:
        rows: those that fit by cycles, then the others by memory of the fullest tile.
        hints: changes that need an edit of the function, and so are not tried; most cycles to save first.
        profile: of the program as it is, with the rows and hints as `profile.advice`: its summary and its page show
            them. None if it cannot be compiled.
    """

    rows: tuple[AdviceRow, ...]
    hints: tuple[AdviceRow, ...] = ()
    profile: Profile | None = field(default=None, compare=False)

    def best(self) -> AdviceRow:
        """Return the row of fewest cycles that fits.

        Raises:
            ArgumentError: if none does.
        """
        first = self.rows[0]
        if first.refused is not None:
            raise ArgumentError("no change that was tried can be compiled", got=first.refused)
        if not first.fits:
            got = f"{first.worst_tile_bytes:,} bytes on the fullest tile"
            raise ArgumentError(
                "no change that was tried fits the machine", got=got, hint="more IPUs with ipu.stage(i)"
            )
        return first

    def __iter__(self) -> Iterator[AdviceRow]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __str__(self) -> str:
        width = max(len(row.change) for row in self.rows)
        lines = [f"{'change':<{width}}  {'cycles':>15}  {'saves':>15}  worst tile"]
        for row in self.rows:
            if row.refused is not None:
                lines.append(f"{row.change:<{width}}  {row.refused}")
                continue
            cycles, saved, memory, _ = _cells(row)
            lines.append(f"{row.change:<{width}}  {cycles:>15}  {saved:>15}  {memory}")
        if self.hints:
            lines += ["", "not tried, for they need an edit of the function:"]
            lines += [f"  {hint.change}; at most {hint.saved_cycles:,} cycles" for hint in self.hints]
        return "\n".join(lines)

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        rows = [(row.change, *_cells(row), row.refused or "") for row in self.rows]
        rows += [(hint.change, "", f"at most {hint.saved_cycles:,}", "", "", "not tried") for hint in self.hints]
        return table(_HEAD, rows, "Changes that were compiled")

    def to_csv(self, path: str | os.PathLike[str]) -> None:
        """Write rows and hints as comma-separated values, with a head; None is an empty cell.

        Raises:
            ArgumentError: the path cannot be written.
        """
        columns = [each.name for each in fields(AdviceRow)]
        write_csv(path, columns, map(asdict, (*self.rows, *self.hints)))


def _cells(row: AdviceRow) -> tuple[str, str, str, str]:
    """Return cycles, cycles saved, memory and bytes saved of a row that could be compiled."""
    if row.refused is not None:
        return "", "", "", ""
    note = f", without {row.unpriced} unpriced" if row.unpriced and row.fits else ""
    memory = f"{row.worst_tile_bytes / 1024:,.1f} KiB{'' if row.fits else ', does not fit'}{note}"
    saved_cycles = f"{row.saved_cycles:+,}" if row.saved_cycles else "-"
    return f"{row.cycles:,}" if row.fits else "-", saved_cycles, memory, f"{row.saved_bytes:+,}"
