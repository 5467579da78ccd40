"""Program section of a page: a tree that folds and unfolds.

Input: `ProgramNode`. Output: a section.
"""

from __future__ import annotations

from ipujax.runtime.markup import Markup, join_markup, tag
from ipujax.runtime.page.anchors import Anchors
from ipujax.runtime.page.charts import bar
from ipujax.runtime.page.document import Section, fold_buttons, sentence
from ipujax.runtime.profile import ProgramNode
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
