"""Tasks of pipelines in a chart over cycles: rectangles, and lines from a task to the reader of its result.

Input: a figure of Bokeh, a `TaskView`, and the row of each task. Output: glyphs that are added to the figure.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ipujax.runtime.graph import TASK_KINDS
from ipujax.runtime.page.document import bokeh
from ipujax.runtime.views import TaskView

# Source: Paul Tol, "Colour schemes", muted; light ones, under dark numbers, and none of those of phases.
KIND_COLOURS = dict(zip(TASK_KINDS, ("#88CCEE", "#DDCC77", "#999933", "#CC6677"), strict=True))
HANDED_ON = "#777777"  # of lines: readable on light and dark pages, and of no phase
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
        source = models.ColumnDataSource({**columns, "kind": [kind.replace("_", " of ")] * int(mask.sum())})
        style = {"fill_color": KIND_COLOURS[kind], "line_color": "#ffffff", "line_width": 0.5}
        rectangles.append(figure.quad("left", "right", "top", "bottom", source=source, name=f"tasks {kind}", **style))
    if len(view.links):
        writer, reader = view.links.T
        lines = {"x0": view.end[writer], "y0": middle[writer], "x1": view.start[reader], "y1": middle[reader]}
        source = models.ColumnDataSource(lines)
        figure.segment("x0", "y0", "x1", "y1", source=source, name="links", line_color=HANDED_ON, line_alpha=opacity)
        figure.scatter("x1", "y1", source=source, size=4, color=HANDED_ON, alpha=opacity)
    figure.add_tools(models.HoverTool(tooltips=_TOOLTIPS, point_policy="follow_mouse", renderers=rectangles))
