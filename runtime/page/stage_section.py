"""The stages of pipelines on a page: a table of what each does, and its tasks over time.

Input: `Figures`. Output: a section, empty without a pipeline.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ipujax.runtime.graph import TASK_KINDS
from ipujax.runtime.markup import Markup, joined, table, tag
from ipujax.runtime.page.charts import PHASE_COLOURS, chart, legend, with_separators, zoom_buttons
from ipujax.runtime.page.document import Section, bokeh, chart_place, sentence
from ipujax.runtime.profile import Figures
from ipujax.runtime.views import STAGE_HEAD, STAGE_NOTE, TaskView, pipeline_sentence, stage_cells, task_view

# Of Okabe and Ito, as phases; a light one under dark numbers.
KIND_COLOURS = dict(zip(TASK_KINDS, ("#56B4E9", "#E69F00", "#F0E442", "#CC79A7"), strict=True))
_HALF = 0.36  # of a row
_NUMBERED = 0.012  # of the run, from which on a task shows the number of its micro-batch
_LISTED = 400  # tasks
_WIDE = 8  # IPUs, from which on rows are lower


def stages_section(profile: Figures) -> Section:
    """What each stage does, and when.

    Args:
        profile: of a run.

    Raises:
        ProfileError: a loop whose trip count is unknown, or a profile saved by a version that knew no stages.
    """
    pipelines, rows = profile.pipelines, profile.stages
    if not pipelines:
        return Section("stages", "Stages", Markup())
    cells = (stage_cells(row, profile.cycles, len(pipelines) > 1) for row in rows)
    head = [name.capitalize() if name != "IPU" else name for name in STAGE_HEAD]
    shared = "" if len({row.ipu for row in rows}) == len(rows) else " Stages of one IPU share what is in no task."
    caption = f"What the IPU of each stage does. {STAGE_NOTE}{shared}"
    parts: list[object] = [*(sentence(pipeline_sentence(pipeline)) for pipeline in pipelines)]
    parts.append(
        tag("div", table(head, cells, caption), class_="scroll", tabindex=0, role="region", aria_label="Stages")
    )
    if not len(profile.tasks):
        return Section("stages", "Stages", joined(parts))
    view = task_view(profile)
    parts += _drawn(view)
    return Section("stages", "Stages", joined(parts), {"tasks": _tasks(view)})


def _drawn(view: TaskView) -> list[object]:
    """What is around the chart, and what says the same in words."""
    kinds = {TASK_KINDS[kind].replace("_", " of "): KIND_COLOURS[TASK_KINDS[kind]] for kind in np.unique(view.kind)}
    notes = ["Numbers are micro-batches; a line goes from a task that hands a value on to the one that reads it."]
    if view.left_out:
        notes.append(f"The last {view.left_out:,} tasks are left out.")
    if view.links_left_out:
        notes.append(f"The last {view.links_left_out:,} lines are left out.")
    ipus = len(np.unique(view.ipu))
    about = f"{len(view.start):,} tasks on {ipus} IPUs over {view.cycles:,} cycles; the list below has them in words"
    return [
        tag("h3", "Tasks over time"),
        sentence(" ".join(notes)),
        legend({**kinds, "handed on": PHASE_COLOURS["global_exchange"]}),
        chart_place("tasks", about),
        zoom_buttons("tasks", "tasks over time"),
        _listed(view),
    ]


def _listed(view: TaskView) -> Markup:
    """The first tasks as a table, folded."""
    shown = range(min(_LISTED, len(view.labels)))
    columns = (view.ipu, view.start, view.end, view.busy, view.waited)
    rows = [(view.labels[n], *(int(column[n]) for column in columns)) for n in shown]
    what = f"All {len(rows):,} tasks" if len(rows) == len(view.labels) else f"The first {len(rows):,} tasks"
    head = ("Task", "IPU", "Starts at", "Ends at", "Cycles of work", "Cycles waited before or in it")
    inside = tag("div", table(head, rows), class_="scroll", tabindex=0, role="region", aria_label=what)
    return tag("details", tag("summary", f"{what} in words"), inside)


def _tasks(view: TaskView) -> Any:
    models, used = bokeh("models"), np.unique(view.ipu)
    row = np.searchsorted(used, view.ipu).astype(np.float64)
    hover = models.HoverTool(
        tooltips=[
            ("", "stage @stage, @kind, micro-batch @micro_batch"),
            ("cycles", "@left{0,0} – @right{0,0}"),
            ("works for", "@busy{0,0}"),
            ("IPU waited", "@waited{0,0}"),
        ],
        point_policy="follow_mouse",
    )
    height = 110 + (44 if len(used) <= _WIDE else 20) * len(used)
    figure = chart("tasks", "cycles", "", min(900, height), y_range=(len(used) - 0.5, -0.5))
    for number in np.unique(view.kind).tolist():
        mine = view.kind == number
        columns = {"left": view.start[mine], "right": view.end[mine], "stage": view.stage[mine].astype(np.int32)}
        columns |= {name: getattr(view, name)[mine].astype(np.int32) for name in ("micro_batch", "busy", "waited")}
        columns |= {"top": row[mine] - _HALF, "bottom": row[mine] + _HALF}
        kinds = [TASK_KINDS[number].replace("_", " of ")] * int(mine.sum())
        source = models.ColumnDataSource({**columns, "kind": kinds})
        drawn = figure.quad(
            "left",
            "right",
            "top",
            "bottom",
            source=source,
            fill_color=KIND_COLOURS[TASK_KINDS[number]],
            line_color="#ffffff",
            line_width=0.5,
        )
        hover.renderers = [*(hover.renderers if isinstance(hover.renderers, list) else []), drawn]
    figure.add_tools(hover)
    _add_numbers(figure, view, row)
    if len(view.links):
        writer, reader = view.links.T
        ends = {"x0": view.end[writer], "y0": row[writer], "x1": view.start[reader], "y1": row[reader]}
        source, colour = models.ColumnDataSource(ends), PHASE_COLOURS["global_exchange"]
        figure.segment("x0", "y0", "x1", "y1", source=source, line_color=colour, line_alpha=0.7)
        figure.scatter("x1", "y1", source=source, size=4, color=colour, alpha=0.8)
    figure.yaxis.ticker = list(range(len(used)))
    figure.yaxis.major_label_overrides = {n: f"IPU {ipu}" for n, ipu in enumerate(used.tolist())}
    figure.ygrid.visible = False
    figure.x_range = models.Range1d(0, max(1, view.cycles), bounds=(0, max(1, view.cycles)))
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
