"""Answer to the question which stage limits a pipeline, who waits for it, and whether one micro-batch is slow.

Input: `Figures`. Output: an `Answer`, without a sentence where no pipeline with stages is known.
"""

from __future__ import annotations

from ipujax.runtime.errors import ProfileError
from ipujax.runtime.profile import Figures, PipelineCost, StageCost
from ipujax.runtime.views.answer import Answer
from ipujax.runtime.views.stage_view import SLOW, bubble_sentence, pipeline_sentence

STAGE = "Which stage limits the pipeline?"
_UNEVEN = 1.1  # times the mean, from which on a stage is slower than the others
_WIDE = 1.25  # times the ideal bubble, from which on something else than the schedule makes it
_FEW = 0.1  # of the time: a bubble that more micro-batches would shorten
_SMALL = 0.01  # of a pipeline's time


def stage_answer(profile: Figures) -> Answer:
    """The stage whose tasks take most, and for how much of its time the others wait for it.

    Args:
        profile: of a run.
    """
    try:
        if not profile.pipelines:
            return Answer(STAGE, "")
    except ProfileError:  # the section on stages says why; whether there is a pipeline is not known either
        return Answer(STAGE, "")
    number = max(range(len(profile.pipelines)), key=lambda n: profile.pipelines[n].cycles)
    pipeline = profile.pipelines[number]
    stages = [row for row in profile.stages if row.pipeline == number]
    slowest = next(row for row in stages if row.stage == pipeline.slowest_stage)
    name = f"stage {slowest.stage}"
    if not pipeline.is_traced:
        return Answer(STAGE, pipeline_sentence(pipeline), "", name, 0.0, "stages")
    by_ipu = [sum(row.task_cycles for row in stages if row.ipu == ipu) for ipu in {row.ipu for row in stages}]
    whole, mean = max(1, pipeline.cycles), sum(by_ipu) / len(by_ipu)
    share, excess = max(by_ipu) / whole, max(by_ipu) / max(1.0, mean)
    which = f"{name} (IPU {slowest.ipu})"
    shared = [row.stage for row in stages if row.ipu == slowest.ipu and row is not slowest]
    busy = f"{'the tasks of its IPU' if shared else 'its tasks'} take {share:.1%} of the pipeline's time"
    is_uneven = len(by_ipu) > 1 and excess > _UNEVEN
    if is_uneven:
        text = f"{which.capitalize().replace('ipu', 'IPU')} limits: {busy}, {excess:.1f} times the mean of all IPUs"
    else:
        text = f"None alone: the slowest, {which}, is within {_UNEVEN - 1:.0%} of the mean; {busy}"
    slow = _slow_micro_batch(stages, whole)
    waits = _waiter(stages, slowest, whole) if is_uneven else _waits(stages, len(by_ipu) * whole)
    text += f"{waits}. {bubble_sentence(pipeline)}{slow}"
    hint = "micro-batches that take equally long, such as sequences sorted by length" if slow else ""
    return Answer(STAGE, text, hint or _hint(profile, pipeline, is_uneven, name), name, share, "stages")


def _waiter(stages: list[StageCost], slowest: StageCost, whole: int) -> str:
    """The stage that waits longest for the slowest, or else for any."""
    waiting = [row for row in stages if row.waits_for == slowest.stage] or stages
    row = max(waiting, key=lambda row: row.waits_for_cycles)
    if row.waits_for_cycles < _SMALL * whole:
        return ""
    awaited = "it" if row.waits_for == slowest.stage else f"stage {row.waits_for}"
    return f"; stage {row.stage} waits {row.waits_for_cycles / whole:.1%} of the time for {awaited}"


def _waits(stages: list[StageCost], whole: int) -> str:
    """When IPUs wait, on average."""
    steady, rest = (sum(row.steady_cycles for row in stages), sum(row.fill_cycles + row.drain_cycles for row in stages))
    if steady + rest < _SMALL * whole:
        return ""
    return f"; IPUs wait {steady / whole:.1%} of the time between tasks, {rest / whole:.1%} while it fills and drains"


def _slow_micro_batch(stages: list[StageCost], whole: int) -> str:
    """The micro-batch that takes much longer than the others in one stage, if there is one."""
    rows = [row for row in stages if row.slow_ratio >= SLOW and row.slow_excess_cycles >= _SMALL * whole]
    if not rows:
        return ""
    row = max(rows, key=lambda row: row.slow_excess_cycles)
    what = f"{row.slow_kind.replace('_', ' of ')} of micro-batch {row.slow_micro_batch}"
    return f" In stage {row.stage}, {what} takes {row.slow_ratio:.1f} times what the others take."


def _hint(profile: Figures, pipeline: PipelineCost, is_uneven: bool, name: str) -> str:
    if pipeline.num_ipus == 1:
        return ""
    if pipeline.schedule == "sequential":
        return "schedule='1f1b' or 'grouped', in which IPUs work at the same time"
    is_wide = pipeline.bubble_share > _WIDE * pipeline.ideal_share
    if is_wide and is_uneven:
        return f"move work from {name} to others, by where ipu.stage begins, or by ipu.pipeline(…, stages='auto')"
    if is_wide and profile.target.global_exchange == "lockstep" and pipeline.schedule != "grouped":
        return "schedule='grouped': all IPUs meet at each exchange, and there all run the same kind of task between two"
    if pipeline.ideal_share > _FEW:
        return f"more than {pipeline.micro_batches:,} micro-batches: filling and draining are then less of the time"
    return ""
