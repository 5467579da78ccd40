"""Anchors of a page, and links between its tables, the execution trace, the source and the layers.

    op-12                an operation, by its number in `Figures.step_costs`
    line-model.py:27     a line of source
    layer-block[3]/dense a layer

Input: `Figures`. Output: `Anchors`, whose methods make links to what the page lists; what it leaves out stays text.
Links to the trace lead to its section, and say in `data-show` which slices `links.js` selects in it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import TypeVar
from urllib.parse import quote

from ipujax.runtime.errors import ProfileError
from ipujax.runtime.markup import Markup, tag
from ipujax.runtime.profile import NO_LAYER, Figures
from ipujax.runtime.sources import line_number
from ipujax.runtime.views import LayerNode, SourceFile, operation_rows, source_view, tree_of

MOST_OPERATIONS = 300  # listed, the most expensive
MOST_FILES = 12
MOST_CHILDREN, MOST_LAYERS = 300, 3_000  # of one layer, and of all, that are listed, the most expensive
_SAFE = "/:[]@!$&'()*+,;=~"  # in fragments of addresses

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Anchors:
    """Ids of what a page lists.

    Args:
        operations: ids of the operations in the table by number, the most expensive first.
        layers: ids by path.
        lines: ids by file and number; the file is its path, or its name.
        rows: numbers of operations by line and layer.
        has_trace: whether slices of the trace are known by operation.
    """

    operations: Mapping[int, str] = field(default_factory=dict)
    layers: Mapping[str, str] = field(default_factory=dict)
    lines: Mapping[tuple[str, int], str] = field(default_factory=dict)
    rows: Mapping[tuple[str, str], tuple[int, ...]] = field(default_factory=dict)
    has_trace: bool = False

    def listed_children(self, node: LayerNode) -> list[LayerNode]:
        """The layers inside a layer that are listed, most expensive first."""
        listed = (child for child in node.children.values() if child.path in self.layers)
        return sorted(listed, key=lambda child: -child.cycles)

    def line_id(self, line: str, file: str = "") -> str:
        """The id of a line of source, "" if it is not listed.

        Args:
            line: `file:line (function)`.
            file: path of the file, where that is known.
        """
        place = line_number(line)
        if place is None:
            return ""
        name, number = place
        return self.lines.get((file, number)) or self.lines.get((name, number), "")

    def line(self, line: str, file: str = "") -> Markup | str:
        """A line of source as a link to its listing; arguments as of `line_id`."""
        return link(line, self.line_id(line, file))

    def layer(self, path: str, text: str = "") -> Markup | str:
        """A layer as a link to its row in the tree.

        Args:
            path: of it.
            text: of the link; the path when empty.
        """
        return link(text or path, self.layers.get(path, ""))

    def operation(self, number: int | None, text: str) -> Markup | str:
        """Text as a link to the row of an operation.

        Args:
            number: of it; None for none.
            text: of the link.
        """
        return link(text, "" if number is None else self.operations.get(number, ""))

    def trace(self, kind: str, *values: object) -> Markup:
        """A link that selects slices of the trace; nothing where these are not known.

        Args:
            kind: "op", "line" or "layer"; "span" for any slices of an IPU in a range of time.
            values: numbers of operations, the id of a line, the path of a layer; IPU, first and last cycle.
        """
        if not values or not (self.has_trace or kind == "span"):
            return Markup()
        shown = " ".join(map(str, (kind, *values)))
        return tag("a", "trace", href="#trace", class_="to-trace", data_show=shown, title="Show in the execution trace")

    def trace_at(self, line: str, layer: str) -> Markup:
        """The same for all operations of one line in one layer."""
        return self.trace("op", *self.rows.get((line, layer), ()))


def link(text: str, anchor: str) -> Markup | str:
    """Text as a link to an id of the page; text alone where that is empty."""
    return tag("a", text, href=f"#{quote(anchor, safe=_SAFE)}") if anchor else text


def anchors_of(profile: Figures) -> Anchors:
    """The anchors of the page of a profile; those of figures that are not known are missing.

    Args:
        profile: of a run.
    """
    rows = _known(lambda: operation_rows(profile)) or ()
    files = _known(lambda: source_view(profile)) or ()
    tree = _known(lambda: tree_of(profile)) or LayerNode("", "")
    trace = _known(lambda: profile.execution_trace)
    by_place: dict[tuple[str, str], list[int]] = defaultdict(list)
    for row in rows:
        by_place[row.line, row.layer_path].append(row.number)
    return Anchors(
        operations={row.number: f"op-{row.number}" for row in rows[:MOST_OPERATIONS]},
        layers=_layer_ids(tree),
        lines=_line_ids(files),
        rows={place: tuple(numbers) for place, numbers in by_place.items()},
        has_trace=trace is not None and any(trace.row_sets),
    )


def _known(figure: Callable[[], T]) -> T | None:
    """A figure; None where an unknown trip count or the file of an older version lacks it, which its section says."""
    try:
        return figure()
    except ProfileError:
        return None


def listed_files(files: Iterable[SourceFile]) -> list[SourceFile]:
    """The files whose text is shown: those that take time, or all where none does."""
    files = list(files)
    return ([file for file in files if file.cycles] or files)[:MOST_FILES]


def _children(node: LayerNode) -> list[LayerNode]:
    return sorted(node.children.values(), key=lambda child: -child.cycles)[:MOST_CHILDREN]


def _line_ids(files: Iterable[SourceFile]) -> dict[tuple[str, int], str]:
    used_ids: set[str] = set()
    ids: dict[tuple[str, int], str] = {}
    for file in listed_files(files):
        for number in file.listed_lines():
            if number is not None and number in file.costs:
                anchor = _unused(f"line-{file.name}:{number}", used_ids)
                ids[file.path, number] = anchor
                ids.setdefault((file.name, number), anchor)
    return ids


def _layer_ids(root: LayerNode) -> dict[str, str]:
    used_ids: set[str] = set()
    ids: dict[str, str] = {}
    nodes, stack = list[LayerNode](), _children(root)
    while stack:
        nodes.append(stack.pop())
        stack.extend(_children(nodes[-1]))
    nodes.sort(key=lambda node: -node.cycles)  # no layer takes more than the one it is in, which stays before it
    for node in nodes[:MOST_LAYERS]:
        ids[node.path] = _unused(f"layer-{node.path}", used_ids)
    if NO_LAYER in ids:
        ids[""] = ids[NO_LAYER]
    return ids


def _unused(name: str, used_ids: set[str]) -> str:
    """An id, which has no spaces, that is not used."""
    base = "_".join(name.split())
    candidates = (base if n == 1 else f"{base}-{n}" for n in count(1))
    anchor = next(candidate for candidate in candidates if candidate not in used_ids)
    used_ids.add(anchor)
    return anchor
