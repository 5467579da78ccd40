"""Stages of pipelines on a page: their tasks and waits over time, a picture for the first tab, and a section of tables.

Input: `Figures`; for glyphs in a chart over cycles also a figure of Bokeh, and the row of each task or wait. Output:
markup and charts, empty without a pipeline: a rectangle a task, lines from a task to the reader of its result, waits.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ipujax.runtime.graph import TASK_KINDS
from ipujax.runtime.markup import Markup, join_markup, table, tag
from ipujax.runtime.page.anchors import Anchors
from ipujax.runtime.page.charts import add_rectangles, chart, format_thousands, legend, zoom_buttons, zoom_by_wheel
from ipujax.runtime.page.document import Column, DataTable, Section, bokeh, chart_place, sentence
from ipujax.runtime.profile import Figures, StageCost, TaskTrace
from ipujax.runtime.views import (
    NO_IPU,
    STAGE_HEAD,
    STAGE_NOTE,
    WAIT_CAUSES,
    TaskView,
    WaitView,
    pipeline_sentence,
    stage_cells,
    task_view,
    wait_view,
)

# Source: Paul Tol, "Colour schemes", muted; light ones, under dark numbers, and none of those of phases.
KIND_COLOURS = dict(zip(TASK_KINDS, ("#88CCEE", "#DDCC77", "#999933", "#CC6677"), strict=True))
HANDED_ON = "#777777"  # of lines: readable on light and dark pages, and of no phase
# Source: Paul Tol, "Colour schemes", vibrant; none is of a kind of tasks.
WAIT_COLOURS = dict(zip(WAIT_CAUSES, ("#009988", "#EE3377", "#0077BB", "#EE7733"), strict=True))
LINES_NOTE = "A line goes from a task that hands a value on to the one that reads it."
_TOOLTIPS = [
    ("", "stage @stage, @kind, micro-batch @micro_batch"),
    ("cycles", "@left{0,0} – @right{0,0}"),
    ("works for", "@busy{0,0}"),
    ("IPU waited", "@waited{0,0}"),
]


def task_legend(view: TaskView) -> dict[str, str]:
    """Return the colours of the kinds of tasks in a view, and of lines, by name."""
    kinds = [TASK_KINDS[kind] for kind in np.unique(view.kind).tolist()]
    return {kind.replace("_", " of "): KIND_COLOURS[kind] for kind in kinds} | {"handed on": HANDED_ON}


def wait_legend(view: WaitView) -> dict[str, str]:
    """Return the colours of the causes of waits in a view, by name."""
    return {
        f"waits: {WAIT_CAUSES[cause]}": WAIT_COLOURS[WAIT_CAUSES[cause]] for cause in np.unique(view.cause).tolist()
    }


def add_waits(figure: Any, view: WaitView, middle: np.ndarray, mask: np.ndarray, half: float) -> None:
    """Draw the waits of a mask, bool[waits], into a figure of Bokeh, `half` their height around `middle`, [waits]."""
    models = bokeh("models")
    rectangles = []
    for number in np.unique(view.cause[mask]).tolist():
        cause = WAIT_CAUSES[number]
        rows = np.flatnonzero(mask & (view.cause == number))
        columns = {"left": view.start[rows], "right": view.end[rows], "cycles": view.cycles[rows].astype(np.float64)}
        columns |= {"top": middle[rows] - half, "bottom": middle[rows] + half}
        awaited = [f", for IPU {ipu}" if ipu != NO_IPU else "" for ipu in view.awaited[rows].tolist()]
        texts = [f"waits: {cause}{text}" for text in awaited]
        style = {"fill_color": WAIT_COLOURS[cause], "line_color": None, "fill_alpha": 0.75}
        rectangles.append(add_rectangles(figure, {**columns, "text": texts}, f"waits {cause}", **style))
    tooltips = [("", "@text"), ("cycles", "@left{0,0} – @right{0,0}"), ("waits for", "@cycles{0,0}")]
    figure.add_tools(models.HoverTool(tooltips=tooltips, point_policy="follow_mouse", renderers=rectangles))


def add_tasks(figure: Any, view: TaskView, middle: np.ndarray, half: float, opacity: float = 0.7) -> None:
    """Draw tasks into a figure of Bokeh, `half` their height around `middle`, float64[tasks], and their links."""
    models = bokeh("models")
    rectangles = []
    for number in np.unique(view.kind).tolist():
        kind = TASK_KINDS[number]
        mask = view.kind == number
        # Bokeh has no binary form for columns of int64.
        columns = {"left": view.start[mask], "right": view.end[mask], "stage": view.stage[mask].astype(np.int32)}
        columns |= {"micro_batch": view.micro_batch[mask].astype(np.int32)}
        columns |= {"busy": view.busy[mask].astype(np.float64), "waited": view.waited[mask].astype(np.float64)}
        columns |= {"top": middle[mask] - half, "bottom": middle[mask] + half}
        columns |= {"kind": [kind.replace("_", " of ")] * int(mask.sum())}
        style = {"fill_color": KIND_COLOURS[kind], "line_color": "#ffffff", "line_width": 0.5}
        rectangles.append(add_rectangles(figure, columns, f"tasks {kind}", **style))
    if len(view.links):
        writer, reader = view.links.T
        lines = {"x0": view.end[writer], "y0": middle[writer], "x1": view.start[reader], "y1": middle[reader]}
        source = models.ColumnDataSource(lines)
        figure.segment("x0", "y0", "x1", "y1", source=source, name="links", line_color=HANDED_ON, line_alpha=opacity)
        figure.scatter("x1", "y1", source=source, size=4, color=HANDED_ON, alpha=opacity)
    figure.add_tools(models.HoverTool(tooltips=_TOOLTIPS, point_policy="follow_mouse", renderers=rectangles))


_HALF = 0.36  # half the height of a task, in rows
_NUMBERED = 0.012  # of the run: longer tasks have the number of their micro-batch
_MAX_WAITS = 4_000  # that are drawn, the longest
_MAX_HIGH_ROWS = 8  # IPUs; rows of more are lower


def stages_section(profile: Figures, anchors: Anchors) -> Section:
    """Return the section of pipelines' stages; its body is empty without a pipeline."""
    pipelines = profile.pipelines
    rows = profile.stages
    if not pipelines:
        return Section("stages", "Stages", Markup())
    tasks = profile.tasks
    cells = [
        (join_markup([name, " ", _trace_of_stage(tasks, row, anchors)]), *figures)
        for row in rows
        for name, *figures in [stage_cells(row, profile.cycles, len(pipelines) > 1)]
    ]
    head = [name.capitalize() if name != "IPU" else name for name in STAGE_HEAD]
    shared = "" if len({row.ipu for row in rows}) == len(rows) else " Stages of one IPU share what is in no task."
    caption = f"What the IPU of each stage does. {STAGE_NOTE}{shared}"
    parts: list[object] = [*(sentence(pipeline_sentence(pipeline)) for pipeline in pipelines)]
    label = {"role": "region", "aria_label": "Stages"}
    parts.append(tag("div", table(head, cells, caption), class_="scroll", tabindex=0, **label))
    if not len(tasks):
        return Section("stages", "Stages", join_markup(parts))
    view = task_view(profile)
    tasks_table = _task_table(view, anchors)
    title = "Tasks" if not view.num_omitted else f"Tasks, without the last {view.num_omitted:,}"
    parts += [tag("h3", title), tasks_table.place()]
    return Section("stages", "Stages", join_markup(parts), data=tasks_table.data())


def _trace_of_stage(tasks: TaskTrace, row: StageCost, anchors: Anchors) -> Markup:
    is_of_stage = (tasks.pipeline == row.pipeline) & (tasks.stage == row.stage)
    if not is_of_stage.any():
        return Markup()
    return anchors.trace("span", row.ipu, int(tasks.start[is_of_stage].min()), int(tasks.end[is_of_stage].max()))


def task_picture(profile: Figures) -> tuple[Markup, dict[str, Any]]:
    """Return the place in the page of a chart of tasks and waits, and the chart by its name; empty without tasks."""
    if not profile.pipelines or not len(profile.tasks):
        return Markup(), {}
    view = task_view(profile)
    waits = wait_view(profile).longest(_MAX_WAITS)
    notes = ["Numbers are micro-batches.", LINES_NOTE, "Narrower bars are waits, coloured by cause."]
    if view.num_omitted:
        notes.append(f"The last {view.num_omitted:,} tasks are left out.")
    if view.num_omitted_links:
        notes.append(f"The last {view.num_omitted_links:,} lines are left out.")
    ipus = len(np.unique(view.ipu))
    text = f"{len(view.start):,} tasks on {ipus} IPUs over {view.cycles:,} cycles; Timeline lists them in words"
    picture = [
        legend(task_legend(view) | wait_legend(waits)),
        chart_place("tasks", text),
        zoom_buttons("tasks", "tasks over time"),
        tag("p", " ".join(notes), class_="hint"),
    ]
    return join_markup(picture), {"tasks": _tasks(view, waits)}


def _task_table(view: TaskView, anchors: Anchors) -> DataTable:
    """Return the tasks as a table, also for readers who cannot see the chart."""
    ipus, starts, end_cycles = (column.tolist() for column in (view.ipu, view.start, view.end))
    spans = [anchors.trace_target("span", *span) for span in zip(ipus, starts, end_cycles, strict=True)]
    columns = (
        Column("Task", "text", list(view.labels)),
        Column("Trace", "trace", spans),
        Column("IPU", "text", [f"IPU {ipu}" for ipu in ipus]),
        Column("Starts at", "number", starts, "cycle at which its work begins, after its waits"),
        Column("Ends at", "number", end_cycles),
        Column("Cycles of work", "number", view.busy.tolist()),
        Column("Waited", "number", view.waited.tolist(), "idle cycles of its IPU before it or in it"),
    )
    return DataTable("tasks-table", "Tasks of pipelines", columns)


def _tasks(view: TaskView, waits: WaitView) -> Any:
    """Draw the tasks of pipelines and the waits before them over time, a row for each IPU."""
    ipus = np.unique(view.ipu)  # a row for each IPU with tasks
    row = np.searchsorted(ipus, view.ipu).astype(np.float64)
    height = 100 + (36 if len(ipus) <= _MAX_HIGH_ROWS else 20) * len(ipus)  # in pixels
    figure = chart("tasks", "cycles", "", min(420, height), y_range=(len(ipus) - 0.5, -0.5))
    is_shown = np.isin(waits.ipu, ipus)
    add_waits(figure, waits, np.searchsorted(ipus, np.minimum(waits.ipu, ipus[-1])), is_shown, _HALF / 2)
    add_tasks(figure, view, row, _HALF)
    _add_numbers(figure, view, row)
    figure.yaxis.ticker = list(range(len(ipus)))
    figure.yaxis.major_label_overrides = {n: f"IPU {ipu}" for n, ipu in enumerate(ipus.tolist())}
    figure.ygrid.visible = False
    zoom_by_wheel(figure, max(1, view.cycles))
    format_thousands(figure)
    return figure


def _add_numbers(figure: Any, view: TaskView, row: np.ndarray) -> None:
    """Write the micro-batches on the tasks that are wide enough before zooming."""
    wide = np.flatnonzero(view.end - view.start > _NUMBERED * view.cycles)
    if len(wide):
        middle = (view.start[wide] + view.end[wide]) / 2
        texts = [str(number) for number in view.micro_batch[wide].tolist()]
        source = bokeh("models").ColumnDataSource({"x": middle, "y": row[wide], "text": texts})
        figure.text(
            "x",
            "y",
            "text",
            source=source,
            text_align="center",
            text_baseline="middle",
            text_font_size="11px",
            text_color="#111111",
        )
