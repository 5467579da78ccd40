"""Sections of a page on the program: as a graph, as a tree that folds, and what each pass changed.

The graph is drawn by `graph.js`, which lays out the nodes that are unfolded: by the longest way to each, from top to
bottom. Equations of two passes are compared by primitive, types and line, as variables have other names after a pass.
Input: `GraphView`, `ProgramNode`, `PassChange`s. Output: sections.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from ipujax.runtime.markup import Markup, join_markup, table, tag
from ipujax.runtime.page.anchors import Anchors
from ipujax.runtime.page.charts import PHASE_COLOURS, bar, legend
from ipujax.runtime.page.document import Column, DataTable, Section, fold_buttons, sentence
from ipujax.runtime.profile import EquationKind, PassChange, ProgramNode, StepCost
from ipujax.runtime.tensor import readable_name
from ipujax.runtime.views import GraphNode, GraphView

MAX_CHILDREN = 1_500  # of one node; programs without loops have far longer Sequences
MAX_EQUATIONS = 120_000  # of all passes together whose order a page has, some 700 KB
LEVELS = 8  # of equations inside others that are told apart; deeper ones are shown as the last
_OPEN_LEVELS = 2
_SMALL_SHARE = 1e-3  # of all cycles: steps that take less are folded
_MANY_STEPS = 4  # behind one another


def graph_section(view: GraphView, rows: Sequence[StepCost]) -> Section:
    """Return the section of the program as a graph, of operations that are rows of `Figures.step_costs`, if any."""
    if not view.root.rows:
        return Section("graph", "Graph", Markup())
    intro = (
        "What reads what: parts of training, layers inside them, operations inside those. ▸ unfolds a node, its name "
        "chooses it: the table below then lists its operations alone. A line is what one reads of what another has "
        "written, in bytes; dashed ones go back, as of a layer that runs again. Bars are cycles by phase."
    )
    buttons = tag(
        "div",
        tag("button", "Unfold the costliest", type="button", data_graph="costliest"),
        tag("button", "Fold all", type="button", data_graph="closed"),
        class_="zoom",
    )
    label = {"role": "group", "aria_label": "Program as a graph", "tabindex": 0}
    drawing = tag("div", class_="graph scroll", id="graph-drawing", **label)
    chosen = tag("output", class_="picked", id="graph-chosen", aria_live="polite")
    operations = DataTable("graph-table", "Operations of the chosen node", ()).place("operations-table")
    colours = legend({name: PHASE_COLOURS[name] for name in _phases(rows)})
    body = join_markup([sentence(intro), buttons, colours, drawing, chosen, operations])
    return Section("graph", "Graph", body, data={"graph": _graph_data(view, rows)})


def _phases(rows: Sequence[StepCost]) -> list[str]:
    """Return the phases that any row has, in the order of their colours."""
    present = {phase for row in rows for phase in row.phases}
    return [name for name in PHASE_COLOURS if name in present]


def _graph_data(view: GraphView, rows: Sequence[StepCost]) -> Mapping[str, Any]:
    """Return nodes as [name, nodes inside], operations as their rows, and the cycles of these by phase."""

    def nested(node: GraphNode) -> Any:
        return [node.name, [nested(child) for child in node.children]] if node.children else node.rows[0]

    phases = _phases(rows)
    cycles = [[rows[row].phases.get(phase, 0) for phase in phases] for row in view.root.rows]
    values = view.values
    columns = (values.writer.tolist(), values.reader.tolist(), values.num_bytes.tolist())
    colours = [PHASE_COLOURS[phase] for phase in phases]
    names = [phase.replace("_", " ") for phase in phases]
    return {
        "root": nested(view.root),
        "rows": view.root.rows,
        "cycles": cycles,
        "values": columns,
        "phases": names,
        "colours": colours,
    }


def program_section(root: ProgramNode, anchors: Anchors) -> Section:
    """Return the section of a program."""
    intro = (
        "Cycles of each part, their share, its kind, name and line. They are those of all runs, on the IPU that spends "
        "most; idle time is left out."
    )
    label = {"role": "region", "aria_label": "Program", "data_search": "program"}
    tree = tag("div", _node(root, root.cycles, 0, anchors), class_="tree scroll", id="tree", tabindex=0, **label)
    body = join_markup([sentence(intro), fold_buttons(), tree])
    return Section("program", "Program", body)


def _node(node: ProgramNode, total: int, level: int, anchors: Anchors) -> Markup:
    """Return the row of a part of the program, which opens to the rows of its first children."""
    label = join_markup(
        [
            tag("span", f"{node.cycles:,}", class_="cycles"),
            tag("span", f"{node.cycles / max(1, total):.1%}", class_="share"),
            tag("span", bar(node.cycles, total), class_="track"),
            tag("span", node.type, class_="kind"),
            " ",
            tag("span", readable_name(node.name), class_="name"),
            " ",
            tag("span", anchors.line(node.line), class_="line") if node.line else "",
            f" {node.runs:,} ×" if node.runs != 1 else "",
        ]
    )
    if not node.children:
        return tag("div", label, class_="leaf")
    children = [part for run in _runs(node, total) for part in _run(run, total, level + 1, anchors)]
    omitted = node.children[MAX_CHILDREN:]
    if omitted:
        cycles = sum(child.cycles for child in omitted)
        children.append(tag("div", f"… {len(omitted):,} more steps, {cycles:,} cycles", class_="leaf"))
    return tag("details", tag("summary", label), *children, open=level < _OPEN_LEVELS)


def _runs(node: ProgramNode, total: int) -> Iterator[list[ProgramNode]]:
    """Yield the children of a node that are shown: small steps behind one another together, others alone."""

    def is_small(child: ProgramNode) -> bool:
        return not child.children and child.cycles < _SMALL_SHARE * total

    for small, run in groupby(node.children[:MAX_CHILDREN], is_small):
        steps = list(run)
        yield from [steps] if small else [[step] for step in steps]


def _run(run: Sequence[ProgramNode], total: int, level: int, anchors: Anchors) -> list[Markup]:
    """Return the nodes of some steps behind one another, folded if they are many."""
    nodes = [_node(child, total, level, anchors) for child in run]
    if len(nodes) < _MANY_STEPS:
        return nodes
    cycles = sum(child.cycles for child in run)
    names = ("cycles", f"{cycles:,}"), ("share", f"{cycles / max(1, total):.1%}"), ("track", bar(cycles, total))
    parts = [*(tag("span", text, class_=name) for name, text in names), f"{len(run):,} small steps"]
    return [tag("details", tag("summary", *parts), *nodes)]


def passes_section(changes: Sequence[PassChange]) -> Section:
    """Return the section of what changed between two passes, which `passes.js` compares; empty without passes."""
    if not changes:
        return Section("passes", "Passes", Markup())
    numbers: dict[EquationKind, int] = {}
    of_passes = [[[numbers.setdefault(kind, len(numbers)), n] for kind, n in each.changes] for each in changes]
    intro = (
        "Equations that were added or removed between two passes of the compilation, by primitive, types and line, "
        "those inside loops and functions included. Below, both texts beside each other: lines with − are of the first "
        "pass, lines with + of the second."
    )
    for each in changes:
        for kind, _ in each.equations:
            numbers.setdefault(kind, len(numbers))
    columns = (
        Column("Added", "number", [0] * len(numbers), "equations; below 0 removed"),
        Column("Primitive", "text", [primitive for primitive, _, _ in numbers]),
        Column("Types", "text", [types for _, types, _ in numbers], "of operands and results"),
        Column("Line", "text", [line for _, _, line in numbers]),
    )
    differences = DataTable("passes-table", "Equations that two passes changed", columns)
    names = [each.name for each in changes]
    orders = _orders(changes, numbers)
    totals = [(each.name, f"{each.num_equations:,}", f"{len(each.changes):,}") for each in changes]
    label = {"tabindex": 0, "role": "region", "aria_label": "Difference"}
    body = [
        sentence(intro),
        tag("p", _chooser("pass-from", "After ", names, 0), _chooser("pass-to", " and after ", names, len(names) - 1)),
        differences.place(),
        tag("pre", class_="difference scroll", id="pass-difference", **label),
        tag("details", tag("summary", "All passes"), table(("Pass", "Equations after it", "Kinds changed"), totals)),
    ]
    data = {"passes": of_passes, "orders": orders, **differences.data()}
    return Section("passes", "Passes", join_markup(body), data=data)


def _orders(changes: Sequence[PassChange], numbers: dict[EquationKind, int]) -> list[list[int] | int | None]:
    """Return the equations after each pass in order, each its kind times `LEVELS` and its level.

    A pass that changes nothing has the number of the pass that it equals; those beyond `MAX_EQUATIONS` are left out.
    """
    orders: list[list[int] | int | None] = []
    firsts: dict[int, int] = {}  # passes by the identity of their equations
    remaining = MAX_EQUATIONS
    for number, each in enumerate(changes):
        first = firsts.setdefault(id(each.equations), number)
        if first < number:
            orders.append(first)
            continue
        remaining -= each.num_equations
        rows = each.equations if remaining >= 0 else None
        orders.append(
            None if rows is None else [numbers[kind] * LEVELS + min(level, LEVELS - 1) for kind, level in rows]
        )
    return orders


def _chooser(key: str, label: str, names: Sequence[str], chosen: int) -> Markup:
    options = (tag("option", name, value=number, selected=number == chosen) for number, name in enumerate(names))
    return tag("label", label, tag("select", *options, id=key))
