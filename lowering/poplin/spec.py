"""Convolutions independently of tiles: extents, strides, dilations, dtypes.

A `Window` is the index map from outputs and kernel elements to the input along one dimension.

A matrix multiplication is the convolution of a one-dimensional field with a kernel of one element: groups are conv
groups, rows the field, the inner dimension input channels, columns output channels. Source: poplibs `MatMul.cpp`
(reference machine.md §2).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import gcd
from typing import Any, Generic, TypeVar

import numpy as np

from ipujax.lowering.poplin.cycles import Precision
from ipujax.runtime.target import Target
from ipujax.runtime.tensor import dtype_name, element_bytes


@dataclass(frozen=True, slots=True)
class Window:
    """Index map from outputs and kernel elements to the input along one dimension.

    Output y and kernel element k meet the input element `(y · stride + k · rhs_dilation − padding[0]) / lhs_dilation`,
    or zero where there is none.

    Args:
        size: elements of the input.
        kernel: elements of the kernel.
        padding: elements before and after the dilated input; removed where negative.
        stride: distance of neighbouring outputs, in elements of the dilated input.
        lhs_dilation: distance of neighbouring elements of the input, likewise.
        rhs_dilation: distance of neighbouring elements of the kernel, likewise.
    """

    size: int
    kernel: int
    padding: tuple[int, int]
    stride: int
    lhs_dilation: int
    rhs_dilation: int

    @property
    def outputs(self) -> int:
        """Number of outputs."""
        dilated = (self.size - 1) * self.lhs_dilation + 1 if self.size else 0
        window = (self.kernel - 1) * self.rhs_dilation + 1 if self.kernel else 0
        return max(0, (dilated + sum(self.padding) - window) // self.stride + 1)

    def without_skipped(self) -> tuple[int, int, Window]:
        """Returns first element and step of the input that windows meet, and the window over these elements.

        Where the steps of outputs and of the kernel have a common divisor, windows step over elements. The padding
        after the input has no meaning in the new window.
        """
        # Of outputs and of the kernel, in elements of the input; 0 for a single one, which takes no step.
        steps = (self.stride if self.outputs > 1 else 0, self.rhs_dilation if self.kernel > 1 else 0)
        step = gcd(*steps)
        if self.lhs_dilation > 1 or step == 1 or self.size == 0:
            return 0, 1, self  # all elements, from 0 in steps of 1
        low = self.padding[0]
        if step == 0:  # one output, one kernel element: at most one input element
            step = self.size
        start = -low % step  # the first window begins `low` elements before the input
        if start >= self.size:
            return 0, 1, self
        size = len(range(start, self.size, step))
        stride, dilation = (max(1, n // step) for n in steps)
        return (
            start,
            step,
            replace(self, size=size, padding=((low + start) // step, 0), stride=stride, rhs_dilation=dilation),
        )


T = TypeVar("T")


# Positions in `Dims`: its first four members, then the field and the kernel.
BATCH, GROUPS, OUT_CHANNELS, IN_CHANNELS, FIELD = range(5)


@dataclass(frozen=True, slots=True)
class Dims(Generic[T]):
    """One value for each dimension of a convolution: extents, numbers of blocks, grains, lengths of a block…"""

    batch: T
    groups: T
    out_channels: T
    in_channels: T
    field: tuple[T, ...]
    kernel: tuple[T, ...]

    @staticmethod
    def of(values: Sequence[T]) -> Dims[T]:
        """Inverse of iteration."""
        rank = (len(values) - 4) // 2
        batch, groups, out_channels, in_channels, *spatial = values
        return Dims(batch, groups, out_channels, in_channels, tuple(spatial[:rank]), tuple(spatial[rank:]))

    def __iter__(self) -> Iterator[T]:
        yield from (self.batch, self.groups, self.out_channels, self.in_channels, *self.field, *self.kernel)


# Axis and size of each dimension of an operand's memory order, outermost first; empty where it is not known.
Memory = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Rearranged:
    """Operands and result of a plan that are in another order than the layer keeps them, see `poplin.rearranged`."""

    lhs: bool
    rhs: bool
    result: bool
    # Channels of a row of activations, weights and results that are no whole vectors; 0 for rows of whole vectors
    rows: tuple[int, int, int] = (0, 0, 0)
    has_halo: bool = False  # whether activations of larger kernels are put together in one piece, as the AMP reads them


@dataclass(frozen=True, slots=True)
class ConvSpec:
    """Parameters of a convolution that planning depends on."""

    extents: Dims[int]  # batch, groups, channels of one group, output field and kernel, in elements
    in_field: tuple[int, ...]  # input field, in elements
    strides: tuple[int, ...]  # stride of the window, one for each field dimension
    lhs_dilation: tuple[int, ...]  # dilation of the input field
    rhs_dilation: tuple[int, ...]  # dilation of the kernel
    lhs_dtype: np.dtype[Any]  # of the activations
    rhs_dtype: np.dtype[Any]  # of the weights
    out_dtype: np.dtype[Any]
    partials_dtype: np.dtype[Any]  # of the partial results when a reduced dimension is split
    # Whether the plan maps the activations to tiles, so that tiles store some of their operands
    lhs_is_free: bool = False
    rhs_is_free: bool = False  # whether the plan maps the weights
    # Memory order of the activations; axes are batch, groups, channels and field, by number
    lhs_memory: Memory = ()
    # Memory order of the weights; axes are groups, output and input channels, kernel, by number
    rhs_memory: Memory = ()
    is_product: bool = False  # whether it is a matrix multiplication, whose layer has operands swapped
    # Data that the vertices of a chosen plan copy; None if the extents decide it
    rearranged: Rearranged | None = None

    @property
    def is_1x1(self) -> bool:
        """True if the kernel is one element."""
        return all(n == 1 for n in self.extents.kernel)

    @property
    def vertex_dtype(self) -> np.dtype[Any]:
        """Dtype that vertices write where nothing is combined: that of partials, if results are cast to a narrower one.

        Source: poplibs `poplin/Convolution.cpp`: partials that are not reduced are cast in a compute set of their own.
        """
        is_cast = element_bytes(self.partials_dtype) > element_bytes(self.out_dtype)
        return self.partials_dtype if is_cast else self.out_dtype

    @property
    def code(self) -> ConvSpec:
        """Key of the codelet: this convolution with meaningless extents, equal for all whose vertices have one code."""
        rank = len(self.in_field)
        return replace(
            self,
            extents=Dims.of((1,) * (4 + 2 * rank)),
            in_field=(_ANY_EXTENT,) * rank,
            lhs_is_free=False,
            rhs_is_free=False,
        )


_ANY_EXTENT = 2**62  # clips no block


# Instructions of a multiply-add in a C++ codelet, by kind and size of the dtype. 4, of other dtypes, is measured (the
# tutorial's dot product, reference); the others are assumed: 64-bit integers as four 32-bit products, complex likewise,
# doubles in software.
_MAC_INSTRUCTIONS = {("i", 8): 16, ("u", 8): 16, ("f", 8): 64, ("c", 8): 16, ("c", 16): 256}
_FEWEST_MAC_INSTRUCTIONS = 4


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """Arithmetic of a target on the operands of a convolution."""

    # Precision of the AMP and vector codelets; None when only a scalar loop has the dtypes
    precision: Precision | None
    casts: bool  # whether operands are first cast to the precision, on the tile
    instructions_per_mac: int = _FEWEST_MAC_INSTRUCTIONS  # instructions of a multiply-add of that scalar loop


def arithmetic(spec: ConvSpec, target: Target) -> Arithmetic:
    """Arithmetic on the operands of `spec`."""
    return arithmetic_of(spec.lhs_dtype, spec.rhs_dtype, target)


def arithmetic_of(lhs_dtype: Any, rhs_dtype: Any, target: Target) -> Arithmetic:
    """Arithmetic on two dtypes: half and float by the AMP, small floats that the target lacks through float."""
    dtypes = [np.dtype(lhs_dtype), np.dtype(rhs_dtype)]
    wide = max(dtypes, key=lambda dtype: dtype.itemsize)
    is_native = [dtype_name(dtype) in target.native_dtypes for dtype in dtypes]
    is_float = [dtype.kind in "fV" for dtype in dtypes]  # kind V: bfloat16 and 8-bit floats
    if not all(is_float) or wide.itemsize > 4:
        emulated = _MAC_INSTRUCTIONS.get((wide.kind, wide.itemsize), _FEWEST_MAC_INSTRUCTIONS)
        instructions = _FEWEST_MAC_INSTRUCTIONS if all(is_native) else emulated
        return Arithmetic(precision=None, casts=False, instructions_per_mac=instructions)
    if wide.itemsize == np.dtype(np.float16).itemsize and all(is_native):
        return Arithmetic("half", casts=False)
    return Arithmetic("float", casts=any(dtype != np.float32 for dtype in dtypes))
