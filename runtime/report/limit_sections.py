"""Sections of a summary on what limits a program: the verdict, the causes of its cycles, the stages of its pipelines.

Input: `Figures`. Output: text, "" where a trip count is data: the section on execution names the loop.
"""

from __future__ import annotations

from ipujax.runtime.errors import ProfileError
from ipujax.runtime.profile import Figures
from ipujax.runtime.profile.text import section, share
from ipujax.runtime.tensor import Origin
from ipujax.runtime.views import STAGE_HEAD, STAGE_NOTE, pipeline_sentence, stage_cells, tried_changes, verdict


def verdict_text(profile: Figures) -> str:
    """Name the cause whose removal saves most, the next ones, and what to try."""
    try:
        result = verdict(profile)
    except ProfileError:
        return ""
    total = profile.cycles
    lines = [result.sentence, result.bound]
    for cause, gain, remedy in zip(result.causes, result.gains, result.remedies, strict=True):
        lines.append(f"{gain:>15,}  {share(gain, total)}  at most, of {cause.name}")
        lines.append(f"{'':>15}  {'':>6}  try, not tried yet: {remedy}")
    changes = tried_changes(profile)
    lines += ["", "Tried by ipu.advise:"] if changes else []
    lines += [f"  {change}: {effect}" for change, effect in changes]
    return section("Verdict", lines)


def causes(profile: Figures) -> str:
    """List the causes of the cycles of a run, each removed behind those before it, and each alone."""
    if not profile.identity.function:  # of Poplar programs the summary has Poplar's sections alone
        return ""
    try:
        rows = profile.causes
    except ProfileError:
        return ""
    total = profile.cycles
    head = f"{'cycles':>15}  {'share':>6}  {'alone':>15}  {'of any plan':>15}  cause"
    lines = [
        f"{row.cycles:>15,}  {share(row.cycles, total)}  {row.alone_cycles:>15,}  {row.least_cycles:>15,}  {row.name}"
        + (f", most at {row.origin}" if row.origin != Origin() else "")
        for row in rows
    ]
    return section("Causes, each removed behind those before it, and each alone", [head, *lines]) if total else ""


_NUM_TEXTS = 2  # columns at the end that are texts, aligned to the left


def stages(profile: Figures) -> str:
    """List each stage's phases in shares of the run, and each pipeline's bubble."""
    try:
        pipelines = profile.pipelines
        rows = profile.stages
    except ProfileError:
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
