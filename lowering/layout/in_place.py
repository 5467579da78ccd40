"""Writes an updated value over the tensor it updates: only elements that differ are copied.

The update of a part of an array is a view: old elements around new ones. Written over the old tensor, the old
elements stay in place.

Input: a value, a tensor of its shape, and the variables that are about to be overwritten. Output: the copy.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from itertools import pairwise

from ipujax.runtime.graph import Builder, Copy
from ipujax.runtime.tensor import Concat, Tensor, Variable, concat


def differing_elements(value: Tensor, place: Tensor) -> tuple[Tensor, Tensor] | None:
    """Elements of a value that differ from those in `place`, and their destination, in one shape; None for none.

    Elements of `value` that are a view of the same elements of `place` need no copy when it is written there.
    """
    moves = list(_differing_parts(value, place))
    if len(moves) <= 1:
        return moves[0] if moves else None
    # Everything moves: the value itself has fewer pieces than its parts.
    if sum(part.size for part, _ in moves) == value.size:
        return value, place
    # One copy of all parts: one superstep.
    sources, places = (concat([x.flatten() for x in side], 0) for side in zip(*moves, strict=True))
    return sources, places


def _differing_parts(value: Tensor, place: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield each part of a concatenated value that is not a view of the same elements as `place`, and its place."""
    node = value.node
    if node == place.node:
        return
    if not isinstance(node, Concat):
        yield value, place
        return
    for part, (first, end) in zip(node.parts, pairwise(node.bounds), strict=True):
        yield from _differing_parts(Tensor(part, part.shape, value.dtype), place.slice(first, end, axis=node.axis))


def must_be_set_aside(value: Tensor, place: Tensor, overwritten: Set[Variable]) -> bool:
    """True if a value must be copied aside first: an element that moves is in a variable to be overwritten."""
    moving = differing_elements(value, place)
    return moving is not None and not overwritten.isdisjoint(moving[0].variables())


def overwrite(builder: Builder, value: Tensor, place: Tensor) -> None:
    """Copies a mapped value to the mapped tensor `place` of its shape, where they differ."""
    moving = differing_elements(value, place)
    if moving is not None:
        builder.prog.add(Copy(*moving, builder.name, builder.graph.origin))
