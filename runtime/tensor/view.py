"""Views of several variables: a tree of affine pieces, and slice, transpose, reverse, broadcast and concat of it.

Grammar:
    node = Affine                           part of one variable (runtime/tensor/affine.py)
         | Concat(axis, parts, shape)       at least two parts one after the other, none empty, neighbours not mergeable
         | Reshaped(source, shape)          a source in row-major order, where neither of the above can express it
         | Indexed(variables, which, index) variable and flat index of each element, as lists

Every operation takes and returns nodes; no data moves. Slices, transposes, reversals and broadcasts of the first two
kinds stay in them, except a strided slice through several sub-dimensions. A `Reshaped` lists its elements only when an
operation other than a reshape follows; an `Indexed` has 16 bytes for each element. A reshape keeps a piece affine where
no boundary of the new shape is inside a sub-dimension, and a concatenation where the new shape cuts it between parts,
or in few rows.

Input and output: nodes with valid arguments; `ipujax.runtime.tensor.tensor` checks the arguments of users.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from math import prod

import numpy as np

from ipujax.runtime.errors import TensorError
from ipujax.runtime.tensor.affine import Affine, Group, canonical, empty, slice_group
from ipujax.runtime.tensor.slice_plan import slice_plan
from ipujax.runtime.tensor.variable import Variable

_MAX_LISTED = 1 << 27  # elements of an `Indexed`, assumed: 16 bytes each


def distinct(variables: Iterable[Variable]) -> tuple[Variable, ...]:
    """Return the distinct variables, in order of first appearance."""
    return tuple(dict.fromkeys(variables))


@dataclass(frozen=True, slots=True)
class Concat:
    """Nodes of one shape but for `axis`, one after the other along it; made by `concat_nodes`."""

    axis: int
    parts: tuple[Node, ...]
    shape: tuple[int, ...]
    variables: tuple[Variable, ...] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        # Kept: a copy between the stages of a pipeline has a part for each, and many passes ask for its variables.
        object.__setattr__(self, "variables", distinct(v for part in self.parts for v in part.variables))

    @property
    def bounds(self) -> list[int]:
        """First index of each part along the axis, and the extent."""
        return list(accumulate((part.shape[self.axis] for part in self.parts), initial=0))

    @property
    def has_broadcast(self) -> bool:
        return any(part.has_broadcast for part in self.parts)


@dataclass(frozen=True, slots=True)
class Reshaped:
    """All elements of `source` in row-major order under another shape."""

    source: Affine | Concat
    shape: tuple[int, ...]

    @property
    def variables(self) -> tuple[Variable, ...]:
        return self.source.variables

    @property
    def has_broadcast(self) -> bool:
        return self.source.has_broadcast


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Indexed:
    """List of elements: element i is flat element `index[i]` of `variables[which[i]]`; read-only int64 arrays."""

    variables: tuple[Variable, ...]
    which: np.ndarray
    index: np.ndarray

    @property
    def shape(self) -> tuple[int, ...]:
        return self.index.shape

    @property
    def has_broadcast(self) -> bool:
        return False


Node = Affine | Concat | Reshaped | Indexed


def elements(node: Node, variables: tuple[Variable, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Return number in `variables` and flat index of each element, int64 arrays of the node's shape."""
    if isinstance(node, Affine):
        index = node.flat_indices()
        return np.broadcast_to(np.int64(variables.index(node.variable)), index.shape), index
    if isinstance(node, Concat):
        both = [elements(part, variables) for part in node.parts]
        return np.concatenate([w for w, _ in both], node.axis), np.concatenate([i for _, i in both], node.axis)
    if isinstance(node, Reshaped):
        which, index = elements(node.source, variables)
        return which.reshape(node.shape), index.reshape(node.shape)
    numbers = np.array([variables.index(v) for v in node.variables], np.int64)
    return numbers[node.which], node.index


def _list_elements(node: Node) -> Indexed:
    """Return a view as a list of its elements, for slices and transposes that no other form has."""
    if isinstance(node, Indexed):
        return node
    if prod(node.shape) > _MAX_LISTED:
        raise TensorError(
            "a view that is not a slice of variables has too many elements to list",  # 2 GiB of indices
            expected=f"at most {_MAX_LISTED:,} elements",
            got=f"shape {list(node.shape)}",
            hint="reshape, slice and transpose so that rows stay whole, or compute it in parts, with `lax.map`",
        )
    return freeze(node.variables, *elements(node, node.variables))


def freeze(variables: tuple[Variable, ...], which: np.ndarray, index: np.ndarray) -> Indexed:
    """Return a list of elements from arrays that nothing writes any more."""
    which = which.view()
    index = index.view()
    which.flags.writeable = index.flags.writeable = False
    return Indexed(variables, which, index)


def _select_listed(node: Indexed, which: np.ndarray, index: np.ndarray) -> Node:
    """Return a list of some elements, without the variables that then have none."""
    if index.size == 0:
        return empty(node.variables[0], index.shape)
    if len(node.variables) == 1:  # still used, without sorting
        return freeze(node.variables, which, index)
    used, which = np.unique(which, return_inverse=True)
    return freeze(tuple(node.variables[i] for i in used), which.reshape(index.shape).astype(np.int64), index)


# --- slice ------------------------------------------------------------------------------------------------------------


def slice_node(node: Node, starts: Sequence[int], counts: Sequence[int], steps: Sequence[int]) -> Node:
    """Slice every dimension: `count` indices from start on, `step` apart; steps may be negative."""
    if 0 in counts:
        return empty(node.variables[0], counts)
    if isinstance(node, Affine):
        return _slice_affine(node, starts, counts, steps)
    if isinstance(node, Concat):
        return _slice_concat(node, starts, counts, steps)
    if tuple(counts) == node.shape and all(step == 1 or n == 1 for n, step in zip(counts, steps, strict=True)):
        return node  # all of it: do not list its elements
    listed = _list_elements(node)
    key = tuple(_python_slice(*sss) for sss in zip(starts, counts, steps, strict=True))
    return _select_listed(listed, listed.which[key], listed.index[key])


def _python_slice(start: int, count: int, step: int) -> slice:
    limit = start + count * step
    return slice(start, limit if limit >= 0 else None, step)


def _slice_affine(node: Affine, starts: Sequence[int], counts: Sequence[int], steps: Sequence[int]) -> Node:
    """Slice a piece: one piece again, several where a dimension of several strides is cut in a row, or a list."""
    offset = node.offset
    dims = list(node.dims)
    cut: list[tuple[int, list[tuple[int, Group]]]] = []
    for axis, group in enumerate(node.dims):
        if len(group) == 1:  # the common case, without the piece list
            stride = group[0][1]
            offset += starts[axis] * stride
            dims[axis] = ((counts[axis], stride * steps[axis]),) if counts[axis] > 1 else ()
        elif group:
            pieces = slice_group(group, starts[axis], counts[axis], steps[axis])
            if pieces is None:
                return slice_node(_list_elements(node), starts, counts, steps)
            cut.append((axis, pieces))
    return _outer_product(node.variable, offset, dims, cut)


def _outer_product(
    variable: Variable, offset: int, dims: list[Group], cut: Sequence[tuple[int, list[tuple[int, Group]]]]
) -> Node:
    """Concatenate the pieces of each cut dimension, along it, one dimension inside the other."""
    if not cut:
        return Affine(variable, offset, tuple(dims))
    (axis, pieces), *rest = cut
    parts = [
        _outer_product(variable, offset + shift, [*dims[:axis], group, *dims[axis + 1 :]], rest)
        for shift, group in pieces
    ]
    return concat_nodes(axis, parts)


def _slice_concat(node: Concat, starts: Sequence[int], counts: Sequence[int], steps: Sequence[int]) -> Node:
    """Slice the parts of a concatenation that the slice meets."""
    axis = node.axis
    start, count, step = starts[axis], counts[axis], steps[axis]
    parts: list[Node] = []
    if step < 0:  # forward, then reversed: only the forward slice is cut at the parts
        forward = [*starts[:axis], start + (count - 1) * step, *starts[axis + 1 :]]
        return reverse_node(slice_node(node, forward, counts, [*steps[:axis], -step, *steps[axis + 1 :]]), (axis,))
    bounds = node.bounds
    for part, low, high in zip(node.parts, bounds, bounds[1:], strict=False):
        first = max(0, -(-(low - start) // step))
        # Of the indices start + step * k, those from k = first on are in this part.
        part_count = min(count, -(-(high - start) // step)) - first
        if part_count > 0:
            part_starts = [*starts[:axis], start + first * step - low, *starts[axis + 1 :]]
            parts.append(slice_node(part, part_starts, [*counts[:axis], part_count, *counts[axis + 1 :]], steps))
    return concat_nodes(axis, parts)


# --- transpose, reverse, broadcast ------------------------------------------------------------------------------------


def transpose_node(node: Node, perm: Sequence[int]) -> Node:
    """Permute dimensions: dimension i of the result is dimension perm[i]."""
    if isinstance(node, Affine):
        return node.transpose(perm)
    if isinstance(node, Concat):
        shape = tuple(node.shape[i] for i in perm)
        return Concat(list(perm).index(node.axis), tuple(transpose_node(part, perm) for part in node.parts), shape)
    listed = _list_elements(node)
    return freeze(listed.variables, listed.which.transpose(perm), listed.index.transpose(perm))


def reverse_node(node: Node, axes: Sequence[int]) -> Node:
    """Reverse the order of indices along `axes`."""
    if isinstance(node, Affine):
        return node.reverse(axes)
    if isinstance(node, Concat):
        parts = [reverse_node(part, axes) for part in node.parts]
        return concat_nodes(node.axis, parts[::-1] if node.axis in axes else parts)
    listed = _list_elements(node)
    return freeze(listed.variables, np.flip(listed.which, tuple(axes)), np.flip(listed.index, tuple(axes)))


def broadcast_node(node: Node, shape: Sequence[int], axes: Sequence[int]) -> Node:
    """Broadcast: dimension i becomes dimension axes[i] of `shape`; the others, and sizes of 1 that grow, repeat."""
    if 0 in shape:
        return empty(node.variables[0], shape)
    if isinstance(node, Affine):
        return node.broadcast(shape, axes)
    if isinstance(node, Concat):
        # The axis of a concatenation has at least two indices, so it never repeats: broadcast the parts.
        axis = axes[node.axis]
        sizes = [part.shape[node.axis] for part in node.parts]
        parts = [
            broadcast_node(part, [*shape[:axis], n, *shape[axis + 1 :]], axes)
            for part, n in zip(node.parts, sizes, strict=True)
        ]
        return Concat(axis, tuple(parts), tuple(shape))
    listed = _list_elements(node)
    inner = [1] * len(shape)
    for axis, n in zip(axes, node.shape, strict=True):
        inner[axis] = n
    which, index = (np.broadcast_to(a.reshape(inner), tuple(shape)) for a in (listed.which, listed.index))
    return freeze(listed.variables, which, index)


# --- concat -----------------------------------------------------------------------------------------------------------


def concat_nodes(axis: int, nodes: Sequence[Node]) -> Node:
    """Concatenate nodes: empty ones dropped, nested ones flattened, neighbours merged where that is affine."""
    parts: list[Node] = []
    for node in nodes:
        if node.shape[axis] == 0:
            continue
        for part in node.parts if isinstance(node, Concat) and node.axis == axis else (node,):
            _append_merged(parts, part, axis)
    if not parts:
        return nodes[0]
    if len(parts) == 1:
        return parts[0]
    extent = sum(part.shape[axis] for part in parts)
    shape = parts[0].shape
    if 0 in shape:
        return empty(parts[0].variables[0], (*shape[:axis], extent, *shape[axis + 1 :]))
    return Concat(axis, tuple(parts), (*shape[:axis], extent, *shape[axis + 1 :]))


def _append_merged(parts: list[Node], part: Node, axis: int) -> None:
    """Append a part of a concatenation, joined with those before it where they are one slice of a variable."""
    parts.append(part)
    while len(parts) > 1:  # a merged part may merge with the one before
        last, new = parts[-2:]
        merged = _merge_pieces(last, new, axis) if isinstance(last, Affine) and isinstance(new, Affine) else None
        if merged is None:
            return
        parts[-2:] = [merged]


def _merge_pieces(a: Affine, b: Affine, axis: int) -> Affine | None:
    """Return the concatenation of two pieces as one piece; None where it takes two."""
    if a.variable is not b.variable or a.is_empty:
        return None
    if a.dims[:axis] != b.dims[:axis] or a.dims[axis + 1 :] != b.dims[axis + 1 :]:
        return None
    group = _merge_groups(a.dims[axis], b.dims[axis], b.offset - a.offset)
    if group is None:
        return None
    dims = (*a.dims[:axis], group, *a.dims[axis + 1 :])
    # A merged piece must stay one static slice of the variable: two slices are better than a gather.
    return Affine(a.variable, a.offset, dims) if slice_plan(a.variable.shape, a.offset, dims) else None


def _merge_groups(a: Group, b: Group, jump: int) -> Group | None:
    """Join rows of one kind, `a` then `b` at flat distance `jump`, to one group; None where they differ."""
    for rows_a, stride_a, row_a in _as_rows(a):
        for rows_b, stride_b, row_b in _as_rows(b):
            stride = stride_a if stride_a is not None else stride_b if stride_b is not None else jump
            if row_a == row_b and jump == rows_a * stride and stride_b in (None, stride):
                return canonical([(rows_a + rows_b, stride), *row_a])
    return None


def _as_rows(group: Group) -> list[tuple[int, int | None, Group]]:
    """Return the readings of a group as (rows, stride of rows, row): its outermost sub-dimension, or one row."""
    one_row: tuple[int, int | None, Group] = (1, None, group)  # a single row has any stride
    return [(*group[0], group[1:]), one_row] if group else [one_row]


# A reshape may cut a concatenation in rows to stay a concatenation; more rows than this cost more than they save.
_MAX_ROWS = 32


def reshape_node(node: Node, shape: Sequence[int]) -> Node:
    """Reshape in row-major order to a shape of as many elements."""
    shape = tuple(shape)
    if shape == node.shape:
        return node
    if isinstance(node, Affine):
        return node.reshape(shape) or Reshaped(node, shape)
    if isinstance(node, Concat):
        return _reshape_concat(node, shape) or Reshaped(node, shape)
    if isinstance(node, Reshaped):
        return reshape_node(node.source, shape)
    return freeze(node.variables, node.which.reshape(shape), node.index.reshape(shape))


def _reshape_concat(node: Concat, shape: tuple[int, ...]) -> Node | None:
    """Reshape the parts instead; None where the concatenation would be cut in too many."""
    outer = prod(node.shape[: node.axis])
    # The new axis begins where the dimensions before it have as many indices as those before the old axis.
    axis = 0
    size = 1
    while size < outer:
        size *= shape[axis]
        axis += 1
    if size != outer:
        return _reshape_by_rows(node, shape, outer)
    while shape[axis] == 1:  # the new axis is the first with several indices, so that it can be cut
        axis += 1
    old_row = prod(node.shape[node.axis + 1 :])
    row = prod(shape[axis + 1 :])
    bounds = [bound * old_row for bound in node.bounds]
    if any(bound % row for bound in bounds):
        return _reshape_by_slices(node, shape, axis, row, old_row)
    lengths = [(high - low) // row for low, high in pairwise(bounds)]
    parts = [
        reshape_node(part, (*shape[:axis], n, *shape[axis + 1 :])) for part, n in zip(node.parts, lengths, strict=True)
    ]
    return concat_nodes(axis, parts)


def _reshape_by_slices(node: Concat, shape: tuple[int, ...], axis: int, row: int, old_row: int) -> Node | None:
    """Reshape where parts end inside rows of the new shape: each index of the new axis by itself."""
    if row % old_row or shape[axis] > _MAX_ROWS:
        return None
    step = row // old_row
    parts = [
        reshape_node(_slice_axis(node, node.axis, i * step, step), (*shape[:axis], 1, *shape[axis + 1 :]))
        for i in range(shape[axis])
    ]
    return concat_nodes(axis, parts)


def _reshape_by_rows(node: Concat, shape: tuple[int, ...], outer: int) -> Node | None:
    """Reshape where the new shape cuts the dimensions before the axis elsewhere: by a flat concatenation."""
    if outer * len(node.parts) > _MAX_ROWS:
        return None
    inner = prod(node.shape) // outer
    rows = reshape_node(node, (outer, inner))
    flat = concat_nodes(0, [reshape_node(_slice_axis(rows, 0, i, 1), (inner,)) for i in range(outer)])
    return reshape_node(flat, shape)


def _slice_axis(node: Node, axis: int, start: int, count: int) -> Node:
    ndim = len(node.shape)
    starts = [0] * ndim
    counts = list(node.shape)
    starts[axis] = start
    counts[axis] = count
    return slice_node(node, starts, counts, [1] * ndim)
