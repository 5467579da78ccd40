"""Section of a summary on the stages of pipelines.

Input: `Figures`. Output: text; empty without a pipeline with stages.
"""

from __future__ import annotations

from ipujax.runtime.errors import ProfileError
from ipujax.runtime.profile.figures import Figures
from ipujax.runtime.views import STAGE_HEAD, STAGE_NOTE, pipeline_sentence, stage_cells

_NUM_TEXTS = 2  # columns at the end that are texts, aligned to the left


def stages(profile: Figures) -> str:
    """List each stage's phases in shares of the run, and each pipeline's bubble."""
    try:
        pipelines = profile.pipelines
        rows = profile.stages
    except ProfileError:  # a trip count is unknown, which the section on execution says
        return ""
    if not pipelines:
        return ""
    cells = [STAGE_HEAD, *(stage_cells(row, profile.cycles, len(pipelines) > 1) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(_align(row, widths)).rstrip() for row in cells]
    note = [] if len({row.ipu for row in rows}) == len(rows) else [_SHARED_IPU]
    text = [*map(pipeline_sentence, pipelines), STAGE_NOTE, *note]
    return "\n".join(["Stages:", *(f"  {line}" for line in (*text, *lines))])


_SHARED_IPU = "Stages on one IPU share what it does in no task of theirs, by the cycles of their tasks."


def _align(row: tuple[str, ...], widths: list[int]) -> list[str]:
    num_numbers = len(row) - _NUM_TEXTS
    cells = zip(row, widths, strict=True)
    return [f"{cell:>{width}}" if n < num_numbers else f"{cell:<{width}}" for n, (cell, width) in enumerate(cells)]
