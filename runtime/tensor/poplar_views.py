"""Poplar's names for queries and views of a tensor, made of the few operations that `Tensor` has of its own.

Input: a tensor. Output: a tensor, with no data moved. `Tensor` inherits these; what it must have for them is declared
in `PoplarViews` for the type checker alone.
Source: poplar::Tensor (Poplar API reference, class Tensor).
Limits: no `reinterpret`: an element is seen in the type of its variable.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

from ipujax.runtime.errors import TensorError

if TYPE_CHECKING:
    from ipujax.runtime.tensor.tensor import Tensor


def axis_of(tensor: Any, axis: int) -> int:
    """A dimension of a tensor, counted from the front.

    Raises:
        TensorError: no such dimension.
    """
    if not -tensor.ndim <= axis < tensor.ndim:
        raise TensorError(f"dimension {axis} of {tensor!r}", expected=f"one of {tensor.ndim} dimensions", got=axis)
    return axis % tensor.ndim


class PoplarViews:
    """What a tensor answers to beside numpy's and JAX's names."""

    __slots__ = ()

    if TYPE_CHECKING:
        shape: tuple[int, ...]
        dtype: Any

        @property
        def ndim(self) -> int: ...
        @property
        def size(self) -> int: ...
        @property
        def is_writable(self) -> bool: ...
        def slice(self, starts: Any, limits: Any, strides: Any = None, *, axis: int = 0) -> Tensor: ...
        def transpose(self, perm: Sequence[int] | None = None) -> Tensor: ...
        def reshape(self, shape: Sequence[int]) -> Tensor: ...
        def broadcast_in_dim(self, shape: Sequence[int], broadcast_dimensions: Sequence[int]) -> Tensor: ...

    # --- queries ---

    def rank(self) -> int:
        """Poplar's name of `ndim`."""
        return len(self.shape)

    def dim(self, axis: int) -> int:
        """Size of one dimension."""
        return self.shape[axis_of(self, axis)]

    def num_elements(self) -> int:
        """Poplar's name of `size`."""
        return self.size

    def element_type(self) -> Any:
        """Poplar's name of `dtype`."""
        return self.dtype

    def contains_aliases(self) -> bool:
        """Whether an element of memory is seen more than once."""
        return not self.is_writable

    # --- parts ---

    def slices(self, intervals: Iterable[tuple[int, int]], axis: int = 0) -> list[Tensor]:
        """The slices of one dimension by several `(begin, end)`."""
        return [self.slice(begin, end, axis=axis) for begin, end in intervals]

    def index(self, indices: Sequence[int]) -> Tensor:
        """The sub-tensor at an index in each of the first dimensions: `t.index([1, 2])` is `t[1][2]`.

        Raises:
            TensorError: more indices than dimensions, or one out of range.
        """
        counts = self.shape[: len(indices)]
        if len(indices) > self.ndim or any(not 0 <= i < n for i, n in zip(indices, counts, strict=False)):
            raise TensorError(f"index of {self!r}", expected=f"indices below {list(self.shape)}", got=list(indices))
        starts = [*indices, *[0] * (self.ndim - len(indices))]
        limits = [*[i + 1 for i in indices], *self.shape[len(indices) :]]
        return self.slice(starts, limits).reshape(self.shape[len(indices) :])

    def sub_sample(self, stride: int, axis: int) -> Tensor:
        """Every `stride`-th index of one dimension, from 0."""
        axis = axis_of(self, axis)
        if stride < 1:
            raise TensorError(f"sub_sample of {self!r}", expected="stride >= 1", got=stride)
        steps = [1] * self.ndim
        steps[axis] = stride
        return self.slice([0] * self.ndim, self.shape, steps)

    # --- order of dimensions ---

    def dim_shuffle(self, perm: Sequence[int]) -> Tensor:
        """Poplar's name of `transpose`."""
        return self.transpose(perm)

    def dim_shuffle_partial(self, source: Sequence[int], destination: Sequence[int]) -> Tensor:
        """Dimension source[i] becomes dimension destination[i]; the others keep their order in the places left.

        Raises:
            TensorError: numbers that differ in count, name a dimension twice, or are no dimensions.
        """
        given, wanted = ([axis_of(self, axis) for axis in axes] for axes in (source, destination))
        if len(given) != len(wanted) or len(set(given)) < len(given) or len(set(wanted)) < len(wanted):
            expected = "equally many different dimensions"
            raise TensorError(
                f"dim_shuffle_partial of {self!r}", expected=expected, got=(list(source), list(destination))
            )
        others = iter(axis for axis in range(self.ndim) if axis not in given)
        return self.transpose([given[wanted.index(n)] if n in wanted else next(others) for n in range(self.ndim)])

    def dim_roll(self, axis: int, to: int = 0) -> Tensor:
        """Moves one dimension to another place; the others keep their order."""
        return self.dim_shuffle_partial([axis], [to])

    # --- shape ---

    def flatten(self, begin: int = 0, end: int | None = None) -> Tensor:
        """The dimensions from `begin` up to but not including `end` as one, in row-major order; all of them at first.

        Raises:
            TensorError: no such range of dimensions.
        """
        end = self.ndim if end is None else end
        if not 0 <= begin <= end <= self.ndim:
            expected = f"0 <= begin <= end <= {self.ndim}"
            raise TensorError(f"flatten of {self!r}", expected=expected, got=(begin, end))
        return self.reshape((*self.shape[:begin], prod(self.shape[begin:end]), *self.shape[end:]))

    def reshape_partial(self, begin: int, end: int, shape: Sequence[int]) -> Tensor:
        """The dimensions from `begin` up to but not including `end` under another shape of as many elements.

        Raises:
            TensorError: no such range of dimensions, or another number of elements.
        """
        if not 0 <= begin <= end <= self.ndim:
            expected = f"0 <= begin <= end <= {self.ndim}"
            raise TensorError(f"reshape_partial of {self!r}", expected=expected, got=(begin, end))
        return self.reshape((*self.shape[:begin], *shape, *self.shape[end:]))

    def expand(self, axes: Sequence[int]) -> Tensor:
        """New dimensions of size 1, each before a dimension of this; a number may stand several times.

        Raises:
            TensorError: a number outside of 0 … number of dimensions.
        """
        if any(not 0 <= axis <= self.ndim for axis in axes):
            raise TensorError(f"expand of {self!r}", expected=f"0 … {self.ndim}", got=list(axes))
        sizes = [[1] * list(axes).count(axis) + list(self.shape[axis : axis + 1]) for axis in range(self.ndim + 1)]
        return self.reshape(tuple(n for some in sizes for n in some))

    # --- repetition ---

    def broadcast(self, count: int, axis: int = 0) -> Tensor:
        """This `count` times along one dimension: `[a, b]` twice is `[a, b, a, b]`.

        Raises:
            TensorError: no such dimension, or a negative count.
        """
        return self._repeated("broadcast", count, axis, before=True)

    def upsample(self, scale: int, axis: int) -> Tensor:
        """Each index of one dimension `scale` times: `[a, b]` twice is `[a, a, b, b]`.

        Raises:
            TensorError: no such dimension, or a negative scale.
        """
        return self._repeated("upsample", scale, axis, before=False)

    def _repeated(self, name: str, count: int, axis: int, *, before: bool) -> Tensor:
        """A new dimension of `count`, which repeats, before or after one of this, and both as one."""
        axis = axis_of(self, axis)
        if count < 0:
            raise TensorError(f"{name} of {self!r}", expected="a count of at least 0", got=count)
        new = axis if before else axis + 1
        kept = [d for d in range(self.ndim + 1) if d != new]
        repeated = self.broadcast_in_dim((*self.shape[:new], count, *self.shape[new:]), kept)
        return repeated.reshape((*self.shape[:axis], count * self.shape[axis], *self.shape[axis + 1 :]))
