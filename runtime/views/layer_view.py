"""Layers of a model as a tree, and kinds of equal layers.

Input: `Figures`. Output: `LayerNode`s, whose cycles include those of the layers inside them, and `LayerKind`s.
Layers are of one kind if their paths differ in numbers alone: `block[3]/attention` and `block[7]/attention`. A name
without a number is of the kind of those with one: Keras names layers `dense`, `dense_1`, `dense_2`.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median

from ipujax.runtime.profile import Figures, LayerCost
from ipujax.runtime.tensor import PARTS as PARTS_OF_STEP

PARTS = (*PARTS_OF_STEP, "")
PART_LABELS = {"": "other"}
_NUMBER = re.compile(r"\d+")
_LAST_NUMBER = re.compile(r"_\d+(?=/|$)")
_OUTLIER = 1.15  # times the median of its kind: a layer with more is named, unless the others differ as much
_SPREAD = 3  # times the median deviation of its kind


@dataclass(slots=True)
class LayerNode:
    """Layer; its figures include those of the layers inside it.

    Args:
        name: the last name of its path.
        path: names of the layers around it and its name, joined by "/"; "" for the model.
        parts: busy cycles of all IPUs by part of training.
        flops: operations on floating-point numbers.
        moved_bytes: bytes that arrive on tiles or the host.
        always_bytes: of variables that are live during the whole run.
        peak_bytes: of these and of variables that are live at the peak.
        limiting_cycles: cycles on the limiting IPU.
        lines: lines of source of the layer without those inside it, most expensive first.
        children: the layers inside it by name, in program order; numbered ones by number.
    """

    name: str
    path: str
    parts: Counter[str] = field(default_factory=Counter)
    flops: int = 0
    moved_bytes: int = 0
    always_bytes: int = 0
    peak_bytes: int = 0
    limiting_cycles: int = 0
    lines: tuple[str, ...] = ()
    children: dict[str, LayerNode] = field(default_factory=dict)

    @property
    def cycles(self) -> int:
        """Busy cycles of all parts of training."""
        return sum(self.parts.values())

    @property
    def own_cycles(self) -> int:
        """Busy cycles without those of the layers inside it."""
        return self.cycles - sum(child.cycles for child in self.children.values())

    def walk(self) -> Iterator[LayerNode]:
        """Yield this layer and all inside it, parents first."""
        yield self
        for child in self.children.values():
            yield from child.walk()


def layer_tree(layers: Sequence[LayerCost]) -> LayerNode:
    """Build the tree of a profile's layers; its root is the model."""
    root = LayerNode("the whole program", "")
    for row in layers:
        node = root
        _add(node, row)
        for name in row.layer.split("/"):
            path = f"{node.path}/{name}" if node.path else name
            node = node.children.setdefault(name, LayerNode(name, path))
            _add(node, row)
        node.lines = tuple(dict.fromkeys((*node.lines, *row.lines)))
    for node in list(root.walk()):
        node.children = _in_order(node.children)
    return root


def _in_order(children: dict[str, LayerNode]) -> dict[str, LayerNode]:
    """Sort names that differ in numbers alone by these, at the place of the first."""
    # A function that several layers call is in the program once: its first call may not be the first layer.
    kinds = list(dict.fromkeys(_NUMBER.sub("*", name) for name in children))
    order = {kind: n for n, kind in enumerate(kinds)}
    return dict(sorted(children.items(), key=lambda item: (order[_NUMBER.sub("*", item[0])], _numbers(item[0]))))


def _numbers(name: str) -> tuple[int, ...]:
    return tuple(map(int, _NUMBER.findall(name)))


def _add(node: LayerNode, row: LayerCost) -> None:
    node.parts[row.part] += row.cycles
    node.flops += row.flops
    node.moved_bytes += row.moved_bytes
    node.always_bytes += row.always_bytes
    node.peak_bytes += row.peak_bytes
    node.limiting_cycles += row.limiting_cycles


@dataclass(frozen=True, slots=True)
class LayerKind:
    """Layers whose paths differ in numbers alone.

    Args:
        path: of the layer; of several, with `*` for numbers.
        nodes: the layers, in program order.
    """

    path: str
    nodes: tuple[LayerNode, ...]

    @property
    def cycles(self) -> int:
        """Busy cycles of all layers of the kind."""
        return sum(node.cycles for node in self.nodes)

    @property
    def own_cycles(self) -> int:
        """Busy cycles of all layers of the kind, without those of the layers inside them."""
        return sum(node.own_cycles for node in self.nodes)

    @property
    def parts(self) -> Counter[str]:
        """Busy cycles of all layers of the kind, by part of training."""
        return sum((node.parts for node in self.nodes), Counter[str]())

    @property
    def median_cycles(self) -> float:
        """Median of the layers' busy cycles."""
        return float(median(node.cycles for node in self.nodes))

    @property
    def outlier(self) -> LayerNode | None:
        """Costliest layer of three or more, if it takes at least 1.15 times their median and most others are alike."""
        if len(self.nodes) < 3:
            return None
        middle = self.median_cycles
        largest = max(self.nodes, key=lambda node: node.cycles)
        deviation = median(abs(node.cycles - middle) for node in self.nodes)
        return largest if largest.cycles - middle >= max((_OUTLIER - 1) * middle, _SPREAD * deviation) else None

    @property
    def excess_part(self) -> str:
        """Part of training with most of what its costliest layer takes beyond the median; "" if that is all of it."""
        parts = [part for part in PARTS if any(node.parts[part] for node in self.nodes)]
        largest = max(self.nodes, key=lambda node: node.cycles)

        def excess(part: str) -> float:
            return largest.parts[part] - float(median(node.parts[part] for node in self.nodes))

        return max(parts, key=excess) if len(parts) > 1 else ""


def layer_kinds(root: LayerNode) -> tuple[LayerKind, ...]:
    """Group the layers of a tree in kinds, most expensive first; of equal ones, the outer kind first."""
    members: dict[str, list[LayerNode]] = defaultdict(list)
    for node in root.walk():
        if node.path:
            members[_NUMBER.sub("*", _LAST_NUMBER.sub("", node.path))].append(node)
    kinds = [LayerKind(_path_of_kind(nodes), tuple(nodes)) for nodes in members.values()]
    return tuple(sorted(kinds, key=lambda kind: -kind.cycles))  # stable: parents come first in `walk`


def _path_of_kind(nodes: Sequence[LayerNode]) -> str:
    # Of `dense` and `dense_1` the longer path has the place of the number.
    return max((_NUMBER.sub("*", node.path) for node in nodes), key=len) if len(nodes) > 1 else nodes[0].path


def tree_of(profile: Figures) -> LayerNode:
    """Return the tree of layers of a profile.

    Raises:
        ProfileError: a loop whose trip count is unknown.
    """
    return layer_tree(profile.layers)
