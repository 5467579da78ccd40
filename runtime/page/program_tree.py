"""Program and passes sections of a page: the control program as a tree that folds, and what each pass changed.

Input: `ProgramNode`, `PassChange`s. Output: sections.
"""

from __future__ import annotations

from collections.abc import Sequence

from ipujax.runtime.markup import Markup, join_markup, table, tag
from ipujax.runtime.page.anchors import Anchors
from ipujax.runtime.page.charts import bar
from ipujax.runtime.page.document import Column, DataTable, Section, fold_buttons, sentence
from ipujax.runtime.profile import EquationKind, PassChange, ProgramNode
from ipujax.runtime.tensor import readable_name

MAX_CHILDREN = 1_500  # of one node; programs without loops have far longer Sequences
_OPEN_LEVELS = 2


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
    children = [_node(child, total, level + 1, anchors) for child in node.children[:MAX_CHILDREN]]
    omitted = node.children[MAX_CHILDREN:]
    if omitted:
        cycles = sum(child.cycles for child in omitted)
        children.append(tag("div", f"… {len(omitted):,} more steps, {cycles:,} cycles", class_="leaf"))
    return tag("details", tag("summary", label), *children, open=level < _OPEN_LEVELS)


def passes_section(changes: Sequence[PassChange]) -> Section:
    """Return the section of what changed between two passes, which `tables.js` sums up; empty without passes."""
    if not changes:
        return Section("passes", "Passes", Markup())
    numbers: dict[EquationKind, int] = {}
    of_passes = [[[numbers.setdefault(kind, len(numbers)), n] for kind, n in each.changes] for each in changes]
    intro = (
        "Equations that were added or removed between two passes of the compilation, by primitive, types and line, "
        "those inside loops and functions included; an equation that only moved is no change."
    )
    columns = (
        Column("Added", "number", [0] * len(numbers), "equations; below 0 removed"),
        Column("Primitive", "text", [primitive for primitive, _, _ in numbers]),
        Column("Types", "text", [types for _, types, _ in numbers], "of operands and results"),
        Column("Line", "text", [line for _, _, line in numbers]),
    )
    differences = DataTable("passes-table", "Equations that two passes changed", columns)
    names = [each.name for each in changes]
    totals = [(each.name, f"{each.num_equations:,}", f"{len(each.changes):,}") for each in changes]
    body = [
        sentence(intro),
        tag("p", _chooser("pass-from", "After ", names, 0), _chooser("pass-to", " and after ", names, len(names) - 1)),
        differences.place(),
        tag("details", tag("summary", "All passes"), table(("Pass", "Equations after it", "Kinds changed"), totals)),
    ]
    return Section("passes", "Passes", join_markup(body), data={"passes": of_passes, **differences.data()})


def _chooser(key: str, label: str, names: Sequence[str], chosen: int) -> Markup:
    options = (tag("option", name, value=number, selected=number == chosen) for number, name in enumerate(names))
    return tag("label", label, tag("select", *options, id=key))
