"""Operations section of a page: a table that sorts by any column, and a roofline.

Input: `OperationRow`s and a target. Output: a section.
Limits: the roofline counts exchanged bytes alone, since a tile reads its memory at full speed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ipujax.runtime.markup import Markup, join_markup, tag
from ipujax.runtime.page.anchors import MAX_OPERATIONS, Anchors
from ipujax.runtime.page.charts import ACCENT, SECOND, bar, chart
from ipujax.runtime.page.document import Section, bokeh, chart_place, sentence
from ipujax.runtime.profile.text import size
from ipujax.runtime.target import Target
from ipujax.runtime.views import OperationRow
from ipujax.runtime.views.operation_view import exchange_bandwidth, peaks

_HEADS = (
    "Operation",
    "Line",
    "Cycles",
    "Share",
    "Moved",
    "Variables",
    "Exchange code",
    "Balance",
    "GFLOP/s",
    "Of peak",
)


def operations_section(
    rows: Sequence[OperationRow], target: Target, anchors: Anchors, language_cycles: Mapping[str, int]
) -> Section:
    """Return the section of operations, most cycles first, with their roofline.

    `language_cycles` are the active cycles of vertices by language.
    """
    num_omitted = len(rows) - MAX_OPERATIONS
    note = f" The {num_omitted:,} cheapest are left out." if num_omitted > 0 else ""
    body = join_markup(
        [
            sentence(
                "A row for each operation of each line: busy cycles of all IPUs. Balance is the share of its compute "
                "time in which a tile computes. Rates and the peaks beside them are those of one IPU; rates count the "
                f"time of its exchanges too.{_language_note(language_cycles)}{note}"
            ),
            _table(rows[:MAX_OPERATIONS], anchors),
            tag("h3", "Roofline"),
            sentence(
                "Rates of one IPU over what operations do for each byte they exchange. "
                "Under the roof's slope exchange limits."
            ),
            chart_place("roofline", "Roofline: rate of operations over their intensity"),
        ]
    )
    return Section("operations", "Operations", body, {"roofline": _roofline(rows, target)})


def _language_note(cycles: Mapping[str, int]) -> str:
    total = sum(cycles.values())
    shares = " and ".join(f"{active / total:.1%} for {name}" for name, active in cycles.items() if active)
    return f" Active cycles of vertices are estimated {shares}." if shares else ""


def _table(rows: Sequence[OperationRow], anchors: Anchors) -> Markup:
    heads = (
        tag(
            "th",
            tag("button", head, type="button", data_sort=n),
            scope="col",
            aria_sort="descending" if n == 2 else None,
        )
        for n, head in enumerate(_HEADS)
    )
    max_cycles = max((row.cycles for row in rows), default=0)
    body = tag("tbody", *(_row(row, max_cycles, anchors) for row in rows))
    table = tag("table", tag("thead", tag("tr", *heads)), body, class_="sortable", id="operations-table")
    label = {"role": "region", "aria_label": "Operations"}
    return tag("div", table, class_="scroll", tabindex=0, data_search="operations", **label)


def _row(row: OperationRow, max_cycles: int, anchors: Anchors) -> Markup:
    computes = bool(row.flops)
    cells = (  # contents, and the value by which the column is sorted
        (join_markup([row.name, " ", anchors.trace("op", row.number), _layer(row, anchors)]), row.name),
        (anchors.line(row.line, row.file), row.line),
        (join_markup([f"{row.cycles:,}", bar(row.cycles, max_cycles)]), row.cycles),
        (f"{row.share:.1%}", row.share),
        (size(row.moved_bytes), row.moved_bytes),
        (size(row.variable_bytes), row.variable_bytes),
        (size(row.exchange_code_bytes), row.exchange_code_bytes),
        ("–" if row.balance is None else f"{row.balance:.0%}", -1 if row.balance is None else row.balance),
        (f"{row.flops_per_second / 1e9:,.0f}" if computes else "–", row.flops_per_second),
        (f"{row.peak_share:.1%} {row.precision}" if computes else "–", row.peak_share),
    )
    return tag(
        "tr",
        *(
            tag("td", content, data_value=value, class_="text" if n < 2 else "number")
            for n, (content, value) in enumerate(cells)
        ),
        id=f"op-{row.number}",
    )


def _layer(row: OperationRow, anchors: Anchors) -> Markup:
    if not row.layer:
        return Markup()
    part = row.layer.removeprefix(row.layer_path)
    layer = anchors.layer(row.layer_path) if row.layer_path else ""
    return tag("span", layer, part, class_="line of-layer")


def _roofline(rows: Sequence[OperationRow], target: Target) -> Any:
    """Draw rates over intensities, both logarithmic, below the roofs of exchange and of the peaks."""
    points = [(row, row.intensity) for row in rows[:MAX_OPERATIONS] if row.intensity and row.flops_per_second]
    intensities = np.array([intensity for _, intensity in points] or [1.0])
    rates = peaks(target)
    bandwidth = exchange_bandwidth(target)
    flat = 4 * max(rates.values()) / bandwidth  # up to here the flat part of each roof is visible
    x = np.geomspace(min(intensities.min(), 0.1) / 2, max(intensities.max(), flat), 60)
    figure = chart(
        "roofline",
        "operations for each exchanged byte (FLOP/B)",
        "rate (GFLOP/s)",
        360,
        "pan,wheel_zoom,box_zoom,hover",
        x_axis_type="log",
        y_axis_type="log",
    )
    for (dtype, peak), colour, dash in zip(rates.items(), (SECOND, ACCENT), ("dashed", "solid"), strict=True):
        roof = np.minimum(peak, bandwidth * x) / 1e9
        figure.line(
            x, roof, color=colour, line_dash=dash, line_width=2, legend_label=f"{dtype}: {peak / 1e12:,.1f} TFLOP/s"
        )
    max_cycles = max((row.cycles for row, _ in points), default=1)
    columns = {
        "x": [intensity for _, intensity in points],
        "y": [row.flops_per_second / 1e9 for row, _ in points],
        "name": [row.name for row, _ in points],
        "line": [row.line for row, _ in points],
        "cycles": [row.cycles for row, _ in points],
        "size": [6 + 22 * (row.cycles / max_cycles) ** 0.5 for row, _ in points],  # the area grows with the cycles
    }
    source = bokeh("models").ColumnDataSource(columns)
    dots = figure.scatter("x", "y", size="size", source=source, fill_color="#56B4E9", fill_alpha=0.6, line_color=ACCENT)
    figure.hover.renderers = [dots]
    figure.hover.tooltips = [("", "@name"), ("line", "@line"), ("cycles", "@cycles{0,0}"), ("GFLOP/s", "@y{0,0}")]
    figure.legend.location = "bottom_right"
    return figure
