"""Stacks the connections of many vertices into one tensor: row v is the connection of vertex v.

Input: for each vertex a tensor, all of one shape and dtype. Output: a tensor `[vertices, *shape]`: affine if the row
offsets are an arithmetic progression (or progressions of progressions, as nested loops make them), else a list of
elements. No data moves.

Limits: a list of elements takes 16 bytes an element; two-level and deeper progressions must be regular throughout.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ipujax.runtime.tensor import Affine, Group, Tensor, Variable, canonical, elements, freeze

_MAX_RADICES = 4  # deeper nested loops become lists of elements


def is_same(tensors: Sequence[Tensor]) -> bool:
    """Test that all tensors are one view."""
    reference = tensors[0]
    # Identity first: comparing long element lists is slow, and most vertices share one tensor.
    return all(tensor is reference or tensor.node == reference.node for tensor in tensors)


def stacked(tensors: Sequence[Tensor]) -> Tensor:
    """Stack tensors, at least one and all of one shape and dtype, along a new first dimension."""
    template = tensors[0]
    shape = (len(tensors), *template.shape)
    offsets, patterns = _sort_by_pattern(tensors)
    if len(patterns) == 1 and template.size:
        # All rows are one affine view at different offsets: affine too, if the offsets are.
        (pattern,) = patterns
        rows = mixed_radix(offsets)
        if pattern is not None and rows is not None:
            variable, dims = pattern
            return Tensor(Affine(variable, int(offsets[0]), (rows, *dims)), shape, template.dtype)
    variables: dict[Variable, int] = {}
    # An index piece: `which` is the number of each element's variable, `index` the flat element in it.
    which = np.zeros((len(tensors), template.size), np.int64)
    index = np.zeros((len(tensors), template.size), np.int64)
    for pattern, numbers in patterns.items():
        if pattern is None:
            _list_elements(tensors, numbers, variables, which, index)
        else:
            variable, dims = pattern
            which[numbers] = variables.setdefault(variable, len(variables))
            index[numbers] = offsets[numbers, None] + Affine(variable, 0, dims).flat_indices().reshape(-1)
    return Tensor(freeze(tuple(variables), which.reshape(shape), index.reshape(shape)), shape, template.dtype)


_Pattern = tuple[Variable, tuple[Group, ...]]


def _sort_by_pattern(tensors: Sequence[Tensor]) -> tuple[np.ndarray, dict[_Pattern | None, np.ndarray]]:
    """Return offsets of affine views, int64[n], and the rows of each pattern of strides, None for other views."""
    offsets = [0] * len(tensors)
    rows = dict[_Pattern | None, list[int]]()
    for row, tensor in enumerate(tensors):
        node = tensor.node
        pattern = None
        if isinstance(node, Affine):
            offsets[row] = node.offset
            pattern = (node.variable, node.dims)
        rows.setdefault(pattern, []).append(row)
    return np.array(offsets, np.int64), {pattern: np.array(numbers) for pattern, numbers in rows.items()}


def _list_elements(
    tensors: Sequence[Tensor], rows: np.ndarray, variables: dict[Variable, int], which: np.ndarray, index: np.ndarray
) -> None:
    """Fill in the rows of views that are not affine."""
    for row in rows.tolist():
        node = tensors[row].node
        numbers = np.array([variables.setdefault(v, len(variables)) for v in node.variables])
        local_which, local_index = elements(node, node.variables)
        which[row] = numbers[local_which].reshape(-1)
        index[row] = local_index.reshape(-1)


def mixed_radix(values: np.ndarray, max_digits: int = _MAX_RADICES) -> Group | None:
    """(size, stride) of each digit of `first + Σ digit · stride`, outermost first; None for any other int64[n]."""
    # With a bounded number of digits, since each costs a pass over the values.
    if len(values) == 1:
        return ()
    step = int(values[1] - values[0])
    # The innermost digit counts up to the first break of the step; the rest recurses on the starts of its runs.
    breaks = np.flatnonzero(np.diff(values) != step)
    run_length = int(breaks[0]) + 1 if len(breaks) else len(values)
    if max_digits == 0 or len(values) % run_length:
        return None
    rows = values.reshape(-1, run_length)
    if np.any(np.diff(rows, axis=1) != step):
        return None
    outer = mixed_radix(rows[:, 0], max_digits - 1)
    return None if outer is None else canonical((*outer, (run_length, step)))


def repeated_element(tensor: Tensor) -> tuple[Variable, int, int, int] | None:
    """Find an element that occurs twice in a stacked tensor: variable, flat element, and its two rows."""
    which, index = (np.broadcast_to(indices, tensor.shape).reshape(-1) for indices in tensor.flat_indices())
    # Sorted by variable and element, equal elements are neighbours: O(n log n).
    order = np.lexsort((index, which))
    duplicates = np.flatnonzero((np.diff(which[order]) == 0) & (np.diff(index[order]) == 0))
    if not duplicates.size:
        return None
    position = order[duplicates[0]]
    duplicate = order[duplicates[0] + 1]
    row_size = tensor.size // tensor.shape[0]
    return (
        tensor.variables()[which[position]],
        int(index[position]),
        int(position // row_size),
        int(duplicate // row_size),
    )
