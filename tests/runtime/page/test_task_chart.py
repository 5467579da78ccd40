"""Tasks as rectangles: each spans its cycles, and half of the height of its row above and below the middle."""

from __future__ import annotations

import numpy as np
import pytest

from ipujax.runtime.graph import TASK_KINDS
from ipujax.runtime.page.charts import chart
from ipujax.runtime.page.stage_section import KIND_COLOURS, add_tasks, task_legend
from ipujax.runtime.views import TaskView

pytest.importorskip("bokeh")

MIDDLE = np.array([0.0, 1.0, 0.0])
VIEW = TaskView(
    num_ipus=2,
    cycles=90,
    ipu=np.array([0, 1, 0]),
    stage=np.array([0, 1, 0]),
    kind=np.array([0, 0, 1]),
    micro_batch=np.array([3, 3, 3]),
    start=np.array([0, 30, 60]),
    end=np.array([20, 50, 90]),
    busy=np.array([15, 20, 25]),
    waited=np.array([0, 10, 5]),
    labels=("first", "second", "third"),
    links=np.array([[0, 1], [1, 2]]),
    num_omitted=0,
    num_omitted_links=0,
)


def columns(name: str) -> dict[str, list[float]]:
    """Columns of the glyphs of a name in the chart of VIEW, as lists."""
    figure = chart("tasks", "cycles", "", 100, y_range=(1.5, -0.5))
    add_tasks(figure, VIEW, MIDDLE, half=0.25)
    (renderer,) = figure.select(name=name)
    return {key: np.asarray(column).tolist() for key, column in renderer.data_source.data.items()}


def test_rectangles_of_a_kind() -> None:
    forward, backward = (columns(f"tasks {kind}") for kind in TASK_KINDS[:2])
    assert (forward["left"], forward["right"]) == ([0, 30], [20, 50])
    # The axis points down, with IPU 0 on top.
    assert (forward["top"], forward["bottom"]) == ([-0.25, 0.75], [0.25, 1.25])
    assert (backward["top"], backward["bottom"]) == ([-0.25], [0.25])
    assert (backward["stage"], backward["busy"], backward["waited"]) == ([0], [25], [5])


def test_lines_join_the_end_of_a_writer_and_the_start_of_its_reader() -> None:
    lines = columns("links")
    assert (lines["x0"], lines["y0"]) == ([20, 50], [0, 1])
    assert (lines["x1"], lines["y1"]) == ([30, 60], [1, 0])


def test_legend_names_the_kinds_in_the_view() -> None:
    names = [kind.replace("_", " of ") for kind in TASK_KINDS[:2]]
    assert list(task_legend(VIEW)) == [*names, "handed on"]
    assert list(task_legend(VIEW).values())[:2] == [KIND_COLOURS[kind] for kind in TASK_KINDS[:2]]
