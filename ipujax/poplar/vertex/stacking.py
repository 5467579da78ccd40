"""Stacks the connections of many vertices into one tensor: row v is the connection of vertex v.

Input: for each vertex a tensor, all of one shape and dtype. Output: a tensor `[vertices, *shape]`, affine where the
rows lie in arithmetic progression (or in progressions of progressions, as nested loops leave them), else a list of
elements. No data moves.

Limits: a list of elements takes 16 bytes an element; two-level and deeper progressions must be regular throughout.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ipujax.runtime.tensor import Affine, Group, Tensor, Variable, canonical, elements, freeze

_MAX_RADICES = 4  # deeper nested loops become lists of elements


def is_same(tensors: Sequence[Tensor]) -> bool:
    """Whether all tensors are one view."""
    first = tensors[0]
    return all(tensor is first or tensor.node == first.node for tensor in tensors)


def stacked(tensors: Sequence[Tensor]) -> Tensor:
    """Stacks tensors along a new first dimension.

    Args:
        tensors: at least one, all of one shape and dtype.
    """
    first = tensors[0]
    shape = (len(tensors), *first.shape)
    offsets, patterns = _by_pattern(tensors)
    if len(patterns) == 1 and first.size:
        (only,) = patterns
        rows = mixed_radix(offsets)
        if only is not None and rows is not None:
            variable, dims = only
            return Tensor(Affine(variable, int(offsets[0]), (rows, *dims)), shape, first.dtype)
    variables: dict[Variable, int] = {}
    which = np.zeros((len(tensors), first.size), np.int64)
    index = np.zeros((len(tensors), first.size), np.int64)
    for pattern, numbers in patterns.items():
        if pattern is None:
            _list_one_by_one(tensors, numbers, variables, which, index)
        else:
            variable, dims = pattern
            which[numbers] = variables.setdefault(variable, len(variables))
            index[numbers] = offsets[numbers, None] + Affine(variable, 0, dims).flat_indices().reshape(-1)
    return Tensor(freeze(tuple(variables), which.reshape(shape), index.reshape(shape)), shape, first.dtype)


_Pattern = tuple[Variable, tuple[Group, ...]]


def _by_pattern(tensors: Sequence[Tensor]) -> tuple[np.ndarray, dict[_Pattern | None, np.ndarray]]:
    """The offset of each affine view, int64[n], and the rows of each pattern of strides; None for other views."""
    offsets, rows = [0] * len(tensors), dict[_Pattern | None, list[int]]()
    for row, tensor in enumerate(tensors):
        node = tensor.node
        pattern = None
        if isinstance(node, Affine):
            offsets[row] = node.offset
            pattern = (node.variable, node.dims)
        rows.setdefault(pattern, []).append(row)
    return np.array(offsets, np.int64), {pattern: np.array(found) for pattern, found in rows.items()}


def _list_one_by_one(
    tensors: Sequence[Tensor], rows: np.ndarray, variables: dict[Variable, int], which: np.ndarray, index: np.ndarray
) -> None:
    """Fills in the rows of views that are not affine."""
    for row in rows.tolist():
        node = tensors[row].node
        numbers = np.array([variables.setdefault(v, len(variables)) for v in node.variables])
        own_which, own_index = elements(node, node.variables)
        which[row], index[row] = numbers[own_which].reshape(-1), own_index.reshape(-1)


def mixed_radix(values: np.ndarray, most: int = _MAX_RADICES) -> Group | None:
    """Writes a sequence as `first + Σ digit · stride` over the mixed-radix digits of the position.

    Args:
        values: int64[n], n at least 1.
        most: maximal number of digits.

    Returns:
        (size, stride) of each digit, outermost first; None if the sequence has no such form.
    """
    if len(values) == 1:
        return ()
    step = int(values[1] - values[0])
    breaks = np.flatnonzero(np.diff(values) != step)
    run = int(breaks[0]) + 1 if len(breaks) else len(values)
    if most == 0 or len(values) % run:
        return None
    rows = values.reshape(-1, run)
    if np.any(np.diff(rows, axis=1) != step):
        return None
    outer = mixed_radix(rows[:, 0], most - 1)
    return None if outer is None else canonical((*outer, (run, step)))


def repeated_element(tensor: Tensor) -> tuple[Variable, int, int, int] | None:
    """An element that occurs twice in a stacked tensor: variable, flat element, and its two rows."""
    which, index = (np.broadcast_to(part, tensor.shape).reshape(-1) for part in tensor.flat_indices())
    order = np.lexsort((index, which))
    same = np.flatnonzero((np.diff(which[order]) == 0) & (np.diff(index[order]) == 0))
    if not same.size:
        return None
    first, second = order[same[0]], order[same[0] + 1]
    row = tensor.size // tensor.shape[0]
    return tensor.variables()[which[first]], int(index[first]), int(first // row), int(second // row)
