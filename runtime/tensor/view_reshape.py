"""Reshapes of views.

Input: a node of `ipujax.runtime.tensor.view` and a shape of as many elements. Output: a node with the elements in the
same row-major order. An affine piece stays affine where no boundary of the new shape falls inside a digit; a
concatenation stays one where the new shape cuts it between parts, or in few rows. Otherwise the result is a `Reshaped`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import prod

from ipujax.runtime.tensor.affine import Affine
from ipujax.runtime.tensor.view import Concat, Node, Reshaped, concat_nodes, freeze, slice_node

# A reshape may cut a concatenation in rows to stay a concatenation; more rows than this cost more than they save.
MAX_ROWS = 32


def reshape_node(node: Node, shape: Sequence[int]) -> Node:
    """The same elements in row-major order under another shape of as many elements."""
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
    """Push a reshape into the parts; None where the concatenation would be cut in too many."""
    outer = prod(node.shape[: node.axis])
    axis, size = 0, 1
    while size < outer:
        size, axis = size * shape[axis], axis + 1
    if size != outer:
        return _reshape_by_rows(node, shape, outer)
    while shape[axis] == 1:
        axis += 1
    old_row, row = prod(node.shape[node.axis + 1 :]), prod(shape[axis + 1 :])
    bounds = [bound * old_row for bound in node.bounds]
    if any(bound % row for bound in bounds):
        return _reshape_by_slices(node, shape, axis, row, old_row)
    lengths = [(high - low) // row for low, high in pairwise(bounds)]
    parts = [
        reshape_node(part, (*shape[:axis], n, *shape[axis + 1 :])) for part, n in zip(node.parts, lengths, strict=True)
    ]
    return concat_nodes(axis, parts)


def _reshape_by_slices(node: Concat, shape: tuple[int, ...], axis: int, row: int, old_row: int) -> Node | None:
    """Parts end inside rows of the new shape: make each index of the new axis by itself."""
    if row % old_row or shape[axis] > MAX_ROWS:
        return None
    step = row // old_row
    parts = [
        reshape_node(_slice_axis(node, node.axis, i * step, step), (*shape[:axis], 1, *shape[axis + 1 :]))
        for i in range(shape[axis])
    ]
    return concat_nodes(axis, parts)


def _reshape_by_rows(node: Concat, shape: tuple[int, ...], outer: int) -> Node | None:
    """The new shape cuts the dimensions before the axis elsewhere: make a flat concatenation of their indices."""
    if outer * len(node.parts) > MAX_ROWS:
        return None
    inner = prod(node.shape) // outer
    rows = reshape_node(node, (outer, inner))
    flat = concat_nodes(0, [reshape_node(_slice_axis(rows, 0, i, 1), (inner,)) for i in range(outer)])
    return reshape_node(flat, shape)


def _slice_axis(node: Node, axis: int, start: int, count: int) -> Node:
    ndim = len(node.shape)
    starts, counts = [0] * ndim, list(node.shape)
    starts[axis], counts[axis] = start, count
    return slice_node(node, starts, counts, [1] * ndim)
