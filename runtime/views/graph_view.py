"""The program as a graph: parts of training, layers inside them, operations, and the bytes that these hand on.

Input: `Figures`. Output: a `GraphView`. A node has at most `MAX_CHILDREN` others inside: more, as of hundreds of equal
layers, are in groups of those that follow one another in the program.
Limits: operations without cycles that hand on nothing are left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ipujax.runtime.profile import Figures, HandedValues
from ipujax.runtime.tensor import readable_name
from ipujax.runtime.views.part_views import PART_LABELS

MAX_CHILDREN = 16


@dataclass(frozen=True, slots=True)
class GraphNode:
    """A part, a layer, a group of layers or operations, or one operation.

    Args:
        name: of a part, a layer or an operation; of a group those of its first and its last node.
        rows: its operations, rows of `Figures.step_costs`; first the one that first runs.
        children: the nodes inside it in the order in which they first run; none of an operation.
    """

    name: str
    rows: tuple[int, ...]
    children: tuple[GraphNode, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class GraphView:
    """The program as a graph.

    Args:
        root: the whole program.
        values: bytes that operations hand on.
    """

    root: GraphNode
    values: HandedValues


def graph_view(profile: Figures) -> GraphView:
    """Return the program as a graph.

    Raises:
        ProfileError: a trip count is data.
    """
    values = profile.handed_values
    handing = {*values.writer.tolist(), *values.reader.tolist()}
    paths: dict[int, tuple[str, ...]] = {}
    for number in np.argsort(values.place, kind="stable").tolist():
        row = profile.step_costs[number]
        if row.cycles or number in handing:
            part = row.origin.part
            paths[number] = (PART_LABELS.get(part, part), *filter(None, row.origin.layer.split("/")))
    names = [readable_name(row.name) for row in profile.step_costs]
    root = _node("program", paths, names, 0)
    only = root.children[0] if len(root.children) == 1 else root
    return GraphView(only if only.children else root, values)


def _node(name: str, paths: Mapping[int, tuple[str, ...]], names: Sequence[str], depth: int) -> GraphNode:
    """Return the node of operations whose paths of layers are equal up to a depth, with a node for each layer below.

    Args:
        name: of the node.
        paths: operation → its part of training and layers, outermost first; in the order of the program.
        names: of all operations.
        depth: number of layers around the node.
    """
    inside: dict[str, dict[int, tuple[str, ...]]] = {}
    children: list[GraphNode] = []
    for row, path in paths.items():
        if len(path) == depth:
            children.append(GraphNode(names[row], (row,)))
        else:
            inside.setdefault(path[depth], {})[row] = path
    for key, rows in inside.items():
        child = _node(key, rows, names, depth + 1)
        while len(child.children) == 1 and child.children[0].children:  # a layer with one layer inside, and no more
            (only,) = child.children
            child = GraphNode(f"{child.name}/{only.name}", only.rows, only.children)
        children.append(child)
    number_of = {row: number for number, row in enumerate(paths)}
    children.sort(key=lambda child: number_of[child.rows[0]])
    return GraphNode(name, tuple(paths), tuple(_grouped(children)))


def _grouped(children: Sequence[GraphNode]) -> Sequence[GraphNode]:
    """Return the children of a node, in groups of groups where they are many."""
    if len(children) <= MAX_CHILDREN:
        return children
    return _grouped([_group(part) for part in _parts(children)])


def _parts(children: Sequence[GraphNode]) -> Iterator[Sequence[GraphNode]]:
    """Yield the children in as few parts as their bound allows, of about equal lengths."""
    count = -(-len(children) // MAX_CHILDREN)
    for number in range(count):
        yield children[number * len(children) // count : (number + 1) * len(children) // count]


def _group(children: Sequence[GraphNode]) -> GraphNode:
    first, last = children[0].name.partition(" … ")[0], children[-1].name.rpartition(" … ")[2]
    return GraphNode(f"{first} … {last}", tuple(row for child in children for row in child.rows), tuple(children))
