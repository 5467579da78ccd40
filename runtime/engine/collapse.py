"""Axes that an engine computes unsplit, and variables of partial results that then need one slot only.

A reduction split over tiles writes partial results, one slot of dimension 0 a block, and a later compute set combines
the slots. Computed unsplit it has one result, so the variable can shrink to one slot, and XLA sees a plain reduction.
That is right only if every access to the variable is one of these:

    writer ::= all slots, dimension 0 = block number of a `reduce` axis that has a block for every slot
               (or of several such axes, in mixed radix)
    reader ::= all slots, dimension 0 = elements of a `reduce` axis over all slots

    all slots: dimension 0 of the tensor is that of the variable, and each slot has all its elements, in any order

and only if every other variable indexed by these axes shrinks as well (value and index of an argmax, or a second stage
of partial results). Otherwise the split of the axis is computed literally.

Input: a graph and a program. Output: a variable of one slot in the place of each variable that shrinks, and each vertex
group as the engine runs it.

Values that codelets test for equality, computed once.

XLA computes a cheap value again in each fusion that reads it, with a fused multiply-add in one and without in another.
The largest element then equals none of the elements that it was chosen from, and its gradient is lost.

Input: a graph and a program. Output: the variables whose values are to be computed once, and such a value.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.xla_metadata import set_xla_metadata

from ipujax.runtime.graph import (
    NO_TILE,
    Access,
    Axis,
    Dim,
    Execute,
    Graph,
    HostStream,
    Program,
    StreamOut,
    Term,
    VertexGroup,
    direct_tensors,
    distinct,
    element,
    unsplit,
)
from ipujax.runtime.names_at_import import jax_jit
from ipujax.runtime.tensor import Tensor, Variable, substitute

Collapsed = Mapping[Variable, Variable]  # a variable of one slot, by the variable of partial results it replaces


def executed_groups(graph: Graph, program: Program) -> Iterator[VertexGroup]:
    """Yield the vertex groups of the compute sets that a program executes, each once."""
    compute_sets = dict.fromkeys(node.compute_set for node in distinct(program) if isinstance(node, Execute))
    for compute_set in compute_sets:
        yield from graph.groups[compute_set]


def find_collapsible(graph: Graph, program: Program, persistent: Collection[Variable] = ()) -> frozenset[Variable]:
    """Return the variables of partial results that need one slot only; any use outside of vertices needs all slots."""
    # Variables in `persistent` may be read after the program.
    candidates = {v for v in graph.variables if v.monoid is not None and v.shape[0] > 1 and not v.is_constant}
    candidates.difference_update(persistent)
    if not candidates:
        return frozenset()
    for node in distinct(program):
        candidates.difference_update(v for tensor in direct_tensors(node) for v in tensor.variables())
    ties: list[set[Variable]] = []
    for group in executed_groups(graph, program):
        if any(v in candidates for access in group.accesses for v in access.tensor.variables()):
            candidates -= _find_other_uses(group, candidates)
            ties += _ties(group)
    # A variable that drops out takes all tied to it along, and these may be tied to others: until a fixpoint.
    while broken := [tie & candidates for tie in ties if tie & candidates and not tie <= candidates]:
        candidates.difference_update(*broken)
    return frozenset(candidates)


def _find_other_uses(group: VertexGroup, candidates: Iterable[Variable]) -> set[Variable]:
    """Return the candidates that a field of the group does not access as a writer or reader of all slots."""
    has_holes = bool(np.any(group.tile == NO_TILE))
    return {
        variable
        for field, access in zip(group.codelet.fields, group.accesses, strict=True)
        for variable in access.tensor.variables()
        if variable in candidates
        and (has_holes or field.direction == "inout" or not _covers_slots(group, access, variable, field.is_read))
    }


def _covers_slots(group: VertexGroup, access: Access, variable: Variable, is_read: bool) -> bool:
    """Return whether dimension 0 of an access, and it alone, covers all slots of a variable by `reduce` axes."""
    dim = access.dims[0]
    if not dim.terms or not _has_all_slots(access.tensor, variable):
        return False
    numbers = [term.axis for term in dim.terms]
    axes = [group.axes[number] for number in numbers]
    slot_terms = [term for slot_dim in access.dims[1:] for term in slot_dim.terms]
    if any(axis.kind != "reduce" for axis in axes) or any(t.axis in numbers or t.unit == "block" for t in slot_terms):
        return False
    if is_read:
        # A reader that gets its first index would see the number of a slot that is gone.
        is_all = dim == element(numbers[0]) and axes[0].extent == variable.shape[0]
        return is_all and axes[0].name not in group.origins
    return _count_block_indices(group, dim) == variable.shape[0]


def _has_all_slots(tensor: Tensor, variable: Variable) -> bool:
    """Return whether dimension 0 of a tensor is that of the variable, and each slot has all its elements."""
    view = tensor.affine
    slots = variable.shape[0]
    if view is None or tensor.shape[0] != slots or view.is_empty or view.offset:
        return False
    slot_size = variable.size // slots
    inside = [subdim for group in view.dims[1:] for subdim in group]
    is_slot = all(stride > 0 for _, stride in inside) and sum((n - 1) * stride for n, stride in inside) == slot_size - 1
    return view.dims[0] == ((slots, slot_size),) and tensor.size == variable.size and view.is_injective and is_slot


def _count_block_indices(group: VertexGroup, dim: Dim) -> int:
    """Return the number of indices of a dimension whose terms are block numbers in mixed radix; 0 for any other."""
    count = 1
    for term in sorted(dim.terms, key=lambda term: term.coeff):
        if term.unit != "block" or term.coeff != count:
            return 0
        count *= group.axes[term.axis].blocks
    return count if dim.offset == 0 and dim.divisor == 1 else 0


def _terms(group: VertexGroup) -> Iterator[tuple[Access, Term]]:
    for access in group.accesses:
        for dim in access.dims:
            for term in dim.terms:
                yield access, term


def _ties(group: VertexGroup) -> list[set[Variable]]:
    """Return the sets of variables that shrink together or not at all, one set for each axis of a group."""
    # A split axis indexed by block number shrinks in every access that has such a term; an axis whose elements are
    # slots shrinks in every access that has any term of it.
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
    """Return a new variable, with the first slot of a variable of partial results alone."""
    return replace(variable, shape=(1, *variable.shape[1:]))


def literal_axes(group: VertexGroup, collapsed: Collapsed, exact_splits: bool = False) -> frozenset[int]:
    """Return the numbers of the axes of a group whose split the engine computes block by block."""
    # Of the axes with more than one block these are the ones of kind `literal`, and those whose block numbers index a
    # variable that keeps a slot for each block; with `exact_splits`, or where blocks have no vertex, all of them.
    split = {number for number, axis in enumerate(group.axes) if axis.blocks > 1}
    if exact_splits or np.any(group.tile == NO_TILE):
        return frozenset(split)
    by_block = {
        term.axis
        for access, term in _terms(group)
        if term.unit == "block" and not any(v in collapsed for v in access.tensor.variables())
    }
    return frozenset(n for n in split if group.axes[n].kind == "literal" or n in by_block)


def collapse_group(group: VertexGroup, collapsed: Collapsed, exact_splits: bool = False) -> VertexGroup:
    """Return a group as the engine runs it: unsplit but for its `literal_axes`, on variables of one slot."""
    literal = literal_axes(group, collapsed, exact_splits)
    if len(literal) < sum(axis.blocks > 1 for axis in group.axes):
        group = unsplit(group, literal)
    if not any(v in collapsed for access in group.accesses for v in access.tensor.variables()):
        return group
    # An axis over the slots of a variable now has one element; one indexed by block number is one block already.
    slots = {
        access.dims[0].terms[0].axis
        for access in group.accesses
        if access.tensor.variables()[0] in collapsed and access.dims[0].terms[0].unit == "element"
    }
    axes = tuple(_shrink_axis(axis) if number in slots else axis for number, axis in enumerate(group.axes))
    accesses = tuple(replace(access, tensor=_shrink_tensor(access.tensor, collapsed)) for access in group.accesses)
    return replace(group, axes=axes, accesses=accesses)


def _shrink_axis(axis: Axis) -> Axis:
    return replace(axis, cuts=np.array([0, 1], np.int64))


def _shrink_tensor(tensor: Tensor, collapsed: Collapsed) -> Tensor:
    return substitute(tensor[:1], collapsed) if tensor.variables()[0] in collapsed else tensor


def compared_variables(graph: Graph, program: Program) -> frozenset[Variable]:
    """Return the variables that codelets compare, in a program that tests any for equality."""
    groups = [group for group in executed_groups(graph, program) if group.codelet.compares != "nothing"]
    if all(group.codelet.compares == "order" for group in groups):
        return frozenset()
    reads = (access for group in groups for access in group.accesses)
    variables = (v for access in reads for v in access.tensor.variables() if not v.is_constant)
    return frozenset(v for v in variables if jnp.issubdtype(v.dtype, jnp.inexact))


def observed_variables(program: Program, observed: Collection[HostStream]) -> frozenset[Variable]:
    """Return the variables of inexact dtypes that some output streams read."""
    sent = (node.source for node in distinct(program) if isinstance(node, StreamOut) and node.stream in observed)
    variables = (v for tensor in sent for v in tensor.variables() if not v.is_constant)
    return frozenset(v for v in variables if jnp.issubdtype(v.dtype, jnp.inexact))


_same = jax_jit(lambda x: x)  # one function: traced once for each shape and dtype


def computed_once(value: jax.Array) -> jax.Array:
    """Return an array as the result of a function that XLA does not inline: all fusions read one value of it."""
    with set_xla_metadata(inlineable="false"):
        result: jax.Array = _same(value)
    return result
