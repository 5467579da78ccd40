"""Page of a profile: tabs of sections.

Input: `Figures`. Output: HTML. A section whose figures are unknown, because a trip count is data, has the error in
their place.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from ipujax.runtime import views
from ipujax.runtime.errors import ProfileError
from ipujax.runtime.garbage import collecting_rarely
from ipujax.runtime.markup import Markup, join_markup, table, tag
from ipujax.runtime.page.anchors import Anchors, anchors_of
from ipujax.runtime.page.document import Alarm, Column, DataTable, Section, Tab, document, sentence
from ipujax.runtime.page.layer_section import layer_section
from ipujax.runtime.page.memory_charts import liveness_section, memory_section
from ipujax.runtime.page.operation_table import operations_section
from ipujax.runtime.page.program_tree import graph_section, passes_section, program_section
from ipujax.runtime.page.source_listing import source_section
from ipujax.runtime.page.stage_section import stages_section
from ipujax.runtime.page.time_charts import trace_section, waits_section
from ipujax.runtime.page.verdict_section import verdict_section
from ipujax.runtime.profile import Figures, out_of_memory
from ipujax.runtime.profile.text import size
from ipujax.runtime.target.machine_page import constant_text
from ipujax.runtime.tensor import Origin, visible_layer

MakeSection = Callable[[Figures, Anchors], Section]
_MAX_WAITS = 5_000  # that are listed, the longest


@collecting_rarely()
def profile_page(profile: Figures) -> str:
    """Return the page of a profile."""
    overflow = out_of_memory(profile.memory)
    alarm = Alarm("Out of memory", overflow, profile.ways_to_fit) if overflow else None
    anchors = anchors_of(profile)
    tabs = [
        Tab(*name, [_section(section, make, profile, anchors) for section, make in sections.items()])
        for name, sections in TABS.items()
    ]
    return document(profile.title, profile.brief, tabs, alarm, is_searched=True)


def _section(name: tuple[str, str], make: MakeSection, profile: Figures, anchors: Anchors) -> Section:
    try:
        return make(profile, anchors)
    except ProfileError as error:
        if "bokeh" in error.what:  # no section can do without it: an error of the page
            raise
        return Section(*name, tag("p", f"Not known: {error.what}. {error.hint or ''}", class_="missing"))


def _trace(profile: Figures, anchors: Anchors) -> Section:
    view = views.trace_view(profile)
    rows = views.operation_rows(profile)
    tasks = views.task_view(profile)
    waits = views.wait_view(profile).longest(_MAX_WAITS)
    return trace_section(view, rows, anchors, waits, tasks if len(tasks.start) else None)


def _waits(profile: Figures, anchors: Anchors) -> Section:
    trace = profile.execution_trace
    return waits_section(views.wait_view(profile).longest(_MAX_WAITS), trace.labels, anchors)


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


def _machine(profile: Figures, anchors: Anchors) -> Section:
    """Return the section of the constants of the machine, with unit, kind of source and source."""
    target = profile.target
    constants = [item for item in dataclasses.fields(target) if item.name in target.sources]
    values = [getattr(target, item.name) for item in constants]
    columns = (
        Column("Constant", "text", [item.name for item in constants]),
        Column("Value", "text", list(map(constant_text, values))),
        Column("Unit", "text", [item.metadata.get("unit", "") for item in constants]),
        Column("Kind", "text", [target.sources[item.name].kind for item in constants]),
        Column("Meaning", "text", [item.metadata.get("doc", "") for item in constants]),
        Column("Source", "text", [target.sources[item.name].text for item in constants]),
    )
    machine = DataTable("machine-table", "Constants of the machine", columns)
    text = f"Constants of {target.name}, of which the costs are made; figures of this program are those of one replica."
    return Section("machine", "Machine", join_markup([sentence(text), machine.place()]), data=machine.data())


def _layers(profile: Figures, anchors: Anchors) -> Section:
    return layer_section(views.tree_of(profile), profile.limiting_ipu, anchors)


def _operations(profile: Figures, anchors: Anchors) -> Section:
    return operations_section(views.operation_rows(profile), profile.target, anchors, profile.language_cycles)


# Function of each section of each tab by its id and heading, in the order of the page.
TABS: dict[tuple[str, str], dict[tuple[str, str], MakeSection]] = {
    ("verdict", "Verdict"): {("summary", "Verdict"): verdict_section},
    ("operations", "Operations"): {
        ("operations", "Operations"): _operations,
        ("warnings", "Fallbacks and warnings"): _warnings,
    },
    ("lines", "Lines & layers"): {
        ("layers", "Layers"): _layers,
        ("source", "Source"): lambda profile, anchors: source_section(views.source_view(profile), anchors),
    },
    ("memory", "Memory"): {
        ("memory", "Memory"): lambda profile, anchors: memory_section(views.memory_view(profile), anchors),
        ("liveness", "Liveness"): lambda profile, _: liveness_section(views.liveness_view(profile)),
    },
    ("timeline", "Timeline"): {
        ("trace", "Execution trace"): _trace,
        ("waits", "Waits"): _waits,
        ("stages", "Stages"): stages_section,
    },
    ("program", "Program"): {
        ("graph", "Graph"): lambda profile, _: graph_section(views.graph_view(profile), profile.step_costs),
        ("program", "Program"): lambda profile, anchors: program_section(profile.program_costs, anchors),
        ("passes", "Passes"): lambda profile, _: passes_section(profile.pass_changes),
    },
    ("machine", "Machine"): {("machine", "Machine"): _machine},
}
SECTIONS = {name: make for sections in TABS.values() for name, make in sections.items()}
