"""Tasks of pipelines in a chart over cycles: rectangles, lines from a task to the reader of its result, and waits.

Input: a figure of Bokeh, a `TaskView` or `WaitView`, and the row of each task or wait. Output: glyphs in the figure.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ipujax.runtime.graph import TASK_KINDS
from ipujax.runtime.page.charts import add_rectangles
from ipujax.runtime.page.document import bokeh
from ipujax.runtime.views import NO_IPU, WAIT_CAUSES, TaskView, WaitView

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
