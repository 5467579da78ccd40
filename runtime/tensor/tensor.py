"""Tensors: views of parts of variables, with no data moved.

Input: variables, and view operations with Poplar's names in snake_case or NumPy's and JAX's (`tensor_base`). Output:
`Tensor`; `read` and `write` move data with JAX. `substitute` replaces variables in time proportional to the pieces of
a view, not to its elements.
Source: poplar::Tensor (Poplar API reference, class Tensor).
Limits: no `reinterpret`: an element has the type of its variable.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import jax
import numpy as np

from ipujax.runtime.errors import TensorError
from ipujax.runtime.tensor.access import piece_covers, read_node, write_node
from ipujax.runtime.tensor.affine import Affine, row_major
from ipujax.runtime.tensor.aliasing import leaves
from ipujax.runtime.tensor.tensor_base import TensorBase, axis_of
from ipujax.runtime.tensor.variable import Variable, dtype_name
from ipujax.runtime.tensor.view import Concat, Indexed, Node, Reshaped, concat_nodes

Substitution = Mapping[
    Variable, Variable
]  # one to one: a view of two variables that became one would show elements twice


class Tensor(TensorBase):
    """View of parts of variables; equal only to itself. Made by `Tensor.of`, `concat` and the methods."""

    __slots__ = ()

    @staticmethod
    def of(variable: Variable) -> Tensor:
        """Return the view of all of a variable, in its own shape."""
        return Tensor(row_major(variable), variable.shape, variable.dtype)

    # --- queries ---

    def rank(self) -> int:
        """Return `ndim`, under Poplar's name."""
        return len(self.shape)

    def dim(self, axis: int) -> int:
        """Return the size of one dimension."""
        return self.shape[axis_of(self, axis)]

    def num_elements(self) -> int:
        """Return `size`, under Poplar's name."""
        return self.size

    def element_type(self) -> Any:
        """Return `dtype`, under Poplar's name."""
        return self.dtype

    def contains_aliases(self) -> bool:
        """Check whether the view has an element of memory more than once."""
        return not self.is_writable

    # --- parts ---

    def slices(self, intervals: Iterable[tuple[int, int]], axis: int = 0) -> list[Tensor]:
        """Return the slices of one dimension by several `(begin, end)`."""
        return [self.slice(begin, end, axis=axis) for begin, end in intervals]

    def index(self, indices: Sequence[int]) -> Tensor:
        """Return the sub-tensor at an index in each of the first dimensions: `t.index([1, 2])` is `t[1][2]`.

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
        """Select every `stride`-th index of one dimension, from 0."""
        axis = axis_of(self, axis)
        if stride < 1:
            raise TensorError(f"sub_sample of {self!r}", expected="stride >= 1", got=stride)
        steps = [1] * self.ndim
        steps[axis] = stride
        return self.slice([0] * self.ndim, self.shape, steps)

    # --- order of dimensions ---

    def dim_shuffle(self, perm: Sequence[int]) -> Tensor:
        """Transpose, under Poplar's name."""
        return self.transpose(perm)

    def dim_shuffle_partial(self, source: Sequence[int], destination: Sequence[int]) -> Tensor:
        """Move dimension source[i] to destination[i]; the others fill the remaining places in order.

        Raises:
            TensorError: numbers that differ in count, name a dimension twice, or are no dimensions.
        """
        old, new = ([axis_of(self, axis) for axis in axes] for axes in (source, destination))
        if len(old) != len(new) or len(set(old)) < len(old) or len(set(new)) < len(new):
            expected = "equally many different dimensions"
            raise TensorError(
                f"dim_shuffle_partial of {self!r}", expected=expected, got=(list(source), list(destination))
            )
        remaining = iter(axis for axis in range(self.ndim) if axis not in old)
        return self.transpose([old[new.index(n)] if n in new else next(remaining) for n in range(self.ndim)])

    def dim_roll(self, axis: int, to: int = 0) -> Tensor:
        """Move one dimension to another position; the others stay in order."""
        return self.dim_shuffle_partial([axis], [to])

    # --- shape ---

    def flatten(self, begin: int = 0, end: int | None = None) -> Tensor:
        """Join the dimensions from `begin` up to but not including `end` in row-major order; all of them by default.

        Raises:
            TensorError: no such range of dimensions.
        """
        end = self.ndim if end is None else end
        if not 0 <= begin <= end <= self.ndim:
            expected = f"0 <= begin <= end <= {self.ndim}"
            raise TensorError(f"flatten of {self!r}", expected=expected, got=(begin, end))
        return self.reshape((*self.shape[:begin], prod(self.shape[begin:end]), *self.shape[end:]))

    def reshape_partial(self, begin: int, end: int, shape: Sequence[int]) -> Tensor:
        """Reshape the dimensions from `begin` up to but not including `end`.

        Raises:
            TensorError: no such range of dimensions, or another number of elements.
        """
        if not 0 <= begin <= end <= self.ndim:
            expected = f"0 <= begin <= end <= {self.ndim}"
            raise TensorError(f"reshape_partial of {self!r}", expected=expected, got=(begin, end))
        return self.reshape((*self.shape[:begin], *shape, *self.shape[end:]))

    def expand(self, axes: Sequence[int]) -> Tensor:
        """Insert dimensions of size 1, each before a dimension of this; a number may occur several times.

        Raises:
            TensorError: a number outside of 0 … number of dimensions.
        """
        if any(not 0 <= axis <= self.ndim for axis in axes):
            raise TensorError(f"expand of {self!r}", expected=f"0 … {self.ndim}", got=list(axes))
        sizes = [[1] * list(axes).count(axis) + list(self.shape[axis : axis + 1]) for axis in range(self.ndim + 1)]
        return self.reshape(tuple(n for group in sizes for n in group))

    # --- repetition ---

    def broadcast(self, count: int, axis: int = 0) -> Tensor:
        """Repeat the tensor `count` times along one dimension: `[a, b]` twice is `[a, b, a, b]`.

        Raises:
            TensorError: no such dimension, or a negative count.
        """
        return self._repeated("broadcast", count, axis, before=True)

    def upsample(self, scale: int, axis: int) -> Tensor:
        """Repeat each index of one dimension `scale` times: `[a, b]` twice is `[a, a, b, b]`.

        Raises:
            TensorError: no such dimension, or a negative scale.
        """
        return self._repeated("upsample", scale, axis, before=False)

    def _repeated(self, name: str, count: int, axis: int, *, before: bool) -> Tensor:
        """Insert a broadcast dimension of `count` before or after one of this, and join the two."""
        axis = axis_of(self, axis)
        if count < 0:
            raise TensorError(f"{name} of {self!r}", expected="a count of at least 0", got=count)
        new = axis if before else axis + 1  # a repeated block is outside of the dimension, a repeated index inside
        old_axes = [d for d in range(self.ndim + 1) if d != new]
        repeated = self.broadcast_in_dim((*self.shape[:new], count, *self.shape[new:]), old_axes)
        return repeated.reshape((*self.shape[:axis], count * self.shape[axis], *self.shape[axis + 1 :]))


def concat(tensors: Sequence[Tensor], axis: int = 0) -> Tensor:
    """Concatenate tensors along one dimension.

    Args:
        tensors: at least one; of one dtype, and of one shape but for `axis`.
        axis: dimension, counted from the end when negative.

    Raises:
        TensorError: no tensors, or ones that differ in dtype, in another dimension, or in their graph.
    """
    if isinstance(tensors, Tensor) or not isinstance(axis, int | np.integer):
        raise TensorError("concat of tensors that are not in a list", expected="concat([first, second], axis)")
    if not tensors:
        raise TensorError("concat of no tensors", expected="at least one tensor")
    first = tensors[0]
    if not isinstance(first, Tensor):
        raise TensorError("concat of other values than tensors", expected="tensors", got=repr(first))
    axis = axis_of(first, axis)
    for tensor in tensors:
        fits = isinstance(tensor, Tensor) and tensor.ndim == first.ndim and tensor.dtype == first.dtype
        if not fits or any(a != b for i, (a, b) in enumerate(zip(tensor.shape, first.shape, strict=True)) if i != axis):
            raise TensorError(f"concat along dimension {axis}", expected=f"shape and dtype like {first!r}", got=tensor)
        if tensor.variables()[0].owner is not first.variables()[0].owner:
            expected = f"tensors of the graph of {first!r}"
            raise TensorError(f"concat: {tensor!r} belongs to another graph", expected=expected, got=tensor)
    shape = (*first.shape[:axis], sum(tensor.shape[axis] for tensor in tensors), *first.shape[axis + 1 :])
    return first if len(tensors) == 1 else Tensor(concat_nodes(axis, [t.node for t in tensors]), shape, first.dtype)


def append(first: Tensor, second: Tensor, axis: int = 0) -> Tensor:
    """Append a tensor of one dimension less as the last index along one dimension.

    Raises:
        TensorError: shapes that do not fit.
    """
    return concat([first, second.expand([axis_of(first, axis)])], axis)


def read(tensor: Tensor, values: Mapping[Variable, jax.Array]) -> jax.Array:
    """Read the elements of a tensor.

    Args:
        tensor: view of the variables.
        values: for each of its variables v an array of v.shape; may be traced.

    Returns:
        An array of tensor.shape; values[v] itself when the tensor is the whole variable in its own shape.

    Raises:
        TensorError: a variable without a value, or a value of another shape.
    """
    for variable in tensor.variables():
        _check_value(tensor, variable, values)
    return read_node(tensor.node, values)


def write(tensor: Tensor, values: Mapping[Variable, jax.Array], new: jax.Array) -> dict[Variable, jax.Array]:
    """Return the arrays of the variables after `new` is written to a tensor; `values` stays unchanged.

    Args:
        tensor: a writable view: each element of memory at most once.
        values: arrays of the tensor's variables; not needed for one that a single piece overwrites.
        new: array of the tensor's shape and dtype.

    Returns:
        For each variable of the tensor, its array after the write.

    Raises:
        TensorError: a tensor that is not writable, or arrays of another shape or dtype.
    """
    if not tensor.is_writable:
        raise TensorError(
            f"write to {tensor!r}",
            expected="each element of memory once",
            got="a broadcast or overlapping pieces",
            hint="copy it to a variable of its own",
        )
    if tuple(new.shape) != tensor.shape or new.dtype != tensor.dtype:
        got = f"{dtype_name(new.dtype)}{list(new.shape)}"
        raise TensorError(f"write to {tensor!r}", expected=f"{dtype_name(tensor.dtype)}{list(tensor.shape)}", got=got)
    # A variable that one piece overwrites needs no value: it may be uninitialised.
    for leaf in leaves(tensor.node):
        if not (isinstance(leaf, Affine) and piece_covers(leaf)):
            for variable in leaf.variables:
                _check_value(tensor, variable, values)
    return write_node(tensor.node, values, new)


def _check_value(tensor: Tensor, variable: Variable, values: Mapping[Variable, jax.Array]) -> None:
    if variable not in values:
        raise TensorError(f"no value of {variable!r} for {tensor!r}", expected=f"an array of shape {variable.shape}")
    if tuple(values[variable].shape) != variable.shape:
        raise TensorError(f"value of {variable!r}", expected=variable.shape, got=tuple(values[variable].shape))


def substitute(tensor: Tensor, table: Substitution) -> Tensor:
    """Return a tensor with the variables in `table`, which are distinct, replaced; itself if it has none of them."""
    if not any(variable in table for variable in tensor.variables()):
        return tensor
    return Tensor(_substituted(tensor.node, table), tensor.shape, tensor.dtype)


def _substituted(node: Node, table: Substitution) -> Node:
    """Return a view of other variables, with the same indices."""
    match node:
        case Affine(variable):
            return replace(node, variable=table.get(variable, variable))
        case Concat(_, parts):
            return replace(node, parts=tuple(_substituted(part, table) for part in parts))
        case Reshaped(source):
            inner = _substituted(source, table)
            assert isinstance(inner, (Affine, Concat)), "a substitution keeps the kind of a node"
            return replace(node, source=inner)
        case Indexed(variables):
            return replace(node, variables=tuple(table.get(v, v) for v in variables))
    raise AssertionError(f"unknown view {node!r}")
