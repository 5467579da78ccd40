"""First tab of a page: the verdict, a picture, remedies; below them answers to questions, and figures.

Input: `Figures`. Output: a section. The picture is a bar of the causes of cycles, and a bar of phases for each IPU; of
a pipeline its tasks over time instead. Bars are elements of a width in percent, which need no script.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ipujax.runtime.causes import COMPUTATION
from ipujax.runtime.causes.removals import CAUSES
from ipujax.runtime.errors import ProfileError
from ipujax.runtime.markup import Markup, join_markup, table, tag
from ipujax.runtime.page.anchors import Anchors, link
from ipujax.runtime.page.charts import PHASE_COLOURS, legend
from ipujax.runtime.page.document import Section, sentence
from ipujax.runtime.page.stage_section import task_picture
from ipujax.runtime.profile import Figures
from ipujax.runtime.profile.text import duration, share, size
from ipujax.runtime.views import Answer, Verdict, answers, certainty, pipeline_sentence, tried_changes, verdict

_MOST_IPUS = 16  # of which each has a bar
_NAMED_SHARE = 0.08  # of the width of a bar: a narrower part has no room for its name
# Okabe and Ito's palette, by family: host and memory, single tiles and dtypes, IPUs, exchange, tiles.
_COLOURS = (
    "#0072b2",
    "#56b4e9",
    "#7f9fb5",
    "#d55e00",
    "#e69f00",
    "#c77c02",
    "#8b5e00",
    "#cc79a7",
    "#8c5a78",
    "#b3b3b3",
)
_FURTHER_COLOURS = ("#aa4499", "#f0e442", "#ddcc77", "#eee8aa", "#b8ad00", "#999999", "#6a8f3c")
CAUSE_COLOURS = dict(zip(CAUSES, (*_COLOURS, *_FURTHER_COLOURS), strict=True)) | {COMPUTATION: "#009e73"}


# Lines below the sentence of the verdict, in this order; "" is left out.
LINES: tuple[Callable[[Figures], str], ...] = (lambda profile: " ".join(map(pipeline_sentence, profile.pipelines)),)


def verdict_section(profile: Figures, anchors: Anchors) -> Section:
    """Return the section of the verdict; where a trip count is data, it has the answers that do not need it."""
    cards = tag("div", *(_answer(answer, anchors) for answer in answers(profile)), class_="answers")
    charts: dict[str, Any] = {}
    try:
        first, charts = _first_screen(profile)
    except ProfileError as error:  # a trip count is data
        if "bokeh" in error.what:
            raise
        first = tag("p", f"Causes of cycles are not known: {error.what}. {error.hint or ''}", class_="missing")
    body = join_markup([first, tag("h3", "Answers"), cards, _totals(profile)])
    return Section("summary", "Verdict", body, charts)


def _first_screen(profile: Figures) -> tuple[Markup, dict[str, Any]]:
    """Return the verdict of a profile with picture, remedies and table of causes, and the charts in it.

    Raises:
        ProfileError: a trip count is data.
    """
    result = verdict(profile)
    lines = [tag("p", line) for line in (line_of(profile) for line_of in LINES) if line]
    tasks, charts = task_picture(profile)
    parts = [tag("p", result.sentence, class_="verdict"), tag("p", result.bound), *lines, _cause_bar(profile)]
    ways = (_remedies(result, profile.cycles), _tried(profile), _all_causes(profile))
    return tag("div", *parts, tasks or _ipu_bars(profile), *ways), charts


def _remedies(result: Verdict, total: int) -> Markup:
    if not result.causes:
        return Markup()
    rows = [
        (cause.name, f", at most {share(gain, total).strip()}: {remedy}")
        for cause, gain, remedy in zip(result.causes, result.gains, result.remedies, strict=True)
    ]
    remedies = tag("ul", *(tag("li", tag("b", name), text) for name, text in rows))
    return tag("div", tag("p", "What to try, not tried yet (ipu.advise compiles some):"), remedies, class_="ways")


def _all_causes(profile: Figures) -> Markup:
    """Return a table of the causes of the cycles of a run, closed until a reader opens it."""
    total = max(1, profile.cycles)
    rows = [
        (
            *(row.name, row.cycles, share(row.cycles, total), row.alone_cycles, row.least_cycles),
            str(row.origin) if row.origin.line else "",
        )
        for row in profile.causes
    ]
    head = ("Cause", "Cycles behind those before it", "Share", "Cycles alone", "Of any plan", "Most of them at")
    causes = table(head, rows, "Cycles that vanish without each cause")
    return tag("details", tag("summary", "All causes"), causes)


def _tried(profile: Figures) -> Markup:
    """Return the changes that were compiled, with what each saves; nothing without any."""
    rows = tried_changes(profile)
    if not rows:
        return Markup()
    return tag("div", tag("p", "Tried by ipu.advise:"), table(("Change", "Effect"), rows, ""), class_="ways")


def _cause_bar(profile: Figures) -> Markup:
    """Return the waterfall as parts of one bar; a cause that makes a run shorter has none."""
    cycles = {row.name: row.cycles for row in profile.causes if row.cycles > 0}
    note = (
        "The parts add up to the run, and begin with the cause that is named above: each is what goes behind those to "
        "its left, so that cycles which overlap those of others are a part of the first."
    )
    bar = _stacked("Cycles by cause", cycles, CAUSE_COLOURS)
    overlaps = any(row.alone_cycles != row.cycles for row in profile.causes)
    colours = {name: CAUSE_COLOURS[name] for name in cycles}  # in the order of the bar
    return join_markup([bar, legend(colours), tag("p", note, class_="hint") if overlaps else ""])


def _ipu_bars(profile: Figures) -> Markup:
    """Return a bar of phases for each of the first IPUs."""
    ipus = profile.ipu_phase_cycles
    if len(ipus) == 1:
        return Markup()
    bars = [_stacked(f"IPU {number}", phases, PHASE_COLOURS) for number, phases in enumerate(ipus[:_MOST_IPUS])]
    note = tag("p", f"and {len(ipus) - _MOST_IPUS} more IPUs", class_="hint") if len(ipus) > _MOST_IPUS else ""
    return join_markup([*bars, note, legend(PHASE_COLOURS)])


def _stacked(label: str, cycles: Mapping[str, int], colours: Mapping[str, str]) -> Markup:
    """Return one bar whose parts are as long as their cycles; large parts have their name in them."""
    total = max(1, sum(cycles.values()))
    parts = []
    for name, part in cycles.items():
        if part > 0:
            text = f"{name.replace('_', ' ')}: {part:,} cycles, {share(part, total).strip()}"
            shown = name.replace("_", " ") if part / total >= _NAMED_SHARE else ""
            style = f"width:{100 * part / total:.2f}%;background:{colours[name]}"
            parts.append(tag("span", shown, style=style, title=text))
    described = f"{label}: " + ", ".join(f"{name.replace('_', ' ')} {part:,}" for name, part in cycles.items())
    bar = tag("div", *parts, class_="stacked")
    return tag("div", tag("span", label), bar, class_="stack", role="img", aria_label=described)


def _answer(answer: Answer, anchors: Anchors) -> Markup:
    """Return a question with its answer, and a link to the row or the section that shows it."""
    row = ""
    if answer.section == "source":
        row = anchors.line_id(answer.subject)
    elif answer.section == "layers":
        row = anchors.layers.get(answer.subject, "")
    elif answer.section == "operations":
        row = next(iter(anchors.operations.values()), "")  # the first of the table is the most expensive
    details = link("Show", row or answer.section) if answer.section else ""
    hint = tag("p", "Try: ", answer.hint, class_="hint") if answer.hint else ""
    return tag("article", tag("h3", answer.question), tag("p", answer.sentence), hint, details)


def _totals(profile: Figures) -> Markup:
    """Return tables of target, time, memory, and phases by IPU."""
    target = profile.target
    memory = profile.memory
    tile_size = size(target.bytes_per_tile)
    rows = [
        ("Machine", f"{profile.device}, {target.tiles_per_ipu:,} tiles of {tile_size} each"),
        profile.copies,
    ]
    try:
        note = f", {profile.cycles_note}" if profile.cycles_note else ""
        rows += [("Cycles", f"{profile.cycles:,}{note}"), ("Estimated time", duration(profile.seconds))]
        rows += certainty(profile)
        total = max(1, profile.cycles)
        rows += [
            (n.replace("_", " ").capitalize(), f"{c:,} ({c / total:.1%})") for n, c in profile.phase_cycles.items()
        ]
    except ProfileError as error:
        rows.append(("Cycles", f"unknown: {error.what}"))
    counts = profile.graph_counts
    rows += [
        ("Fullest tile", f"{memory.worst_tile:,}, {size(memory.max_tile_bytes)} of {tile_size}"),
        ("All tiles", size(memory.total_bytes)),
        ("Streaming memory", size(profile.streaming_memory_bytes)),
        (
            "Compute sets, variables, vertices",
            ", ".join(f"{counts[n]:,}" for n in ("numComputeSets", "numVars", "numVertices")),
        ),
    ]
    figures = table((), rows, "In figures; the phases are those of the IPU that is busy for most cycles")
    return tag("div", figures, _phases_by_ipu(profile), class_="figures")


def _phases_by_ipu(profile: Figures) -> Markup:
    """Return a table of each phase's share of the run, for every IPU; empty for one IPU."""
    if profile.target.num_ipus == 1:
        return Markup()
    try:
        ipus = profile.ipu_phase_cycles
    except ProfileError as error:
        return sentence(f"Phases of the other IPUs are not known: {error.what}.")
    names = list(ipus[0])
    cycles = max(1, profile.cycles)
    rows = [(f"IPU {ipu}", *(f"{phases[n] / cycles:.1%}" for n in names)) for ipu, phases in enumerate(ipus)]
    means = (sum(phases[n] for phases in ipus) / len(ipus) / cycles for n in names)
    rows.append(("Mean", *(f"{share:.1%}" for share in means)))
    return table(("", *(n.replace("_", " ").capitalize() for n in names)), rows, "Phases by IPU, shares of the run")
