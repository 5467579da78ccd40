"""Stages of pipelines on a page: the tasks over time, a picture for the first tab, and a section of tables.

Input: `Figures`. Output: markup and charts; empty without a pipeline.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ipujax.runtime.markup import Markup, join_markup, table, tag
from ipujax.runtime.page.anchors import Anchors
from ipujax.runtime.page.charts import chart, format_thousands, legend, zoom_buttons, zoom_by_wheel
from ipujax.runtime.page.document import Column, DataTable, Section, bokeh, chart_place, sentence
from ipujax.runtime.page.task_chart import LINES_NOTE, add_tasks, add_waits, task_legend, wait_legend
from ipujax.runtime.profile import Figures, StageCost, TaskTrace
from ipujax.runtime.views import (
    STAGE_HEAD,
    STAGE_NOTE,
    TaskView,
    WaitView,
    pipeline_sentence,
    stage_cells,
    task_view,
    wait_view,
)

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
    """Return the place of a chart of the tasks of pipelines and of the waits of IPUs, and the chart; empty without."""
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
    zoom_by_wheel(figure, 0, max(1, view.cycles))
    format_thousands(figure, "x")
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
