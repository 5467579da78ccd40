"""The execution trace of a page: one row an IPU, coloured by phase.

Input: `TraceView`. Output: a section.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ipujax.runtime.markup import Markup, joined, table, tag
from ipujax.runtime.page.anchors import Anchors
from ipujax.runtime.page.charts import PHASE_COLOURS, chart, legend, with_separators, zoom_buttons, zooms_by_wheel
from ipujax.runtime.page.document import Section, bokeh, chart_place, sentence
from ipujax.runtime.page.task_chart import LINES_NOTE, add_tasks, task_legend
from ipujax.runtime.profile import TRACE_PHASES
from ipujax.runtime.views import OperationRow, TaskView, TraceView

_FAINT = 0.25  # of lines between tasks, which cross slices
_HALF, _LANE = 0.32, 0.12  # of a row of compute tiles, and that of I/O tiles under it
SELECTED = "#F0E442"  # yellow of Okabe and Ito, which no phase has
_NOTHING_CHOSEN = "No slice is chosen."
_NOTES = {
    "is_folded": "Hatched: later iterations of long loops, folded; each phase has its share of them, without an order.",
    "is_joined": "There are more steps than are drawn one by one: neighbours are one slice; phases have their share.",
    "is_cut": "There are too many steps to draw: each part of time shows how much of it every phase takes.",
}


def trace_section(
    view: TraceView, rows: Sequence[OperationRow], anchors: Anchors, tasks: TaskView | None = None
) -> Section:
    """When each IPU does what.

    Args:
        view: of a profile.
        rows: its operations.
        anchors: of the page.
        tasks: of its pipelines, if it has some, which are the parents of its slices.
    """
    head = ("IPU", *(name.replace("_", " ") for name in TRACE_PHASES))
    spent = (
        (f"IPU {ipu}", *(f"{c:,} ({c / max(1, view.cycles):.1%})" for c in row))
        for ipu, row in enumerate(view.phase_cycles.tolist())
    )
    notes = [text for name, text in _NOTES.items() if getattr(view, name)]
    colours = PHASE_COLOURS if tasks is None else PHASE_COLOURS | task_legend(tasks)
    notes += [] if tasks is None else [f"Above its slices each IPU has its tasks of pipelines. {LINES_NOTE}"]
    body = joined(
        [
            sentence(
                " ".join(
                    [
                        "Drag over a range, turn the wheel or use the buttons to zoom; double click to see all again. "
                        "Click a slice to see its operations, lines and layers; links called trace lead back here.",
                        *notes,
                    ]
                )
            ),
            legend(
                colours,
                {"folded iterations": "hatched"} if view.is_folded else {},
            ),
            chart_place("trace", f"Phases of {view.num_ipus} IPUs over {view.cycles:,} cycles"),
            zoom_buttons("trace", "execution trace"),
            tag("p", "Shown: ", tag("output", id="trace-range", aria_live="polite")),
            _selection(),
            table(head, spent, "Cycles of each phase, and their share of the run"),
        ]
    )
    data = {"labels": list(view.labels), "trace": _slices_of_rows(view), "operations": _operations(rows, anchors)}
    return Section("trace", "Execution trace", body, {"trace": _trace(view, tasks)}, data)


def _selection() -> Markup:
    """A place for the slice that is chosen, which `links.js` fills, and buttons that go from slice to slice."""
    steps = {"longest": "Longest slice shown", "previous": "Previous slice", "next": "Next slice", "none": "Clear"}
    buttons = (tag("button", text, type="button", data_pick=step) for step, text in steps.items())
    group = tag("div", *buttons, class_="zoom", role="group", aria_label="Choose a slice")
    return tag("div", group, tag("div", tag("p", _NOTHING_CHOSEN), id="picked", aria_live="polite"), class_="picked")


def _slices_of_rows(view: TraceView) -> dict[str, Any]:
    """The steps of the trace with the numbers of their operations."""
    ipu, start, end, step = view.spans.T.tolist()
    spans = {"ipu": ipu, "start": start, "end": end, "step": step}
    return {**spans, "sets": [list(numbers) for numbers in view.row_sets], "rows": view.rows.tolist()}


def _operations(rows: Sequence[OperationRow], anchors: Anchors) -> dict[str, Any]:
    """Operations by number, as [name, line, layer, part of training, cycles] with numbers of lines and layers."""
    lines: dict[tuple[str, str], int] = {}
    layers: dict[str, int] = {}
    by_number: list[list[Any]] = []
    for row in sorted(rows, key=lambda row: row.number):
        line = lines.setdefault((row.line, anchors.line_id(row.line, row.file)), len(lines))
        layer = layers.setdefault(row.layer_path, len(layers))
        part = row.layer.removeprefix(row.layer_path).removeprefix(", ")
        by_number.append([row.name, line, layer, part, row.cycles])
    paths = [[path, anchors.layers.get(path, "")] for path in layers]
    return {
        "rows": by_number,
        "lines": [list(line) for line in lines],
        "layers": paths,
        "listed": [*anchors.operations],
    }


def _trace(view: TraceView, tasks: TaskView | None) -> Any:
    models, height = bokeh("models"), 120 + 44 * view.num_ipus
    hover = models.HoverTool(
        tooltips=[("", "@label{custom}"), ("cycles", "@left{0,0} – @right{0,0}")], point_policy="follow_mouse"
    )
    hover.formatters = {"@label": models.CustomJSHover(code="return window.ipujaxPage.label(value)")}
    figure = chart("trace", "cycles", "", min(700, height), y_range=(view.num_ipus - 0.5, -0.5))
    figure.add_tools(hover)
    hovered: list[Any] = []
    for number, (name, colour) in enumerate(PHASE_COLOURS.items()):
        mine = view.phase == number
        columns = {"left": view.start[mine], "right": view.end[mine], "label": view.label[mine].astype(np.int32)}
        rows = view.ipu[mine].astype(np.float32)
        source = models.ColumnDataSource(columns | {"top": rows - _HALF, "bottom": rows + _HALF})
        alpha = 0.35 if name == "idle" else 1.0
        style = {"fill_color": colour, "line_color": None, "fill_alpha": alpha}
        hovered.append(figure.quad("left", "right", "top", "bottom", source=source, name=f"slices {name}", **style))
    if len(view.transfers):
        ipu, start, end, label = view.transfers.T
        lane = ipu + _HALF + 0.02
        columns = {"left": start, "right": end, "label": label, "top": lane, "bottom": lane + _LANE}
        source = models.ColumnDataSource(columns)
        style = {"fill_color": PHASE_COLOURS["host_exchange"], "line_color": None}
        hovered.append(figure.quad("left", "right", "top", "bottom", source=source, **style))
    hover.renderers = hovered
    if tasks is not None:
        add_tasks(figure, tasks, tasks.ipu - _HALF - 0.02 - _LANE / 2, _LANE / 2, _FAINT)
    _hatch(figure, view)
    _selected(figure)
    _slice_labels(figure)
    figure.js_on_event("tap", models.CustomJS(code="window.ipujaxPage.pickAt(cb_obj.x, cb_obj.y)"))
    figure.yaxis.ticker = list(range(view.num_ipus))
    figure.yaxis.major_label_overrides = {ipu: f"IPU {ipu}" for ipu in range(view.num_ipus)}
    figure.ygrid.visible = False
    zooms_by_wheel(figure, 0, max(1, view.cycles))
    with_separators(figure, "x")
    labels = models.CustomJS(code="window.ipujaxPage.labelSlices()")
    figure.x_range.js_on_change("start", labels)
    figure.x_range.js_on_change("end", labels)
    figure.js_on_change("inner_width", labels)
    return figure


def _hatch(figure: Any, view: TraceView) -> None:
    """Hatches what holds several iterations."""
    ipu, start, end, label = view.folded.T
    columns = {"left": start, "right": end, "top": ipu - _HALF, "bottom": ipu + _HALF, "label": label}
    source = bokeh("models").ColumnDataSource(columns)
    style = {"hatch_pattern": "right_diagonal_line", "hatch_color": "white", "hatch_alpha": 0.75, "hatch_scale": 10}
    figure.quad(
        "left", "right", "top", "bottom", source=source, name="folded", fill_alpha=0, line_color="white", **style
    )


def _selected(figure: Any) -> None:
    """A frame around the slices that are chosen or searched for, which `links.js` fills."""
    empty: dict[str, list[Any]] = {"left": [], "right": [], "top": [], "bottom": []}
    source = bokeh("models").ColumnDataSource(empty)
    style = {"fill_color": SELECTED, "fill_alpha": 0.3, "line_color": SELECTED, "line_width": 2}
    figure.quad("left", "right", "top", "bottom", source=source, name="selected", **style)


def _slice_labels(figure: Any) -> None:
    """A place for names of the slices that are wide enough, which `page.js` fills as the chart is zoomed."""
    empty: dict[str, list[Any]] = {"x": [], "y": [], "text": [], "colour": [], "back": []}
    source = bokeh("models").ColumnDataSource(empty)
    style = {
        "text_align": "center",
        "text_baseline": "middle",
        "text_font_size": "11px",
        "text_font": {"value": "sans-serif"},
    }
    colours = {"text_color": "colour", "background_fill_color": "back"}
    figure.text("x", "y", "text", source=source, name="slice labels", padding=2, **style, **colours)
