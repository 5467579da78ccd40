"""Affine views of one variable: offset plus mixed-radix groups of (size, stride).

Grammar:
    Affine(variable, offset, dims)      dims: one group for each dimension of the view
    group = ((size, stride), ...)       sub-dimensions, outermost first; strides in elements of the flat variable

A stride of 0 is a broadcast, a negative one a reversal. A reshape of a transposed or broadcast view leads to a
dimension of several sub-dimensions: its index is in mixed radix.
Canonical form: no sub-dimension of size 1 (a dimension of size 1 is the empty group), and no neighbours in a group
where the outer stride equals inner size times inner stride (they are merged). A view without elements has offset 0 and
strides 0.

Input and output: tuples of Python ints only; only `Affine.flat_indices` makes an array.
Limits: None where a view does not stay affine; `ipujax.runtime.tensor.view` then takes a wider form.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from ipujax.runtime.cache import remembered_small
from ipujax.runtime.tensor.variable import Variable

Group = tuple[tuple[int, int], ...]
Piece = tuple[int, Group]  # (addend of the offset, the group)


def canonical(subdims: Iterable[tuple[int, int]]) -> Group:
    """Drop sub-dimensions of size 1 and merge neighbours of one stride."""
    out: list[tuple[int, int]] = []
    for size, stride in subdims:
        if size == 1:
            continue
        if out and out[-1][1] == size * stride:
            out[-1] = (out[-1][0] * size, stride)
        else:
            out.append((size, stride))
    return tuple(out)


def group_size(group: Group) -> int:
    """Return the number of index values of a group."""
    return prod([n for n, _ in group])


def regroup(subdims: Iterable[tuple[int, int]], shape: Sequence[int]) -> tuple[Group, ...] | None:
    """Cut row-major sub-dimensions, none of size 0, into canonical groups of `shape`; None if a cut is inside one."""
    remaining = list(canonical(subdims))
    dims: list[Group] = []
    # From the innermost dimension out: take sub-dimensions until they fill the size, and split the last if it divides.
    for size in reversed(shape):
        group: list[tuple[int, int]] = []
        while size > 1:
            n, stride = remaining[-1]
            if size % n == 0:
                group.append(remaining.pop())
                size //= n
            elif n % size == 0:
                group.append((size, stride))
                remaining[-1] = (n // size, stride * size)
                size = 1
            else:
                return None
        dims.append(tuple(reversed(group)))
    return tuple(reversed(dims))


@remembered_small
def _reshaped(dims: tuple[Group, ...], shape: tuple[int, ...]) -> tuple[Group, ...] | None:
    return regroup([subdim for group in dims for subdim in group], shape)


@remembered_small
def _flat(dims: tuple[Group, ...]) -> Group:
    return canonical([subdim for group in dims for subdim in group])


def _offset_of(group: Group, index: int) -> int:
    offset = 0
    for n, stride in reversed(group):
        index, at = divmod(index, n)
        offset += at * stride
    return offset


def _shift_pieces(pieces: Iterable[Piece], shift: int) -> list[Piece]:
    return [(offset + shift, group) for offset, group in pieces]


def _contiguous_pieces(group: Group, start: int, limit: int) -> list[Piece]:
    """Return the indices [start, limit) of a group: a row's end, complete rows, a row's start, recursively."""
    size, stride = group[0]
    inner = group[1:]
    if not inner:
        return [(start * stride, canonical([(limit - start, stride)]))]
    row = group_size(inner)
    if start == 0 and limit == size * row:
        return [(0, group)]
    first, head = divmod(start, row)
    last, tail = divmod(limit, row)
    if limit <= (first + 1) * row:
        return _shift_pieces(_contiguous_pieces(inner, head, limit - first * row), first * stride)
    pieces: list[Piece] = []
    if head:
        pieces += _shift_pieces(_contiguous_pieces(inner, head, row), first * stride)
        first += 1
    if last > first:
        pieces.append((first * stride, canonical([(last - first, stride), *inner])))
    if tail:
        pieces += _shift_pieces(_contiguous_pieces(inner, 0, tail), last * stride)
    return pieces


def _strided_pieces(group: Group, start: int, count: int, step: int) -> list[Piece] | None:
    """Return every `step`-th index: cut whole periods of `step`, then select one index of each period."""
    window = start - start % step
    if window + step * count > group_size(group):  # the last period is incomplete: its index is a piece of its own
        head = slice_group(group, start, count - 1, step)
        return None if head is None else [*head, (_offset_of(group, start + step * (count - 1)), ())]
    pieces: list[Piece] = []
    for offset, part in _contiguous_pieces(group, window, window + step * count):
        periods, remainder = divmod(group_size(part), step)
        cut = None if remainder else regroup(part, (periods, step))
        if cut is None:
            return None
        # Of each period the index at the position of `start`.
        pieces.append((offset + _offset_of(cut[1], start - window), cut[0]))
    return pieces


def reverse_group(group: Group) -> Piece:
    """Return a group with its indices in opposite order, as a piece."""
    return sum((n - 1) * stride for n, stride in group), tuple((n, -stride) for n, stride in group)


def slice_group(group: Group, start: int, count: int, step: int) -> list[Piece] | None:
    """Return the indices start, start + step, … of a group as pieces in order; None where those would be many."""
    if count == 1:
        return [(_offset_of(group, start), ())]
    if len(group) == 1:
        stride = group[0][1]
        return [(start * stride, ((count, stride * step),))]
    if step < 0:
        pieces = slice_group(group, start + (count - 1) * step, count, -step)
        if pieces is None:
            return None
        reversed_pieces = [(offset, reverse_group(part)) for offset, part in reversed(pieces)]
        return [(offset + shift, part) for offset, (shift, part) in reversed_pieces]
    return _contiguous_pieces(group, start, start + count) if step == 1 else _strided_pieces(group, start, count, step)


@dataclass(frozen=True, slots=True)
class Affine:
    """View of one variable whose flat index is affine in the sub-dimensions of the view's indices.

    Args:
        variable: the variable.
        offset: flat element of the view's element 0.
        dims: a canonical group for each dimension.
    """

    variable: Variable
    offset: int
    dims: tuple[Group, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the view."""
        return tuple([group[0][0] if len(group) == 1 else group_size(group) for group in self.dims])

    @property
    def variables(self) -> tuple[Variable, ...]:
        return (self.variable,)

    @property
    def subdims(self) -> list[tuple[int, int]]:
        """The sub-dimensions of all dimensions, outermost first."""
        return [subdim for group in self.dims for subdim in group]

    @property
    def is_empty(self) -> bool:
        return any(group and group[0][0] == 0 for group in self.dims)

    @property
    def has_broadcast(self) -> bool:
        """True if a stride of 0 repeats elements."""
        return not self.is_empty and any(stride == 0 for _, stride in self.subdims)

    @property
    def is_injective(self) -> bool:
        """True if strides nest, so that no element repeats; may be False for a view without repeats."""
        return self.is_empty or nests(self.subdims)

    @property
    def is_whole(self) -> bool:
        """True for all of the variable in row-major order, in any shape."""
        size = self.variable.size
        if self.is_empty or size == 0:
            return self.is_empty and size == 0  # an empty view is not all of a variable that has elements
        return self.offset == 0 and _flat(self.dims) == (() if size == 1 else ((size, 1),))

    def transpose(self, perm: Sequence[int]) -> Affine:
        """Permute dimensions: dimension i of the result is dimension perm[i] of this."""
        return Affine(self.variable, self.offset, tuple([self.dims[i] for i in perm]))

    def reverse(self, axes: Iterable[int]) -> Affine:
        """Reverse the order of indices along `axes`."""
        if self.is_empty:
            return self
        offset = self.offset
        dims = list(self.dims)
        for axis in axes:
            shift, dims[axis] = reverse_group(dims[axis])
            offset += shift
        return Affine(self.variable, offset, tuple(dims))

    def broadcast(self, shape: Sequence[int], axes: Sequence[int]) -> Affine:
        """Broadcast: dimension i becomes dimension axes[i] of `shape`; the others, and sizes of 1 that grow, repeat."""
        if 0 in shape:
            return empty(self.variable, shape)
        source = dict(zip(axes, self.dims, strict=True))  # a dimension of size 1 is (), which `or` replaces below
        repeated = [() if n == 1 else ((n, 0),) for n in shape]
        return Affine(self.variable, self.offset, tuple([source.get(i) or repeated[i] for i in range(len(shape))]))

    def reshape(self, shape: Sequence[int]) -> Affine | None:
        """Reshape in row-major order; None where the result is not affine."""
        if self.is_empty:
            return empty(self.variable, shape)
        dims = _reshaped(self.dims, tuple(shape))
        return None if dims is None else Affine(self.variable, self.offset, dims)

    def flat_indices(self) -> np.ndarray:
        """Return the variable's flat element for each element of the view, int64 of the view's shape."""
        index = np.array(self.offset, np.int64)
        for n, stride in self.subdims:
            index = index[..., None] + np.arange(n, dtype=np.int64) * stride
        return index.reshape(self.shape)


def row_major(variable: Variable) -> Affine:
    """Return the view of all of a variable, in its own shape."""
    if 0 in variable.shape:
        return empty(variable, variable.shape)
    dims = []
    stride = 1
    for n in reversed(variable.shape):
        dims.append(((n, stride),) if n > 1 else ())
        stride *= n
    return Affine(variable, 0, tuple(reversed(dims)))


def empty(variable: Variable, shape: Sequence[int]) -> Affine:
    """Return a view without elements; `shape` has a 0."""
    assert prod(shape) == 0, shape
    return Affine(variable, 0, tuple([() if n == 1 else ((n, 0),) for n in shape]))


def nests(subdims: Iterable[tuple[int, int]]) -> bool:
    """Check whether each stride exceeds the reach of all smaller strides together, so that no element repeats."""
    reach = 0  # largest flat distance that the smaller strides step over together
    for n, stride in sorted(((n, abs(stride)) for n, stride in subdims), key=lambda subdim: subdim[1]):
        if stride <= reach:
            return False
        reach += (n - 1) * stride
    return True
