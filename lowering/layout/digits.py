"""Views of a whole variable in mixed radix: digits of the view's indices along the variable's dimensions.

The index of each dimension of a reshaped view is a number in mixed radix, each digit of which runs along one
dimension of the variable. So blocks of the view become blocks of the variable.
Input: a view and cuts along its dimensions. Output: cuts of the variable, and the view's block of each of its blocks.
Limits: views of one whole variable, each element once. Where a cut of the view falls inside of several digits,
blocks of the variable are finer than those of the view.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from ipujax.runtime.tensor import Tensor, frozen


@dataclass(frozen=True, slots=True)
class Digit:
    """One digit of a view's index."""

    dim: int  # dimension of the variable that the digit runs along
    size: int  # number of its values
    step: int  # distance of two values along that dimension
    weight: int  # distance of two values in the view's index
    is_reversed: bool  # whether the view counts backwards along that dimension

    def values_at(self, positions: np.ndarray) -> np.ndarray:
        """Values of the digit at positions along the dimension."""
        values = positions // self.step % self.size
        return self.size - 1 - values if self.is_reversed else values

    def bounds_of(self, values: np.ndarray) -> np.ndarray:
        """Position before each value, within the first period of the digit."""
        return (self.size - values if self.is_reversed else values) * self.step


def view_digits(tensor: Tensor) -> tuple[tuple[Digit, ...], ...] | None:
    """Digits of each dimension of a view, outermost first; None if it has not each element of one variable once.

    The index along a dimension is a number in mixed radix, each digit of which runs along one of the variable's.
    """
    affine = tensor.affine
    if affine is None or tensor.size != affine.variable.size:
        return None
    rows = [_digits_of(group, affine.variable.shape) for group in affine.dims]
    complete_rows = [row for row in rows if row is not None]
    is_complete = len(complete_rows) == len(rows) and _count_every_index(complete_rows, affine.variable.shape)
    return tuple(complete_rows) if is_complete else None


def _count_every_index(digits: Sequence[Sequence[Digit]], shape: Sequence[int]) -> bool:
    """True if the digits along each dimension of the variable count through all of it exactly once."""
    reached = [1] * len(shape)
    for digit in sorted((digit for row in digits for digit in row), key=lambda digit: digit.step):
        # Each digit has to continue where the finer ones wrap around.
        if digit.step != reached[digit.dim]:
            return False
        reached[digit.dim] *= digit.size
    return reached == list(shape)


def _digits_of(group: Sequence[tuple[int, int]], shape: tuple[int, ...]) -> tuple[Digit, ...] | None:
    """Digits of an index of one dimension of a view, outermost first; None where sizes do not divide.

    A digit counts along one dimension of the variable, in steps, or across a part of it; the digits together are the
    index, in a mixed radix.

    Args:
        group: (size, stride) of each piece of the dimension, outermost first; the stride is negative if reversed.
        shape: shape of the variable.
    """
    weight = 1  # of the next digit: the product of the sizes of those inside of it
    digits: list[Digit] = []
    for size, signed in reversed(group):
        stride = abs(signed)
        while size > 1:
            # The variable's dimension in which the stride is.
            dim = next((d for d in range(len(shape)) if prod(shape[d + 1 :]) <= stride < prod(shape[d:])), None)
            if dim is None:
                return None
            inner = prod(shape[dim + 1 :])
            step = stride // inner
            values_left = shape[dim] // step
            count = min(size, values_left)
            # A digit has to divide both dimensions, and one that does not end the view's must end the variable's.
            if stride % inner or shape[dim] % step or size % count or (count < size and count * step != shape[dim]):
                return None
            digits.append(Digit(dim, count, step, weight, signed < 0))
            size //= count
            weight *= count
            stride = inner * shape[dim]  # the rest of the piece counts along the next outer dimension
    return tuple(reversed(digits))


def variable_blocks(
    shape: Sequence[int], digits: Sequence[Sequence[Digit]], cuts: Sequence[np.ndarray]
) -> tuple[tuple[np.ndarray, ...], tuple[np.ndarray, ...]]:
    """Cuts of a variable so that each block is in one block of the view, and the numbers of those blocks.

    Args:
        shape: shape of the variable.
        digits: digits of each dimension of the view, as by `view_digits`.
        cuts: cuts of each dimension of the view.

    Returns:
        Cuts of each dimension of the variable, and for each dimension of the view the number of the block that has a
        block of the variable, int64[*blocks of the variable], where it varies.
    """
    bounds = [np.array([0, size]) for size in shape]
    for row, cut in zip(digits, cuts, strict=True):
        for digit in row:
            quotient = cut // digit.weight
            # Values of the digit at the cuts. A cut inside of a value bounds the variable on both sides of that value.
            values = np.unique(
                np.concatenate([quotient, np.where(cut % digit.weight, quotient + 1, quotient)]) % digit.size
            )
            # The digit begins again along its dimension of the variable after each period.
            repeats = np.arange(0, shape[digit.dim], digit.size * digit.step)
            bounds[digit.dim] = np.union1d(bounds[digit.dim], (repeats[:, None] + digit.bounds_of(values)).ravel())
    blocks = []
    for row, cut in zip(digits, cuts, strict=True):
        # Index along this dimension of the view of the first element of each block of the variable.
        index = np.zeros((1,) * len(shape), np.int64)
        for digit in row:
            value = digit.values_at(bounds[digit.dim][:-1])
            index = index + digit.weight * value.reshape([-1 if d == digit.dim else 1 for d in range(len(shape))])
        blocks.append(np.searchsorted(cut, index, side="right") - 1)
    return tuple(frozen(b, np.int64) for b in bounds), tuple(blocks)
