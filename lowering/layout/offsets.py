"""Offsets at which the operands of an operation read one variable, as those of stencils do.

Input: operands over one index space: slices, and concatenations of slices, as `jnp.roll` and padding make them.
Output: for each variable the dimensions along which it is followed, and the smallest and largest offset.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from ipujax.lowering.layout.mapping import variable_dims
from ipujax.runtime.tensor import Affine, Concat, Node, Tensor, Variable


@dataclass(frozen=True, slots=True)
class Neighbours:
    """Range of offsets at which the points of an index space read one variable."""

    variable: Variable
    dims: tuple[int | None, ...]  # its dimension that each dimension of the index space follows, None for one of size 1
    low: tuple[int, ...]  # smallest offset of a point along each dimension of the index space
    high: tuple[int, ...]  # largest offset


@dataclass(frozen=True, slots=True)
class Part:
    """Rectangle of an operand that is a rectangle of a variable."""

    variable: Variable
    dims: tuple[int | None, ...]  # its dimensions along those of the operand, None for one of size 1
    # Position in the variable minus position in the operand, along each dimension of the operand; modulo the extent
    # along a dimension of a concatenation, because a roll continues at the other end
    offsets: tuple[int, ...]
    size: int


def neighbours(operands: Iterable[Tensor]) -> list[Neighbours]:
    """Variables that operands of one shape read at several offsets, and in no other way."""
    parts: dict[Variable, list[Part]] = {}
    irregular: set[Variable] = set()
    views = list(operands)
    # The usual case, without a look at the views.
    if all(count == 1 for count in Counter(variable for view in views for variable in view.variables()).values()):
        return []
    for operand in views:
        rectangles = parts_of(operand)
        for part in rectangles or ():
            parts.setdefault(part.variable, []).append(part)
        irregular.update(operand.variables() if rectangles is None else ())
    stencils = [_together(variable, rectangles) for variable, rectangles in parts.items() if variable not in irregular]
    return [stencil for stencil in stencils if stencil is not None and stencil.low != stencil.high]


def parts_of(operand: Tensor) -> list[Part] | None:
    """Rectangles of which a view is a concatenation; None for any other view."""
    parts = _rectangles(operand.node, (0,) * operand.ndim, (False,) * operand.ndim)
    return None if parts is None else list(parts)


def _rectangles(node: Node, at: tuple[int, ...], joined: tuple[bool, ...]) -> Iterable[Part] | None:
    """Rectangles of a node at position `at` of the operand, in concatenations along the dimensions `joined`."""
    if isinstance(node, Concat):
        joined_inside = tuple(is_joined or d == node.axis for d, is_joined in enumerate(joined))
        starts = (tuple(n + bound * (d == node.axis) for d, n in enumerate(at)) for bound in node.bounds)
        nested = [_rectangles(part, start, joined_inside) for part, start in zip(node.parts, starts, strict=False)]
        return None if None in nested else [part for parts in nested if parts is not None for part in parts]
    dims = variable_dims(node) if isinstance(node, Affine) and not node.is_empty else None
    if not isinstance(node, Affine) or dims is None:
        return None
    shape = node.variable.shape
    if len(dims) == len(shape) and all(dim in (None, d) for d, dim in enumerate(dims)):
        # A single row has no stride to tell its dimension by: it is that of the other parts.
        dims = tuple(range(len(shape)))
    first = [int(n) for n in np.unravel_index(node.offset, shape)]
    rows = zip(dims, at, joined, strict=True)
    offsets = [
        0 if dim is None else _offset(first[dim] - position, shape[dim], is_ring) for dim, position, is_ring in rows
    ]
    return [Part(node.variable, dims, tuple(offsets), prod(node.shape))]


def _offset(offset: int, extent: int, is_ring: bool) -> int:
    return (offset + extent // 2) % extent - extent // 2 if is_ring else offset


def _together(variable: Variable, parts: Sequence[Part]) -> Neighbours | None:
    """Range of offsets over all parts of a variable; None if they follow different dimensions."""
    dims: list[int | None] = []
    low: list[int] = []
    high: list[int] = []
    for d in range(len(parts[0].dims)):
        followed = {part.dims[d] for part in parts} - {None}
        if len(followed) > 1:
            return None
        dim = next(iter(followed), None)
        offsets = [part.offsets[d] for part in parts if part.dims[d] == dim]
        dims.append(dim)
        low.append(min(offsets))
        high.append(max(offsets))
    used = [dim for dim in dims if dim is not None]
    return Neighbours(variable, tuple(dims), tuple(low), tuple(high)) if len(set(used)) == len(used) else None
