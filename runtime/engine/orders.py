"""Order in which the engine keeps the elements of each variable: that in which they are computed, not the machine's.

A planner gives variables the layout that exchange and vertices want: channel groups, transposed operands. XLA would
copy arrays to such layouts and back between operations. So an array has the order of the view by which its variable is
written first: arguments have that of the host, products that of their dimensions, copies and elementwise results that
of their operands (`group_order`). Numbers are the same, but for the order of sums.

Input: a program, and its vertex groups as the engine runs them. Output: the order of each variable whose array is not
row-major, and the groups on these arrays.
Limits: a variable whose views do not all fit its order (`ElementOrder.view`) stays row-major.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

from ipujax.runtime.engine.group_order import dims_of_result, in_order
from ipujax.runtime.graph import (
    Copy,
    Execute,
    Program,
    RemoteIn,
    StreamIn,
    VertexGroup,
    WholeOperation,
    direct_tensors,
    distinct,
)
from ipujax.runtime.tensor import Affine, ElementOrder, Orders, Tensor, Variable, leaves, regroup, reordered_node

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
