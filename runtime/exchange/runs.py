"""Flat runs of a view: contiguous parts of its variables that blocks or intervals of its elements consist of.

Input: a node of `ipujax.runtime.tensor.view` and either blocks of its indices or intervals of its row-major order.
Output: `Runs`, intervals of a flat space of all variables one after the other. Neighbours that are contiguous are never
listed one by one; a view whose innermost stride is not 1 has runs of one element. Beyond a limit on runs the result is
a sample of them with weights (`exchange.sample`).
Limits: int64 everywhere: (number of blocks) times (elements of all variables) must stay below 2^63.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import inf, prod

import numpy as np

from ipujax.runtime.exchange.sample import list_or_sample, ragged_rows, sample_rows, sampling_steps
from ipujax.runtime.tensor import Affine, Concat, Group, Indexed, Node, Reshaped, Variable, canonical

Bases = dict[Variable, int]


@dataclass(frozen=True, eq=False, slots=True)
class Runs:
    """Intervals of flat elements, each needed by one block.

    Args:
        block: number of the block, int64[n].
        start: first element, int64[n].
        length: number of elements, at least 1, int64[n].
        weight: number of runs that each stands for, float64[n]; None where every run stands for itself.
        before: in a sample, last element of the run before each in its block, which the sample may lack; −1 where none
            is before it, int64[n]; None where all are −1.
    """

    block: np.ndarray
    start: np.ndarray
    length: np.ndarray
    weight: np.ndarray | None = None
    before: np.ndarray | None = None

    def take(self, index: np.ndarray) -> Runs:
        """Select runs by number or mask."""
        weight, before = (None if column is None else column[index] for column in (self.weight, self.before))
        return Runs(self.block[index], self.start[index], self.length[index], weight, before)


def flat_bases(variables: Sequence[Variable]) -> Bases:
    """Return the first flat element of each variable; a gap of one element follows each, so that no two touch."""
    return dict(zip(variables, accumulate((v.size + 1 for v in variables), initial=0), strict=False))


def block_runs(
    node: Node, block: np.ndarray, start: np.ndarray, length: np.ndarray, bases: Bases, max_runs: float = inf
) -> list[Runs]:
    """List the runs of blocks of a view, in no set order; where the view repeats an element they may overlap.

    Args:
        node: the view, of rank r.
        block: number of each block, int64[n].
        start: first index of each block in each dimension, int64[n, r].
        length: number of indices, at least 1, int64[n, r].
        bases: first flat element of each variable.
        max_runs: limit beyond which about so many are sampled, of each part of the view.
    """
    if len(block) == 0:
        return []
    if isinstance(node, Concat):
        return _concat_blocks(node, block, start, length, bases, max_runs)
    if isinstance(node, Affine):
        return _affine_blocks(node, block, start, length, bases, max_runs)
    # Other nodes have no strides: list the blocks' runs in row-major order, then the runs of those.
    strides = [prod(node.shape[axis + 1 :]) for axis in range(len(node.shape))]
    view = _list_runs(block, np.zeros(len(block), np.int64), strides, start, length, max_runs)
    parts = interval_runs(node, np.arange(len(view.block)), view.start, view.length, bases, max_runs)
    return [_nested_runs(view, part) for part in parts]


def _nested_runs(outer: Runs, inner: Runs) -> Runs:
    """Renumber runs inside `outer` runs by the blocks of these, weights multiplied."""
    weight = inner.weight
    if outer.weight is not None:
        weight = outer.weight[inner.block] * (1 if weight is None else weight)
    return replace(inner, block=outer.block[inner.block], weight=weight)


def _affine_blocks(
    node: Affine, block: np.ndarray, start: np.ndarray, length: np.ndarray, bases: Bases, max_runs: float
) -> list[Runs]:
    """Cut blocks at rows of a dimension with several strides: a row's end, complete rows, a row's start.

    Such a piece has one stride a dimension, so its runs are a product; arguments as of `block_runs`.
    """
    axis = next((axis for axis, group in enumerate(node.dims) if len(group) > 1), None)
    if axis is None:  # one stride a dimension: no row to cut at
        strides = [group[0][1] if group else 0 for group in node.dims]
        return [
            _list_runs(block, np.full(len(block), bases[node.variable] + node.offset), strides, start, length, max_runs)
        ]
    outer, *inner = node.dims[axis]
    # The outermost sub-dimension becomes a dimension of its own; the recursion cuts at the next.
    finer = replace(node, dims=(*node.dims[:axis], (outer,), tuple(inner), *node.dims[axis + 1 :]))
    row = prod(size for size, _ in inner)
    runs = list[Runs]()
    head, rows, tail = _rows(start[:, axis], length[:, axis], row)
    for first_row, row_count, first_column, columns in (
        (start[:, axis] // row, np.minimum(head, 1), start[:, axis] % row, head),
        (-(-start[:, axis] // row), rows, 0, row),
        ((start[:, axis] + length[:, axis]) // row, np.minimum(tail, 1), 0, tail),
    ):
        occupied = row_count > 0
        if not occupied.any():
            continue
        part_start = np.insert(start, axis + 1, first_column, 1)[occupied]
        part_length = np.insert(length, axis + 1, columns, 1)[occupied]
        part_start[:, axis] = first_row[occupied]
        part_length[:, axis] = row_count[occupied]
        runs += block_runs(finer, block[occupied], part_start, part_length, bases, max_runs)
    return runs


def _rows(start: np.ndarray, length: np.ndarray, row: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Cut intervals at rows: elements before the first complete row, number of complete rows, elements behind them."""
    head = np.minimum(-start % row, length)
    rows, tail = np.divmod(length - head, row)
    return head, rows, tail


def _concat_blocks(
    node: Concat, block: np.ndarray, start: np.ndarray, length: np.ndarray, bases: Bases, max_runs: float
) -> list[Runs]:
    """Cut blocks at the parts of a concatenation, and list the runs of each piece in its part."""
    axis = node.axis
    runs = list[Runs]()
    for part, low, high in zip(node.parts, node.bounds, node.bounds[1:], strict=False):
        first = np.maximum(start[:, axis], low)
        count = np.minimum(start[:, axis] + length[:, axis], high) - first
        inside = count > 0
        part_start = start[inside]
        part_length = length[inside]
        part_start[:, axis] = first[inside] - low
        part_length[:, axis] = count[inside]
        runs += block_runs(part, block[inside], part_start, part_length, bases, max_runs)
    return runs


def _list_runs(
    block: np.ndarray, base: np.ndarray, strides: Sequence[int], start: np.ndarray, length: np.ndarray, max_runs: float
) -> Runs:
    """Return runs of blocks of a view with one stride a dimension, sorted by block where the strides nest."""
    dims = []
    for axis, stride in enumerate(strides):
        if stride:
            low = start[:, axis] if stride > 0 else start[:, axis] + length[:, axis] - 1
            base = base + stride * low
            dims.append((abs(stride), length[:, axis], low if stride > 0 else -low))
    dims.sort(key=lambda dim: dim[0])
    run = np.ones(len(block), np.int64)
    # Innermost dimensions whose stride equals the run so far make it longer; the first gap ends it.
    while dims and bool(np.all((run == dims[0][0]) | (dims[0][1] == 1))):
        run = run * dims.pop(0)[1]
    number = np.arange(len(block))
    weight = before = None
    steps, min_listed = sampling_steps([count for _, count, _ in dims], max_runs)
    for (stride, count, low), step in zip(reversed(dims), reversed(steps), strict=True):
        if step == 1:
            row, within = ragged_rows(count[number])
            weight = None if weight is None else weight[row]
        else:
            row, within, row_weight = sample_rows(low[number], count[number], step, min_listed)
            weight = row_weight if weight is None else weight[row] * row_weight
        number = number[row]
        base = base[row] + stride * within
        # Last element of the run before each in its row, which a sample may lack.
        before = None if step == 1 else np.where(within > 0, base - stride + run[number] - 1, -1)
    return Runs(block[number], base, run[number], weight, before)


def interval_runs(
    node: Node, block: np.ndarray, start: np.ndarray, length: np.ndarray, bases: Bases, max_runs: float = inf
) -> list[Runs]:
    """List the runs of intervals [start, start + length) of a view's row-major order; arguments as of `block_runs`."""
    if len(block) == 0:
        return []
    if isinstance(node, Reshaped):
        return interval_runs(node.source, block, start, length, bases, max_runs)
    if isinstance(node, Affine):
        base = np.full(len(block), bases[node.variable] + node.offset)
        return _subdim_runs(canonical(node.subdims), base, block, start, length, max_runs)
    if isinstance(node, Indexed):
        return [_listed_runs(node, block, start, start + length, bases, max_runs)]
    return _concat_intervals(node, block, start, length, bases, max_runs)


def _listed_runs(
    node: Indexed, block: np.ndarray, start: np.ndarray, stop: np.ndarray, bases: Bases, max_runs: float
) -> Runs:
    """Return runs of intervals of a list of elements; the list is cut into runs before any sample is drawn."""
    offsets = np.array([bases[v] for v in node.variables])
    element = (offsets[node.which] + node.index).reshape(-1)
    bounds = np.concatenate(([0], np.flatnonzero(np.diff(element) != 1) + 1, [len(element)]))
    first = np.searchsorted(bounds, start, "right") - 1
    last = np.searchsorted(bounds, stop - 1, "right") - 1
    row, within, weight = list_or_sample(first, last - first + 1, max_runs)
    run = first[row] + within
    begin = np.maximum(bounds[run], start[row])
    return Runs(block[row], element[begin], np.minimum(bounds[run + 1], stop[row]) - begin, weight)


def _subdim_runs(
    subdims: Group, base: np.ndarray, block: np.ndarray, start: np.ndarray, length: np.ndarray, max_runs: float
) -> list[Runs]:
    """Return runs of intervals of a mixed-radix index: a row's end, complete rows, a row's start."""
    if not subdims:
        return [Runs(block, base, length)]
    (_, stride), *inner = subdims
    if not inner:
        return [_list_runs(block, base, [stride], start[:, None], length[:, None], max_runs)]
    row = prod(size for size, _ in inner)
    head, rows, tail = _rows(start, length, row)
    first = (start + head) // row
    runs: list[Runs] = []
    for number, begin, count in ((start // row, start % row, head), (first + rows, np.zeros_like(start), tail)):
        cut = count > 0
        if np.any(cut):
            row_base = (base + number * stride)[cut]
            runs += _subdim_runs(tuple(inner), row_base, block[cut], begin[cut], count[cut], max_runs)
    complete = rows > 0
    if np.any(complete):
        begin = np.zeros((np.count_nonzero(complete), len(subdims)), np.int64)
        count = np.broadcast_to([size for size, _ in subdims], begin.shape).copy()
        begin[:, 0] = first[complete]
        count[:, 0] = rows[complete]
        strides = [stride for _, stride in subdims]
        runs.append(_list_runs(block[complete], base[complete], strides, begin, count, max_runs))
    return runs


def _concat_intervals(
    node: Concat, block: np.ndarray, start: np.ndarray, length: np.ndarray, bases: Bases, max_runs: float
) -> list[Runs]:
    """Cut intervals at the rows of the concatenation, then each row at the parts."""
    inner = prod(node.shape[node.axis + 1 :])
    size = node.shape[node.axis] * inner
    first = start // size
    last = (start + length - 1) // size
    piece, within, weight = list_or_sample(first, last - first + 1, max_runs)
    row = first[piece] + within
    runs = list[Runs]()
    low = np.maximum(start[piece], row * size) - row * size
    high = np.minimum((start + length)[piece], (row + 1) * size) - row * size
    for part, bound, limit in zip(node.parts, node.bounds, node.bounds[1:], strict=False):
        begin = np.maximum(low, bound * inner) - bound * inner
        count = np.minimum(high, limit * inner) - bound * inner - begin
        inside = count > 0
        at = (row * (limit - bound) * inner + begin)[inside]
        rows = Runs(block[piece][inside], at, count[inside], None if weight is None else weight[inside])
        inner_runs = interval_runs(part, np.arange(len(at)), at, rows.length, bases, max_runs)
        runs += [_nested_runs(rows, part_runs) for part_runs in inner_runs]
    return runs


def concat_runs(parts: Sequence[Runs]) -> Runs:
    """Return all runs of some parts; where one is a sample, those of complete parts count once each."""
    empty = np.zeros(0, np.int64)
    block, start, length = (
        np.concatenate([empty, *(getattr(part, name) for part in parts)]) for name in ("block", "start", "length")
    )
    if all(part.weight is None for part in parts):
        return Runs(block, start, length)
    weight = [np.ones(len(part.block)) if part.weight is None else part.weight for part in parts]
    before = [np.full(len(part.block), -1) if part.before is None else part.before for part in parts]
    return Runs(block, start, length, np.concatenate(weight), np.concatenate(before))


def merge_runs(parts: Sequence[Runs], span: int) -> Runs:
    """Sort runs by block and element, below `span`, and merge those of a block that overlap or touch."""
    runs = concat_runs(parts)
    length = runs.length
    key = runs.block * (span + 1) + runs.start  # of the order by block, then element
    if np.all(key[1:] >= key[:-1] + length[:-1]):  # sorted and disjoint already
        return runs
    if runs.weight is None and np.all(length == 1):
        return _merge_elements(key, span)
    order = np.argsort(key, kind="stable")
    key = key[order]
    reach = np.maximum.accumulate(key + length[order])
    first = np.append(True, key[1:] > reach[:-1])
    stop = reach[np.append(np.flatnonzero(first)[1:], len(key)) - 1]
    return replace(runs.take(order[first]), length=stop - key[first])


def _merge_elements(key: np.ndarray, span: int) -> Runs:
    """Merge runs of one element; sorts keys alone, which is faster than an order of all columns."""
    key = np.sort(key)
    first = np.append(True, key[1:] > key[:-1] + 1)
    start = key[first]
    last = key[np.append(np.flatnonzero(first)[1:], len(key)) - 1]
    block = start // (span + 1)
    return Runs(block, start - block * (span + 1), last + 1 - start)


def select_blocks(runs: Runs, blocks: np.ndarray, new_numbers: np.ndarray, num_blocks: int) -> Runs:
    """Return the runs of some blocks, each with its new number; a block may be selected several times."""
    counts = np.bincount(runs.block, minlength=num_blocks)
    row, within = ragged_rows(counts[blocks])
    at = (np.cumsum(counts) - counts)[blocks][row] + within
    return replace(runs.take(at), block=new_numbers[row])


def union_runs(runs: Runs, size: int) -> Runs:
    """Return disjoint parts of runs that together cover all of them, as one block; elements are below `size`."""
    # Of many single elements a mask is faster than sorting.
    if runs.weight is None and len(runs.start) > size // 8 and bool(np.all(runs.length == 1)):
        is_covered = np.zeros(size, bool)
        is_covered[runs.start] = True
        element = np.flatnonzero(is_covered)
        return Runs(np.zeros_like(element), element, np.ones(len(element), np.int64))
    order = np.argsort(runs.start, kind="stable")  # merges the sorted runs of each block
    start = runs.start[order]
    end = start + runs.length[order]
    # Each run keeps the part behind all that start before it.
    reach = np.append(np.int64(0), np.maximum.accumulate(end)[:-1]) if len(end) else end
    first = np.maximum(start, reach)
    new = end > first
    block = np.zeros(np.count_nonzero(new), np.int64)
    return replace(runs.take(order[new]), block=block, start=first[new], length=(end - first)[new])


def scale_by_weight(values: np.ndarray, weight: np.ndarray | None) -> np.ndarray:
    return values if weight is None else values * weight


def flat_size(sizes: Sequence[int]) -> int:
    """Return the size of the flat space of variables of these sizes, a gap of one element behind each."""
    return sum(sizes) + len(sizes)
