"""How a whole variable looks through a view: digits of the view's indices along the variable's dimensions.

A reshape joins dimensions or cuts them. Both become digits: the index of each dimension of the view is a number in
mixed radix, and each of its digits runs along one dimension of the variable. So boxes of a view can be boxes of the
variable, wherever a planner wants them.

Input: a view and boundaries along its dimensions. Output: boundaries along the variable's dimensions, and for each of
the boxes between them the box of the view it lies in.
Limits: views of one whole variable, each element once; where a cut of the view falls inside of several
digits, boxes of the variable are finer than those of the view.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from ipujax.runtime.tensor import Tensor, frozen


@dataclass(frozen=True, slots=True)
class Digit:
    """One digit of a view's index.

    Args:
        dim: dimension of the variable it runs along.
        size: number of its values.
        step: distance of two of them along that dimension.
        weight: distance of two of them in the view's index.
        is_reversed: whether the view counts backwards along that dimension.
    """

    dim: int
    size: int
    step: int
    weight: int
    is_reversed: bool

    def values_at(self, places: np.ndarray) -> np.ndarray:
        """The values of the digit at places along the dimension."""
        values = places // self.step % self.size
        return self.size - 1 - values if self.is_reversed else values

    def bounds_of(self, values: np.ndarray) -> np.ndarray:
        """The boundaries along the dimension, within its first period, before each of some values."""
        return (self.size - values if self.is_reversed else values) * self.step


def view_digits(tensor: Tensor) -> tuple[tuple[Digit, ...], ...] | None:
    """The digits of each dimension of a view, outermost first.

    Returns:
        None for a view that is not each element of one variable once, or whose dimensions cut the variable's where
        they do not divide.
    """
    affine = tensor.affine
    if affine is None or tensor.size != affine.variable.size:
        return None
    rows = [_digits_of(group, affine.variable.shape) for group in affine.dims]
    found = [row for row in rows if row is not None]
    complete = len(found) == len(rows) and _count_all(found, affine.variable.shape)
    return tuple(found) if complete else None


def _count_all(digits: Sequence[Sequence[Digit]], shape: Sequence[int]) -> bool:
    """Whether the digits along each dimension count through all of it, each place once."""
    reached = [1] * len(shape)
    for digit in sorted((digit for row in digits for digit in row), key=lambda digit: digit.step):
        if digit.step != reached[digit.dim]:
            return False
        reached[digit.dim] *= digit.size
    return reached == list(shape)


def _digits_of(group: Sequence[tuple[int, int]], shape: tuple[int, ...]) -> tuple[Digit, ...] | None:
    """The digits of one dimension of a view, innermost pieces found first."""
    weight, digits = 1, list[Digit]()
    for size, signed in reversed(group):
        stride = abs(signed)
        while size > 1:
            dim = next((d for d in range(len(shape)) if prod(shape[d + 1 :]) <= stride < prod(shape[d:])), None)
            if dim is None:
                return None
            inner = prod(shape[dim + 1 :])
            step = stride // inner
            room = shape[dim] // step
            count = min(size, room)
            if stride % inner or shape[dim] % step or size % count or (count < size and count * step != shape[dim]):
                return None
            digits.append(Digit(dim, count, step, weight, signed < 0))
            size, stride, weight = size // count, inner * shape[dim], weight * count
    return tuple(reversed(digits))


def boxes_of_variable(
    shape: Sequence[int], digits: Sequence[Sequence[Digit]], cuts: Sequence[np.ndarray]
) -> tuple[tuple[np.ndarray, ...], tuple[np.ndarray, ...]]:
    """Boundaries of a variable such that each of its boxes lies within one box of a view.

    Args:
        shape: of the variable.
        digits: of each dimension of the view, see `view_digits`.
        cuts: boundaries along each dimension of the view, int64[blocks + 1].

    Returns:
        Boundaries along each dimension of the variable, and for each dimension of the view the number of the block in
        which each box of the variable lies, int64 arrays that broadcast over the boxes.
    """
    bounds = [np.array([0, size]) for size in shape]
    for row, cut in zip(digits, cuts, strict=True):
        for digit in row:
            whole = cut // digit.weight
            values = np.unique(np.concatenate([whole, np.where(cut % digit.weight, whole + 1, whole)]) % digit.size)
            repeats = np.arange(0, shape[digit.dim], digit.size * digit.step)
            bounds[digit.dim] = np.union1d(bounds[digit.dim], (repeats[:, None] + digit.bounds_of(values)).ravel())
    blocks = []
    for row, cut in zip(digits, cuts, strict=True):
        index = np.zeros((1,) * len(shape), np.int64)
        for digit in row:
            value = digit.values_at(bounds[digit.dim][:-1])
            index = index + digit.weight * value.reshape([-1 if d == digit.dim else 1 for d in range(len(shape))])
        blocks.append(np.searchsorted(cut, index, side="right") - 1)
    return tuple(frozen(b, np.int64) for b in bounds), tuple(blocks)
