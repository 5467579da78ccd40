"""Order in which the engine keeps the elements of each variable: that in which they are computed, not the machine's.

A planner gives variables the layout that exchange and vertices want: channel groups, transposed operands. XLA would
copy arrays to such layouts and back between operations. So an array has the order of the view by which its variable is
written first: arguments have that of the host, products that of their dimensions, copies and elementwise results that
of their operands. Numbers are the same, but for the order of sums.

Vertices are computed in the order and the shape of these arrays. A codelet may have other axes if it says so
(`Codelet.with_axes`): those of the largest operand's array are taken, so that the array is read as it is, and results
have its order and shape. XLA then finds no reshape between two operations, at which it would compute the first again.
Along an axis that stays, elements are computed in the order of the array.

Input: a program, and its vertex groups as the engine runs them, unsplit. Output: the order of each variable whose array
is not row-major, and the groups with other axes and views, on these arrays.
Limits: a variable whose views do not all fit its order (`ElementOrder.view`) stays row-major.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from math import prod

import numpy as np

from ipujax.runtime.graph import (
    Access,
    Axis,
    Copy,
    Dim,
    Execute,
    Program,
    RemoteIn,
    StreamIn,
    VertexGroup,
    WholeOperation,
    direct_tensors,
    distinct,
    element,
)
from ipujax.runtime.tensor import (
    Affine,
    ElementOrder,
    Group,
    Orders,
    Tensor,
    Variable,
    canonical,
    leaves,
    regroup,
    reordered_node,
)

Dims = Sequence[Sequence[int]]
GroupsOf = Callable[[Execute], Iterable[VertexGroup]]


@dataclass(frozen=True, slots=True)
class ChosenOrders:
    """Orders of variables and vertices.

    Args:
        variables: orders of the variables whose arrays are not row-major.
        groups: the groups whose elements or axes are in another order, by group, as views of the variables.
    """

    variables: Orders = field(default_factory=dict)
    groups: dict[VertexGroup, VertexGroup] = field(default_factory=dict)


def choose_orders(program: Program, groups_of: GroupsOf, fixed: Collection[Variable]) -> ChosenOrders:
    """Choose orders, first writers first.

    Args:
        program: the program.
        groups_of: vertex groups of a step, unsplit as the engine runs them.
        fixed: variables that stay row-major.
    """
    chosen = ChosenOrders()
    for node in distinct(program):
        match node:
            case StreamIn(destination=tensor) | RemoteIn(destination=tensor):
                _set_order(chosen, tensor, _dims(tensor), fixed)
            case Copy(source, destination):
                _set_order(chosen, destination, _dims_of_copy(chosen.variables, source, destination), fixed)
            case WholeOperation(outputs=outputs):
                for tensor in outputs:
                    _set_order(chosen, tensor, _dims(tensor), fixed)
            case Execute():
                for group in groups_of(node):
                    _choose_for_group(chosen, group, fixed)
    for variable in _unfit_variables(program, groups_of, chosen.variables):
        del chosen.variables[variable]
    return chosen


def reorder_group(group: VertexGroup, chosen: ChosenOrders) -> VertexGroup:
    """Return a group on arrays in their orders."""
    return _on_arrays(chosen.groups.get(group, group), chosen.variables) or _on_arrays(group, chosen.variables) or group


def _on_arrays(group: VertexGroup, orders: Orders) -> VertexGroup | None:
    """Return a group on the arrays of `orders`; None where one of its views is not affine."""
    tensors = [_reordered(access.tensor, orders) for access in group.accesses]
    accesses = [replace(x, tensor=tensor) for x, tensor in zip(group.accesses, tensors, strict=True) if tensor]
    return replace(group, accesses=tuple(accesses)) if len(accesses) == len(tensors) else None


def reordered(tensor: Tensor, orders: Orders) -> Tensor:
    """Return a tensor as a view of the arrays of `orders`, which it fits."""
    if not any(variable in orders for variable in tensor.variables()):
        return tensor
    view = _reordered(tensor, orders)
    assert view is not None, f"{tensor!r} does not fit the order of its variables"
    return view


def _reordered(tensor: Tensor, orders: Orders) -> Tensor | None:
    node = reordered_node(tensor.node, orders)
    return None if node is None else Tensor(node, tensor.shape, tensor.dtype)


def _set_order(chosen: ChosenOrders, tensor: Tensor, dims: Dims, fixed: Collection[Variable]) -> None:
    """Let dimensions of strides, outermost first, decide the order of the variable of a tensor that is written."""
    if tensor.affine is None or tensor.affine.is_empty:
        return
    variable = tensor.affine.variable
    if variable in chosen.variables or variable in fixed or variable.is_constant:
        return
    order = ElementOrder.of_dims(variable, dims)
    if order is not None:
        chosen.variables[variable] = order


def _dims(tensor: Tensor) -> Dims:
    """Return the strides in each dimension of a tensor."""
    node = tensor.affine
    return [] if node is None else [[stride for _, stride in group if stride] for group in node.dims]


def _dims_of_copy(orders: Orders, source: Tensor, destination: Tensor) -> Dims:
    """Return the strides of a destination in the dimensions in which its source is kept."""
    node = source.affine
    order = None if node is None else orders.get(node.variable)
    if node is None or order is None or destination.affine is None:
        return _dims(destination)
    dims: list[tuple[int, int, int]] = []
    for group, destination_group in zip(node.dims, destination.affine.dims, strict=True):
        parts = order.split(group)
        cut = None if parts is None else regroup(destination_group, [size for size, _ in parts])
        if parts is None or cut is None or any(len(piece) != 1 for piece in cut):
            return _dims(destination)
        pairs = zip(parts, cut, strict=True)
        dims += [(order.position(stride), -abs(stride), piece[0][1]) for (_, stride), piece in pairs]
    rows = groupby(sorted(dims), lambda each: order.dimensions[each[0]])
    return [[stride for _, _, stride in of_dimension] for _, of_dimension in rows]


def _unfit_variables(program: Program, groups_of: GroupsOf, orders: Orders) -> set[Variable]:
    """Return the variables whose order is their own, and those with a view that does not fit their order."""
    unfit = {variable for variable, order in orders.items() if order.is_own}
    nodes = (node for tensor in _tensors(program, groups_of) for node in leaves(tensor.node))
    views = {node for node in nodes if isinstance(node, Affine) and node.variable in orders}  # many are equal
    return unfit.union(view.variable for view in views if orders[view.variable].view(view) is None)


def _tensors(program: Program, groups_of: GroupsOf) -> Iterator[Tensor]:
    """Yield all tensors that steps of a program read or write."""
    for node in distinct(program):
        yield from direct_tensors(node)
        if isinstance(node, WholeOperation):
            yield from (*node.inputs, *node.outputs)
        if isinstance(node, Execute):
            for group in groups_of(node):
                yield from (access.tensor for access in group.accesses)


def _choose_for_group(chosen: ChosenOrders, group: VertexGroup, fixed: Collection[Variable]) -> None:
    """Choose the order of a group's elements and axes, and of the variables that it writes first."""
    fields = group.codelet.fields
    reads = [access.tensor for access, x in zip(group.accesses, fields, strict=True) if x.is_read]
    if all(variable.is_constant for tensor in reads for variable in tensor.variables()):
        return  # a fill has no order
    ordered = in_order(group, chosen.variables)
    if ordered is not group:
        chosen.groups[group] = ordered
    for access, x in zip(ordered.accesses, fields, strict=True):
        if x.is_written:
            is_free = group.codelet.with_axes is not None
            dims = _dims(access.tensor) if is_free else dims_of_result(group, access, chosen.variables)
            _set_order(chosen, access.tensor, dims, fixed)


_FIXED = (-1, 0)  # place of the one digit of an axis whose order is fixed


@dataclass(frozen=True, slots=True)
class _Operand:
    """An access whose variable has an order."""

    access: Access
    node: Affine
    order: ElementOrder

    def form(self) -> object:
        """Return what operands have in common whose arrays are read alike."""
        return self.node.dims, self.order.digits, self.order.array.shape

    def subdims(self, axis: int) -> Group:
        """Return the sub-dimensions along an axis, cut at the digits of the order; () where there are none."""
        dimension = _dimension(self.access, axis)
        parts = None if dimension is None else self.order.split(self.node.dims[dimension])
        return parts if parts and all(stride for _, stride in parts) else ()


@dataclass(frozen=True, slots=True)
class _Digit:
    """A digit of the number of an element along an axis.

    Args:
        axis: number of the axis.
        number: of the digit among those of the axis, outermost first.
        size: number of its values.
        place: position in the order of an operand, and the negative stride; `_FIXED` of an axis with a fixed order.
        dimension: number of the operand, and the dimension of its array.
    """

    axis: int
    number: int
    size: int
    place: tuple[int, int]
    dimension: tuple[int, int]


NewAxis = tuple[_Digit, ...]  # one or several digits as one axis, outermost first


def in_order(group: VertexGroup, orders: Orders) -> VertexGroup:
    """Return a group with its elements and axes in the order of its operands; itself where that is theirs."""
    operands = _operands(group, orders)
    if group.codelet.with_axes is None or not operands or any(axis.blocks > 1 for axis in group.axes):
        return group
    digits = {axis: _digits(group, axis, operands) for axis in range(len(group.axes))}
    if all(map(_has_plain_dims, group.accesses)):
        for new_axes in (_as_array(digits, group), _as_before(digits)):
            ordered = _with_axes(group, digits, new_axes)
            if ordered is not None:
                return ordered
    for of_axis in digits.values():
        group = _with_elements(group, of_axis)
    return group


def dims_of_result(group: VertexGroup, access: Access, orders: Orders) -> list[list[int]]:
    """Return the strides in each dimension of a result; dimensions that are one in an operand's array are joined.

    So the channel groups of a table that a codelet looks up are channels again, of the rows that it copied.
    """
    node = access.tensor.affine
    if node is None:
        return []
    operands = _operands(group, orders)
    rows: dict[tuple[int, int], list[tuple[tuple[int, int], list[int]]]] = {}
    for number, (subdims, dim) in enumerate(zip(node.dims, access.dims, strict=True)):
        strides = [stride for _, stride in subdims if stride]
        axis = _axis_of(dim)
        digits = [] if axis is None else _digits(group, axis, operands)
        is_known = len(digits) == 1 and digits[0].place != _FIXED
        key = digits[0].dimension if is_known else (-1, number)
        earlier = rows.pop(key, [])  # at the place of its innermost part
        rows[key] = [*earlier, (digits[0].place if is_known else _FIXED, strides)]
    return [[stride for _, strides in sorted(parts) for stride in strides] for parts in rows.values()]


def _operands(group: VertexGroup, orders: Orders) -> list[_Operand]:
    """Return the operands with an order, the largest first, and of these the ones that most others are like."""
    pairs = zip(group.codelet.fields, group.accesses, strict=True)
    nodes = [(access, access.tensor.affine) for field, access in pairs if field.is_read]
    operands = [_Operand(x, node, orders[node.variable]) for x, node in nodes if node and node.variable in orders]
    alike = Counter(map(_Operand.form, operands))
    return sorted(operands, key=lambda operand: (-operand.access.tensor.size, -alike[operand.form()]))


# --- digits of an axis ---


def _digits(group: VertexGroup, axis: int, operands: Sequence[_Operand]) -> list[_Digit]:
    """Return the digits of an axis in the largest operand that has it; one digit where its order is fixed."""
    operand_number = next((number for number, operand in enumerate(operands) if operand.subdims(axis)), None)
    if operand_number is None or not _is_free(group, axis):
        return [_Digit(axis, 0, group.axes[axis].extent, _FIXED, (-1, axis))]
    order = operands[operand_number].order
    return [
        _Digit(axis, number, size, (order.position(stride), -abs(stride)), (operand_number, order.dimension(stride)))
        for number, (size, stride) in enumerate(operands[operand_number].subdims(axis))
    ]


def _is_free(group: VertexGroup, axis: int) -> bool:
    """Return whether vertices may be computed along an axis in any order: elements alone, and no origin."""
    description = group.axes[axis]
    if description.kind == "literal" or axis in group.codelet.ordered_axes or description.name in group.origins:
        return False
    for access in group.accesses:
        used = [
            n for n, dim in enumerate(access.dims) if any(t.axis == axis and t.unit == "element" for t in dim.terms)
        ]
        entire = [n for n in used if access.dims[n] == element(axis) and access.tensor.shape[n] == description.extent]
        if used != entire or len(used) > 1:
            return False
    return True


def _with_elements(group: VertexGroup, digits: Sequence[_Digit]) -> VertexGroup:
    """Return a group with the elements of an axis in another order; itself where a view does not allow it."""
    places = sorted(range(len(digits)), key=lambda n: digits[n].place)
    if places == sorted(places):
        return group
    accesses = []
    for access in group.accesses:
        dimension = _dimension(access, digits[0].axis)
        node = access.tensor.affine
        if dimension is not None:
            cut = None if node is None else regroup(node.dims[dimension], [digit.size for digit in digits])
            if node is None or cut is None:
                return group
            dims = list(node.dims)
            dims[dimension] = canonical([subdim for place in places for subdim in cut[place]])
            tensor = Tensor(replace(node, dims=tuple(dims)), access.tensor.shape, access.tensor.dtype)
            access = replace(access, tensor=tensor)
        accesses.append(access)
    return replace(group, accesses=tuple(accesses))


def _dimension(access: Access, axis: int) -> int | None:
    """Return the dimension of a tensor whose index is the element of an axis."""
    index = element(axis)
    return access.dims.index(index) if index in access.dims else None


# --- other axes ---


def _as_array(digits: Mapping[int, Sequence[_Digit]], group: VertexGroup) -> list[NewAxis]:
    """Return an axis for each dimension of the arrays of operands, those with a fixed order after the axis before."""
    free = [digit for of_axis in digits.values() for digit in of_axis if digit.place != _FIXED]
    alike = {axis: (group.axes[axis].kind, *_uses(group, axis)) for axis in digits}
    rows = groupby(sorted(free, key=lambda digit: digit.place), lambda digit: (digit.dimension, alike[digit.axis]))
    new_axes = [tuple(of_dimension) for _, of_dimension in rows]
    for of_axis in digits.values():
        if of_axis[0].place == _FIXED:
            before = [n for n, new in enumerate(new_axes) if any(digit.axis < of_axis[0].axis for digit in new)]
            new_axes.insert(max(before, default=-1) + 1, tuple(of_axis))
    return new_axes


def _as_before(digits: Mapping[int, Sequence[_Digit]]) -> list[NewAxis]:
    """Return the same axes, in the order of their outermost digits, those with a fixed order after the axis before."""
    keys: list[tuple[int, int]] = []
    for of_axis in digits.values():
        is_fixed = of_axis[0].place == _FIXED
        keys.append((keys or [_FIXED])[-1] if is_fixed else min(digit.place for digit in of_axis))
    order = sorted(digits, key=lambda axis: keys[axis])
    return [tuple(sorted(digits[axis], key=lambda digit: digit.place)) for axis in order]


def _uses(group: VertexGroup, axis: int) -> tuple[bool, ...]:
    """Return for each access whether it has a dimension along an axis."""
    return tuple(_dimension(access, axis) is not None for access in group.accesses)


def _has_plain_dims(access: Access) -> bool:
    """Return whether each dimension that the codelet sees follows one axis, and no two the same."""
    axes = [_axis_of(dim) for dim in access.dims if not dim.is_squeezed]
    return None not in axes and len(set(axes)) == len(axes)


def _axis_of(dim: Dim) -> int | None:
    return dim.terms[0].axis if len(dim.terms) == 1 and dim.terms[0].unit == "element" else None


def _with_axes(
    group: VertexGroup, digits: Mapping[int, Sequence[_Digit]], new_axes: Sequence[NewAxis]
) -> VertexGroup | None:
    """Return a group with new axes; None where its codelet or a view does not allow them."""
    if list(new_axes) == [tuple(of_axis) for of_axis in digits.values()]:
        return group
    assert group.codelet.with_axes is not None
    codelet = group.codelet.with_axes([tuple(dict.fromkeys(digit.axis for digit in new)) for new in new_axes])
    if codelet is None:
        return None
    accesses = [_on_axes(access, digits, new_axes) for access in group.accesses]
    present = tuple(access for access in accesses if access is not None)
    if len(present) < len(accesses):
        return None
    axes = tuple(_axis(group, new) for new in new_axes)
    tile = np.zeros([axis.blocks for axis in axes], np.int32)
    return replace(group, codelet=codelet, axes=axes, accesses=present, tile=tile)


def _axis(group: VertexGroup, new: NewAxis) -> Axis:
    old = group.axes[new[0].axis]
    extent = prod(digit.size for digit in new)
    return old if extent == old.extent else replace(old, cuts=np.array([0, extent], np.int64))


def _on_axes(access: Access, digits: Mapping[int, Sequence[_Digit]], new_axes: Sequence[NewAxis]) -> Access | None:
    """Return an access with dimensions along new axes, after those that the codelet does not see."""
    numbers = {digit.axis: number for number, new in reversed(list(enumerate(new_axes))) for digit in new}
    dimensions = {_axis_of(dim): n for n, dim in enumerate(access.dims) if not dim.is_squeezed}
    squeezed = [n for n, dim in enumerate(access.dims) if dim.is_squeezed]
    is_transpose = all(
        len(digits[axis]) == 1 and len(new_axes[numbers[axis]]) == 1 for axis in dimensions if axis is not None
    )
    if is_transpose:
        reordered_dims = [dimensions[new[0].axis] for new in new_axes if new[0].axis in dimensions]
        dims = tuple(_renumbered(access.dims[n], numbers) for n in (*squeezed, *reordered_dims))
        return replace(access, tensor=access.tensor.transpose((*squeezed, *reordered_dims)), dims=dims)
    node = access.tensor.affine
    cuts = {} if node is None else {a: _cut(node.dims[n], digits[a]) for a, n in dimensions.items() if a is not None}
    if node is None or None in cuts.values():
        return None
    groups = [node.dims[n] for n in squeezed]
    shape = [access.tensor.shape[n] for n in squeezed]
    index = [_renumbered(access.dims[n], numbers) for n in squeezed]
    for number, new in enumerate(new_axes):
        axis = new[0].axis
        if axis not in dimensions:
            continue
        is_whole = len(new) == len(digits[axis]) == 1
        groups.append(canonical([subdim for digit in new for subdim in (cuts[digit.axis] or ())[digit.number]]))
        shape.append(access.tensor.shape[dimensions[axis]] if is_whole else prod(digit.size for digit in new))
        index.append(_renumbered(access.dims[dimensions[axis]], numbers) if is_whole else element(number))
    tensor = Tensor(replace(node, dims=tuple(groups)), tuple(shape), access.tensor.dtype)
    return replace(access, tensor=tensor, dims=tuple(index))


def _cut(group: Group, digits: Sequence[_Digit]) -> tuple[Group, ...] | None:
    return (group,) if len(digits) == 1 else regroup(group, [digit.size for digit in digits])


def _renumbered(dim: Dim, numbers: Mapping[int, int]) -> Dim:
    return replace(dim, terms=tuple(replace(term, axis=numbers[term.axis]) for term in dim.terms))
