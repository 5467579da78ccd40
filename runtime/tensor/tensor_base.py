"""Views of parts of variables, under NumPy's and JAX's names, with no data moved.

Input: a view and arguments of a user, which are checked here. Output: another view: a shape, a dtype and a node of
`ipujax.runtime.tensor.view`, which has the variable and flat index of each element. A key (integers, slices, `...` and
None) becomes a `StridedSlice`: start, count and step of every dimension.
Source: the operations of poplar::Tensor (Poplar API reference, class Tensor), with the shapes of `jax.lax`.
Limits: indexing is NumPy's basic indexing; an index array is a gather, which is no view.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from operator import index as as_int
from typing import Any, Self

import numpy as np

from ipujax.runtime.errors import TensorError
from ipujax.runtime.not_copied import OfGraph
from ipujax.runtime.tensor.affine import Affine
from ipujax.runtime.tensor.aliasing import has_distinct_elements
from ipujax.runtime.tensor.variable import Variable, dtype_name
from ipujax.runtime.tensor.view import (
    Node,
    broadcast_node,
    elements,
    reshape_node,
    reverse_node,
    slice_node,
    transpose_node,
)

Key = Any  # an integer, a slice, Ellipsis, None, or a tuple of these; anything else is refused by `parse_key`


@dataclass(frozen=True, slots=True)
class StridedSlice:
    """Strided slice of every dimension, and the shape of the result.

    Args:
        starts: first index in each dimension.
        counts: number of indices in each dimension.
        steps: distance of indices in each dimension, negative for a reversal.
        shape: `counts` without the dimensions that integers index, with a 1 for each None.
    """

    starts: tuple[int, ...]
    counts: tuple[int, ...]
    steps: tuple[int, ...]
    shape: tuple[int, ...]


def parse_key(shape: tuple[int, ...], key: Key) -> StridedSlice:
    """Return the strided slice of an array of `shape` that the basic index `key` selects."""
    starts: list[int] = []
    counts: list[int] = []
    steps: list[int] = []
    result_shape: list[int] = []
    for item in _with_full_slices(len(shape), key):
        if item is None:
            result_shape.append(1)
            continue
        start, count, step = _parse_item(shape, len(starts), item)
        starts.append(start)
        counts.append(count)
        steps.append(step)
        if isinstance(item, slice):
            result_shape.append(count)
    return StridedSlice(tuple(starts), tuple(counts), tuple(steps), tuple(result_shape))


def _with_full_slices(ndim: int, key: Key) -> list[Any]:
    """Return the items of a key with `...`, written or implied at the end, expanded to full slices."""
    items = list(key) if isinstance(key, tuple) else [key]
    dots = [i for i, item in enumerate(items) if item is Ellipsis] or [len(items)]
    missing = ndim - sum(item is not None and item is not Ellipsis for item in items)
    if missing < 0 or len(dots) > 1:
        raise TensorError(f"index of {ndim} dimensions", expected=f"at most {ndim} indices and one ...", got=key)
    items[dots[0] : dots[0] + 1] = [slice(None)] * missing
    return items


def _parse_item(shape: tuple[int, ...], axis: int, item: Any) -> tuple[int, int, int]:
    """Return start, count and step of an integer or a slice along a dimension; refuse other indices."""
    n = shape[axis]
    if isinstance(item, slice):
        if item.step == 0:
            raise TensorError(f"slice of dimension {axis} of {list(shape)}", expected="a step other than 0", got=item)
        indices = range(*item.indices(n))
        return indices.start, len(indices), indices.step
    # A bool is a Python integer, but as an index NumPy takes it for a mask.
    if isinstance(item, bool | np.bool_ | np.ndarray) or not hasattr(item, "__index__"):
        raise TensorError(f"index of {list(shape)}", expected="integers, slices, ... and None", got=repr(item))
    number = as_int(item)
    if not -n <= number < n:
        raise TensorError(f"index of {list(shape)}", expected=f"{-n} <= index < {n} in dimension {axis}", got=number)
    return number % n, 1, 1


def axis_of(tensor: TensorBase, axis: int) -> int:
    """Return a dimension of a tensor, counted from the front."""
    if not -tensor.ndim <= axis < tensor.ndim:
        raise TensorError(f"dimension {axis} of {tensor!r}", expected=f"one of {tensor.ndim} dimensions", got=axis)
    return axis % tensor.ndim


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class TensorBase(OfGraph):
    """View of parts of variables; equal only to itself. `Tensor` adds Poplar's names.

    Args:
        node: variable and flat index of each element.
        shape: sizes of its dimensions.
        dtype: a NumPy dtype, or one of JAX's extended dtypes.
    """

    node: Node
    shape: tuple[int, ...]
    dtype: Any

    def __repr__(self) -> str:
        names = ", ".join(v.name or "unnamed" for v in self.variables())
        return f"Tensor({dtype_name(self.dtype)}{list(self.shape)} of {names})"

    # --- queries ---

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    def variables(self) -> tuple[Variable, ...]:
        """Return the distinct variables of the view; a view without elements names one variable."""
        return self.node.variables

    @property
    def affine(self) -> Affine | None:
        """View as one affine piece, or None."""
        return self.node if isinstance(self.node, Affine) else None

    @property
    def is_whole_variable(self) -> bool:
        """True for all of one variable in row-major order; its shape may differ from the variable's."""
        return isinstance(self.node, Affine) and self.node.is_whole

    @property
    def contains_constant(self) -> bool:
        """True if a variable of the view has a constant value."""
        return any(variable.is_constant for variable in self.variables())

    @property
    def is_writable(self) -> bool:
        """True if the view has each element of memory at most once: pieces disjoint, no stride 0."""
        return has_distinct_elements(self.node)

    def flat_indices(self) -> tuple[np.ndarray, np.ndarray]:
        """List the variable and the flat index of every element; for small targets and tests.

        Returns:
            (which, index), int64 arrays of the tensor's shape: element i is flat element index[i] of
            variables()[which[i]].
        """
        return elements(self.node, self.variables())

    # --- views ---

    def slice(
        self,
        starts: int | Sequence[int],
        limits: int | Sequence[int],
        strides: int | Sequence[int] | None = None,
        *,
        axis: int = 0,
    ) -> Self:
        """Slice from `starts` up to but not including `limits`, as `lax.slice`, or one dimension so.

        Args:
            starts: first index in each dimension, or one number for one dimension.
            limits: one past the last index in each dimension, or one number.
            strides: distance of indices in each dimension, at least 1; all 1 when None. One number is Poplar's third
                argument, the dimension.
            axis: the dimension that is cut when `starts` is one number.

        Raises:
            TensorError: another number of dimensions, a slice outside the tensor, or a stride below 1.
        """
        # Poplar's form, slice(begin, end, dimension), is turned into that of `lax.slice`.
        if isinstance(starts, int | np.integer) and isinstance(limits, int | np.integer):
            if isinstance(strides, int | np.integer):
                axis = int(strides)
                strides = None
            axis = axis_of(self, axis)
            starts = [int(starts) if d == axis else 0 for d in range(self.ndim)]
            limits = [int(limits) if d == axis else n for d, n in enumerate(self.shape)]
        numbers = int | np.integer
        if isinstance(starts, numbers) or isinstance(limits, numbers) or isinstance(strides, numbers):
            expected = "two numbers and a dimension, or two sequences and strides"
            raise TensorError(f"slice of {self!r}", expected=expected, got=(starts, limits, strides))
        strides = [1] * self.ndim if strides is None else strides
        if not len(starts) == len(limits) == len(strides) == self.ndim:
            raise TensorError(
                f"slice of {self!r}", expected=f"{self.ndim} starts, limits and strides", got=(starts, limits, strides)
            )
        for start, limit, stride, n in zip(starts, limits, strides, self.shape, strict=True):
            if not 0 <= start <= limit <= n or stride < 1:
                raise TensorError(
                    f"slice of {self!r}",
                    expected=f"0 <= start <= limit <= {n} and stride >= 1",
                    got=f"start {start}, limit {limit}, stride {stride}",
                )
        counts = [len(range(*sls)) for sls in zip(starts, limits, strides, strict=True)]
        return self._sliced(list(starts), counts, list(strides))

    def __getitem__(self, key: Key) -> Self:
        """Index as NumPy's basic indexing does: integers, slices with any step, `...` and None.

        Raises:
            TensorError: an integer out of range, too many indices, or an index array.
        """
        strided = parse_key(self.shape, key)
        return self._sliced(strided.starts, strided.counts, strided.steps)._reshaped(strided.shape)

    def __iter__(self) -> Iterator[Self]:
        """Iterate over the sub-tensors along dimension 0."""
        if not self.shape:
            raise TensorError(f"iteration over {self!r}", expected="at least one dimension", got="none")
        return (self[i] for i in range(self.shape[0]))

    def transpose(self, perm: Sequence[int] | None = None) -> Self:
        """Permute dimensions: dimension i of the result is dimension perm[i] of this; all in opposite order when None.

        Raises:
            TensorError: `perm` is no permutation of the dimensions.
        """
        perm = tuple(range(self.ndim))[::-1] if perm is None else tuple(as_int(i) for i in perm)
        if sorted(perm) != list(range(self.ndim)):
            raise TensorError(f"transpose of {self!r}", expected=f"a permutation of 0…{self.ndim - 1}", got=perm)
        if perm == tuple(range(self.ndim)):
            return self
        return self._with_node(transpose_node(self.node, perm))

    def reshape(self, shape: Sequence[int]) -> Self:
        """Reshape in row-major order; one size may be -1.

        Raises:
            TensorError: the shape has another number of elements.
        """
        try:
            sizes = tuple(as_int(n) for n in shape)
        except TypeError as error:
            raise TensorError(f"reshape of {self!r}", expected="whole numbers", got=repr(shape)) from error
        known_size = prod(n for n in sizes if n != -1)
        if sizes.count(-1) == 1 and known_size and self.size % known_size == 0:
            sizes = tuple(self.size // known_size if n == -1 else n for n in sizes)
        if any(n < 0 for n in sizes) or prod(sizes) != self.size:
            raise TensorError(f"reshape of {self!r}", expected=f"{self.size} elements", got=f"shape {list(shape)}")
        return self._reshaped(sizes)

    def broadcast_in_dim(self, shape: Sequence[int], broadcast_dimensions: Sequence[int]) -> Self:
        """Repeat elements to a larger shape, as `lax.broadcast_in_dim`.

        Args:
            shape: shape of the result.
            broadcast_dimensions: for each dimension of this, in increasing order, the dimension of the result it
                becomes; its size is 1 or that of the result.

        Raises:
            TensorError: dimensions that do not increase, or sizes that do not match.
        """
        shape = tuple(as_int(n) for n in shape)
        axes = tuple(as_int(i) for i in broadcast_dimensions)
        increasing = all(a < b for a, b in zip((-1, *axes), (*axes, len(shape)), strict=True))
        if len(axes) != self.ndim or not increasing or any(n < 0 for n in shape):
            raise TensorError(
                f"broadcast of {self!r} to {list(shape)}",
                expected=f"{self.ndim} increasing dimensions below {len(shape)}",
                got=axes,
            )
        if any(n not in (1, shape[axis]) for n, axis in zip(self.shape, axes, strict=True)):
            raise TensorError(
                f"broadcast of {self!r}",
                expected=f"sizes of 1 or those of dimensions {list(axes)} of {list(shape)}",
                got=list(self.shape),
            )
        return self if shape == self.shape else self._with_node(broadcast_node(self.node, shape, axes))

    def expand_dims(self, axes: int | Iterable[int]) -> Self:
        """Insert dimensions of size 1, at these numbers in the result."""
        new_axes = [axes] if isinstance(axes, int) else list(axes)
        ndim = self.ndim + len(new_axes)
        positions = {axis + ndim if axis < 0 else axis for axis in new_axes}
        if len(positions) != len(new_axes) or not positions <= set(range(ndim)):
            raise TensorError(f"expand_dims of {self!r}", expected=f"distinct axes below {ndim}", got=new_axes)
        sizes = iter(self.shape)
        return self._reshaped(tuple(1 if i in positions else next(sizes) for i in range(ndim)))

    def squeeze(self, axes: int | Iterable[int] | None = None) -> Self:
        """Remove these dimensions of size 1; all of them when None."""
        if axes is None:
            axes = [i for i, n in enumerate(self.shape) if n == 1]
        removed = {axis_of(self, axis) for axis in ([axes] if isinstance(axes, int) else axes)}
        if any(self.shape[axis] != 1 for axis in removed):
            raise TensorError(f"squeeze of {self!r}", expected="dimensions of size 1", got=sorted(removed))
        return self._reshaped(tuple(n for i, n in enumerate(self.shape) if i not in removed))

    def reverse(self, axes: int | Iterable[int]) -> Self:
        """Reverse the order of indices along these dimensions."""
        reversed_axes = sorted({axis_of(self, axis) for axis in ([axes] if isinstance(axes, int) else axes)})
        return self._with_node(reverse_node(self.node, reversed_axes)) if reversed_axes else self

    def _sliced(self, starts: Sequence[int], counts: Sequence[int], steps: Sequence[int]) -> Self:
        shape = tuple(counts)
        if shape == self.shape and all(n == 1 or step == 1 for n, step in zip(shape, steps, strict=True)):
            return self
        return self._with_node(slice_node(self.node, starts, counts, steps))

    def _reshaped(self, shape: tuple[int, ...]) -> Self:
        return self if shape == self.shape else self._with_node(reshape_node(self.node, shape))

    def _with_node(self, node: Node) -> Self:
        return type(self)(node, node.shape, self.dtype)
