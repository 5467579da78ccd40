"""Result of `ipu.search`: plans that were compiled, estimated, or left out; its text is a table.

Input: rows. Output: a table, best first, with the plan as code.

    plan                                                 cycles  fullest tile  figures    left out
    ipu.Plan(data=2, stages=4, micro_batches=8)         346,654      31.3 KiB  compiled
    ipu.Plan(stages=8, micro_batches=8)                 402,118      29.0 KiB  estimated
    ipu.Plan(micro_batches=64)                        1,214,000     912.0 KiB  estimated  needs 288.0 KiB more
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from ipujax.jit import IpuFunction
from ipujax.plan_search.search_plan import Plan
from ipujax.runtime.errors import ArgumentError
from ipujax.studies import Sweep

Figures = Literal["compiled", "estimated", "none"]
Ended = Literal["all", "seconds", "interrupt"]
ENDINGS: dict[Ended, str] = {
    "all": "the search has ended",
    "seconds": "the seconds of the search were over",
    "interrupt": "the search was interrupted",
}
_SHOWN_ROWS = 24
_SPECS = re.compile(r"specs=\{[^}]*\}")  # a line for each argument would be too much in a table


@dataclass(frozen=True, slots=True)
class SearchRow:
    """A plan and its cost.

    Args:
        plan: the plan; its text is code.
        cycles: cycles of one step; None without figures.
        max_tile_bytes: bytes of the fullest tile; None likewise.
        fits: whether it fits the machine.
        figures: "compiled", "estimated", or "none" for a plan that is impossible.
        left_out: why the plan was not compiled, or is of no use; "" for one that was compiled and fits.
    """

    plan: Plan
    cycles: int | None
    max_tile_bytes: int | None
    fits: bool
    figures: Figures
    left_out: str = ""


@dataclass(frozen=True, slots=True)
class Search:
    """Plans of a step, best first.

    Args:
        rows: compiled plans that fit by cycles, then estimated ones, those that do not fit, and impossible ones.
        step: the step.
        settings: arguments of `Plan.jit` beside the step.
        bytes_per_tile: memory of a tile.
        reasons: axes that were left at one, and why.
        ended: what ended the search: "all" plans were compared, its "seconds", or an "interrupt".
    """

    rows: tuple[SearchRow, ...]
    step: Callable[..., Any]
    settings: dict[str, Any]
    bytes_per_tile: int
    reasons: tuple[str, ...] = ()
    ended: Ended = "all"

    @property
    def best(self) -> SearchRow:
        """The compiled plan of fewest cycles that fits.

        Raises:
            ArgumentError: none does; names the closest, and the bytes that are missing.
        """
        fitting = [row for row in self.rows if row.fits and row.figures == "compiled"]
        if fitting:
            return min(fitting, key=lambda row: row.cycles or 0)
        if self.ended != "all" and self.rows and self.rows[0].figures == "estimated" and self.rows[0].fits:
            raise ArgumentError(
                f"no plan that fits was compiled: {ENDINGS[self.ended]}",
                got=f"about {self.rows[0].cycles:,} cycles, by an estimate, with {self.rows[0].plan!r}",
                hint="more seconds, or axes={...} with fewer values",
            )
        failed = [row for row in self.rows if row.figures == "compiled" and row.max_tile_bytes is None]
        if failed and not any(row.figures == "compiled" and row not in failed for row in self.rows):
            reasons = "; ".join(sorted({row.left_out for row in failed}))
            raise ArgumentError("no plan of this search could be compiled", got=reasons)
        rows_with_bytes = [row for row in self.rows if row.max_tile_bytes is not None]
        compiled = [row for row in rows_with_bytes if row.figures == "compiled"] or rows_with_bytes
        if not compiled:
            problem = "no plan of this search is possible" if self.ended == "all" else f"no plan: {ENDINGS[self.ended]}"
            raise ArgumentError(problem, got="; ".join(self._reasons_of_rows()) or None)
        # The plan that lacks fewest bytes tells how much larger the machine must be.
        closest = min(compiled, key=lambda row: row.max_tile_bytes or 0)
        missing = max(0, (closest.max_tile_bytes or 0) - self.bytes_per_tile)
        raise ArgumentError(
            "no plan that was compiled fits the machine",
            expected=f"at most {self.bytes_per_tile:,} bytes on a tile",
            got=f"{closest.max_tile_bytes:,} bytes with {closest.plan!r}: {missing:,} more",
            hint="more IPUs, more micro-batches, state in streaming memory (donate_argnums), or more seconds",
        )

    def function(self, row: SearchRow | None = None) -> IpuFunction[..., Any]:
        """Return the step for `ipu.jit` with the plan of a row, of the best one when None."""
        return (row or self.best).plan.jit(self.step, **self.settings)

    @property
    def table(self) -> Sweep:
        """The rows as a table of plain data, with `pareto`, `to_csv` and `plot`; "error" is why one was left out."""
        return Sweep(tuple(map(self._fields, self.rows)))

    def _fields(self, row: SearchRow) -> dict[str, Any]:
        seconds = None if row.cycles is None else self.settings["device"].target.seconds(row.cycles)
        costs = {"cycles": row.cycles, "seconds": seconds, "max_tile_bytes": row.max_tile_bytes, "fits": row.fits}
        place = {"num_ipus": row.plan.num_ipus, "figures": row.figures}
        return {**place, **costs, "plan": repr(row.plan), "error": row.left_out or None}

    def pareto(self, *columns: str) -> Sweep:
        """Return the rows that no other row beats in all columns, "cycles" and "max_tile_bytes" by default."""
        return self.table.pareto(*(columns or ("cycles", "max_tile_bytes")))

    def to_csv(self, path: str | os.PathLike[str]) -> None:
        """Write the table as comma-separated values, with a head."""
        self.table.to_csv(path)

    def __iter__(self) -> Iterator[SearchRow]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def _reasons_of_rows(self) -> list[str]:
        return sorted({row.left_out for row in self.rows if row.left_out})

    def _repr_html_(self) -> str:
        return self.table._repr_html_()

    def __str__(self) -> str:
        shown_rows = self.rows[:_SHOWN_ROWS]
        codes = [_SPECS.sub("specs={…}", repr(row.plan)) for row in shown_rows]
        width = max((len(code) for code in codes), default=4)
        lines = [f"{'plan':<{width}}  {'cycles':>15}  fullest tile  figures    left out"]
        for code, row in zip(codes, shown_rows, strict=True):
            cycles = "-" if row.cycles is None else f"{row.cycles:,}"
            memory = "-" if row.max_tile_bytes is None else f"{row.max_tile_bytes / 1024:,.1f} KiB"
            lines.append(f"{code:<{width}}  {cycles:>15}  {memory:>12}  {row.figures:<9}  {row.left_out}".rstrip())
        if len(self.rows) > _SHOWN_ROWS:
            lines.append(f"{len(self.rows) - _SHOWN_ROWS:,} more rows")
        if any("{…}" in code for code in codes):
            lines.append("specs={…}: in full in the plans of rows, and in the file that to_csv writes")
        if self.ended != "all" and self.rows:
            lines.append(
                f"{ENDINGS[self.ended]}: {self._counted('estimated')} estimated, {self._counted('compiled')} compiled"
            )
        return "\n".join([*lines, *self.reasons])

    def _counted(self, figures: Figures) -> str:
        count = sum(row.figures == figures for row in self.rows)
        return f"{count:,} plan{'' if count == 1 else 's'}"

    def __repr__(self) -> str:
        return f"Search of {len(self.rows):,} plans; see .best, .rows, .pareto(), .to_csv(path)"
