"""The picture of the page: predicted against measured, and the error of every row."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

_BAND = 0.2  # errors up to which a row counts as near
_ROW = re.compile(r"^\| ([^|*]+) \| ([\d,.]+)([^|]*) \| ([\d,.]+)[^|]* \| [+-]", re.MULTILINE)
# What text and identifiers are in the file, so that it differs only where numbers do.
_STYLE = {"svg.fonttype": "none", "svg.hashsalt": "fidelity", "font.family": "sans-serif", "font.size": 9}


@dataclass(frozen=True, slots=True)
class Point:
    """A row of the page.

    Args:
        section: title of its section.
        measured: the published figure.
        simulated: the same of the simulated machine.
        is_cycles: whether both are cycles.
    """

    section: str
    measured: float
    simulated: float
    is_cycles: bool


def points(page: str) -> list[Point]:
    """Every row of the page, in its order.

    Args:
        page: text of `docs/fidelity.md`.
    """
    rows = list[Point]()
    for section in page.split("\n## ")[1:]:
        title = section.splitlines()[0]
        for _, measured, unit, simulated in _ROW.findall(section):
            figures = (float(text.replace(",", "")) for text in (measured, simulated))
            rows.append(Point(title, *figures, is_cycles=not unit.strip()))
    return rows


def picture(rows: Sequence[Point]) -> str:
    """Draws the rows as SVG: those in cycles predicted against measured, and the errors of all.

    Args:
        rows: of `points`.
    """
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(11, 5.4), layout="constrained")
        left, right = figure.subplots(1, 2)
        for number, section in enumerate(dict.fromkeys(row.section for row in rows)):
            colour = f"C{number}"
            numbered_rows = [(place, row) for place, row in enumerate(rows) if row.section == section]
            errors = [100 * (row.simulated / row.measured - 1) for _, row in numbered_rows]
            right.scatter([place for place, _ in numbered_rows], errors, s=12, color=colour, label=section)
            cycles = [row for _, row in numbered_rows if row.is_cycles]
            left.scatter([row.measured for row in cycles], [row.simulated for row in cycles], s=12, color=colour)
        _band(left, [row.measured for row in rows if row.is_cycles])
        left.set(xscale="log", yscale="log", xlabel="measured, cycles", ylabel="predicted, cycles")
        right.axhspan(-100 * _BAND, 100 * _BAND, color="0.9", zorder=0)
        right.axhline(0, color="0.5", linewidth=0.8, zorder=0)
        right.set_yscale("symlog", linthresh=100 * _BAND)
        ticks = [-100, -20, -10, 0, 10, 20, 100, 300]
        right.set_yticks(ticks, [f"{tick:+d} %" if tick else "0" for tick in ticks])
        right.set(xlabel="row of the page", ylabel="error of the prediction", ylim=(-150, 400))
        figure.legend(loc="outside lower center", ncols=3, frameon=False)
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines()) + "\n"


def _band(axes: Axes, measured: Sequence[float]) -> None:
    """Draws where predictions are equal, and the bars around it."""
    limits = [min(measured) / 2, max(measured) * 2]
    axes.fill_between(
        limits, *([end * (1 + sign * _BAND) for end in limits] for sign in (-1, 1)), color="0.9", zorder=0
    )
    axes.plot(limits, limits, color="0.5", linewidth=0.8, zorder=0)
