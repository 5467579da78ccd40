"""The layers of a model as a tree, what kinds of layers there are, and which layer differs from its like.

Input: `Figures`. Output: `LayerNode`s, whose cycles include those of the layers inside them, and `LayerKind`s.
Layers are of one kind if their paths differ in numbers alone: `block[3]/attention` and `block[7]/attention`.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median

from ipujax.runtime.profile import Figures, LayerCost

PARTS = ("forward", "backward", "recomputed", "update", "")
PART_LABELS = {"": "other"}
_NUMBER = re.compile(r"\d+")
_UNLIKE = 1.5  # times the median of its kind, from which on a layer differs from its like


@dataclass(slots=True)
class LayerNode:
    """One layer, those inside it included.

    Args:
        name: the last name of its path.
        path: names of the layers it is in, and its own; empty for the whole model.
        parts: busy cycles of all IPUs by part of training, those of layers inside it included.
        flops: operations on floating-point numbers.
        moved_bytes: bytes that arrive on tiles or the host.
        always_bytes: size of variables that are live during the whole run.
        peak_bytes: size of those and of variables that are live when most is.
        limiting_cycles: cycles on the limiting IPU; None where that is not known.
        lines: lines of source of the layer itself, most expensive first.
        children: the layers inside it, in program order.
    """

    name: str
    path: str
    parts: Counter[str] = field(default_factory=Counter)
    flops: int = 0
    moved_bytes: int = 0
    always_bytes: int = 0
    peak_bytes: int = 0
    limiting_cycles: int | None = 0
    lines: tuple[str, ...] = ()
    children: dict[str, LayerNode] = field(default_factory=dict)

    @property
    def cycles(self) -> int:
        """Busy cycles of all parts of training."""
        return sum(self.parts.values())

    def walk(self) -> Iterator[LayerNode]:
        """This layer and all inside it, parents first."""
        yield self
        for child in self.children.values():
            yield from child.walk()


def layer_tree(layers: Sequence[LayerCost]) -> LayerNode:
    """The whole model with its layers.

    Args:
        layers: of a profile.
    """
    root = LayerNode("the whole program", "")
    for row in layers:
        node = root
        _add(node, row)
        for name in row.layer.split("/"):
            path = f"{node.path}/{name}" if node.path else name
            node = node.children.setdefault(name, LayerNode(name, path))
            _add(node, row)
        node.lines = tuple(dict.fromkeys((*node.lines, *row.lines)))
    return root


def _add(node: LayerNode, row: LayerCost) -> None:
    node.parts[row.part] += row.cycles
    node.flops += row.flops or 0
    node.moved_bytes += row.moved_bytes
    node.always_bytes += row.always_bytes
    node.peak_bytes += row.peak_bytes
    known = node.limiting_cycles is not None and row.limiting_cycles is not None
    node.limiting_cycles = (node.limiting_cycles or 0) + (row.limiting_cycles or 0) if known else None


@dataclass(frozen=True, slots=True)
class LayerKind:
    """Layers whose paths differ in numbers alone.

    Args:
        path: of them, with `*` for numbers where there are several.
        nodes: the layers, in program order.
    """

    path: str
    nodes: tuple[LayerNode, ...]

    @property
    def cycles(self) -> int:
        """Busy cycles of all of them."""
        return sum(node.cycles for node in self.nodes)

    @property
    def parts(self) -> Counter[str]:
        """The same by part of training."""
        return sum((node.parts for node in self.nodes), Counter[str]())

    @property
    def median_cycles(self) -> float:
        """Busy cycles of the layer in the middle."""
        return float(median(node.cycles for node in self.nodes))

    @property
    def unlike(self) -> LayerNode | None:
        """The layer that takes most, if there are three or more and it takes 1.5 times the median or more."""
        most = max(self.nodes, key=lambda node: node.cycles)
        is_unlike = len(self.nodes) > 2 and most.cycles >= _UNLIKE * self.median_cycles
        return most if is_unlike else None


def layer_kinds(root: LayerNode) -> tuple[LayerKind, ...]:
    """The kinds of layers of a model, most expensive first; the outer one first of those that are equal.

    Args:
        root: of `layer_tree`.
    """
    members: dict[str, list[LayerNode]] = defaultdict(list)
    for node in root.walk():
        if node.path:
            members[_NUMBER.sub("*", node.path)].append(node)
    kinds = [LayerKind(path if len(nodes) > 1 else nodes[0].path, tuple(nodes)) for path, nodes in members.items()]
    return tuple(sorted(kinds, key=lambda kind: -kind.cycles))


def tree_of(profile: Figures) -> LayerNode:
    """The layers of a profile.

    Args:
        profile: of a run.

    Raises:
        ProfileError: a loop whose trip count is unknown, or a profile saved by a version that knew no layers.
    """
    return layer_tree(profile.layers)
