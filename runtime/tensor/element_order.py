"""Order in which an array keeps the elements of a variable: mixed-radix digits of the flat index, in another order.

    flat index = Σ digit · stride      0 ≤ digit < size, strides multiply up: each element has one list of digits
    array      = the digits in another order, one or several a dimension

Input: a variable, and the dimensions of a view of it. Output: an `ElementOrder`, which turns views of the variable into
views of the array. The view whose order the array has is then all of it, in its own shape.
Limits: None where strides do not divide each other, or where an index of a view carries from one digit to the next.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from math import prod

import numpy as np

from ipujax.runtime.tensor.affine import Affine, Group, canonical
from ipujax.runtime.tensor.variable import Variable
from ipujax.runtime.tensor.view import Concat, Indexed, Node, Reshaped, freeze


@dataclass(frozen=True, slots=True)
class ElementOrder:
    """Order of a variable's elements in an array.

    Args:
        variable: the variable.
        digits: size and stride of each digit of the flat index, in the order of the array, outermost first.
        dimensions: number of the dimension of the array that each digit is in.
        array: variable with the shape of the array, whose row-major order is that of the digits.
    """

    variable: Variable
    digits: Group
    dimensions: tuple[int, ...]
    array: Variable

    @staticmethod
    def of_dims(variable: Variable, dims: Iterable[Iterable[int]]) -> ElementOrder | None:
        """Return the order of a view by the strides in each of its dimensions, outermost first; None if there is none.

        Where the view has a part of the variable alone, a stride of 1 that is not listed is the innermost.
        """
        listed = [list(strides) for strides in dims if strides]
        if not any(1 in strides for strides in listed):
            listed.append([1])
        rising = sorted(stride for strides in listed for stride in strides)
        limits = [*rising[1:], variable.size]
        if variable.size < 2 or any(m < 1 or n % m or n == m for m, n in zip(rising, limits, strict=True)):
            return None
        sizes = {m: n // m for m, n in zip(rising, limits, strict=True)}
        groups = [canonical((sizes[stride], stride) for stride in strides) for strides in listed]
        dimensions = tuple(number for number, group in enumerate(groups) for _ in group)
        array = replace(variable, shape=tuple(prod(size for size, _ in group) for group in groups))
        return ElementOrder(variable, tuple(chain.from_iterable(groups)), dimensions, array)

    @property
    def is_own(self) -> bool:
        """True for the order and the shape of the variable itself."""
        order = [stride for _, stride in self.digits]
        return order == sorted(order, reverse=True) and self.array.shape == self.variable.shape

    def dimension(self, stride: int) -> int:
        """Return the dimension of the array that a stride steps in."""
        return self.dimensions[self.position(stride)]

    def position(self, stride: int) -> int:
        """Return the number of the digit that a stride steps in; the outermost is 0."""
        distance = max(1, abs(stride))
        units = [unit for _, unit in self.digits]
        return units.index(max(unit for unit in units if unit <= distance))

    def split(self, group: Group) -> Group | None:
        """Cut each sub-dimension of a group at the digits that it steps through; None where one begins inside it."""
        parts: list[tuple[int, int]] = []
        for size, stride in group:
            pieces = self._split_subdim(size, stride)
            if pieces is None:
                return None
            parts += pieces
        return tuple(parts)

    def _split_subdim(self, size: int, stride: int) -> list[tuple[int, int]] | None:
        """Cut a sub-dimension so that each piece moves one digit of the order; None where it moves part of one."""
        pieces: list[tuple[int, int]] = []
        while stride:
            digit_size, unit = self.digits[self.position(stride)]
            end = digit_size * unit
            if abs(stride) % unit:
                return None
            if (size - 1) * abs(stride) < end:
                break
            inner = end // abs(stride)
            if end % abs(stride) or size % inner:
                return None
            pieces.append((inner, stride))
            size //= inner
            stride = end if stride > 0 else -end
        return [(size, stride), *reversed(pieces)]

    def view(self, node: Affine) -> Affine | None:
        """Return a view of the variable as a view of the array; None where it is not affine."""
        if node.is_empty:
            return replace(node, variable=self.array)
        groups = [self.split(group) for group in node.dims]
        if any(group is None for group in groups):
            return None
        lowest = list(self._digits_of(node.offset))
        highest = list(lowest)
        weights = self._weights
        dims: list[Group] = []
        for group in groups:
            strides: list[tuple[int, int]] = []
            for size, stride in group or ():
                number = self.position(stride)
                step = stride // self.digits[number][1]
                lowest[number] += min(0, (size - 1) * step)
                highest[number] += max(0, (size - 1) * step)
                strides.append((size, step * weights[number]))
            dims.append(canonical(strides))
        if min(lowest) < 0 or any(high >= size for high, (size, _) in zip(highest, self.digits, strict=True)):
            return None
        offset = sum(a * b for a, b in zip(self._digits_of(node.offset), weights, strict=True))
        return Affine(self.array, offset, tuple(dims))

    @property
    def _weights(self) -> list[int]:
        """Strides of the digits in the array."""
        sizes = [size for size, _ in self.digits]
        return [prod(sizes[number + 1 :]) for number in range(len(sizes))]

    def _digits_of(self, index: int) -> list[int]:
        return [index // stride % size for size, stride in self.digits]

    def indices(self, index: np.ndarray) -> np.ndarray:
        """Return flat indices of the variable, int64, as those of the array."""
        places = np.zeros_like(index)
        for (size, stride), weight in zip(self.digits, self._weights, strict=True):
            places += index // stride % size * weight
        return places


Orders = dict[Variable, ElementOrder]


def reordered_node(node: Node, orders: Orders) -> Node | None:
    """Return a view of variables as a view of the arrays of `orders`; None where a part of it is not affine."""
    match node:
        case Affine(variable):
            return orders[variable].view(node) if variable in orders else node
        case Concat(_, parts):
            nodes = [reordered_node(part, orders) for part in parts]
            present = tuple(part for part in nodes if part is not None)
            return replace(node, parts=present) if len(present) == len(parts) else None
        case Reshaped(source):
            inner = reordered_node(source, orders)
            return None if inner is None else replace(node, source=inner)  # type: ignore[arg-type]
        case Indexed(variables, which, index):
            return _reordered_list(variables, which, index, orders)


def _reordered_list(variables: Sequence[Variable], which: np.ndarray, index: np.ndarray, orders: Orders) -> Indexed:
    reordered = index.copy()
    for number, variable in enumerate(variables):
        if variable in orders:
            of_variable = which == number
            reordered[of_variable] = orders[variable].indices(index[of_variable])
    arrays = tuple(orders[variable].array if variable in orders else variable for variable in variables)
    return freeze(arrays, which, reordered)
