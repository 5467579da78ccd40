"""Answers on the parts of a program: the costliest layers, and the stage that limits a pipeline.

A layer that takes longer than others of its kind is named, and so are the stages that wait, and a slow micro-batch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from ipujax.runtime.errors import ProfileError
from ipujax.runtime.profile import NO_LAYER, Figures, PipelineCost, StageCost
from ipujax.runtime.views.part_views import (
    SLOW,
    LayerKind,
    LayerNode,
    bubble_sentence,
    layer_kinds,
    pipeline_sentence,
    tree_of,
)


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer to one question.

    Args:
        question: in words.
        sentence: the answer; empty where the question does not arise.
        hint: a change to try; empty when no change promises a gain.
        subject: of the answer: an operation, "tile 3", "IPU 1", or a line of source; empty when unknown.
        share: of the run, or of the tile's memory, that the subject takes; above 1 for a tile without enough memory.
        section: of the page with details.
    """

    question: str
    sentence: str
    hint: str = ""
    subject: str = ""
    share: float = 0.0
    section: str = ""


STAGE = "Which stage limits the pipeline?"
_UNEVEN = 1.1  # times the mean: an IPU with more is slower than the others
_WIDE = 1.25  # times the ideal bubble: a larger one has other causes than the schedule
_LARGE_BUBBLE = 0.1  # of the time: more micro-batches would shorten it
_SMALL_SHARE = 0.01  # of a pipeline's time
_ALIKE = 0.05  # of the run: IPUs whose computing differs by less compute alike


def stage_answer(profile: Figures) -> Answer:
    """Name the stage with the longest tasks, the waiting of the others, and the bubble against the schedule's."""
    try:
        if not profile.pipelines:
            return Answer(STAGE, "")
    except ProfileError:  # a trip count is unknown: whether there is a pipeline is unknown too
        return Answer(STAGE, "")
    number = max(range(len(profile.pipelines)), key=lambda n: profile.pipelines[n].cycles)
    pipeline = profile.pipelines[number]
    stages = [row for row in profile.stages if row.pipeline == number]
    slowest = next(row for row in stages if row.stage == pipeline.slowest_stage)
    name = f"stage {slowest.stage}"
    if not pipeline.is_traced:
        return Answer(STAGE, pipeline_sentence(pipeline), "", name, 0.0, "stages")
    by_ipu = [sum(row.busy_cycles for row in stages if row.ipu == ipu) for ipu in {row.ipu for row in stages}]
    cycles = max(1, pipeline.cycles)
    slowest_cycles = max(by_ipu)
    share = slowest_cycles / cycles
    ratio = slowest_cycles / max(1.0, sum(by_ipu) / len(by_ipu))
    label = f"{name} (IPU {slowest.ipu})"
    is_shared = any(row.ipu == slowest.ipu and row is not slowest for row in stages)
    host_share = slowest.phases["host"] / cycles
    loading = f" and host exchanges ({host_share:.1%})" if host_share >= _SMALL_SHARE else ""
    tasks = "the tasks of its IPU" if is_shared else "its tasks"
    busy = f"{tasks}{loading} take {share:.1%} of the pipeline's time"
    is_uneven = len(by_ipu) > 1 and ratio > _UNEVEN
    if is_uneven:
        text = f"{label.capitalize().replace('ipu', 'IPU')} limits: {busy}, {ratio:.1f} times the mean of all IPUs"
    else:
        text = (
            f"None alone: the slowest, {label}, is within {_UNEVEN - 1:.0%} of the mean; {busy}{_longest_tasks(stages)}"
        )
    slow = _slow_micro_batch(stages, cycles)
    waits = _longest_wait(stages, slowest, cycles) if is_uneven else _mean_waits(stages, len(by_ipu) * cycles)
    text += f"{waits}. {bubble_sentence(pipeline)}{_compute_shares(profile, stages)}{slow}"
    hint = "micro-batches that take equally long, such as sequences sorted by length" if slow else ""
    return Answer(STAGE, text, hint or _hint(profile, pipeline, is_uneven, slowest), name, share, "stages")


def _longest_tasks(stages: list[StageCost]) -> str:
    """Name the IPU with the longest tasks, if it is slower but for the host exchanges of the others; "" without one."""
    by_ipu = {row.ipu: sum(x.task_cycles for x in stages if x.ipu == row.ipu) for row in stages}
    ipu = max(by_ipu, key=lambda ipu: by_ipu[ipu])
    ratio = by_ipu[ipu] / max(1.0, sum(by_ipu.values()) / len(by_ipu))
    if ratio <= _UNEVEN:
        return ""
    numbers = " and ".join(str(row.stage) for row in stages if row.ipu == ipu)
    return f"; of tasks alone those of stage {numbers} (IPU {ipu}) take most, {ratio:.1f} times the mean"


def _compute_shares(profile: Figures, stages: list[StageCost]) -> str:
    """Give the share of the run in which stages compute: those of the IPUs with most and with least of it."""
    numbers: dict[int, list[int]] = {}
    for row in stages:
        numbers.setdefault(row.ipu, []).append(row.stage)
    if len(numbers) == 1:
        return ""
    cycles = max(1, profile.cycles)
    shares = {ipu: profile.ipu_phase_cycles[ipu]["compute"] / cycles for ipu in numbers}
    most, least = max(shares.values()), min(shares.values())
    groups = [[ipu for ipu, share in shares.items() if most - share <= _ALIKE]]
    groups += [[ipu for ipu, share in shares.items() if share - least <= _ALIKE]] if most - least > 2 * _ALIKE else []
    return " " + ", ".join(_compute_share(group, numbers, shares) for group in groups).capitalize() + " of the run."


def _compute_share(ipus: list[int], numbers: dict[int, list[int]], shares: dict[int, float]) -> str:
    """Return the words for the stages of some IPUs and the share of the run in which these compute."""
    stages = sorted(stage for ipu in ipus for stage in numbers[ipu])
    low, high = (f"{limit(shares[ipu] for ipu in ipus):.1%}" for limit in (min, max))
    several = len(stages) > 1
    listed = " and ".join([", ".join(map(str, stages[:-1])), str(stages[-1])] if several else [str(stages[0])])
    if len(stages) > 2 and stages == list(range(stages[0], stages[-1] + 1)):
        listed = f"{stages[0]} to {stages[-1]}"
    return f"stage{'s' * several} {listed} compute{'s' * (not several)} {low if low == high else f'{low} to {high}'}"


def _longest_wait(stages: list[StageCost], slowest: StageCost, cycles: int) -> str:
    """Name the stage that waits longest for the slowest; without such a stage, for any other."""
    waiting = [row for row in stages if row.waits_for == slowest.stage] or stages
    row = max(waiting, key=lambda row: row.waits_for_cycles)
    if row.waits_for_cycles < _SMALL_SHARE * cycles:
        return ""
    awaited = "it" if row.waits_for == slowest.stage else f"stage {row.waits_for}"
    return f"; stage {row.stage} waits {row.waits_for_cycles / cycles:.1%} of the time for {awaited}"


def _mean_waits(stages: list[StageCost], ipu_cycles: int) -> str:
    steady = sum(row.steady_cycles for row in stages)
    ramp = sum(row.fill_cycles + row.drain_cycles for row in stages)
    if steady + ramp < _SMALL_SHARE * ipu_cycles:
        return ""
    return (
        f"; IPUs wait {steady / ipu_cycles:.1%} of the time between tasks, "
        f"{ramp / ipu_cycles:.1%} while it fills and drains"
    )


def _slow_micro_batch(stages: list[StageCost], cycles: int) -> str:
    """Name the micro-batch that takes far longer than the others in some stage; "" if none does."""
    rows = [row for row in stages if row.slow_ratio >= SLOW and row.slow_excess_cycles >= _SMALL_SHARE * cycles]
    if not rows:
        return ""
    row = max(rows, key=lambda row: row.slow_excess_cycles)
    task = f"{row.slow_kind.replace('_', ' of ')} of micro-batch {row.slow_micro_batch}"
    return f" In stage {row.stage}, {task} takes {row.slow_ratio:.1f} times what the others take."


def _hint(profile: Figures, pipeline: PipelineCost, is_uneven: bool, slowest: StageCost) -> str:
    """Return a change that may shorten the waits of a pipeline, by the first cause that applies; "" for none."""
    if pipeline.num_ipus == 1:
        return ""
    if pipeline.schedule == "sequential":
        return "schedule='1f1b' or 'grouped', in which IPUs work at the same time"
    is_wide = pipeline.bubble_share > _WIDE * pipeline.ideal_share
    if is_wide and is_uneven and slowest.phases["host"] > slowest.task_cycles:
        return "larger micro-batches, or Options(io_tiles=…), which load the next one meanwhile"
    if is_wide and is_uneven:
        stage = f"stage {slowest.stage}"
        return f"move work from {stage} to others, by where ipu.stage begins, or by ipu.pipeline(…, stages='auto')"
    if is_wide and profile.target.global_exchange == "lockstep" and pipeline.schedule != "grouped":
        return (
            "schedule='grouped': all IPUs meet at copies between stages, and there all run one kind of task between two"
        )
    if pipeline.ideal_share > _LARGE_BUBBLE:
        return f"more than {pipeline.micro_batches:,} micro-batches: filling and draining are then less of the time"
    return ""


LAYER = "Which layer takes most?"
_MODEL_SHARE = 0.95  # of the cycles of all layers: a layer with more is the model, which is no answer
_MAJORITY = 0.5  # of the cycles of a layer
_COARSE = 1.5  # a smaller ratio has two decimals


def layer_answer(profile: Figures) -> Answer:
    """Name the costliest kind of layer, that with most own cycles, and a layer far above the median of its kind."""
    root = tree_of(profile)
    total = max(1, root.cycles)
    in_layers = total - (root.children[NO_LAYER].cycles if NO_LAYER in root.children else 0)
    named = [kind for kind in layer_kinds(root) if kind.path != NO_LAYER]
    kinds = [kind for kind in named if not _is_model(kind, in_layers, named)]
    if not kinds or not kinds[0].cycles:
        hint = "name layers by jax.named_scope, or write them as functions"
        return Answer(LAYER, "No layer is known.", hint)
    top = kinds[0]
    if top.cycles < _SMALL_SHARE * total:
        text = f"No layer takes more than {top.cycles / total:.1%} of the busy cycles; the others are in no layer."
        return Answer(LAYER, text, "", top.path, top.cycles / total, "layers")
    of_own = max(named, key=lambda kind: kind.own_cycles)
    text = f"{_describe(top.path, len(top.nodes), top.cycles / total)}{_shares(top.parts)}."
    if of_own is not top:
        without = "innermost layers" if _is_innermost(of_own) else "layers without those inside them"
        text += f" Of {without} most is {_describe(of_own.path, len(of_own.nodes), of_own.own_cycles / total)}."
    uneven = _uneven_kind(kinds)
    if uneven is None or uneven.outlier is None or _excess_cycles(uneven) < _SMALL_SHARE * total:
        return Answer(LAYER, text, "", top.path, top.cycles / total, "layers")
    layer = uneven.outlier
    ratio = layer.cycles / max(1.0, uneven.median_cycles)
    form = ".1f" if ratio >= _COARSE else ".2f"
    part = f", most of that in {uneven.excess_part}" if uneven.excess_part else ""
    text += f" {layer.path} takes {ratio:{form}} times the median of the {len(uneven.nodes)} layers of its kind{part}."
    return Answer(LAYER, text, "", layer.path, layer.cycles / total, "layers")


def _uneven_kind(kinds: Sequence[LayerKind]) -> LayerKind | None:
    """Return the kind with the layer farthest above its median.

    Where most of the excess of that layer is of one uneven layer inside it, the kind of the inner one: it is the cause.
    """
    uneven = [kind for kind in kinds if kind.outlier]
    cause = max(uneven, key=_excess_cycles, default=None)
    while cause is not None and cause.outlier is not None:
        most_of_excess = _MAJORITY * _excess_cycles(cause)
        prefix = f"{cause.outlier.path}/"
        inside = [kind for kind in uneven if kind.outlier and kind.outlier.path.startswith(prefix)]
        candidates = [kind for kind in inside if _excess_cycles(kind) > most_of_excess]
        inner = max(candidates, key=_excess_cycles, default=None)
        if inner is None:
            break
        cause = inner
    return cause


def _describe(path: str, num_layers: int, share: float) -> str:
    count = f" ({num_layers} layers)" if num_layers > 1 else ""
    return f"{path}{count} with {share:.1%} of the busy cycles"


def _shares(parts: Counter[str]) -> str:
    """List the shares of the parts of training in brackets; "" for a single part."""
    named = [(part, cycles) for part, cycles in parts.most_common() if part and cycles]
    shares = ", ".join(f"{part} {cycles / max(1, parts.total()):.0%}" for part, cycles in named)
    return f" ({shares})" if len(named) > 1 else ""


def _is_model(kind: LayerKind, in_layers: int, kinds: Sequence[LayerKind]) -> bool:
    """Return True for a layer around nearly all others, or around several of one kind that take most of it."""
    if len(kind.nodes) > 1 or not kind.nodes[0].children:
        return False
    inside = f"{kind.path}/"
    repeated = (other for other in kinds if len(other.nodes) > 1 and other.nodes[0].path.startswith(inside))
    return kind.cycles > _MODEL_SHARE * in_layers or any(x.cycles > _MAJORITY * kind.cycles for x in repeated)


def _is_innermost(kind: LayerKind) -> bool:
    return not any(node.children for node in kind.nodes)


def _excess_cycles(kind: LayerKind) -> float:
    layer: LayerNode | None = kind.outlier
    return 0.0 if layer is None else layer.cycles - kind.median_cycles
