"""Windows: one array around a block, of which several operands are parts, so that a vertex reads it once.

Input: operands over one index space that are views of one variable at several offsets, as those of stencils are.
Output: views a little larger than the index space, and the position of each operand in them. A vertex that is
connected to such a view has one array in its memory instead of one for each operand.
Limits: slices of a whole array, rolls of it, and slices of it padded with its edges.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from operator import add, sub

from ipujax.lowering.layout.neighbours import parts_of
from ipujax.runtime.tensor import Tensor, Variable, concat

# Extends (view, dim, first, end) to that range of the dimension; both bounds may be beyond the view.
_Widen = Callable[[Tensor, int, int, int], Tensor]


@dataclass(frozen=True, slots=True)
class SharedWindow:
    """View that contains several operands."""

    tensor: Tensor  # the view
    reach: tuple[int, ...]  # its length minus that of the index space, along each dimension
    begins: dict[int, tuple[int, ...]]  # by the number of each operand, its first index in each dimension


def shared_windows(operands: Sequence[Tensor | None], longest: Sequence[int]) -> list[SharedWindow]:
    """Windows that take fewer bytes than the operands they replace, in the largest block; None stands for no tensor."""
    views: dict[tuple[Variable, ...], dict[int, Tensor]] = {}
    for number, operand in enumerate(operands):
        if operand is not None:
            views.setdefault(operand.variables(), {})[number] = operand
    repeated = [(key[0], group) for key, group in views.items() if len(key) == 1 and len(group) > 1]
    windows = (_window_of_variable(variable, group, longest) for variable, group in repeated)
    return [window for window in windows if window is not None]


def _window_of_variable(variable: Variable, views: Mapping[int, Tensor], longest: Sequence[int]) -> SharedWindow | None:
    """Smallest view that contains most views of a variable, so that a tile reads its block of that once for all.

    None where separate blocks of the views take fewer bytes.

    Args:
        variable: the variable.
        views: operands of one shape that are views of it, by number.
        longest: lengths of the largest block of the index space.
    """
    view_offsets = {number: _offset_of_largest_part(view, len(variable.shape)) for number, view in views.items()}
    offsets = {number: offset for number, offset in view_offsets.items() if offset is not None}
    if not offsets:
        return None
    # Smallest and largest offset along each dimension.
    low, high = (tuple(map(pick, zip(*offsets.values(), strict=True))) for pick in (min, max))
    shape = views[next(iter(offsets))].shape
    reach = tuple(map(sub, high, low))  # elements that the window has more than a view, along each dimension
    # From this number on, separate blocks of the operands take more elements than the window.
    fewest = prod(map(add, longest, reach)) // max(1, prod(longest)) + 1
    if len(offsets) < fewest:
        return None
    begins = {number: tuple(map(sub, offset, low)) for number, offset in offsets.items()}

    def window_by(widen: _Widen) -> SharedWindow:
        """The view from the lowest to the highest offset, and the operands that are parts of it.

        `widen` says what is beyond the ends of the variable: its other end, or its edge again.
        """
        window = Tensor.of(variable)
        for d, extent in enumerate(shape):
            window = widen(window, d, low[d], high[d] + extent)
        # Operands that are exactly the part of the window at their offset.
        matching = {
            number: offset
            for number, offset in begins.items()
            if _part_at(window, offset, shape).node == views[number].node
        }
        return SharedWindow(window, reach, matching)

    # Padding with edges gives offsets around 0, no larger than the reach.
    can_repeat_edges = all(-r <= a and b <= r for a, b, r in zip(low, high, reach, strict=True))
    extensions = (_on_ring, _with_edges) if can_repeat_edges else (_on_ring,)
    best = max(map(window_by, extensions), key=lambda candidate: len(candidate.begins))
    return best if len(best.begins) >= fewest else None


def _offset_of_largest_part(view: Tensor, rank: int) -> tuple[int, ...] | None:
    """Offset of the largest part of a view that follows all dimensions of its variable in order."""
    parts = parts_of(view)
    if not parts or not rank or any(part.dims != tuple(range(rank)) for part in parts):
        return None
    return max(parts, key=lambda part: part.size).offsets


def _part_at(view: Tensor, begin: Sequence[int], shape: Sequence[int]) -> Tensor:
    return view.slice(begin, list(map(add, begin, shape)))


def _on_ring(view: Tensor, dim: int, first: int, end: int) -> Tensor:
    """Range of one dimension that continues at the other end."""
    extent = view.shape[dim]
    ranges = ((extent + first, extent), (max(first, 0), min(end, extent)), (0, end - extent))
    return concat([view.slice(low, high, axis=dim) for low, high in ranges if low < high <= extent], dim)


def _with_edges(view: Tensor, dim: int, first: int, end: int) -> Tensor:
    """Range of one dimension, with the first and the last index repeated beyond the ends."""
    extent = view.shape[dim]
    ranges = [(0, 1)] * -first + [(max(first, 0), min(end, extent))] + [(extent - 1, extent)] * (end - extent)
    return concat([view.slice(low, high, axis=dim) for low, high in ranges], dim)
