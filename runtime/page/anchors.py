"""Anchors of a page, and links between its tables, the execution trace, the source and the layers.

    op-12                an operation, by its number in `Figures.step_costs`
    line-model.py:27     a line of source
    layer-block[3]/dense a layer

Input: `Figures`. Output: `Anchors`, whose methods make links to listed operations, layers and lines; others stay text.
Links to the trace lead to its section; `links.js` selects the slices that their attribute `data-show` names.
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

# The most expensive are listed; larger pages open slowly.
MAX_OPERATIONS = 5_000
MAX_FILES = 12
MAX_CHILDREN = 300  # of one layer
MAX_LAYERS = 3_000  # of all
_SAFE = "/:[]@!$&'()*+,;=~"  # in fragments of addresses

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Anchors:
    """Ids of a page's operations, layers and lines.

    Args:
        operations: ids of the operations in the table by number, the most expensive first.
        layers: ids by path.
        lines: ids by file and number; the file is its path, or its name.
        rows: numbers of operations by line and layer.
        has_trace: slices of the trace are known by operation.
    """

    operations: Mapping[int, str] = field(default_factory=dict)
    layers: Mapping[str, str] = field(default_factory=dict)
    lines: Mapping[tuple[str, int], str] = field(default_factory=dict)
    rows: Mapping[tuple[str, str], tuple[int, ...]] = field(default_factory=dict)
    has_trace: bool = False

    def listed_children(self, node: LayerNode) -> list[LayerNode]:
        """Return the listed layers inside a layer, most expensive first."""
        listed = (child for child in node.children.values() if child.path in self.layers)
        return sorted(listed, key=lambda child: -child.cycles)

    def line_id(self, line: str, file: str = "") -> str:
        """Return the id of a line `file:line (function)` of a file with a known path, "" if it is not listed."""
        name_and_number = line_number(line)
        if name_and_number is None:
            return ""
        name, number = name_and_number
        return self.lines.get((file, number)) or self.lines.get((name, number), "")

    def line(self, line: str, file: str = "") -> Markup | str:
        """Return a line of source as a link to its listing; arguments as of `line_id`."""
        return link(line, self.line_id(line, file))

    def layer(self, path: str, text: str = "") -> Markup | str:
        """Return text, or the path, as a link to the row of a layer."""
        return link(text or path, self.layers.get(path, ""))

    def operation(self, number: int | None, text: str) -> Markup | str:
        """Return text as a link to the row of an operation; None for no operation."""
        return link(text, "" if number is None else self.operations.get(number, ""))

    def trace_target(self, kind: str, *values: object) -> str:
        """Return what a link to the trace selects; "" if the trace does not name it.

        Args:
            kind: what `values` select by: "op", "line", "layer", or "span", which needs no names in the trace.
            values: of "op" numbers of operations, of "line" its id, of "layer" its path, of "span" the IPU, the first
                and the last cycle.
        """
        return " ".join(map(str, (kind, *values))) if values and (self.has_trace or kind == "span") else ""

    def trace(self, kind: str, *values: object) -> Markup:
        """Return a link that selects slices of the trace; "" if the trace does not name them; see `trace_target`."""
        target = self.trace_target(kind, *values)
        label = {"class_": "to-trace", "data_show": target, "title": "Show in the execution trace"}
        return tag("a", "trace", href="#trace", **label) if target else Markup()

    def trace_target_at(self, line: str, layer: str) -> str:
        """Return what a link to the slices of all operations of a line in a layer selects."""
        return self.trace_target("op", *self.rows.get((line, layer), ()))


def link(text: str, anchor: str) -> Markup | str:
    """Return text as a link to an id of the page; the text alone without an id."""
    return tag("a", text, href=f"#{quote(anchor, safe=_SAFE)}") if anchor else text


def anchors_of(profile: Figures) -> Anchors:
    """Return the anchors of the page of a profile; those of unknown figures are missing."""
    rows = _figure_or_none(lambda: operation_rows(profile)) or ()

    trace = _figure_or_none(lambda: profile.execution_trace)
    numbers_of: dict[tuple[str, str], list[int]] = defaultdict(list)
    for row in rows:
        numbers_of[row.line, row.layer_path].append(row.number)
    return Anchors(
        operations={row.number: f"op-{row.number}" for row in rows[:MAX_OPERATIONS]},
        layers=_layer_ids(_figure_or_none(lambda: tree_of(profile)) or LayerNode("", "")),
        lines=_line_ids(_figure_or_none(lambda: source_view(profile)) or ()),
        rows={line_and_layer: tuple(numbers) for line_and_layer, numbers in numbers_of.items()},
        has_trace=trace is not None and any(trace.row_sets),
    )


def _figure_or_none(figure: Callable[[], T]) -> T | None:
    try:
        return figure()
    except ProfileError:  # an unknown trip count: its section names the cause
        return None


def listed_files(files: Iterable[SourceFile]) -> list[SourceFile]:
    """Return the files that are listed with their text: those with cycles, or all where none has any."""
    files = list(files)
    return ([file for file in files if file.cycles] or files)[:MAX_FILES]


def _children(node: LayerNode) -> list[LayerNode]:
    return sorted(node.children.values(), key=lambda child: -child.cycles)[:MAX_CHILDREN]


def _line_ids(files: Iterable[SourceFile]) -> dict[tuple[str, int], str]:
    """Return the HTML id of each listed line with costs, by path of its file, or name, and number of the line."""
    used_ids: set[str] = set()
    ids: dict[tuple[str, int], str] = {}
    for file in listed_files(files):
        for number in file.listed_lines():
            if number is not None and number in file.costs:
                anchor = _make_id(f"line-{file.name}:{number}", used_ids)
                ids[file.path, number] = anchor
                ids.setdefault((file.name, number), anchor)  # of files of one name, the most expensive
    return ids


def _layer_ids(root: LayerNode) -> dict[str, str]:
    """Return the HTML id of each of the costliest layers, by its path."""
    used_ids: set[str] = set()
    ids: dict[str, str] = {}
    nodes = list[LayerNode]()
    stack = _children(root)
    while stack:
        nodes.append(stack.pop())
        stack.extend(_children(nodes[-1]))
    # No layer takes more than the layer around it, which stays before it: listed layers have listed parents.
    nodes.sort(key=lambda node: -node.cycles)
    for node in nodes[:MAX_LAYERS]:
        ids[node.path] = _make_id(f"layer-{node.path}", used_ids)
    if NO_LAYER in ids:
        ids[""] = ids[NO_LAYER]
    return ids


def _make_id(name: str, used_ids: set[str]) -> str:
    """Return an id that no other element has, and add it to the used ones."""
    base = "_".join(name.split())  # HTML allows no spaces in ids
    candidates = (base if n == 1 else f"{base}-{n}" for n in count(1))
    anchor = next(candidate for candidate in candidates if candidate not in used_ids)
    used_ids.add(anchor)
    return anchor
