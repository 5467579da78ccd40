"""Concatenations in one form: equal ones are joined once, whatever views are read of them.

A view of a concatenation may be reshaped, so that each of its rows is in parts, or transposed, so that each part is.
Its parts are joined here in rows, in the order in which their arrays have their dimensions, and the result is reshaped
and transposed. XLA then finds that two views are of one array.

    node [d0, …, dn] = transpose(reshape(concatenate(parts, axis)))

Input: a `Concat` of affine parts. Output: a `Joined`, or None where a part is of another kind.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import prod

import jax
from jax import lax

from ipujax.runtime.tensor.affine import Affine
from ipujax.runtime.tensor.view import Concat


@dataclass(frozen=True, slots=True)
class Joined:
    """A concatenation by its parts.

    Args:
        parts: views without dimensions of size 1, but for the axis.
        axis: number of the dimension along which they are joined.
        shape: dimensions of the joined parts, in the order of the arrays.
        order: for each of these dimensions, its number among those of the view, of which one may be split in two.
        view_shape: shape of the view with that dimension split.
    """

    parts: tuple[Affine, ...]
    axis: int
    shape: tuple[int, ...]
    order: tuple[int, ...]
    view_shape: tuple[int, ...]

    @property
    def bounds(self) -> list[int]:
        """First index of each part along the axis, and the extent."""
        return list(accumulate((part.shape[self.axis] for part in self.parts), initial=0))

    def view(self, array: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """Return the joined parts as the view, of `shape`."""
        inverse = [self.order.index(number) for number in range(len(self.order))]
        return lax.reshape(_transposed(lax.reshape(array, self.shape), inverse), shape)

    def array(self, new: jax.Array) -> jax.Array:
        """Return an array of the view's shape as the joined parts."""
        joined_shape = list(self.parts[0].shape)
        joined_shape[self.axis] = self.bounds[-1]
        return lax.reshape(_transposed(lax.reshape(new, self.view_shape), self.order), joined_shape)


def _transposed(array: jax.Array, order: Sequence[int]) -> jax.Array:
    return array if list(order) == sorted(order) else lax.transpose(array, tuple(order))


def joined(node: Concat) -> Joined | None:
    """Return a concatenation by its parts; None if a part is not affine."""
    parts = [part for part in node.parts if isinstance(part, Affine)]
    if len(parts) < len(node.parts):
        return None
    axis = node.axis
    shape = node.shape
    rows, steps = _rows(parts)
    if rows > 1:
        row_parts = parts[: len(steps)]
        parts = [_with_rows(part, axis, rows, step) for part, step in zip(row_parts, steps, strict=True)]
        shape = (*shape[:axis], rows, shape[axis] // rows, *shape[axis + 1 :])
        axis += 1
    order = _order(max(parts, key=lambda part: prod(part.shape)))
    kept = [number for number in order if number == axis or shape[number] > 1]
    views = tuple(replace(part, dims=tuple(part.dims[number] for number in kept)) for part in parts)
    return Joined(views, kept.index(axis), tuple(shape[n] for n in order), order, shape)


def _rows(parts: Sequence[Affine]) -> tuple[int, list[int]]:
    """Return the number of equal rows that parts form, and the distance of rows in each part of the first."""
    count = len(parts)
    for period in (n for n in range(1, count) if count % n == 0):
        steps = [parts[n + period].offset - parts[n].offset for n in range(period)]
        expected = (
            replace(parts[n % period], offset=parts[n % period].offset + n // period * steps[n % period])
            for n in range(count)
        )
        if all(part == row for part, row in zip(parts, expected, strict=True)):
            return count // period, steps
    return 1, []


def _with_rows(part: Affine, axis: int, rows: int, step: int) -> Affine:
    return replace(part, dims=(*part.dims[:axis], ((rows, step),), *part.dims[axis:]))


def _order(part: Affine) -> tuple[int, ...]:
    """Return the dimensions by their largest strides, outermost first."""
    strides = [max((abs(stride) for _, stride in group), default=0) for group in part.dims]
    return tuple(sorted(range(len(strides)), key=lambda n: (strides[n] != 0, -strides[n])))
