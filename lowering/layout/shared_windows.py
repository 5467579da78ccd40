"""What a vertex reads once, though several operands show it: an array around its box, of which each is a part.

Input: operands over one index space that show one variable at several offsets, as those of stencils do. Output: views
that are a little larger than the index space, and where in them each operand begins. A vertex that is connected to such
a view holds one array in place of one for each operand.
Limits: slices of a whole array, and rolls of it, where a view goes on at the other end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from operator import add, sub

from ipujax.lowering.layout.offsets import parts_of
from ipujax.runtime.tensor import Tensor, Variable, concat


@dataclass(frozen=True, slots=True)
class SharedWindow:
    """A view that several operands are parts of.

    Args:
        tensor: the view.
        reach: by how much it is longer than the index space, along each dimension.
        begins: by the number of each operand, the first index of its part in each dimension.
    """

    tensor: Tensor
    reach: tuple[int, ...]
    begins: dict[int, tuple[int, ...]]


def shared_windows(operands: Sequence[Tensor | None], longest: Sequence[int]) -> list[SharedWindow]:
    """The views that are smaller than the operands they stand for, in the largest box.

    Args:
        operands: tensors of one shape; None for what is not one.
        longest: lengths of the largest box of that shape.
    """
    shown: dict[Variable, dict[int, tuple[int, ...]]] = {}
    views = {number: operand for number, operand in enumerate(operands) if operand is not None}
    for number, operand in views.items():
        at = _offset(operand)
        if at is not None:
            shown.setdefault(at[0], {})[number] = at[1]
    windows = (_window(variable, offsets, views) for variable, offsets in shown.items() if len(offsets) > 1)
    return [window for window in windows if _length(window, longest) < len(window.begins) * prod(longest)]


def _length(window: SharedWindow, longest: Sequence[int]) -> int:
    return prod(n + more for n, more in zip(longest, window.reach, strict=True))


def _offset(operand: Tensor) -> tuple[Variable, tuple[int, ...]] | None:
    """The variable whose dimensions an operand follows in order, and its one offset."""
    places = {(part.variable, part.offsets) for part in parts_of(operand) or ()}
    if len(places) != 1 or operand.ndim != len(operand.variables()[0].shape):
        return None
    if any(dim not in (None, d) for part in parts_of(operand) or () for d, dim in enumerate(part.dims)):
        return None
    return places.pop()


def _window(variable: Variable, offsets: Mapping[int, tuple[int, ...]], views: Mapping[int, Tensor]) -> SharedWindow:
    low, high = (tuple(map(pick, *offsets.values())) for pick in (min, max))
    shape, view = views[next(iter(offsets))].shape, Tensor.of(variable)
    for d, extent in enumerate(shape):
        view = _around(view, d, low[d], high[d] + extent)
    begins = {n: tuple(map(sub, at, low)) for n, at in offsets.items()}
    shows = {n: begin for n, begin in begins.items() if _part(view, begin, shape).node == views[n].node}
    return SharedWindow(view, tuple(map(sub, high, low)), shows)


def _part(view: Tensor, begin: Sequence[int], shape: Sequence[int]) -> Tensor:
    return view.slice(begin, list(map(add, begin, shape)))


def _around(view: Tensor, dim: int, first: int, end: int) -> Tensor:
    """A range of one dimension, which goes on at the other end."""
    extent = view.shape[dim]
    ranges = ((extent + first, extent), (max(first, 0), min(end, extent)), (0, end - extent))
    return concat(
        [view.slice(max(a, 0), min(b, extent), axis=dim) for a, b in ranges if a < b and b > 0 and a < extent], dim
    )
