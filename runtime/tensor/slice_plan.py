"""Slice plans: an affine view as one static slice of a reshaped variable.

A flat index is written in mixed radix, as a reshape of the variable does. The view is a plain strided slice of that
array when every sub-dimension of the view moves one radix only, no two move the same, and none carries into the next.

Input: the variable's shape, and the offset and groups of an affine view. Output: a `SlicePlan`, or None where no
radices fit; then only a gather reads the view. Pure functions of integers, cached by value.
Radices tried, in order: the variable's own shape (no reshape needed); that shape without the boundaries that the view
crosses and with the view's own; the view's strides alone; the same on a window of the flat variable whose length is
a multiple of the largest stride.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod

from ipujax.runtime.cache import remembered
from ipujax.runtime.tensor.affine import Group


@dataclass(frozen=True, slots=True)
class SlicePlan:
    """Strided slice of a reshaped variable, and the axis of each sub-dimension of the view.

    Args:
        window: (first element, number of elements) of the flat variable that is reshaped; None for all of it.
        radices: shape to reshape to.
        starts: first index of the slice on each axis.
        counts: number of indices on each axis.
        steps: distance of indices on each axis.
        axes: for each sub-dimension of the view that is not a broadcast, in the view's order, its axis.
        reversed_axes: axes that the view reads backwards.
    """

    window: tuple[int, int] | None
    radices: tuple[int, ...]
    starts: tuple[int, ...]
    counts: tuple[int, ...]
    steps: tuple[int, ...]
    axes: tuple[int, ...]
    reversed_axes: tuple[int, ...]

    @property
    def limits(self) -> tuple[int, ...]:
        """One past the last index on each axis."""
        return tuple(s + (n - 1) * d + 1 for s, n, d in zip(self.starts, self.counts, self.steps, strict=True))

    def with_steps_as_axes(self) -> SlicePlan:
        """Split each radix that its step divides: the step becomes an axis, of which one index is read."""
        rows: list[tuple[int, int, int, int]] = []  # (radix, start, count, step)
        new_axes: list[int] = []  # new number of each axis
        for radix, start, count, step in zip(self.radices, self.starts, self.counts, self.steps, strict=True):
            new_axes.append(len(rows))
            if step > 1 and radix % step == 0:
                rows += [(radix // step, start // step, count, 1), (step, start % step, 1, 1)]
            else:
                rows.append((radix, start, count, step))
        radices, starts, counts, steps = zip(*rows, strict=True) if rows else ((), (), (), ())
        axes = tuple(new_axes[axis] for axis in self.axes)
        reversed_axes = tuple(new_axes[axis] for axis in self.reversed_axes)
        return SlicePlan(self.window, radices, starts, counts, steps, axes, reversed_axes)


@remembered
def slice_plan(shape: tuple[int, ...], offset: int, dims: tuple[Group, ...]) -> SlicePlan | None:
    """Plan the slice of a view, which has elements, of a variable of `shape`; None where none fits."""
    moving = [(n, stride) for group in dims for n, stride in group if stride]
    # A slice cannot run backwards: it starts at the lowest element, and the axes are reversed afterwards.
    base = offset + sum((n - 1) * stride for n, stride in moving if stride < 0)
    forward = [(n, abs(stride)) for n, stride in moving]
    backward = {i for i, (_, stride) in enumerate(moving) if stride < 0}
    plan = _full_plan(shape, base, forward) or _window_plan(prod(shape), base, forward)
    if plan is None:
        return None
    return replace(plan, reversed_axes=tuple(sorted(plan.axes[i] for i in backward)))


def _full_plan(shape: tuple[int, ...], base: int, forward: Sequence[tuple[int, int]]) -> SlicePlan | None:
    return (
        _plan_of_dimensions(shape, base, forward)
        or _plan_of_dimensions(_refined_radices(shape, base, forward), base, forward)
        or _plan_of_dimensions(_stride_radices(prod(shape), forward), base, forward)
    )


def _window_plan(size: int, base: int, forward: Sequence[tuple[int, int]]) -> SlicePlan | None:
    """Plan on the rows of the largest stride, cut from the flat variable where they fit in it."""
    if not forward:
        return None
    (count, stride), *inner = sorted(forward, key=lambda subdim: -subdim[1])
    reach = sum((n - 1) * s for n, s in inner)
    length = count * stride
    # Rows start at a multiple of the stride where no row then wraps into the next, else at the view's first element.
    start = min(base - base % stride if base % stride + reach < stride else base, size - length)
    if start < 0:
        return None
    plan = _full_plan((count, stride), base - start, forward)
    return None if plan is None else replace(plan, window=(start, length))


def _plan_of_dimensions(
    radices: tuple[int, ...] | None, base: int, forward: Sequence[tuple[int, int]]
) -> SlicePlan | None:
    """Plan the slice of a variable reshaped to `radices`, in which each sub-dimension moves along an axis of its own.

    Args:
        radices: shape of the reshaped variable; None if there is none.
        base: lowest flat element of the view.
        forward: size and stride, above 0, of each sub-dimension.

    Returns:
        None where two sub-dimensions need one axis, or an index carries over into the next.
    """
    if radices is None:
        return None
    weights = [prod(radices[axis + 1 :]) for axis in range(len(radices))]  # flat elements from index to index
    starts = [base // w % radix for w, radix in zip(weights, radices, strict=True)]
    counts = [1] * len(radices)
    steps = [1] * len(radices)
    axes = []
    for n, stride in forward:
        axis = next((i for i, w in enumerate(weights) if w <= stride and radices[i] > 1), None)
        if axis is None or stride % weights[axis] or counts[axis] > 1:
            return None
        step = stride // weights[axis]
        if starts[axis] + (n - 1) * step >= radices[axis]:  # the index would carry into the next axis
            return None
        counts[axis] = n
        steps[axis] = step
        axes.append(axis)
    return SlicePlan(None, radices, tuple(starts), tuple(counts), tuple(steps), tuple(axes), ())


def _radices(bounds: Sequence[int]) -> tuple[int, ...]:
    """Return the ratios of successive boundaries, which descend and each divide the one before."""
    return tuple(outer // inner for outer, inner in pairwise(bounds))


def _refined_radices(shape: tuple[int, ...], base: int, forward: Sequence[tuple[int, int]]) -> tuple[int, ...]:
    """Choose boundaries greedily from the variable's own, the view's strides and its spans."""
    # A boundary is chosen if no index of the view carries over it, and it nests with those chosen before.
    natural = []
    size = 1
    for n in reversed(shape):
        size *= n
        natural.append(size)
    chosen = [size, 1]
    for bound in (*natural[::-1], *(s for _, s in forward), *(n * s for n, s in forward)):
        # Radices must divide each other, so a boundary must divide, or be divided by, all chosen ones.
        if bound in chosen or size % bound or any(a % bound and bound % a for a in chosen):
            continue
        if all(s % bound == 0 if s >= bound else base % bound + (n - 1) * s < bound for n, s in forward):
            chosen.append(bound)
    return _radices(sorted(chosen, reverse=True))


def _stride_radices(size: int, forward: Sequence[tuple[int, int]]) -> tuple[int, ...] | None:
    """Return radices whose boundaries are the strides alone; None where one does not divide the next."""
    bounds = sorted({size, 1, *(s for _, s in forward)}, reverse=True)
    if any(outer % inner for outer, inner in pairwise(bounds)):
        return None
    return _radices(bounds)
