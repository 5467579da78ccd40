"""Page of a profile.

Input: `Figures`. Output: HTML. A section whose figures are unknown, because a trip count is data, has the error in
their place.
"""

from __future__ import annotations

from collections.abc import Callable

from ipujax.runtime.errors import ProfileError
from ipujax.runtime.markup import Markup, join_markup, table, tag
from ipujax.runtime.page.anchors import Anchors, anchors_of, link
from ipujax.runtime.page.document import Alarm, Section, document, sentence
from ipujax.runtime.page.layer_section import layer_section
from ipujax.runtime.page.memory_charts import liveness_section, memory_section
from ipujax.runtime.page.operation_table import operations_section
from ipujax.runtime.page.program_tree import program_section
from ipujax.runtime.page.source_listing import source_section
from ipujax.runtime.page.stage_section import stages_section
from ipujax.runtime.page.time_charts import trace_section
from ipujax.runtime.page.verdict_section import verdict_lines
from ipujax.runtime.profile import Figures, out_of_memory
from ipujax.runtime.profile.text import duration, size
from ipujax.runtime.tensor import Origin, visible_layer
from ipujax.runtime.views import (
    Answer,
    answers,
    certainty,
    liveness_view,
    memory_view,
    operation_rows,
    source_view,
    task_view,
    trace_view,
    tree_of,
)

MakeSection = Callable[[Figures, Anchors], Section]


def profile_page(profile: Figures) -> str:
    """Return the page of a profile."""
    overflow = out_of_memory(profile.memory)
    alarm = Alarm("Out of memory", overflow, profile.ways_to_fit) if overflow else None
    anchors = anchors_of(profile)
    sections = [_section(name, make, profile, anchors) for name, make in SECTIONS.items()]
    return document(
        profile.title, profile.brief, [section for section in sections if section.body], alarm, is_searched=True
    )


def _section(name: tuple[str, str], make: MakeSection, profile: Figures, anchors: Anchors) -> Section:
    try:
        return make(profile, anchors)
    except ProfileError as error:
        if "bokeh" in error.what:  # no section can do without it: an error of the page
            raise
        return Section(*name, tag("p", f"Not known: {error.what}. {error.hint or ''}", class_="missing"))


def _summary(profile: Figures, anchors: Anchors) -> Section:
    cards = tag("div", *(_answer(answer, anchors) for answer in answers(profile)), class_="answers")
    try:
        first = verdict_lines(profile)
    except ProfileError as error:  # a trip count is data
        first = tag("p", f"Causes of cycles are not known: {error.what}. {error.hint or ''}", class_="missing")
    return Section("summary", "Summary", join_markup([first, cards, _totals(profile)]))


def _answer(answer: Answer, anchors: Anchors) -> Markup:
    row = ""
    if answer.section == "source":
        row = anchors.line_id(answer.subject)
    elif answer.section == "layers":
        row = anchors.layers.get(answer.subject, "")
    elif answer.section == "operations":
        row = next(iter(anchors.operations.values()), "")  # the first of the table is the most expensive
    details = link("Show", row or answer.section)
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


def _trace(profile: Figures, anchors: Anchors) -> Section:
    view = trace_view(profile)
    rows = operation_rows(profile)
    tasks = task_view(profile)
    return trace_section(view, rows, anchors, tasks if len(tasks.start) else None)


def _warnings(profile: Figures, anchors: Anchors) -> Section:
    """Return the section on unpriced operations, fallbacks, slow code, unmet bounds, and lack of memory."""

    def origin_links(origin: Origin) -> Markup:
        layer = visible_layer(origin.layer)
        links = [anchors.line(str(origin), origin.file), anchors.layer(layer) if layer else ""]
        return join_markup(
            [*filter(None, links), anchors.trace("line", *filter(None, [anchors.line_id(str(origin))]))], " "
        )

    fallbacks = [(f.operation, f.name, f.cycles, f.borrowed_tiles, origin_links(f.origin)) for f in profile.fallbacks]
    unpriced = [
        (u.operation, u.place, "by data" if u.runs is None else u.runs, origin_links(u.origin))
        for u in profile.unpriced
    ]
    emulated = [(e.dtype, ", ".join(e.operations[:4]), e.cycles, origin_links(e.origin)) for e in profile.emulated]
    slow = [(s.operation, s.reason, s.cycles, origin_links(s.origin)) for s in profile.slow_paths]
    unmet = [(str(bound), origin_links(bound.origin)) for bound in profile.unmet_bounds]
    num_over = int((profile.memory.overflowed_bytes > 0).sum())
    parts: list[object] = []
    if num_over:
        worst = size(int(profile.memory.overflowed_bytes.max()))
        text = f"Out of memory: {num_over:,} tiles need more than they have, the worst {worst} more."
        parts.append(tag("p", text, class_="alarm"))
    if len(profile.attempts) > 1:
        head = ("Plan", "Cycles", "Fullest tile, gaps not counted", "Fits", "Used")
        rows = (
            (
                each.changes,
                "unknown" if each.cycles is None else f"{each.cycles:,}",
                size(each.live_bytes),
                *("yes" if value else "no" for value in (each.fits, each.is_used)),
            )
            for each in profile.attempts
        )
        parts.append(table(head, rows, "Plans that were tried until one fitted"))
    if unpriced:
        columns = ("Operation", "Place", "Runs", "Line")
        parts.append(table(columns, unpriced, "Unpriced operations, whose time no figure counts"))
    if fallbacks:
        head = ("Operation", "Step", "Cycles of a run", "Tiles whose memory it takes", "Line")
        parts.append(table(head, fallbacks, "Operations on one tile only, for want of a parallel rule"))
    if emulated:
        parts.append(
            table(("Dtype", "Codelets", "Cycles", "Line"), emulated, "Arithmetic in dtypes that the machine lacks")
        )
    if slow:
        columns = ("Operation", "Reason", "Cycles", "Line")
        parts.append(table(columns, slow, "Slow paths, cycles of one run of each step"))
    if unmet:
        parts.append(table(("Operation", "Line"), unmet, "Planned with more memory than the available proportion"))
    body = tag("div", *(parts or [sentence("None.")]), data_search="warnings")
    return Section("warnings", "Fallbacks and warnings", body)


# Function of each section by its id and heading, in the order of the page.
SECTIONS: dict[tuple[str, str], MakeSection] = {
    ("summary", "Summary"): _summary,
    ("layers", "Layers"): lambda profile, anchors: layer_section(tree_of(profile), profile.limiting_ipu, anchors),
    ("operations", "Operations"): lambda profile, anchors: operations_section(
        operation_rows(profile), profile.target, anchors, profile.language_cycles
    ),
    ("stages", "Stages"): stages_section,
    ("trace", "Execution trace"): _trace,
    ("memory", "Memory"): lambda profile, anchors: memory_section(memory_view(profile), anchors),
    ("liveness", "Liveness"): lambda profile, _: liveness_section(liveness_view(profile)),
    ("program", "Program"): lambda profile, anchors: program_section(profile.program_costs, anchors),
    ("source", "Source"): lambda profile, anchors: source_section(source_view(profile), anchors),
    ("warnings", "Fallbacks and warnings"): _warnings,
}
