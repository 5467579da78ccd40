"""Layers section of a page: a table, flame graphs of cycles and of bytes, and a tree that folds.

Input: a `LayerNode`. Output: a section; in flame graphs the width of a rectangle is the layer's share.
"""

from __future__ import annotations

from ipujax.runtime.markup import Markup, join_markup, tag
from ipujax.runtime.page.anchors import Anchors
from ipujax.runtime.page.charts import bar
from ipujax.runtime.page.document import Column, DataTable, Section, fold_buttons, sentence
from ipujax.runtime.profile.text import size
from ipujax.runtime.views import LayerNode
from ipujax.runtime.views.part_views import PART_LABELS, PARTS

_MAX_LEVELS = 6  # of the icicle
_MIN_SHARE = 0.002  # of the icicle's width; smaller layers are omitted
_OPEN_LEVELS = 2
_LARGE = 0.5  # of the program's cycles: larger layers are open at first, at any level
_FLAMES = {"cycles": "Busy cycles", "peak_bytes": "Bytes of variables that are live when most is"}
_SMALL = 0.001  # of the program's cycles: a smaller part of training has no column


def layer_section(root: LayerNode, limiting_ipu: int, anchors: Anchors) -> Section:
    """Return the section; the limiting IPU's cycles have a column."""
    parts = [part for part in PARTS if root.parts[part] > _SMALL * root.cycles]
    intro = (
        "Layers are name scopes, or functions where there is none. Cycles are busy cycles of all IPUs, shares are of "
        "the whole program; peak is bytes of variables that are live when most is, always those of the whole run."
    )
    tree = tag(
        "div",
        _head(parts if len(parts) > 1 else [], limiting_ipu),
        *(_node(child, root.cycles, parts, 0, anchors) for child in anchors.listed_children(root)),
        class_="tree scroll layers",
        id="layer-tree",
        tabindex=0,
        role="region",
        aria_label="Layers",
        data_search="layers",
    )
    flames = [
        tag("h3", "Flame graphs"),
        *(_icicle(root, anchors, name, unit) for name, unit in _FLAMES.items()),
        tag("h3", "Tree"),
    ]
    layers = _layer_table(root, anchors)
    body = join_markup([sentence(intro), layers.place(), *flames, fold_buttons(), tree])
    return Section("layers", "Layers", body, data=layers.data())


def _layer_table(root: LayerNode, anchors: Anchors) -> DataTable:
    """Return the table of listed layers; `own` figures are without those of the layers inside."""
    nodes = [node for node in root.walk() if node.path and node.path in anchors.layers]
    # A part that no layer has is no column.
    parts = [part for part in PARTS if root.parts[part]]
    columns = [
        Column("Layer", "link", [(node.path, anchors.layers[node.path]) for node in nodes]),
        Column("Trace", "trace", [anchors.trace_target("layer", node.path) if node.cycles else "" for node in nodes]),
        Column("Own cycles", "number", [node.own_cycles for node in nodes], "without the layers inside it"),
        Column("Cycles", "number", [node.cycles for node in nodes], "with the layers inside it"),
        *(
            Column(PART_LABELS.get(part, part).capitalize(), "number", [node.parts[part] for node in nodes])
            for part in parts
            if len(parts) > 1
        ),
        Column("Moved", "bytes", [node.moved_bytes for node in nodes], "bytes that arrive on tiles or the host"),
        Column("Peak", "bytes", [node.peak_bytes for node in nodes], "variables live when most is"),
        Column("Always", "bytes", [node.always_bytes for node in nodes], "variables live during the whole run"),
        Column("FLOP", "number", [node.flops for node in nodes]),
    ]
    return DataTable("layers-table", "Layers", columns, sorted_by="Own cycles")


def _head(parts: list[str], limiting_ipu: int) -> Markup:
    """Return the names of the columns of the tree of layers."""
    return tag(
        "div",
        tag("span", "layer", class_="name"),
        tag("span", class_="links"),
        tag("span", "cycles", class_="cycles"),
        tag("span", "share", class_="share"),
        tag("span", class_="track"),
        *(tag("span", PART_LABELS.get(part, part), class_="share") for part in parts),
        tag("span", f"on IPU {limiting_ipu}", class_="cycles"),
        *(tag("span", name, class_="share") for name in ("FLOP", "peak", "always")),
        class_="head",
    )


def _icicle(root: LayerNode, anchors: Anchors, figure: str, unit: str) -> Markup:
    """Draw layers as rectangles that are links to their rows, as wide as a figure, the layers inside each below."""
    total = sum(getattr(child, figure) for child in root.children.values())
    if not total:
        return Markup()
    rectangles = [_rectangle(child, total, total, 1, anchors, figure) for child in root.children.values()]
    label = {"role": "group", "aria_label": f"{unit} of layers, as listed above"}
    return join_markup([tag("p", unit, class_="hint"), tag("div", *rectangles, class_="icicle", **label)])


def _rectangle(node: LayerNode, parent: int, total: int, level: int, anchors: Anchors, figure: str) -> Markup:
    """Draw a layer, and below it those inside; `parent` is the figure of the layer around it, `total` of all layers."""
    amount = getattr(node, figure)
    share = amount / total
    if share < _MIN_SHARE:
        return Markup()
    text = f"{amount:,} cycles" if figure == "cycles" else size(amount)
    label = tag("span", anchors.layer(node.path, node.name), title=f"{node.path}: {text}, {share:.1%}")
    children: list[object] = []
    if level < _MAX_LEVELS and node.children:
        inside = node.children.values()
        children = [_rectangle(child, max(1, amount), total, level + 1, anchors, figure) for child in inside]
    below = tag("div", *children, class_="below") if children else Markup()
    return tag("div", label, below, class_="box", style=f"width:{100 * amount / parent:.2f}%")


def _lines(node: LayerNode, anchors: Anchors) -> Markup:
    """Link to the most expensive line; the others are in the title."""
    first = anchors.line(node.lines[0]) if node.lines else ""
    further = " …" if len(node.lines) > 1 else ""
    return tag("span", first, further, class_="line", title=", ".join(node.lines[1:]) or None)


def _node(node: LayerNode, total: int, parts: list[str], level: int, anchors: Anchors) -> Markup:
    """Return the row of a layer, which opens to the rows of the layers inside it."""
    # Nothing instead of zeros: the rows that have a part stand out.
    shares = [f"{node.parts[part] / max(1, total):.1%}" if node.parts[part] else "" for part in parts]
    by_part = [tag("span", share, class_="share") for share in shares]
    label = join_markup(
        [
            tag("span", node.name, class_="name", title=node.path, style=f"padding-left:{level}rem"),
            tag("span", anchors.trace("layer", node.path) if node.cycles else "", class_="links"),
            tag("span", f"{node.cycles:,}", class_="cycles"),
            tag("span", f"{node.cycles / max(1, total):.1%}", class_="share"),
            tag("span", bar(node.cycles, total), class_="track"),
            *(by_part if len(parts) > 1 else []),
            tag("span", f"{node.limiting_cycles:,}", class_="cycles"),
            tag("span", f"{node.flops:.1e}" if node.flops else "", class_="share"),
            tag("span", size(node.peak_bytes) if node.peak_bytes else "", class_="share"),
            tag("span", size(node.always_bytes) if node.always_bytes else "", class_="share"),
            " ",
            _lines(node, anchors),
        ]
    )
    anchor = anchors.layers.get(node.path)
    words = " ".join([node.path, *(part for part in parts if part and node.parts[part])])  # for the search box
    if not node.children:
        return tag("div", label, class_="leaf", id=anchor, data_find=words)
    children = [_node(child, total, parts, level + 1, anchors) for child in anchors.listed_children(node)]
    num_omitted = len(node.children) - len(children)
    if num_omitted:
        children.append(tag("div", f"… {num_omitted:,} more layers", class_="leaf"))
    heading = tag("summary", label, id=anchor)
    is_open = level < _OPEN_LEVELS or node.cycles > _LARGE * total
    return tag("details", heading, *children, data_find=words, open=is_open)
