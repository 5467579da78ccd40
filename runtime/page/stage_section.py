"""The stages of pipelines on a page: a table of what each does, and its tasks over time.

Input: `Figures`. Output: a section, empty without a pipeline.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ipujax.runtime.markup import Markup, joined, table, tag
from ipujax.runtime.page.anchors import Anchors
from ipujax.runtime.page.charts import chart, legend, with_separators, zoom_buttons, zooms_by_wheel
from ipujax.runtime.page.document import Section, bokeh, chart_place, sentence
from ipujax.runtime.page.task_chart import LINES_NOTE, add_tasks, task_legend
from ipujax.runtime.profile import Figures, StageCost, TaskTrace
from ipujax.runtime.views import STAGE_HEAD, STAGE_NOTE, TaskView, pipeline_sentence, stage_cells, task_view

_HALF = 0.36  # of a row
_NUMBERED = 0.012  # of the run, from which on a task shows the number of its micro-batch
_LISTED = 400  # tasks
_WIDE = 8  # IPUs, from which on rows are lower


def stages_section(profile: Figures, anchors: Anchors) -> Section:
    """What each stage does, and when.

    Args:
        profile: of a run.
        anchors: of the page.

    Raises:
        ProfileError: a loop whose trip count is unknown, or a profile saved by a version that knew no stages.
    """
    pipelines, rows = profile.pipelines, profile.stages
    if not pipelines:
        return Section("stages", "Stages", Markup())
    tasks = profile.tasks
    cells = [
        (joined([name, " ", _trace_of_stage(tasks, row, anchors)]), *others)
        for row in rows
        for name, *others in [stage_cells(row, profile.cycles, len(pipelines) > 1)]
    ]
    head = [name.capitalize() if name != "IPU" else name for name in STAGE_HEAD]
    shared = "" if len({row.ipu for row in rows}) == len(rows) else " Stages of one IPU share what is in no task."
    caption = f"What the IPU of each stage does. {STAGE_NOTE}{shared}"
    parts: list[object] = [*(sentence(pipeline_sentence(pipeline)) for pipeline in pipelines)]
    label = {"role": "region", "aria_label": "Stages"}
    parts.append(tag("div", table(head, cells, caption), class_="scroll", tabindex=0, **label))
    if not len(tasks):
        return Section("stages", "Stages", joined(parts))
    view = task_view(profile)
    parts += _drawn(view, anchors)
    return Section("stages", "Stages", joined(parts), {"tasks": _tasks(view)})


def _trace_of_stage(tasks: TaskTrace, row: StageCost, anchors: Anchors) -> Markup:
    """A link to the tasks of a stage in the trace."""
    mine = (tasks.pipeline == row.pipeline) & (tasks.stage == row.stage)
    if not mine.any():
        return Markup()
    return anchors.trace("span", row.ipu, int(tasks.start[mine].min()), int(tasks.end[mine].max()))


def _drawn(view: TaskView, anchors: Anchors) -> list[object]:
    """What is around the chart, and what says the same in words."""
    notes = ["Numbers are micro-batches.", LINES_NOTE]
    if view.num_omitted:
        notes.append(f"The last {view.num_omitted:,} tasks are left out.")
    if view.num_omitted_links:
        notes.append(f"The last {view.num_omitted_links:,} lines are left out.")
    ipus = len(np.unique(view.ipu))
    about = f"{len(view.start):,} tasks on {ipus} IPUs over {view.cycles:,} cycles; the list below has them in words"
    return [
        tag("h3", "Tasks over time"),
        sentence(" ".join(notes)),
        legend(task_legend(view)),
        chart_place("tasks", about),
        zoom_buttons("tasks", "tasks over time"),
        _listed(view, anchors),
    ]


def _listed(view: TaskView, anchors: Anchors) -> Markup:
    """The first tasks as a table, folded."""
    shown = range(min(_LISTED, len(view.labels)))
    columns = (view.ipu, view.start, view.end, view.busy, view.waited)
    rows = []
    for n in shown:
        ipu, start, end, *spent = (int(column[n]) for column in columns)
        name = joined([view.labels[n], " ", anchors.trace("span", ipu, start, end)])
        rows.append((name, ipu, start, end, *spent))
    what = f"All {len(rows):,} tasks" if len(rows) == len(view.labels) else f"The first {len(rows):,} tasks"
    head = ("Task", "IPU", "Starts at", "Ends at", "Cycles of work", "Cycles waited before or in it")
    label = {"role": "region", "aria_label": what, "data_search": "tasks"}
    inside = tag("div", table(head, rows), class_="scroll", tabindex=0, **label)
    return tag("details", tag("summary", f"{what} in words"), inside)


def _tasks(view: TaskView) -> Any:
    used = np.unique(view.ipu)
    row = np.searchsorted(used, view.ipu).astype(np.float64)
    height = 110 + (44 if len(used) <= _WIDE else 20) * len(used)
    figure = chart("tasks", "cycles", "", min(900, height), y_range=(len(used) - 0.5, -0.5))
    add_tasks(figure, view, row, _HALF)
    _add_numbers(figure, view, row)
    figure.yaxis.ticker = list(range(len(used)))
    figure.yaxis.major_label_overrides = {n: f"IPU {ipu}" for n, ipu in enumerate(used.tolist())}
    figure.ygrid.visible = False
    zooms_by_wheel(figure, 0, max(1, view.cycles))
    with_separators(figure, "x")
    return figure


def _add_numbers(figure: Any, view: TaskView, row: np.ndarray) -> None:
    """Micro-batches on the tasks that are wide enough at first."""
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
