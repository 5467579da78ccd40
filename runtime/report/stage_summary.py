"""The section of a summary on the stages of pipelines.

Input: `Figures`. Output: text; empty where there is no pipeline with stages.
"""

from __future__ import annotations

from ipujax.runtime.errors import ProfileError
from ipujax.runtime.profile.figures import Figures
from ipujax.runtime.views import STAGE_HEAD, STAGE_NOTE, pipeline_sentence, stage_cells

_TEXTS = 2  # columns at the end that are texts


def stages(profile: Figures) -> str:
    """What each stage does all the time, in shares of the run, and what each pipeline loses to waiting.

    Args:
        profile: of a run.
    """
    try:
        pipelines, rows = profile.pipelines, profile.stages
    except ProfileError:  # no cycles are known, which the section on execution says; or an older file
        return ""
    if not pipelines:
        return ""
    cells = [STAGE_HEAD, *(stage_cells(row, profile.cycles, len(pipelines) > 1) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(_aligned(row, widths)).rstrip() for row in cells]
    shared = [] if len({row.ipu for row in rows}) == len(rows) else [_SHARED]
    text = [*map(pipeline_sentence, pipelines), STAGE_NOTE, *shared]
    return "\n".join(["Stages:", *(f"  {line}" for line in (*text, *lines))])


_SHARED = "Stages on one IPU share what it does in no task of theirs, by the cycles of their tasks."


def _aligned(row: tuple[str, ...], widths: list[int]) -> list[str]:
    numbers = len(row) - _TEXTS
    padded = zip(row, widths, strict=True)
    return [f"{cell:>{width}}" if n < numbers else f"{cell:<{width}}" for n, (cell, width) in enumerate(padded)]
