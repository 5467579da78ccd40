"""At which offsets the operands of an operation show one variable, as those of stencils do.

Input: operands over one index space: slices, and slices joined again, as `jnp.roll` and padding make them. Output: for
each variable the dimensions along which it is followed, and the least and the largest offset.
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
    """What the points of an index space read of one variable.

    Args:
        variable: what they read.
        dims: the dimension of the variable that each dimension of the index space follows, None for one of size 1.
        low: for each dimension of the index space the least offset at which a point reads.
        high: the largest.
    """

    variable: Variable
    dims: tuple[int | None, ...]
    low: tuple[int, ...]
    high: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Part:
    """A rectangle of an operand that is a rectangle of a variable.

    Args:
        variable: that variable.
        dims: its dimensions along those of the operand, None for one of size 1.
        offsets: for each dimension of the operand, where in the variable it is, relative to where in the operand; of
            one that was joined, as on a ring: what is rolled beyond the end is next to the beginning.
        size: elements.
    """

    variable: Variable
    dims: tuple[int | None, ...]
    offsets: tuple[int, ...]
    size: int


def neighbours(operands: Iterable[Tensor]) -> list[Neighbours]:
    """The variables that are shown at several offsets, and only so.

    Args:
        operands: tensors of one shape.
    """
    parts, others = dict[Variable, list[Part]](), set[Variable]()
    views = list(operands)
    if all(n == 1 for n in Counter(variable for view in views for variable in view.variables()).values()):
        return []  # the usual case
    for operand in views:
        own = parts_of(operand)
        for part in own or ():
            parts.setdefault(part.variable, []).append(part)
        others.update(operand.variables() if own is None else ())
    several = [_together(variable, own) for variable, own in parts.items() if variable not in others]
    return [one for one in several if one is not None and one.low != one.high]


def parts_of(operand: Tensor) -> list[Part] | None:
    """The rectangles that a view is joined of; None for views of other kinds."""
    found = _parts(operand.node, (0,) * operand.ndim, (False,) * operand.ndim)
    return None if found is None else list(found)


def _parts(node: Node, at: tuple[int, ...], joined: tuple[bool, ...]) -> Iterable[Part] | None:
    """Those of a view whose first element is at some place of the operand, joined with others along some dimensions."""
    if isinstance(node, Concat):
        along = tuple(was or d == node.axis for d, was in enumerate(joined))
        places = (tuple(n + first * (d == node.axis) for d, n in enumerate(at)) for first in node.bounds)
        found = [_parts(part, place, along) for part, place in zip(node.parts, places, strict=False)]
        return None if None in found else [part for some in found if some is not None for part in some]
    dims = variable_dims(node) if isinstance(node, Affine) and not node.is_empty else None
    if not isinstance(node, Affine) or dims is None:
        return None
    shape = node.variable.shape
    if len(dims) == len(shape) and all(dim in (None, d) for d, dim in enumerate(dims)):
        dims = tuple(range(len(shape)))  # a single row is one of the dimension that the others follow
    start = [int(n) for n in np.unravel_index(node.offset, shape)]
    rows = zip(dims, at, joined, strict=True)
    offsets = [0 if dim is None else _offset(start[dim] - here, shape[dim], ring) for dim, here, ring in rows]
    return [Part(node.variable, dims, tuple(offsets), prod(node.shape))]


def _offset(offset: int, extent: int, is_ring: bool) -> int:
    return (offset + extent // 2) % extent - extent // 2 if is_ring else offset


def _together(variable: Variable, parts: Sequence[Part]) -> Neighbours | None:
    """What all parts of a variable read; None where they follow it in different ways."""
    dims, low, high = list[int | None](), list[int](), list[int]()
    for d in range(len(parts[0].dims)):
        followed = {part.dims[d] for part in parts} - {None}
        if len(followed) > 1:
            return None
        dim = next(iter(followed), None)
        offsets = [part.offsets[d] for part in parts if part.dims[d] == dim]
        dims.append(dim)
        low.append(min(offsets))
        high.append(max(offsets))
    taken = [dim for dim in dims if dim is not None]
    return Neighbours(variable, tuple(dims), tuple(low), tuple(high)) if len(set(taken)) == len(taken) else None
