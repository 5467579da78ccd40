"""The operations section of a page: a table that sorts by any column, and a roofline.

Input: `OperationRow`s and a target. Output: a section.
Limits: the roofline is over bytes that are exchanged, for what a tile keeps it reads at full speed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ipujax.runtime.markup import Markup, joined, tag
from ipujax.runtime.page.anchors import MOST_OPERATIONS, Anchors
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


def operations_section(rows: Sequence[OperationRow], target: Target, anchors: Anchors) -> Section:
    """All operations.

    Args:
        rows: most cycles first.
        target: the machine of one replica.
        anchors: of the page.
    """
    shown, left_out = rows[:MOST_OPERATIONS], len(rows) - MOST_OPERATIONS
    rest = f" The {left_out:,} cheapest are left out." if left_out > 0 else ""
    body = joined(
        [
            sentence(
                "A row for each operation of each line: busy cycles of all IPUs. Balance is the share of its compute "
                "time in which a tile computes. Rates and the peaks beside them are those of one IPU; rates count the "
                f"time of its exchanges too.{rest}"
            ),
            _table(shown, anchors),
            tag("h3", "Roofline"),
            sentence(
                "Rates of one IPU over what operations do for each byte they exchange. "
                "Under the roof's slope exchange limits."
            ),
            chart_place("roofline", "Roofline: rate of operations over their intensity"),
        ]
    )
    return Section("operations", "Operations", body, {"roofline": _roofline(rows, target)})


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
    most = max((row.cycles for row in rows), default=0)
    body = tag("tbody", *(_row(row, most, anchors) for row in rows))
    table = tag("table", tag("thead", tag("tr", *heads)), body, class_="sortable", id="operations-table")
    label = {"role": "region", "aria_label": "Operations"}
    return tag("div", table, class_="scroll", tabindex=0, data_search="operations", **label)


def _row(row: OperationRow, most: int, anchors: Anchors) -> Markup:
    computes = bool(row.flops)
    cells = (
        (joined([row.name, " ", anchors.trace("op", row.number), _layer(row, anchors)]), row.name),
        (anchors.line(row.line, row.file), row.line),
        (joined([f"{row.cycles:,}", bar(row.cycles, most)]), row.cycles),
        (f"{row.share:.1%}", row.share),
        (size(row.moved_bytes), row.moved_bytes),
        (size(row.variable_bytes), row.variable_bytes),
        (size(row.exchange_code_bytes), row.exchange_code_bytes),
        ("–" if row.balance is None else f"{row.balance:.0%}", -1 if row.balance is None else row.balance),
        (f"{row.flops_per_second / 1e9:,.0f}" if computes else "–", row.flops_per_second),
        (f"{row.peak_share:.1%} {row.precision}" if computes and row.peak_share else "–", row.peak_share or 0),
    )
    return tag(
        "tr",
        *(
            tag("td", shown, data_value=value, class_="text" if n < 2 else "number")
            for n, (shown, value) in enumerate(cells)
        ),
        id=f"op-{row.number}",
    )


def _layer(row: OperationRow, anchors: Anchors) -> Markup:
    """The layer of an operation and its part of training, below its name."""
    if not row.layer:
        return Markup()
    part = row.layer.removeprefix(row.layer_path)
    layer = anchors.layer(row.layer_path) if row.layer_path else ""
    return tag("span", layer, part, class_="line of-layer")


def _roofline(rows: Sequence[OperationRow], target: Target) -> Any:
    """Rates over intensities, both logarithmic."""
    points = [(row, row.intensity) for row in rows[:MOST_OPERATIONS] if row.intensity and row.flops_per_second]
    found = np.array([intensity for _, intensity in points] or [1.0])
    rates, bandwidth = peaks(target), exchange_bandwidth(target)
    low, high = min(found.min(), 0.1) / 2, max(found.max(), 4 * max(rates.values()) / bandwidth)
    x = np.geomspace(low, high, 60)
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
    most = max((row.cycles for row, _ in points), default=1)
    columns = {
        "x": [intensity for _, intensity in points],
        "y": [row.flops_per_second / 1e9 for row, _ in points],
        "name": [row.name for row, _ in points],
        "line": [row.line for row, _ in points],
        "cycles": [row.cycles for row, _ in points],
        "size": [6 + 22 * (row.cycles / most) ** 0.5 for row, _ in points],
    }
    source = bokeh("models").ColumnDataSource(columns)
    dots = figure.scatter("x", "y", size="size", source=source, fill_color="#56B4E9", fill_alpha=0.6, line_color=ACCENT)
    figure.hover.renderers = [dots]
    figure.hover.tooltips = [("", "@name"), ("line", "@line"), ("cycles", "@cycles{0,0}"), ("GFLOP/s", "@y{0,0}")]
    figure.legend.location = "bottom_right"
    return figure
