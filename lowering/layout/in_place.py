"""Writes a value over the tensor that it is an update of: only what differs moves.

An array of which a part is replaced is a view: the old elements around the new ones. Written back to where the old ones
lie, these stay as they are.

Input: a value, a tensor of its shape, and the variables that are about to be overwritten. Output: the copy.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from itertools import pairwise

from ipujax.runtime.graph import Copy, Graph, Sequence as ProgramSequence
from ipujax.runtime.tensor import Concat, Tensor, Variable, concat


def changes(value: Tensor, place: Tensor) -> tuple[Tensor, Tensor] | None:
    """What of a value is not in its place already, and where it goes: two tensors of one shape; None for nothing.

    Args:
        value: any view.
        place: a tensor of its shape.
    """
    parts = list(_changes(value, place))
    if len(parts) <= 1:
        return parts[0] if parts else None
    if sum(part.size for part, _ in parts) == value.size:
        return value, place
    sources, places = (concat([x.flatten() for x in side], 0) for side in zip(*parts, strict=True))
    return sources, places


def _changes(value: Tensor, place: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    node = value.node
    if node == place.node:
        return
    if not isinstance(node, Concat):
        yield value, place
        return
    for part, (first, end) in zip(node.parts, pairwise(node.bounds), strict=True):
        yield from _changes(Tensor(part, part.shape, value.dtype), place.slice(first, end, axis=node.axis))


def must_be_set_aside(value: Tensor, place: Tensor, overwritten: Set[Variable]) -> bool:
    """Whether a value must be set aside before variables are overwritten: what of it moves is a view of one of them."""
    moving = changes(value, place)
    return moving is not None and not overwritten.isdisjoint(moving[0].variables())


def overwrite(graph: Graph, value: Tensor, place: Tensor, prog: ProgramSequence, name: str) -> None:
    """Copies a value to its place.

    Args:
        graph: gives the origin.
        value: what is copied; lies on tiles.
        place: a tensor of its shape; lies on tiles.
        prog: program to add to.
        name: debug name.
    """
    moving = changes(value, place)
    if moving is not None:
        prog.add(Copy(*moving, name, graph.origin))
