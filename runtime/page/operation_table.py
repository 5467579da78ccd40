"""Operations section of a page: a table of all operations, and a roofline.

Input: `OperationRow`s and a target. Output: a section.
Limits: the roofline counts exchanged bytes alone, since a tile reads its memory at full speed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ipujax.runtime.markup import join_markup, tag
from ipujax.runtime.page.anchors import MAX_OPERATIONS, Anchors
from ipujax.runtime.page.charts import ACCENT, SECOND, chart
from ipujax.runtime.page.document import Column, DataTable, Section, bokeh, chart_place, sentence
from ipujax.runtime.target import Target
from ipujax.runtime.views import OperationRow
from ipujax.runtime.views.operation_view import exchange_bandwidth, peaks

_MAX_POINTS = 300  # of the roofline, most cycles first


def operations_section(
    rows: Sequence[OperationRow], target: Target, anchors: Anchors, language_cycles: Mapping[str, int]
) -> Section:
    """Return the section of operations, most cycles first, with their roofline.

    `language_cycles` are the active cycles of vertices by language.
    """
    table = _table(rows[:MAX_OPERATIONS], anchors)
    num_omitted = len(rows) - MAX_OPERATIONS
    note = f" The {num_omitted:,} cheapest are left out." if num_omitted > 0 else ""
    body = join_markup(
        [
            sentence(
                "A row for each operation of each line: busy cycles of all IPUs. Balance is the share of its compute "
                "time in which a tile computes. Rates and the peaks beside them are those of one IPU; rates count the "
                f"time of its exchanges too.{_language_note(language_cycles)}{note} Fields below the headings filter: "
                "texts that contain some letters, numbers from a value on (<5: up to it, 2..5: between)."
            ),
            table.place(),
            tag("h3", "Roofline"),
            sentence(
                "Rates of one IPU over what operations do for each byte they exchange. "
                "Under the roof's slope exchange limits."
            ),
            chart_place("roofline", "Roofline: rate of operations over their intensity"),
        ]
    )
    return Section("operations", "Operations", body, {"roofline": _roofline(rows, target)}, table.data())


def _language_note(cycles: Mapping[str, int]) -> str:
    total = sum(cycles.values())
    shares = " and ".join(f"{active / total:.1%} for {name}" for name, active in cycles.items() if active)
    return f" Active cycles of vertices are estimated {shares}." if shares else ""


def _table(rows: Sequence[OperationRow], anchors: Anchors) -> DataTable:
    """Return the table of operations, with links to their lines, layers and first slices of the trace."""
    parts = [row.layer.removeprefix(row.layer_path).removeprefix(", ") for row in rows]
    columns = (
        Column("Operation", "text", [row.name for row in rows]),
        Column("Trace", "trace", [anchors.trace_target("op", row.number) for row in rows]),
        Column("Line", "link", [(row.line, anchors.line_id(row.line, row.file)) for row in rows]),
        Column("Layer", "link", [(row.layer_path, anchors.layers.get(row.layer_path, "")) for row in rows]),
        Column("Part", "text", parts, "part of training"),
        Column("Cycles", "number", [row.cycles for row in rows], "busy cycles of all IPUs"),
        Column("Share", "share", [row.share for row in rows], "of the busy cycles of all IPUs"),
        Column("Moved", "bytes", [row.moved_bytes for row in rows], "bytes that arrive on tiles or the host"),
        Column("Moved from", "text", [row.largest_read for row in rows], "largest variable that its exchanges read"),
        Column("Variables", "bytes", [row.variable_bytes for row in rows], "size of its variables"),
        Column("Exchange code", "bytes", [row.exchange_code_bytes for row in rows], "on the tile with most of it"),
        Column("Balance", "share", [row.balance for row in rows], "share of its compute time in which a tile computes"),
        Column("GFLOP/s", "number", [round(row.flops_per_second / 1e9, 1) if row.flops else None for row in rows]),
        Column("Of peak", "share", [row.peak_share if row.flops else None for row in rows], "of one IPU in its dtype"),
        Column("Peak of", "text", [row.precision if row.flops else "" for row in rows], "dtype of the peak"),
    )
    ids = [anchors.operations.get(row.number, "") for row in rows]
    return DataTable("operations-table", "Operations", columns, ids, "Cycles")


def _roofline(rows: Sequence[OperationRow], target: Target) -> Any:
    """Draw rates over intensities, both logarithmic, below the roofs of exchange and of the peaks."""
    points = [(row, row.intensity) for row in rows[:_MAX_POINTS] if row.intensity and row.flops_per_second]
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
    figure.legend.location = "top_left"  # above the roofs, where no operation can be
    return figure
