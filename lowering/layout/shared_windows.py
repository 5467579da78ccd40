"""What a vertex reads once, though several operands show it: an array around its box, of which each is a part.

Input: operands over one index space that show one variable at several offsets, as those of stencils do. Output: views
that are a little larger than the index space, and where in them each operand begins. A vertex that is connected to such
a view holds one array in place of one for each operand.
Limits: slices of a whole array, rolls of it, and slices of it padded with its edges.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from operator import add, sub

from ipujax.lowering.layout.offsets import parts_of
from ipujax.runtime.tensor import Tensor, Variable, concat

# Makes a range of one dimension of a view, from its first to before its end; both may be beyond the view's.
_Widen = Callable[[Tensor, int, int, int], Tensor]


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
    views: dict[tuple[Variable, ...], dict[int, Tensor]] = {}
    for number, operand in enumerate(operands):
        if operand is not None:
            views.setdefault(operand.variables(), {})[number] = operand
    several = [(one, own) for (one, *more), own in views.items() if not more and len(own) > 1]
    found = (_window(variable, own, longest) for variable, own in several)
    return [window for window in found if window is not None]


def _window(variable: Variable, views: Mapping[int, Tensor], longest: Sequence[int]) -> SharedWindow | None:
    """The smallest view that most views of a variable are parts of; None where these are smaller."""
    found = {number: _offset(view, len(variable.shape)) for number, view in views.items()}
    offsets = {number: at for number, at in found.items() if at is not None}
    if not offsets:
        return None
    low, high = (tuple(map(pick, zip(*offsets.values(), strict=True))) for pick in (min, max))
    shape, reach = views[next(iter(offsets))].shape, tuple(map(sub, high, low))
    fewest = prod(map(add, longest, reach)) // max(1, prod(longest)) + 1  # operands that take more than the window
    if len(offsets) < fewest:
        return None
    begins = {number: tuple(map(sub, at, low)) for number, at in offsets.items()}

    def made_by(widen: _Widen) -> SharedWindow:
        around = Tensor.of(variable)
        for d, extent in enumerate(shape):
            around = widen(around, d, low[d], high[d] + extent)
        shown = {number: at for number, at in begins.items() if _part(around, at, shape).node == views[number].node}
        return SharedWindow(around, reach, shown)

    are_edges_near = all(-r <= a and b <= r for a, b, r in zip(low, high, reach, strict=True))
    ways = (_on_ring, _with_edges) if are_edges_near else (_on_ring,)
    best = max(map(made_by, ways), key=lambda window: len(window.begins))
    return best if len(best.begins) >= fewest else None


def _offset(view: Tensor, rank: int) -> tuple[int, ...] | None:
    """The offset of the largest part of a view that follows all dimensions of its variable in order."""
    parts = parts_of(view)
    if not parts or not rank or any(part.dims != tuple(range(rank)) for part in parts):
        return None
    return max(parts, key=lambda part: part.size).offsets


def _part(view: Tensor, begin: Sequence[int], shape: Sequence[int]) -> Tensor:
    return view.slice(begin, list(map(add, begin, shape)))


def _on_ring(view: Tensor, dim: int, first: int, end: int) -> Tensor:
    """A range of one dimension, which goes on at the other end."""
    extent = view.shape[dim]
    ranges = ((extent + first, extent), (max(first, 0), min(end, extent)), (0, end - extent))
    return concat([view.slice(low, high, axis=dim) for low, high in ranges if low < high <= extent], dim)


def _with_edges(view: Tensor, dim: int, first: int, end: int) -> Tensor:
    """A range of one dimension, of which the first and the last index go on beyond the ends."""
    extent = view.shape[dim]
    ranges = [(0, 1)] * -first + [(max(first, 0), min(end, extent))] + [(extent - 1, extent)] * (end - extent)
    return concat([view.slice(low, high, axis=dim) for low, high in ranges], dim)
