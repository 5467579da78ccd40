"""Vertices computed in the order in which arrays keep their operands.

Along an axis on which vertices are independent the elements may be computed in any order. A codelet that only maps and
reduces elements may have its axes in any order too (`Codelet.with_axes`). The order of the largest operand is taken:
then its array is read as it is, and the arrays of results have the same order.

Input: a vertex group that the engine runs unsplit, and the orders of variables. Output: the group with dimensions of
its tensors in another order: other views of the same variables.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf

import numpy as np

from ipujax.runtime.graph import Access, Dim, VertexGroup, element
from ipujax.runtime.tensor import Affine, ElementOrder, Group, Orders, Tensor, canonical, regroup


@dataclass(frozen=True, slots=True)
class _Operand:
    """An access whose variable has an order."""

    access: Access
    node: Affine
    order: ElementOrder

    def digits(self, axis: int) -> Group:
        """Return the sub-dimensions along an axis, cut at the digits of the order; () where there are none."""
        dimension = _dimension(self.access, axis)
        parts = None if dimension is None else self.order.split(self.node.dims[dimension])
        return parts if parts and all(stride for _, stride in parts) else ()

    def place(self, stride: int) -> tuple[int, int]:
        """Return a key by which strides are sorted in the order of the array, outermost first."""
        return self.order.position(stride), -abs(stride)


def in_order(group: VertexGroup, orders: Orders) -> VertexGroup:
    """Return a group with its elements and axes in the order of its operands; itself where that is theirs."""
    operands = _operands(group, orders)
    if not operands:
        return group
    for axis in range(len(group.axes)):
        by_axis = [operand for operand in operands if operand.digits(axis)]
        if by_axis and _is_free(group, axis):
            group = _with_elements(group, axis, by_axis[0])
    return _with_axes(group, operands[0])


def _operands(group: VertexGroup, orders: Orders) -> list[_Operand]:
    """Return the operands with an order, the largest first."""
    pairs = zip(group.codelet.fields, group.accesses, strict=True)
    nodes = [(access, access.tensor.affine) for field, access in pairs if field.is_read]
    operands = [_Operand(x, node, orders[node.variable]) for x, node in nodes if node and node.variable in orders]
    return sorted(operands, key=lambda operand: -operand.access.tensor.size)


# --- elements of an axis ---


def _is_free(group: VertexGroup, axis: int) -> bool:
    """Return whether vertices may be computed along an axis in any order: one block, elements alone, no origin."""
    description = group.axes[axis]
    is_ordered = description.kind == "literal" or (description.kind == "reduce" and group.codelet.with_axes is None)
    if is_ordered or description.blocks != 1 or description.name in group.origins:
        return False
    for access in group.accesses:
        used = [
            n for n, dim in enumerate(access.dims) if any(t.axis == axis and t.unit == "element" for t in dim.terms)
        ]
        whole = [n for n in used if access.dims[n] == element(axis) and access.tensor.shape[n] == description.extent]
        if used != whole or len(used) > 1:
            return False
    return True


def _with_elements(group: VertexGroup, axis: int, operand: _Operand) -> VertexGroup:
    """Return a group with the elements of an axis in the order of an operand; itself where a view does not allow it."""
    digits = operand.digits(axis)
    places = sorted(range(len(digits)), key=lambda n: operand.place(digits[n][1]))
    if places == sorted(places):
        return group
    accesses = []
    for access in group.accesses:
        dimension = _dimension(access, axis)
        tensor = access.tensor
        if dimension is not None:
            ordered = _with_digits(tensor, dimension, [size for size, _ in digits], places)
            if ordered is None:
                return group
            tensor = ordered
        accesses.append(replace(access, tensor=tensor))
    return replace(group, accesses=tuple(accesses))


def _with_digits(tensor: Tensor, dimension: int, sizes: Sequence[int], places: Sequence[int]) -> Tensor | None:
    """Return a tensor with the digits of an index, of these sizes, in another order; None where it is not affine."""
    node = tensor.affine
    groups = None if node is None else regroup(node.dims[dimension], sizes)
    if node is None or groups is None:
        return None
    dims = list(node.dims)
    dims[dimension] = canonical([subdim for place in places for subdim in groups[place]])
    return Tensor(replace(node, dims=tuple(dims)), tensor.shape, tensor.dtype)


def _dimension(access: Access, axis: int) -> int | None:
    """Return the dimension of a tensor whose index is the element of an axis."""
    return next((number for number, dim in enumerate(access.dims) if dim == element(axis)), None)


# --- axes ---


def _with_axes(group: VertexGroup, operand: _Operand) -> VertexGroup:
    """Return a group with its axes in the order of an operand; itself where its codelet does not allow it."""
    if group.codelet.with_axes is None or any(axis.blocks > 1 for axis in group.axes):
        return group
    order = _order_of_axes(len(group.axes), operand)
    if order == sorted(order) or not all(_has_plain_dims(access) for access in group.accesses):
        return group
    return replace(
        group,
        codelet=group.codelet.with_axes(order),
        axes=tuple(group.axes[axis] for axis in order),
        accesses=tuple(_transposed(access, order) for access in group.accesses),
        tile=np.transpose(group.tile, order),
    )


def _order_of_axes(count: int, operand: _Operand) -> list[int]:
    """Return the axes by the places of an operand's outermost digits; others come after the axis before them."""
    keys: list[tuple[float, float]] = []
    for axis in range(count):
        digits = operand.digits(axis)
        keys.append(min(operand.place(stride) for _, stride in digits) if digits else (keys or [(-1, -inf)])[-1])
    return sorted(range(count), key=lambda axis: keys[axis])


def _has_plain_dims(access: Access) -> bool:
    """Return whether each dimension that the codelet sees follows one axis, and no two the same."""
    axes = [_axis_of(dim) for dim in access.dims if not dim.is_squeezed]
    return None not in axes and len(set(axes)) == len(axes)


def _axis_of(dim: Dim) -> int | None:
    numbers = [term.axis for term in dim.terms if term.unit == "element"]
    return numbers[0] if len(numbers) == len(dim.terms) == 1 else None


def _transposed(access: Access, order: Sequence[int]) -> Access:
    """Return an access of a group whose axis number i was order[i], with its dimensions in the order of the axes."""
    places = {axis: place for place, axis in enumerate(order)}
    perm = sorted(range(len(access.dims)), key=lambda n: places.get(_axis_of(access.dims[n]), -1))  # type: ignore[arg-type]
    dims = tuple(
        replace(access.dims[n], terms=tuple(replace(t, axis=places[t.axis]) for t in access.dims[n].terms))
        for n in perm
    )
    return replace(access, tensor=access.tensor.transpose(perm), dims=dims)
