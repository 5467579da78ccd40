"""Flat runs of a view: which contiguous parts of its variables some boxes or intervals of its elements are.

Input: a node of `ipujax.runtime.tensor.view` and either boxes of its indices or intervals of its row-major order.
Output: `Runs`, intervals of a flat space in which the variables lie one after the other. Never lists elements where
neighbours lie contiguous; a view whose innermost stride is not one has runs of one element. Asked for at most so many
runs, it gives a sample of them with weights (`exchange.sample`).
Limits: int64 everywhere: (number of boxes) times (elements of all variables) must stay below 2^63.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf, prod

import numpy as np

from ipujax.runtime.exchange.sample import ragged, sampled, sampled_if_many, sampling_steps
from ipujax.runtime.tensor import Affine, Concat, Group, Indexed, Node, Reshaped, Variable, canonical

Bases = dict[Variable, int]


@dataclass(frozen=True, eq=False, slots=True)
class Runs:
    """Intervals of flat elements, each needed by one box.

    Args:
        box: number of the box, int64[n].
        start: first element, int64[n].
        length: number of elements, at least 1, int64[n].
        weight: number of runs that each stands for, float64[n]; None where each is itself alone.
        before: where a run of a sample stands behind one that need not be in it, that run's last element; −1 for other
            runs, int64[n]; None where all are −1.
    """

    box: np.ndarray
    start: np.ndarray
    length: np.ndarray
    weight: np.ndarray | None = None
    before: np.ndarray | None = None


def flat_bases(variables: Sequence[Variable]) -> Bases:
    """Where each variable starts in the common flat space; one element stays free after each, so that none touch."""
    bases, base = {}, 0
    for variable in variables:
        bases[variable] = base
        base += variable.size + 1
    return bases


def box_runs(
    node: Node, box: np.ndarray, start: np.ndarray, length: np.ndarray, bases: Bases, most: float = inf
) -> list[Runs]:
    """The runs of boxes of a view.

    Args:
        node: the view, of rank r.
        box: number of each box, int64[n].
        start: first index of each box in each dimension, int64[n, r].
        length: number of indices, at least 1, int64[n, r].
        bases: where each variable starts in the flat space.
        most: runs beyond which a sample of about so many is given, of each piece of the view.

    Returns:
        Runs in no set order; where the view repeats an element they may overlap.
    """
    if len(box) == 0:
        return []
    if isinstance(node, Concat):
        return _concat_boxes(node, box, start, length, bases, most)
    if isinstance(node, Affine):
        return _affine_boxes(node, box, start, length, bases, most)
    strides = [prod(node.shape[axis + 1 :]) for axis in range(len(node.shape))]
    view = _enumerate(box, np.zeros(len(box), np.int64), strides, start, length, most)
    parts = interval_runs(node, np.arange(len(view.box)), view.start, view.length, bases, most)
    return [_of_runs(view, part) for part in parts]


def _of_runs(view: Runs, part: Runs) -> Runs:
    """Runs of runs as those of the boxes that these are of."""
    weight = part.weight
    if view.weight is not None:
        weight = view.weight[part.box] * (1 if weight is None else weight)
    return replace(part, box=view.box[part.box], weight=weight)


def _affine_boxes(
    node: Affine, box: np.ndarray, start: np.ndarray, length: np.ndarray, bases: Bases, most: float
) -> list[Runs]:
    """Where a dimension joins several, boxes are cut at its rows: the end of one, whole ones, the start of one."""
    axis = next((axis for axis, group in enumerate(node.dims) if len(group) > 1), None)
    if axis is None:
        strides = [group[0][1] if group else 0 for group in node.dims]
        return [_enumerate(box, np.full(len(box), bases[node.variable] + node.offset), strides, start, length, most)]
    outer, *inner = node.dims[axis]
    finer = replace(node, dims=(*node.dims[:axis], (outer,), tuple(inner), *node.dims[axis + 1 :]))
    row, out = prod(size for size, _ in inner), list[Runs]()
    head, rows, tail = _rows(start[:, axis], length[:, axis], row)
    for first, count, begin, within in (
        (start[:, axis] // row, np.minimum(head, 1), start[:, axis] % row, head),
        (-(-start[:, axis] // row), rows, 0, row),
        ((start[:, axis] + length[:, axis]) // row, np.minimum(tail, 1), 0, tail),
    ):
        some = count > 0
        part_start, part_length = (
            np.insert(whole, axis + 1, one, 1)[some] for whole, one in ((start, begin), (length, within))
        )
        part_start[:, axis], part_length[:, axis] = first[some], count[some]
        out += box_runs(finer, box[some], part_start, part_length, bases, most)
    return out


def _rows(start: np.ndarray, length: np.ndarray, row: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Intervals cut at rows: the elements before the first whole one, the whole ones, the elements behind them."""
    head = np.minimum(-start % row, length)
    rows, tail = np.divmod(length - head, row)
    return head, rows, tail


def _concat_boxes(
    node: Concat, box: np.ndarray, start: np.ndarray, length: np.ndarray, bases: Bases, most: float
) -> list[Runs]:
    axis, out = node.axis, []
    for part, low, high in zip(node.parts, node.bounds, node.bounds[1:], strict=False):
        first = np.maximum(start[:, axis], low)
        count = np.minimum(start[:, axis] + length[:, axis], high) - first
        inside = count > 0
        part_start, part_length = start[inside], length[inside]
        part_start[:, axis], part_length[:, axis] = first[inside] - low, count[inside]
        out += box_runs(part, box[inside], part_start, part_length, bases, most)
    return out


def _enumerate(
    box: np.ndarray, base: np.ndarray, strides: Sequence[int], start: np.ndarray, length: np.ndarray, most: float
) -> Runs:
    """Runs of boxes of a view with one stride a dimension, sorted by box where the strides nest; base int64[boxes]."""
    dims = []
    for axis, stride in enumerate(strides):
        if stride:
            low = start[:, axis] if stride > 0 else start[:, axis] + length[:, axis] - 1
            base = base + stride * low
            dims.append((abs(stride), length[:, axis], low if stride > 0 else -low))
    dims.sort(key=lambda dim: dim[0])
    run = np.ones(len(box), np.int64)
    while dims and bool(np.all((run == dims[0][0]) | (dims[0][1] == 1))):
        run = run * dims.pop(0)[1]
    number, weight, before = np.arange(len(box)), None, None
    steps, fewest = sampling_steps([count for _, count, _ in dims], most)
    for (stride, count, low), step in zip(reversed(dims), reversed(steps), strict=True):
        if step == 1:
            row, within = ragged(count[number])
            weight = None if weight is None else weight[row]
        else:
            row, within, each = sampled(low[number], count[number], step, fewest)
            weight = each if weight is None else weight[row] * each
        number, base = number[row], base[row] + stride * within
        before = None if step == 1 else np.where(within > 0, base - stride + run[number] - 1, -1)
    return Runs(box[number], base, run[number], weight, before)


def interval_runs(
    node: Node, box: np.ndarray, start: np.ndarray, length: np.ndarray, bases: Bases, most: float = inf
) -> list[Runs]:
    """The runs of intervals of a view's row-major order.

    Args:
        node: the view.
        box: number of the box each interval belongs to, int64[n].
        start: first element in row-major order, int64[n].
        length: number of elements, at least 1, int64[n].
        bases: where each variable starts in the flat space.
        most: as for `box_runs`.

    Returns:
        As `box_runs`.
    """
    if len(box) == 0:
        return []
    if isinstance(node, Reshaped):
        return interval_runs(node.source, box, start, length, bases, most)
    if isinstance(node, Affine):
        base = np.full(len(box), bases[node.variable] + node.offset)
        return _subdim_runs(canonical(node.subdims), base, box, start, length, most)
    if isinstance(node, Indexed):
        row, within, weight = sampled_if_many(start, length, most)
        at = start[row] + within
        offsets = np.array([bases[v] for v in node.variables])
        element = offsets[node.which.reshape(-1)[at]] + node.index.reshape(-1)[at]
        return [Runs(box[row], element, np.ones(len(element), np.int64), weight)]
    return _concat_intervals(node, box, start, length, bases, most)


def _subdim_runs(
    subdims: Group, base: np.ndarray, box: np.ndarray, start: np.ndarray, length: np.ndarray, most: float
) -> list[Runs]:
    """Runs of intervals of an index in mixed radix: the end of a row, whole rows, the start of a row; base int64[n]."""
    if not subdims:
        return [Runs(box, base, length)]
    (_, stride), *inner = subdims
    if not inner:
        return [_enumerate(box, base, [stride], start[:, None], length[:, None], most)]
    row = prod(size for size, _ in inner)
    head, rows, tail = _rows(start, length, row)
    first = (start + head) // row
    out: list[Runs] = []
    for at, begin, count in ((start // row, start % row, head), (first + rows, np.zeros_like(start), tail)):
        some = count > 0
        if np.any(some):
            out += _subdim_runs(tuple(inner), (base + at * stride)[some], box[some], begin[some], count[some], most)
    some = rows > 0
    if np.any(some):
        begin = np.zeros((np.count_nonzero(some), len(subdims)), np.int64)
        count = np.broadcast_to([size for size, _ in subdims], begin.shape).copy()
        begin[:, 0], count[:, 0] = first[some], rows[some]
        out.append(_enumerate(box[some], base[some], [stride for _, stride in subdims], begin, count, most))
    return out


def _concat_intervals(
    node: Concat, box: np.ndarray, start: np.ndarray, length: np.ndarray, bases: Bases, most: float
) -> list[Runs]:
    """Cuts intervals at the rows of the concatenation, then each row at the parts."""
    inner = prod(node.shape[node.axis + 1 :])
    size = node.shape[node.axis] * inner
    first, last = start // size, (start + length - 1) // size
    piece, within, weight = sampled_if_many(first, last - first + 1, most)
    row, out = first[piece] + within, []
    low = np.maximum(start[piece], row * size) - row * size
    high = np.minimum((start + length)[piece], (row + 1) * size) - row * size
    for part, bound, limit in zip(node.parts, node.bounds, node.bounds[1:], strict=False):
        begin = np.maximum(low, bound * inner) - bound * inner
        count = np.minimum(high, limit * inner) - bound * inner - begin
        inside = count > 0
        at = (row * (limit - bound) * inner + begin)[inside]
        rows = Runs(box[piece][inside], at, count[inside], None if weight is None else weight[inside])
        found = interval_runs(part, np.arange(len(at)), at, rows.length, bases, most)
        out += [_of_runs(rows, runs) for runs in found]
    return out


def joined(parts: Sequence[Runs]) -> Runs:
    """Runs one after the other."""
    none = np.zeros(0, np.int64)
    box, start, length = (
        np.concatenate([none, *(getattr(part, name) for part in parts)]) for name in ("box", "start", "length")
    )
    if all(part.weight is None for part in parts):
        return Runs(box, start, length)
    weight = [np.ones(len(part.box)) if part.weight is None else part.weight for part in parts]
    before = [np.full(len(part.box), -1) if part.before is None else part.before for part in parts]
    return Runs(box, start, length, np.concatenate(weight), np.concatenate(before))


def tidy(parts: Sequence[Runs], span: int) -> Runs:
    """All runs sorted by box and element, overlapping or touching ones of a box joined.

    Args:
        parts: runs in any order.
        span: an upper bound of all elements.
    """
    runs = joined(parts)
    box, start, length = runs.box, runs.start, runs.length
    key = box * (span + 1) + start
    if np.all(key[1:] >= key[:-1] + length[:-1]):
        return runs
    if runs.weight is None and np.all(length == 1):
        return _tidy_elements(key, span)
    order = np.argsort(key)
    key, end = key[order], key[order] + length[order]
    reach = np.maximum.accumulate(end)
    first = np.append(True, key[1:] > reach[:-1])
    stop = reach[np.append(np.flatnonzero(first)[1:], len(key)) - 1]
    key = key[first]
    box, start = np.divmod(key, span + 1)
    weight, before = (None if part is None else part[order][first] for part in (runs.weight, runs.before))
    return Runs(box, start, stop - key, weight, before)


def _tidy_elements(key: np.ndarray, span: int) -> Runs:
    """`tidy` of runs of one element, without sorting anything but keys."""
    key = np.sort(key)
    first = np.append(True, key[1:] > key[:-1] + 1)
    start = key[first]
    last = key[np.append(np.flatnonzero(first)[1:], len(key)) - 1]
    box = start // (span + 1)
    return Runs(box, start - box * (span + 1), last + 1 - start)


def pick(runs: Runs, boxes: np.ndarray, names: np.ndarray, num_boxes: int) -> Runs:
    """The runs of some boxes, under new names.

    Args:
        runs: sorted by box.
        boxes: the boxes wanted, any number of times, int64[n].
        names: the new name of each, int64[n].
        num_boxes: number of boxes in `runs`.
    """
    counts = np.bincount(runs.box, minlength=num_boxes)
    row, within = ragged(counts[boxes])
    at = (np.cumsum(counts) - counts)[boxes][row] + within
    weight, before = (None if part is None else part[at] for part in (runs.weight, runs.before))
    return Runs(names[row], runs.start[at], runs.length[at], weight, before)


def covered(runs: Runs, size: int) -> Runs:
    """Disjoint intervals that cover what some intervals cover, each inside one of them, without boxes.

    Args:
        runs: the intervals, of any boxes.
        size: an upper bound of all elements.
    """
    start, length = runs.start, runs.length
    if runs.weight is None and len(start) > size // 8 and bool(np.all(length == 1)):
        seen = np.zeros(size, bool)
        seen[start] = True
        found = np.flatnonzero(seen)
        return Runs(np.zeros_like(found), found, np.ones(len(found), np.int64))
    order = np.argsort(start)
    start, end = start[order], (start + length)[order]
    before = np.append(np.int64(0), np.maximum.accumulate(end)[:-1]) if len(end) else end
    gained = np.maximum(start, before)
    new = end > gained
    weight = None if runs.weight is None else runs.weight[order][new]
    return Runs(np.zeros(np.count_nonzero(new), np.int64), gained[new], (end - gained)[new], weight)


def weighed(values: np.ndarray, weight: np.ndarray | None) -> np.ndarray:
    """Values of runs, or of all runs that each stands for."""
    return values if weight is None else values * weight


def total(sizes: Sequence[int]) -> int:
    """Elements of the flat space of variables of these sizes."""
    return sum(sizes) + len(sizes)
