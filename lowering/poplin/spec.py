"""What a convolution is, apart from where it runs: extents, strides, dilations, dtypes.

A matrix multiplication is the convolution of a one-dimensional field with a kernel of one element: groups are conv
groups, rows the field, the inner dimension input channels, columns output channels. Source: poplibs `MatMul.cpp`
(reference machine.md §2).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import numpy as np

from ipujax.lowering.poplin.cycles import Precision
from ipujax.runtime.target import Target

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
        """The inverse of iterating."""
        rank = (len(values) - 4) // 2
        batch, groups, out_channels, in_channels, *rest = values
        return Dims(batch, groups, out_channels, in_channels, tuple(rest[:rank]), tuple(rest[rank:]))

    def __iter__(self) -> Iterator[T]:
        yield from (self.batch, self.groups, self.out_channels, self.in_channels, *self.field, *self.kernel)


Memory = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class ConvSpec:
    """A convolution.

    Args:
        extents: batch, groups, channels of one group, output field and kernel, in elements.
        in_field: input field, in elements.
        strides: of the window, one for each field dimension.
        lhs_dilation: of the input field.
        rhs_dilation: of the kernel.
        lhs_dtype: dtype of the activations.
        rhs_dtype: dtype of the weights.
        out_dtype: dtype of the result.
        partials_dtype: dtype of the partial results when a reduced dimension is split.
        lhs_is_free: whether the plan decides where the activations lie, so that tiles hold what they use of them.
        rhs_is_free: the same of the weights.
        lhs_memory: how the activations are kept, outermost first: which of batch, groups, channels and field, by
            number, and how many of it; empty where that is not known.
        rhs_memory: the same of the weights: groups, output and input channels, kernel.
    """

    extents: Dims[int]
    in_field: tuple[int, ...]
    strides: tuple[int, ...]
    lhs_dilation: tuple[int, ...]
    rhs_dilation: tuple[int, ...]
    lhs_dtype: Any
    rhs_dtype: Any
    out_dtype: Any
    partials_dtype: Any
    lhs_is_free: bool = False
    rhs_is_free: bool = False
    lhs_memory: Memory = ()
    rhs_memory: Memory = ()

    @property
    def is_1x1(self) -> bool:
        """Whether the kernel is one element."""
        return all(n == 1 for n in self.extents.kernel)

    @property
    def code(self) -> ConvSpec:
        """The convolution with extents of no meaning: what convolutions computed by the same codelet have in common."""
        rank = len(self.in_field)
        extents, in_field = Dims.of((1,) * (4 + 2 * rank)), (_ANY_EXTENT,) * rank
        return replace(self, extents=extents, in_field=in_field, lhs_is_free=False, rhs_is_free=False)


_ANY_EXTENT = 2**62  # clips no block


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """How a target multiplies and adds the operands of a convolution.

    Args:
        precision: of the AMP and vector codelets; None when only a scalar loop can do it.
        instructions_per_mac: of that scalar loop.
        casts: whether operands are first cast to the precision, on the tile.
    """

    precision: Precision | None
    instructions_per_mac: int
    casts: bool


# Instructions of a multiply-add in a C++ codelet, by kind and size of the dtype. 4 is measured (the tutorial's dot
# product, reference); the others are assumed: 64-bit integers as four 32-bit products, complex likewise, doubles in
# software.
_MAC_INSTRUCTIONS = {("i", 8): 16, ("u", 8): 16, ("f", 8): 64, ("c", 8): 16, ("c", 16): 256}


def arithmetic(spec: ConvSpec, target: Target) -> Arithmetic:
    """How the operands of `spec` are multiplied on `target`."""
    return arithmetic_of(spec.lhs_dtype, spec.rhs_dtype, target)


def arithmetic_of(lhs_dtype: Any, rhs_dtype: Any, target: Target) -> Arithmetic:
    """How two dtypes are multiplied on `target`: half and float by the AMP, small floats through float."""
    dtypes = [np.dtype(lhs_dtype), np.dtype(rhs_dtype)]
    wide = max(dtypes, key=lambda dtype: dtype.itemsize)
    is_float = [dtype.kind in "fV" for dtype in dtypes]  # kind V: bfloat16 and 8-bit floats
    if not all(is_float) or wide.itemsize > 4:
        return Arithmetic(None, _MAC_INSTRUCTIONS.get((wide.kind, wide.itemsize), 4), False)
    if all(dtype == np.float16 for dtype in dtypes) and "float16" in target.native_dtypes:
        return Arithmetic("half", 4, False)
    return Arithmetic("float", 4, any(dtype != np.float32 for dtype in dtypes))
