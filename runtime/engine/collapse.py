"""Which axes an engine computes unsplit, and which variables of partial results then need one slot only.

A reduction split over tiles writes partial results, one slot of dimension 0 a block, and a later compute set combines
the slots. Computed unsplit it has one result, so the variable can shrink to one slot and nothing is left of the detour.
That is right only if everything that touches the variable takes part:

    writer ::= all slots, dimension 0 = block number of a `reduce` axis that has a block for every slot
               (or of several such axes, in mixed radix)
    reader ::= all slots, dimension 0 = elements of a `reduce` axis over all slots

    all slots: dimension 0 of the tensor is that of the variable, and each slot is seen whole, in any order of elements

and only if whatever else hangs on these axes shrinks as well (value and index of an argmax, or a second stage of
partial results). Otherwise the split of the axis is computed literally.

Input: a graph and a program. Output: for each variable that shrinks a variable of one slot that stands for it, and each
group as it is to be run.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace

import numpy as np

from ipujax.runtime.graph import (
    NO_TILE,
    Access,
    Axis,
    Dim,
    Execute,
    Graph,
    Program,
    Term,
    VertexGroup,
    distinct,
    element,
    own_tensors,
    substituted,
    unsplit,
)
from ipujax.runtime.tensor import Tensor, Variable

Collapsed = Mapping[Variable, Variable]


def executed_groups(graph: Graph, program: Program) -> Iterator[VertexGroup]:
    """All vertex groups of the compute sets a program executes, each once."""
    compute_sets = dict.fromkeys(node.compute_set for node in distinct(program) if isinstance(node, Execute))
    for compute_set in compute_sets:
        yield from graph.groups[compute_set]


def collapsible(graph: Graph, program: Program, kept: Collection[Variable] = ()) -> frozenset[Variable]:
    """Finds the variables of partial results that an engine may keep in one slot.

    Args:
        graph: holds the vertex groups.
        program: all that will run; any other use of a variable in it keeps the variable whole.
        kept: variables that something outside of the program uses.

    Returns:
        Variables with a `monoid` and more than one slot.
    """
    found = {v for v in graph.variables if v.monoid is not None and v.shape[0] > 1 and not v.is_constant}
    found.difference_update(kept)
    if not found:
        return frozenset()
    for node in distinct(program):
        found.difference_update(v for tensor in own_tensors(node) for v in tensor.variables())
    ties: list[set[Variable]] = []
    for group in executed_groups(graph, program):
        if any(v in found for access in group.accesses for v in access.tensor.variables()):
            found -= _misused(group, found)
            ties += _ties(group)
    while broken := [tie & found for tie in ties if tie & found and not tie <= found]:
        found.difference_update(*broken)
    return frozenset(found)


def _misused(group: VertexGroup, candidates: Iterable[Variable]) -> set[Variable]:
    """The candidates that one of a group's fields does not access as a writer or reader of all slots."""
    has_holes = bool(np.any(group.tile == NO_TILE))
    return {
        variable
        for field, access in zip(group.codelet.fields, group.accesses, strict=True)
        for variable in access.tensor.variables()
        if variable in candidates
        and (has_holes or field.direction == "inout" or not _covers_slots(group, access, variable, field.is_read))
    }


def _covers_slots(group: VertexGroup, access: Access, variable: Variable, is_read: bool) -> bool:
    """Whether dimension 0 of an access, and it alone, goes over all slots of a whole variable by `reduce` axes."""
    tensor, dim = access.tensor, access.dims[0]
    if not dim.terms or not _sees_slots(tensor, variable):
        return False
    numbers = [term.axis for term in dim.terms]
    axes = [group.axes[number] for number in numbers]
    others = [term for other in access.dims[1:] for term in other.terms]
    if any(axis.kind != "reduce" for axis in axes) or any(t.axis in numbers or t.unit == "block" for t in others):
        return False
    if is_read:
        is_all = dim == element(numbers[0]) and axes[0].extent == variable.shape[0]
        return is_all and axes[0].name not in group.origins
    return _counts_blocks(group, dim) == variable.shape[0]


def _sees_slots(tensor: Tensor, variable: Variable) -> bool:
    """Whether dimension 0 of a tensor is that of the variable, and each slot is seen whole, in any order."""
    view, slots = tensor.affine, variable.shape[0]
    if view is None or tensor.shape[0] != slots or view.is_empty or view.offset:
        return False
    slot_size = variable.size // slots
    inside = [subdim for group in view.dims[1:] for subdim in group]
    is_slot = all(stride > 0 for _, stride in inside) and sum((n - 1) * stride for n, stride in inside) == slot_size - 1
    return view.dims[0] == ((slots, slot_size),) and tensor.size == variable.size and view.is_injective and is_slot


def _counts_blocks(group: VertexGroup, dim: Dim) -> int:
    """How many indices a dimension takes whose terms are block numbers in mixed radix; 0 for any other."""
    count = 1
    for term in sorted(dim.terms, key=lambda term: term.coeff):
        if term.unit != "block" or term.coeff != count:
            return 0
        count *= group.axes[term.axis].blocks
    return count if dim.offset == 0 and dim.divisor == 1 else 0


def _terms(group: VertexGroup) -> Iterator[tuple[Access, Term]]:
    """All terms of all accesses."""
    for access in group.accesses:
        for dim in access.dims:
            for term in dim.terms:
                yield access, term


def _ties(group: VertexGroup) -> list[set[Variable]]:
    """Sets of variables that shrink together or not at all, one set for each axis of a group.

    A split axis named by block number shrinks in every access that names its blocks; an axis whose elements are slots
    shrinks in every access that names it at all.
    """
    slots = {
        access.dims[0].terms[0].axis
        for field, access in zip(group.codelet.fields, group.accesses, strict=True)
        if field.is_read and access.dims and access.dims[0].terms and access.tensor.variables()[0].monoid is not None
    }
    ties: dict[int, set[Variable]] = {}
    for access, term in _terms(group):
        is_split = group.axes[term.axis].blocks > 1
        if (term.unit == "block" and is_split) or (term.axis in slots and (term.unit == "element" or is_split)):
            ties.setdefault(term.axis, set()).update(access.tensor.variables())
    return list(ties.values())


def one_slot(variable: Variable) -> Variable:
    """Makes the variable of one slot that stands for a variable of partial results."""
    return replace(variable, shape=(1, *variable.shape[1:]))


def literal_axes(group: VertexGroup, collapsed: Collapsed, exact_splits: bool = False) -> frozenset[int]:
    """The axes of a group whose split an engine must compute as it is.

    Args:
        group: any vertex group.
        collapsed: the variables that shrink to one slot.
        exact_splits: every split is computed as it is.

    Returns:
        Numbers of axes of more than one block: those of kind `literal`, those whose block numbers index a variable that
        does not shrink, and all of them where some blocks have no vertex.
    """
    split = {number for number, axis in enumerate(group.axes) if axis.blocks > 1}
    if exact_splits or np.any(group.tile == NO_TILE):
        return frozenset(split)
    by_block = {
        term.axis
        for access, term in _terms(group)
        if term.unit == "block" and not any(v in collapsed for v in access.tensor.variables())
    }
    return frozenset(n for n in split if group.axes[n].kind == "literal" or n in by_block)


def merged(group: VertexGroup, collapsed: Collapsed, exact_splits: bool = False) -> VertexGroup:
    """The group as an engine runs it: unsplit but for its `literal_axes`, on the variables that stand for others.

    Args:
        group: any vertex group.
        collapsed: the variables that shrink to one slot, and what stands for each.
        exact_splits: every split is computed as it is.
    """
    literal = literal_axes(group, collapsed, exact_splits)
    if len(literal) < sum(axis.blocks > 1 for axis in group.axes):
        group = unsplit(group, literal)
    if not any(v in collapsed for access in group.accesses for v in access.tensor.variables()):
        return group
    slots = {
        access.dims[0].terms[0].axis
        for access in group.accesses
        if access.tensor.variables()[0] in collapsed and access.dims[0].terms[0].unit == "element"
    }
    axes = tuple(_one_element(axis) if number in slots else axis for number, axis in enumerate(group.axes))
    accesses = tuple(replace(access, tensor=_shrunk(access.tensor, collapsed)) for access in group.accesses)
    return replace(group, axes=axes, accesses=accesses)


def _one_element(axis: Axis) -> Axis:
    return replace(axis, cuts=np.array([0, 1], np.int64))


def _shrunk(tensor: Tensor, collapsed: Collapsed) -> Tensor:
    """The view of slot 0, of the variable that stands for that of a tensor."""
    return substituted(tensor[:1], collapsed) if tensor.variables()[0] in collapsed else tensor
