"""Kernels: elementwise operations over one index space as data, and reductions of their values, computed by one vertex.

    kernel    ::= inputs, steps, results, reductions
    input     ::= dtype, the axes of the index space that it runs along (along the others it is repeated), and its
                  first index in a block that several inputs are parts of
    step      ::= operation, operands: numbers of inputs and of earlier steps, or constants by their bits
    reduction ::= number of a value, monoid, the axes it is reduced over

Values are numbered, inputs first. A value that is not a result is never stored. Every step rounds to its own dtype.

`kernel_codelet` makes the codelet of a kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np
from jax import lax

from ipujax.lowering.popops.vertices.reducers import REDUCERS, axes_among

Frozen = tuple[str, bytes]


def freeze(value: np.ndarray) -> Frozen:
    """Hashable bits of a scalar: 0.0 equals -0.0, and True 1, but they are not the same constant."""
    return value.dtype.name, value.tobytes()


def thawed(value: Frozen) -> np.ndarray:
    """Scalar of the bits that `freeze` returned."""
    return np.frombuffer(value[1], jax.numpy.dtype(value[0])).reshape(())


@dataclass(frozen=True, slots=True)
class Op:
    """Elementwise operation: a row of the cost table and a function of equally shaped arrays."""

    name: str  # row of `OP_COSTS`, a JAX primitive name
    fun: Callable[..., jax.Array] = field(compare=False)
    out_dtype: Any
    key: Hashable = None  # distinguishes operations of one name and dtype; the function itself when None
    # Whether the function is the primitive `name` without parameters, and does not only cost the same
    is_primitive: bool = field(default=False, compare=False)

    def __post_init__(self) -> None:
        if self.key is None:
            object.__setattr__(self, "key", self.fun)


@dataclass(frozen=True, slots=True)
class Input:
    """Operand of a kernel.

    Args:
        dtype: its dtype.
        axes: axes of the index space that its dimensions run along.
        field: number of the first input that is part of the same block, which owns the field; None for an input that is
            a block by itself.
        begins: in each dimension its first index in that block; empty for a block by itself.
        reach: in each dimension the elements by which that block is longer than the index space's; empty likewise.
    """

    dtype: Any
    axes: tuple[int, ...]
    field: int | None = None
    begins: tuple[int, ...] = ()
    reach: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Step:
    """Operation of a kernel on values by number and on constants."""

    op: Op
    operands: tuple[int | Frozen, ...]


@dataclass(frozen=True, slots=True)
class Reduction:
    """Value by number, reduced over some axes of the index space by a monoid of `REDUCERS`."""

    value: int
    monoid: str
    axes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Kernel:
    """Elementwise operations over an index space of `rank` dimensions, and reductions of their values."""

    rank: int
    inputs: tuple[Input, ...]
    steps: tuple[Step, ...]
    results: tuple[int, ...]  # numbers of the values that are stored
    reductions: tuple[Reduction, ...] = ()

    @property
    def fields(self) -> dict[int, int]:
        """Number of the field of each input that owns one, by number of the input."""
        owners = [n for n, x in enumerate(self.inputs) if x.field in (None, n)]
        return {number: field for field, number in enumerate(owners)}

    @property
    def result_dtypes(self) -> tuple[Any, ...]:
        """Dtype of each result."""
        return tuple(self.dtype_of(number) for number in self.results)

    @property
    def reduced_dtypes(self) -> tuple[Any, ...]:
        """Dtype of each reduction."""
        return tuple(self.dtype_of(reduction.value) for reduction in self.reductions)

    @property
    def sources(self) -> tuple[frozenset[int], ...]:
        """Numbers of the fields that each result and reduction is computed from."""
        fields = self.fields  # number of the field, by number of the input that owns it
        owners = [number if operand.field is None else operand.field for number, operand in enumerate(self.inputs)]
        sources = [frozenset((fields[owner],)) for owner in owners]
        for step in self.steps:
            sources.append(frozenset().union(*(sources[x] for x in step.operands if isinstance(x, int))))
        return tuple(sources[number] for number in (*self.results, *(r.value for r in self.reductions)))

    def dtype_of(self, value: int | Frozen) -> Any:
        """Dtype of a value or a constant."""
        if not isinstance(value, int):
            return jax.numpy.dtype(value[0])
        inputs = len(self.inputs)
        return self.inputs[value].dtype if value < inputs else self.steps[value - inputs].op.out_dtype

    def with_axes(self, sources: Sequence[Sequence[int]]) -> Kernel | None:
        """Return the kernel over an index space of other axes, see `Codelet.with_axes`; dimensions of inputs follow.

        `sources` has for each new axis the old ones that it joins, in order. None where an input or a reduction has
        some of the joined axes only, so that it cannot be expressed by the new ones.
        """
        inputs = [_on_axes(operand, sources) for operand in self.inputs]
        reduced = [axes_among(reduction.axes, sources) for reduction in self.reductions]
        if None in inputs or None in reduced:
            return None
        reductions = (
            replace(r, axes=axes) for r, axes in zip(self.reductions, reduced, strict=True) if axes is not None
        )
        operands = tuple(operand for operand in inputs if operand is not None)
        return replace(self, rank=len(sources), inputs=operands, reductions=tuple(reductions))

    def evaluate(self, arrays: Sequence[jax.Array], shape: tuple[int, ...]) -> list[jax.Array]:
        """Computes the kernel on one block of the index space, in JAX: the results, then the reductions.

        Args:
            arrays: the block of each field that is read, by number of the field.
            shape: shape of the index space's block, which inputs that lack some of its axes are broadcast to.
        """
        fields = self.fields  # number of the field, by number of the input that owns it
        values: list[jax.Array] = []
        for number, operand in enumerate(self.inputs):
            owner = number if operand.field is None else operand.field
            x = arrays[fields[owner]]
            if operand.field is not None:  # one of several inputs that are parts of one block
                ends = [first + n for first, n in zip(operand.begins, shape, strict=True)]
                x = lax.slice(x, operand.begins, ends)
            values.append(lax.broadcast_in_dim(x, shape, operand.axes) if len(operand.axes) < self.rank else x)
        for step in self.steps:
            operands = (values[x] if isinstance(x, int) else lax.full(shape, thawed(x)) for x in step.operands)
            values.append(step.op.fun(*operands))
        reduced = [REDUCERS[r.monoid](values[r.value], axes=r.axes) for r in self.reductions]
        return [*(values[number] for number in self.results), *reduced]


def _on_axes(operand: Input, sources: Sequence[Sequence[int]]) -> Input | None:
    """An input of a kernel over new axes, each of which joins the old ones of `sources`; None where it cannot be."""
    axes = axes_among(operand.axes, sources)
    if axes is None or not (operand.begins or operand.reach):
        return None if axes is None else replace(operand, axes=axes)
    # An input that is a part of a longer block keeps its dimensions.
    if len(axes) != len(operand.axes) or any(len(sources[axis]) > 1 for axis in axes):
        return None
    dims = [operand.axes.index(sources[axis][0]) for axis in axes]
    begins = tuple(operand.begins[dim] for dim in dims) if operand.begins else ()
    reach = tuple(operand.reach[dim] for dim in dims) if operand.reach else ()
    return replace(operand, axes=axes, begins=begins, reach=reach)
