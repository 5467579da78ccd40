"""The execution trace of a page: one row an IPU, coloured by phase.

Input: `TraceView`. Output: a section.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ipujax.runtime.markup import joined, table
from ipujax.runtime.page.charts import PHASE_COLOURS, chart, legend, with_separators, zoom_buttons
from ipujax.runtime.page.document import Section, bokeh, chart_place, sentence
from ipujax.runtime.profile import TRACE_PHASES
from ipujax.runtime.views import TraceView

_HALF, _LANE = 0.32, 0.12  # of a row of compute tiles, and that of I/O tiles under it
_NOTES = {
    "is_folded": "Later iterations of long loops are folded: what repeats there has the right shares, in no order.",
    "is_cut": "There are too many steps to draw: each part of time shows how much of it every phase takes.",
}


def trace_section(view: TraceView) -> Section:
    """When each IPU does what.

    Args:
        view: of a profile.
    """
    head = ("IPU", *(name.replace("_", " ") for name in TRACE_PHASES))
    rows = (
        (f"IPU {ipu}", *(f"{c:,} ({c / max(1, view.cycles):.1%})" for c in row))
        for ipu, row in enumerate(view.spent.tolist())
    )
    notes = [text for name, text in _NOTES.items() if getattr(view, name)]
    body = joined(
        [
            sentence(
                " ".join(["Drag or use the buttons to zoom; hover to see which step a slice belongs to.", *notes])
            ),
            legend(PHASE_COLOURS),
            chart_place("trace", f"Phases of {view.num_ipus} IPUs over {view.cycles:,} cycles"),
            zoom_buttons("trace", "execution trace"),
            table(head, rows, "Cycles of each phase, and their share of the run"),
        ]
    )
    return Section("trace", "Execution trace", body, {"trace": _trace(view)}, {"labels": list(view.labels)})


def _trace(view: TraceView) -> Any:
    models, height = bokeh("models"), 120 + 44 * view.num_ipus
    hover = models.HoverTool(
        tooltips=[("", "@label{custom}"), ("cycles", "@left{0,0} – @right{0,0}")], point_policy="follow_mouse"
    )
    hover.formatters = {"@label": models.CustomJSHover(code="return window.ipujaxPage.label(value)")}
    figure = chart("trace", "cycles", "", min(700, height), y_range=(view.num_ipus - 0.5, -0.5))
    figure.add_tools(hover)
    for number, (name, colour) in enumerate(PHASE_COLOURS.items()):
        mine = view.phase == number
        columns = {"left": view.start[mine], "right": view.end[mine], "label": view.label[mine].astype(np.int32)}
        rows = view.ipu[mine].astype(np.float32)
        source = models.ColumnDataSource(columns | {"top": rows - _HALF, "bottom": rows + _HALF})
        alpha = 0.35 if name == "idle" else 1.0
        figure.quad(
            "left", "right", "top", "bottom", source=source, fill_color=colour, line_color=None, fill_alpha=alpha
        )
    if len(view.moved):
        ipu, start, end, label = view.moved.T
        lane = ipu + _HALF + 0.02
        columns = {"left": start, "right": end, "label": label, "top": lane, "bottom": lane + _LANE}
        source = models.ColumnDataSource(columns)
        figure.quad(
            "left", "right", "top", "bottom", source=source, fill_color=PHASE_COLOURS["host_exchange"], line_color=None
        )
    figure.yaxis.ticker = list(range(view.num_ipus))
    figure.yaxis.major_label_overrides = {ipu: f"IPU {ipu}" for ipu in range(view.num_ipus)}
    figure.ygrid.visible = False
    figure.x_range = models.Range1d(0, max(1, view.cycles), bounds=(0, max(1, view.cycles)))
    with_separators(figure, "x")
    return figure
