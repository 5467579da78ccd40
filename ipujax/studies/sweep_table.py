"""Table of a sweep: a row of plain data for each machine.

Input: points, jobs and the costs of each job. Output: `Sweep`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, overload

from ipujax.runtime.errors import ArgumentError
from ipujax.runtime.markup import Markup, join_markup, table, tag
from ipujax.runtime.page.document import Section, Tab, bokeh, chart_place, document
from ipujax.runtime.profile import write_csv, write_text
from ipujax.runtime.target import nearest
from ipujax.studies.point_costs import Job, Point, PointCost

COSTS = ("cycles", "seconds", "joules", "max_tile_bytes", "fits", "plan", "error")
_SHOWN_ROWS = 20
Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Sweep:
    """Machines and the costs of a function on them; its text is a table.

    Args:
        rows: a dict for each point, in order: the constants that were changed; "cycles" and "seconds" of one call,
            "joules" of all IPUs meanwhile, None where no program could be compiled; "max_tile_bytes", there those of
            the plan that lacks least, None without one; "fits", whether the program fits the machine; "plan", the
            number of the point whose machine the program was compiled for, None for that of the function's device;
            "error", why no program could be compiled, or None.
    """

    rows: tuple[Row, ...]

    @staticmethod
    def of(points: Sequence[Point], jobs: Sequence[Job], costs: Mapping[int, Sequence[PointCost]]) -> Sweep:
        """Return the table of a sweep, of several plans of a point the best."""
        best: dict[int, tuple[Any, PointCost, Job]] = {}
        for number, job in enumerate(jobs):
            for point, cost in zip(job.points, costs[number], strict=True):
                # Plans that fit before others, then by cycles, and of equals the point's own.
                rank = not cost.fits, cost.cycles is None, cost.cycles or 0, job.point != point, number
                if point not in best or rank < best[point][0]:
                    best[point] = rank, cost, job
        chosen = [best[number] for number in range(len(points))]
        rows = (_row(point, cost, job.point) for point, (_, cost, job) in zip(points, chosen, strict=True))
        return Sweep(tuple(rows))

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns: constants in the order of their first change, then costs."""
        names = dict.fromkeys(name for row in self.rows for name in row if name not in COSTS)
        return (*names, *COSTS)

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    @overload
    def __getitem__(self, number: int) -> Row: ...
    @overload
    def __getitem__(self, number: slice) -> Sweep: ...
    def __getitem__(self, number: int | slice) -> Row | Sweep:
        return Sweep(self.rows[number]) if isinstance(number, slice) else self.rows[number]

    def pareto(self, *columns: str) -> Sweep:
        """Return the rows that fit and that no other row beats: none is as small in all columns and smaller in one.

        Args:
            columns: names of columns of numbers, as "cycles" and "max_tile_bytes"; smaller is better.

        Raises:
            ArgumentError: no column, an unknown one, or one that is no number in some row.
        """
        if not columns:
            raise ArgumentError("a front needs columns to compare rows by", expected='names, as "cycles"', got="none")
        chosen = [row for row in self.rows if row["fits"]]
        values = [tuple(self._number(row, name) for name in columns) for row in chosen]
        front: list[tuple[tuple[float, ...], Row]] = []
        for value, row in sorted(zip(values, chosen, strict=True), key=lambda pair: pair[0]):
            if not any(all(a <= b for a, b in zip(other, value, strict=True)) for other, _ in front):
                front.append((value, row))
        return Sweep(tuple(row for _, row in front))

    def _number(self, row: Row, name: str) -> float:
        if name not in self.columns:
            hint = nearest(name, self.columns)
            expected = f"one of {', '.join(self.columns)}"
            raise ArgumentError(f"a sweep has no column {name!r}", expected=expected, got=repr(name), hint=hint)
        value = row.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ArgumentError(f"column {name} of a sweep is no number in some row", got=repr(value))
        return value

    def to_csv(self, path: str | os.PathLike[str]) -> None:
        """Write the table as comma-separated values, with a head; None is an empty cell.

        Raises:
            ArgumentError: the path cannot be written.
        """
        write_csv(path, self.columns, self.rows)

    def plot(self, x: str, y: str = "cycles", *, path: str | os.PathLike[str]) -> None:
        """Write a page of HTML with a chart of one column over another; it needs no network.

        Args:
            x: column of the horizontal axis.
            y: column of the vertical axis.
            path: file of the page; rows that fit and no other beats in both columns are joined by a line.

        Raises:
            ArgumentError: an unknown column, or the path cannot be written.
            ProfileError: Bokeh is not installed.
        """
        figure = bokeh("plotting").figure(
            x_axis_label=x, y_axis_label=y, sizing_mode="stretch_width", height=420, tools="pan,wheel_zoom,reset"
        )
        fitting = [row for row in self.rows if row["fits"]]
        front = self.pareto(x, y)
        points = [[self._number(row, name) for row in fitting] for name in (x, y)]
        figure.scatter(*points, size=7, color="#0072B2", legend_label="machines")
        line = [[self._number(row, name) for row in front] for name in (x, y)]
        figure.line(*line, line_width=2, color="#D55E00", legend_label="no other is better in both")
        body = join_markup([chart_place("sweep", f"{y} over {x} of {len(fitting)} machines")])
        tab = Tab("sweep", f"{y} over {x}", [Section("sweep", f"{y} over {x}", body, {"sweep": figure})])
        write_text(path, document(f"{len(self.rows):,} machines", f"{y} over {x}", [tab]))

    def _cells(self) -> list[list[str]]:
        columns = [name for name in self.columns if any(row.get(name) is not None for row in self.rows)]
        return [columns, *([_text(row.get(name)) for name in columns] for row in self.rows[:_SHOWN_ROWS])]

    def _hidden_rows(self) -> str:
        hidden = len(self.rows) - _SHOWN_ROWS
        return f"{hidden:,} more rows" if hidden > 0 else ""

    def _repr_html_(self) -> str:
        head, *rows = self._cells()
        return join_markup([table(head, rows), Markup(tag("p", self._hidden_rows())) if self._hidden_rows() else ""])

    def __str__(self) -> str:
        cells = self._cells()
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in cells]
        return "\n".join([*lines, *filter(None, [self._hidden_rows()])])

    def __repr__(self) -> str:
        return f'Sweep of {len(self.rows):,} machines; see .rows, .pareto("cycles", …), .to_csv(path)'


def _row(point: Point, cost: PointCost, plan: int | None) -> Row:
    seconds = None if cost.cycles is None else point.target.seconds(cost.cycles)
    joules = None if seconds is None else seconds * point.target.ipu_watts * point.target.num_ipus
    costs = (cost.cycles, seconds, joules, cost.max_tile_bytes, cost.fits, plan, cost.error)
    return {**point.changes, **dict(zip(COSTS, costs, strict=True))}


def _text(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value).partition("\n")[0]  # errors go on with details, which rows and files have
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
