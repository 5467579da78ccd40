"""Stages section of a page: a table of their phases, and the tasks of pipelines over time.

Input: `Figures`. Output: a section, empty without a pipeline.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ipujax.runtime.markup import Markup, join_markup, table, tag
from ipujax.runtime.page.anchors import Anchors
from ipujax.runtime.page.charts import chart, format_thousands, legend, zoom_buttons, zoom_by_wheel
from ipujax.runtime.page.document import Section, bokeh, chart_place, sentence
from ipujax.runtime.page.task_chart import LINES_NOTE, add_tasks, task_legend
from ipujax.runtime.profile import Figures, StageCost, TaskTrace
from ipujax.runtime.views import STAGE_HEAD, STAGE_NOTE, TaskView, pipeline_sentence, stage_cells, task_view

_HALF = 0.36  # half the height of a task, in rows
_NUMBERED = 0.012  # of the run: longer tasks have the number of their micro-batch
_MAX_LISTED = 400  # tasks
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
    parts += _tasks_over_time(view, anchors)
    return Section("stages", "Stages", join_markup(parts), {"tasks": _tasks(view)})


def _trace_of_stage(tasks: TaskTrace, row: StageCost, anchors: Anchors) -> Markup:
    is_of_stage = (tasks.pipeline == row.pipeline) & (tasks.stage == row.stage)
    if not is_of_stage.any():
        return Markup()
    return anchors.trace("span", row.ipu, int(tasks.start[is_of_stage].min()), int(tasks.end[is_of_stage].max()))


def _tasks_over_time(view: TaskView, anchors: Anchors) -> list[object]:
    """Return the place of the chart with notes, legend and buttons, and the list of its tasks."""
    notes = ["Numbers are micro-batches.", LINES_NOTE]
    if view.num_omitted:
        notes.append(f"The last {view.num_omitted:,} tasks are left out.")
    if view.num_omitted_links:
        notes.append(f"The last {view.num_omitted_links:,} lines are left out.")
    ipus = len(np.unique(view.ipu))
    text = f"{len(view.start):,} tasks on {ipus} IPUs over {view.cycles:,} cycles; the list below has them in words"
    return [
        tag("h3", "Tasks over time"),
        sentence(" ".join(notes)),
        legend(task_legend(view)),
        chart_place("tasks", text),
        zoom_buttons("tasks", "tasks over time"),
        _list_tasks(view, anchors),
    ]


def _list_tasks(view: TaskView, anchors: Anchors) -> Markup:
    """Return the first tasks as a folded table, for readers who cannot see the chart."""
    columns = (view.ipu, view.start, view.end, view.busy, view.waited)
    rows = []
    for n in range(min(_MAX_LISTED, len(view.labels))):
        ipu, start, end, busy, waited = (int(column[n]) for column in columns)
        name = join_markup([view.labels[n], " ", anchors.trace("span", ipu, start, end)])
        rows.append((name, ipu, start, end, busy, waited))
    title = f"All {len(rows):,} tasks" if len(rows) == len(view.labels) else f"The first {len(rows):,} tasks"
    head = ("Task", "IPU", "Starts at", "Ends at", "Cycles of work", "Cycles waited before or in it")
    label = {"role": "region", "aria_label": title, "data_search": "tasks"}
    tasks = tag("div", table(head, rows), class_="scroll", tabindex=0, **label)
    return tag("details", tag("summary", f"{title} in words"), tasks)


def _tasks(view: TaskView) -> Any:
    ipus = np.unique(view.ipu)  # a row for each IPU with tasks
    row = np.searchsorted(ipus, view.ipu).astype(np.float64)
    height = 110 + (44 if len(ipus) <= _MAX_HIGH_ROWS else 20) * len(ipus)  # in pixels
    figure = chart("tasks", "cycles", "", min(900, height), y_range=(len(ipus) - 0.5, -0.5))
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
