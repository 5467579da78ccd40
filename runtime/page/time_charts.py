"""Execution trace of a page: a row for each IPU, coloured by phase.

Input: `TraceView`. Output: a section.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ipujax.runtime.markup import Markup, join_markup, table, tag
from ipujax.runtime.page.anchors import Anchors
from ipujax.runtime.page.charts import (
    PHASE_COLOURS,
    add_rectangles,
    chart,
    format_thousands,
    legend,
    zoom_buttons,
    zoom_by_wheel,
)
from ipujax.runtime.page.document import Column, DataTable, Section, bokeh, chart_place, sentence
from ipujax.runtime.page.stage_section import LINES_NOTE, add_tasks, task_legend
from ipujax.runtime.profile import TRACE_PHASES
from ipujax.runtime.views import NO_IPU, WAIT_CAUSES, OperationRow, TaskView, TraceView, WaitView

_FAINT = 0.25  # of lines between tasks, which cross slices
_HALF = 0.32  # half the height of the slices of compute tiles, in rows
_LANE = 0.12  # height of the transfers of I/O tiles, below those slices, and of the tasks above them
SELECTED = "#F0E442"  # yellow of Okabe and Ito, which no phase has
_NOTHING_CHOSEN = "No slice is chosen."
_NOTES = {  # by the property of `TraceView` that must hold
    "is_folded": "Hatched: later iterations of long loops, folded; each phase has its share of them, without an order.",
    "is_joined": "There are more steps than are drawn one by one: neighbours are one slice; phases have their share.",
    "is_cut": "There are too many steps to draw: each part of time shows how much of it every phase takes.",
}


def trace_section(
    view: TraceView, rows: Sequence[OperationRow], anchors: Anchors, waits: WaitView, tasks: TaskView | None = None
) -> Section:
    """Return the section on the phases of each IPU over time, with tasks of pipelines above the slices of their IPU."""
    notes = [text for name, text in _NOTES.items() if getattr(view, name)]
    colours = PHASE_COLOURS if tasks is None else PHASE_COLOURS | task_legend(tasks)
    notes += [] if tasks is None else [f"Above its slices each IPU has its tasks of pipelines. {LINES_NOTE}"]
    body = join_markup(
        [
            sentence(
                " ".join(
                    [
                        "Drag over a range, turn the wheel or use the buttons to zoom; double click to see all. "
                        "Click a slice to see its operations, lines and layers, idle time to see what is awaited.",
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
            _selection(),
            tag("h3", "Sums of the shown range"),
            _range_fields(view),
            tag("div", _sums(view), class_="scroll", id="range-sums", tabindex=0, role="region", aria_label="Sums"),
        ]
    )
    data = {"labels": list(view.labels), "trace": _slices_of_rows(view), "operations": _operations(rows, anchors)}
    data |= {"phases": list(TRACE_PHASES), "phaseCycles": view.phase_cycles.tolist(), "waits": _waits(waits)}
    return Section("trace", "Execution trace", body, {"trace": _trace(view, tasks)}, data)


def _sums(view: TraceView) -> Markup:
    """Return the cycles of each phase of the run; `trace.js` puts those of the shown range in their place."""
    head = ("IPU", *(name.replace("_", " ") for name in TRACE_PHASES))
    rows = (
        (f"IPU {ipu}", *(f"{c:,} ({c / max(1, view.cycles):.1%})" for c in row))
        for ipu, row in enumerate(view.phase_cycles.tolist())
    )
    return table(head, rows, "Cycles of each phase, and their share of the range")


def _range_fields(view: TraceView) -> Markup:
    """Return fields for the first and the last cycle of the shown range, and the place of its text."""
    limits = {"type": "number", "min": 0, "max": view.cycles, "inputmode": "numeric"}
    first = tag("label", "From cycle ", tag("input", id="range-from", value=0, **limits))
    last = tag("label", " to ", tag("input", id="range-to", value=view.cycles, **limits))
    return tag("p", first, last, " ", tag("output", id="trace-range", aria_live="polite"), class_="range")


def _waits(view: WaitView) -> dict[str, Any]:
    """Return the waits of IPUs, for `trace.js`."""
    columns = {name: getattr(view, name).tolist() for name in ("ipu", "start", "end", "cause", "awaited", "step")}
    return columns | {"causes": list(WAIT_CAUSES)}


def waits_section(view: WaitView, labels: Sequence[str], anchors: Anchors) -> Section:
    """Return the section that lists when each IPU waits, why, and for which other IPU; empty without waits."""
    if not len(view):
        return Section("waits", "Waits", Markup())
    ipus, starts, end_cycles, cycles = (column.tolist() for column in (view.ipu, view.start, view.end, view.cycles))
    spans = [anchors.trace_target("span", *span) for span in zip(ipus, starts, end_cycles, strict=True)]
    columns = (
        Column("IPU", "text", [f"IPU {ipu}" for ipu in ipus], "that waits"),
        Column("Trace", "trace", spans),
        Column("From cycle", "number", starts),
        Column("To cycle", "number", end_cycles),
        Column("Cycles", "number", cycles),
        Column("Cause", "text", [WAIT_CAUSES[cause] for cause in view.cause.tolist()]),
        Column("For", "text", ["" if ipu == NO_IPU else f"IPU {ipu}" for ipu in view.awaited.tolist()]),
        Column("Which runs", "text", [labels[step] if step >= 0 else "" for step in view.step.tolist()]),
    )
    note = (
        "Filling is before an IPU's first computation, draining after its last; between its computations it waits for "
        "another IPU or the host. The other IPU is the one that comes last to the step with which it goes on."
    )
    waits = DataTable("waits-table", "Waits of IPUs", columns, sorted_by="Cycles")
    return Section("waits", "Waits", join_markup([sentence(note), waits.place()]), data=waits.data())


def _selection() -> Markup:
    """Return a place for the chosen slice, which `trace.js` fills, and buttons that go from slice to slice."""
    steps = {"longest": "Longest slice shown", "previous": "Previous slice", "next": "Next slice", "none": "Clear"}
    buttons = (tag("button", text, type="button", data_pick=step) for step, text in steps.items())
    group = tag("div", *buttons, class_="zoom", role="group", aria_label="Choose a slice")
    return tag("div", group, tag("div", tag("p", _NOTHING_CHOSEN), id="picked", aria_live="polite"), class_="picked")


def _slices_of_rows(view: TraceView) -> dict[str, Any]:
    """Return the steps of the trace with the numbers of their operations, for `trace.js`."""
    ipu, start, end, step = view.spans.T.tolist()
    spans = {"ipu": ipu, "start": start, "end": end, "step": step}
    return {**spans, "sets": [list(numbers) for numbers in view.row_sets], "rows": view.rows.tolist()}


def _operations(rows: Sequence[OperationRow], anchors: Anchors) -> dict[str, Any]:
    """Return operations by number, as [name, line, layer, part of training, cycles], for `trace.js`."""
    # Lines and layers are numbers in lists: thousands of operations share few of them.
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
    """Draw the phases of each IPU over time, with transfers and tasks in lanes beside them; `page.js` labels slices."""
    models = bokeh("models")
    hover = models.HoverTool(
        tooltips=[("", "@label{custom}"), ("cycles", "@left{0,0} – @right{0,0}")], point_policy="follow_mouse"
    )
    hover.formatters = {"@label": models.CustomJSHover(code="return window.ipujaxPage.label(value)")}
    figure = chart("trace", "cycles", "", min(700, 120 + 44 * view.num_ipus), y_range=(view.num_ipus - 0.5, -0.5))
    figure.add_tools(hover)
    hovered: list[Any] = []
    for number, (name, colour) in enumerate(PHASE_COLOURS.items()):  # in the order of `TRACE_PHASES`
        mask = view.phase == number
        columns = {"left": view.start[mask], "right": view.end[mask], "label": view.label[mask].astype(np.int32)}
        rows = view.ipu[mask].astype(np.float32)
        source = columns | {"top": rows - _HALF, "bottom": rows + _HALF}
        alpha = 0.35 if name == "idle" else 1.0
        style = {"fill_color": colour, "line_color": None, "fill_alpha": alpha}
        hovered.append(add_rectangles(figure, source, f"slices {name}", **style))
    if len(view.transfers):
        ipu, start, end, label = view.transfers.T
        lane = ipu + _HALF + 0.02
        columns = {"left": start, "right": end, "label": label, "top": lane, "bottom": lane + _LANE}
        style = {"fill_color": PHASE_COLOURS["host_exchange"], "line_color": None}
        hovered.append(add_rectangles(figure, columns, "transfers", **style))
    hover.renderers = hovered
    if tasks is not None:
        add_tasks(figure, tasks, tasks.ipu - _HALF - 0.02 - _LANE / 2, _LANE / 2, _FAINT)
    _hatch(figure, view)
    _add_selection(figure)
    _add_slice_labels(figure)
    figure.js_on_event("tap", models.CustomJS(code="window.ipujaxPage.pickAt(cb_obj.x, cb_obj.y)"))
    figure.yaxis.ticker = list(range(view.num_ipus))
    figure.yaxis.major_label_overrides = {ipu: f"IPU {ipu}" for ipu in range(view.num_ipus)}
    figure.ygrid.visible = False
    zoom_by_wheel(figure, max(1, view.cycles))
    format_thousands(figure)
    # Labels depend on the range and on the width of the window.
    labels = models.CustomJS(code="window.ipujaxPage.labelSlices()")
    figure.x_range.js_on_change("start", labels)
    figure.x_range.js_on_change("end", labels)
    figure.js_on_change("inner_width", labels)
    return figure


def _hatch(figure: Any, view: TraceView) -> None:
    """Hatch the steps with several iterations."""
    ipu, start, end, label = view.folded.T
    columns = {"left": start, "right": end, "top": ipu - _HALF, "bottom": ipu + _HALF, "label": label}
    style = {"hatch_pattern": "right_diagonal_line", "hatch_color": "white", "hatch_alpha": 0.75, "hatch_scale": 10}
    add_rectangles(figure, columns, "folded", fill_alpha=0, line_color="white", **style)


def _add_selection(figure: Any) -> None:
    """Add the frame around slices that are chosen or match a search, which `trace.js` fills."""
    empty: dict[str, list[Any]] = {"left": [], "right": [], "top": [], "bottom": []}
    style = {"fill_color": SELECTED, "fill_alpha": 0.3, "line_color": SELECTED, "line_width": 2}
    add_rectangles(figure, empty, "selected", **style)


def _add_slice_labels(figure: Any) -> None:
    """Add the names of slices that are wide enough, which `trace.js` fills as the chart is zoomed."""
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
