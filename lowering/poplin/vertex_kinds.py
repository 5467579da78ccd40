"""Kinds of vertices of a convolution, as a table: applicability, grains, cost.

Source: the vertex types and transforms of poplibs `lib/poplin/ConvPlan.cpp`, `ConvModel.cpp` (reference machine.md §2).
"Swapped" kinds exchange the roles of activations and weights; "expanded" kinds gather the kernel's windows into input
channels on the tile (PopLibs' expandDims), which pays when channels are few or the kernel is larger than the field.
Limits: the zeros around the field that a SLIC vertex reads are there for free; a dilated input has the cost of its
non-zero elements.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from ipujax.lowering.layout import GROUP_CHANNELS
from ipujax.lowering.poplin import cycles as formula
from ipujax.lowering.poplin.cycles import Count, ceil_div, product
from ipujax.lowering.poplin.spec import (
    BATCH,
    FIELD,
    IN_CHANNELS,
    OUT_CHANNELS,
    Arithmetic,
    ConvSpec,
    Dims,
    Memory,
    arithmetic,
)
from ipujax.lowering.popops.vertices.elementwise_cycles import elementwise_cycles
from ipujax.runtime.cache import number_values
from ipujax.runtime.graph import Language
from ipujax.runtime.target import Target
from ipujax.runtime.tensor import element_bytes

Block = Dims[Count]
Cost = Callable[[ConvSpec, Block, Target, Arithmetic], Count]


@dataclass(frozen=True, slots=True)
class VertexKind:
    """Kind of vertex that computes a block of a convolution."""

    name: str  # PopLibs' name of the codelet, shown in profiles
    applies: Callable[[ConvSpec, Arithmetic], bool]  # whether it can compute a convolution, from its arithmetic
    cycles: Cost  # tile cycles of a block
    uses_amp: bool = False  # whether channels are cut in blocks of the AMP
    is_swapped: bool = False  # whether output elements take the role of output channels, and vice versa
    is_expanded: bool = False  # whether the kernel is first gathered into input channels
    is_combined: bool = False  # whether groups are put beside each other in blocks of the AMP, with zeros between them
    is_wide: bool = False  # whether it multiplies at the rate of the AMP, without its blocks of channels
    language: Language = "assembly"  # of PopLibs' codelet


def block_cycles(kind: VertexKind, spec: ConvSpec, block: Block, target: Target) -> Count:
    """Tile cycles of a vertex, casts of operands included.

    Args:
        kind: kind of the vertex, which has the formula.
        spec: the convolution; of its extents only those that `block` does not have are used.
        block: lengths of the block that the vertex computes, int64 arrays with one entry a candidate.
        target: the machine.
    """
    arith = arithmetic(spec, target)
    total = kind.cycles(spec, block, target, arith)
    if arith.casts:
        elements = np.asarray(product(input_lengths(spec, block)) + product(weight_lengths(block)))
        total = total + elementwise_cycles(
            "convert_element_type", np.float32, operands=1, immediates=0, elements=elements, target=target
        )
    return total


def input_lengths(spec: ConvSpec, block: Block) -> tuple[Count, ...]:
    """Lengths of the activations that a block reads: batch, groups, channels and field."""
    field = []
    for d, size in enumerate(spec.in_field):
        hull = (block.field[d] - 1) * spec.strides[d] + (block.kernel[d] - 1) * spec.rhs_dilation[d] + 1
        field.append(np.minimum(ceil_div(hull, spec.lhs_dilation[d]), size))
    return block.batch, block.groups, block.in_channels, *field


def weight_lengths(block: Block) -> tuple[Count, ...]:
    """Lengths of the weights that a block reads."""
    return block.groups, block.out_channels, block.in_channels, *block.kernel


def output_lengths(block: Block) -> tuple[Count, ...]:
    """Lengths of the results of a block."""
    return block.batch, block.groups, block.out_channels, *block.field


def gathered_bytes(kind: VertexKind, spec: ConvSpec, block: Block) -> Count:
    """Bytes of the windows that an expanded kind gathers on the tile, 0 for others."""
    if not kind.is_expanded:
        return np.int64(0)
    windows = product((block.batch, block.groups, block.in_channels, *block.field, *_useful_kernel(spec, block)))
    return windows * element_bytes(spec.lhs_dtype)


def grains(kind: VertexKind, spec: ConvSpec, target: Target, *, in_groups: bool = False) -> Dims[int]:
    """Number of which cuts of each dimension are multiples, so that no unit of a vertex of the kind is idle.

    With `in_groups` cuts are multiples of the channel groups, too, in which the operands are stored.
    """
    grain = _kind_grains(kind, spec, target, in_groups=in_groups)
    if not in_groups:
        return grain
    # Half a group is an exchange fragment for each element of the dimension around it. By position in `Dims`.
    sizes = {**_group_size(spec.rhs_memory, _WEIGHTS), **_group_size(spec.lhs_memory, _rows_of(spec))}
    return Dims.of([max(n, sizes.get(axis, 1)) for axis, n in enumerate(grain)])


def _kind_grains(kind: VertexKind, spec: ConvSpec, target: Target, *, in_groups: bool) -> Dims[int]:
    """Block lengths that leave no unit of a vertex idle: channels of the AMP, rows where operands are swapped; else 1.

    Output channels are stored in groups, which are never cut; input channels with `in_groups` only.
    """
    arith = arithmetic(spec, target)
    extents = spec.extents
    ones = Dims.of((1,) * (4 + 2 * len(extents.field)))  # batch, groups, two of channels, field and kernel
    outs = _channel_group(extents.out_channels)
    ins = _channel_group(extents.in_channels) if in_groups else 1
    if not kind.uses_amp:
        return replace(ones, out_channels=outs, in_channels=ins)
    assert arith.precision is not None, "AMP kinds apply to half and float only"
    amp = formula.amp_block(target, arith.precision)
    # An expanded kind turns elements of the kernel into input channels, which fill the units where channels are few.
    if extents.in_channels >= amp.in_channels or not kind.is_expanded:
        ins = max(ins, amp.in_channels)
    if not kind.is_swapped:
        return Dims(1, 1, max(outs, amp.out_channels), ins, ones.field, ones.kernel)
    # Swapped, rows of the activations are the output channels of the AMP: the longest dimension fills its units.
    rows = [extents.batch, *extents.field]
    longest = max(range(len(rows)), key=rows.__getitem__)
    batch_grain, *field_grains = (min(amp.out_channels, n) if d == longest else 1 for d, n in enumerate(rows))
    return Dims(batch_grain, 1, outs, ins, tuple(field_grains), ones.kernel)


_WEIGHTS = {1: OUT_CHANNELS, 2: IN_CHANNELS}  # dimension of the weights → position in `Dims`


def _rows_of(spec: ConvSpec) -> dict[int, int]:
    """Dimensions of the activations whose blocks are blocks of a position in `Dims`: others have windows."""
    pairs = enumerate(zip(spec.extents.kernel, spec.strides, spec.lhs_dilation, strict=True))
    return {0: BATCH, 2: IN_CHANNELS, **{3 + d: FIELD + d for d, sizes in pairs if sizes == (1, 1, 1)}}


def _group_size(memory: Memory, positions: Mapping[int, int]) -> dict[int, int]:
    """Size of the groups of the dimension that an operand stores in groups, by position in `Dims`.

    Empty where the innermost dimension of its memory is not a part of another one.
    """
    axes = [axis for axis, _ in memory]
    inner, size = memory[-1] if memory else (-1, 1)
    return {positions[inner]: size} if axes.count(inner) > 1 and inner in positions else {}


def _channel_group(channels: int) -> int:
    return GROUP_CHANNELS if channels > GROUP_CHANNELS and channels % GROUP_CHANNELS == 0 else 1


def _useful_kernel(spec: ConvSpec, block: Block) -> tuple[Count, ...]:
    """Kernel lengths that meet non-zero elements of a dilated input."""
    return tuple(ceil_div(n, dilation) for n, dilation in zip(block.kernel, spec.lhs_dilation, strict=True))


def _rows(block: Block) -> Count:
    return block.batch * product(block.field)


def _amp_1x1(spec: ConvSpec, block: Block, target: Target, arith: Arithmetic) -> Count:
    return _amp(spec, block, target, arith, _rows(block), block.out_channels)


def _amp_1x1_swapped(spec: ConvSpec, block: Block, target: Target, arith: Arithmetic) -> Count:
    return _amp(spec, block, target, arith, block.out_channels, _rows(block))


def _amp(spec: ConvSpec, block: Block, target: Target, arith: Arithmetic, rows: Count, out_channels: Count) -> Count:
    """Cycles of a vertex for kernels of one element, or whose kernel is gathered into input channels.

    `rows` and `out_channels` are those of the block, or exchanged where the operands are.
    """
    return formula.amp_1x1_cycles(
        target,
        _precision(arith),
        rows=rows,
        in_channels=block.in_channels * product(_useful_kernel(spec, block)),
        out_channels=out_channels,
        groups=block.groups,
        half_sums=sums_in_half(spec),
    )


def sums_in_half(spec: ConvSpec) -> bool:
    """True if partial results are half precision."""
    return element_bytes(spec.partials_dtype) == _HALF_BYTES


_HALF_BYTES = 2


def _amp_nx1(spec: ConvSpec, block: Block, target: Target, arith: Arithmetic) -> Count:
    """Cycles of an AMP vertex for larger kernels, whose elements are read one after the other."""
    rows, width = _rows_and_width(spec, block)
    return formula.amp_nx1_cycles(
        target,
        _precision(arith),
        rows=rows,
        width=width,
        kernel=block.kernel,
        in_channels=block.in_channels,
        out_channels=block.out_channels,
        groups=block.groups,
        half_sums=sums_in_half(spec),
    )


def _amp_combined(spec: ConvSpec, block: Block, target: Target, arith: Arithmetic) -> Count:
    """Cycles where as many groups are put beside each other as fill the input channels of an AMP block.

    The vertex computes them as one group with `factor` times the channels, with zeros as weights between groups.
    """
    amp = formula.amp_block(target, _precision(arith))
    factor = amp.in_channels // max(1, spec.extents.in_channels)
    combined = replace(
        block,
        groups=ceil_div(block.groups, factor),
        in_channels=block.in_channels * factor,
        out_channels=block.out_channels * factor,
    )
    return _amp_nx1(spec, combined, target, arith)


def _hmac(spec: ConvSpec, block: Block, target: Target, arith: Arithmetic) -> Count:
    """Cycles of a dot product vertex without AMP."""
    rows, width = _rows_and_width(spec, block)
    return formula.hmac_cycles(
        target,
        _precision(arith),
        rows=rows,
        width=width,
        # All of them, also for a dilated input: rows and width have only the outputs that one of them meets.
        kernel_positions=product(block.kernel),
        in_channels=block.in_channels,
        out_channels=block.out_channels,
        groups=block.groups,
        half_sums=sums_in_half(spec),
    )


def _vmac(spec: ConvSpec, block: Block, target: Target, arith: Arithmetic) -> Count:
    kernel = _useful_kernel(spec, block)
    return formula.vmac_cycles(
        target, outputs=_rows(block), kernel=kernel, groups=block.groups, half_sums=sums_in_half(spec)
    )


def _slic(spec: ConvSpec, block: Block, target: Target, arith: Arithmetic) -> Count:
    """Cycles of a SLIC vertex; its formula is for one number of channels, so it is evaluated for each that occurs."""
    rows, width = _rows_and_width(spec, block)
    # Groups are as many output as input channels: a block with fewer of one kind leaves units idle.
    channels = np.maximum(block.in_channels, block.out_channels)
    counts = [int(n) for n in np.unique(channels)]
    by_count = [
        formula.slic_cycles(
            target,
            rows=rows,
            width=width,
            kernel=block.kernel,
            channels=count,
            groups=block.groups,
            stride=spec.strides[-1],
            half_sums=sums_in_half(spec),
        )
        for count in counts
    ]
    return np.select([channels == count for count in counts], by_count)


def _rows_and_width(spec: ConvSpec, block: Block) -> tuple[Count, Count]:
    """Rows of output elements that meet non-zero elements of a dilated input, and their length."""
    lengths = [ceil_div(n, dilation) for n, dilation in zip(block.field, spec.lhs_dilation, strict=True)]
    return block.batch * product(lengths[:-1]), lengths[-1] if lengths else 1


def _outer_product(spec: ConvSpec, block: Block, target: Target, arith: Arithmetic) -> Count:
    return formula.outer_product_cycles(target, _precision(arith), _rows(block), block.out_channels, block.groups)


def _scalar(spec: ConvSpec, block: Block, target: Target, arith: Arithmetic) -> Count:
    reduced = block.in_channels * product(_useful_kernel(spec, block))
    return formula.scalar_mac_cycles(target, arith.instructions_per_mac, product(output_lengths(block)), reduced)


def _precision(arith: Arithmetic) -> formula.Precision:
    assert arith.precision is not None, "vector kinds apply to half and float only"
    return arith.precision


def _has_few_channels(spec: ConvSpec, arith: Arithmetic) -> bool:
    """True if a dot product without AMP can pay: blocks of the AMP would be three quarters padding."""
    return arith.precision is not None and min(spec.extents.in_channels, spec.extents.out_channels) <= _FEW_CHANNELS


_FEW_CHANNELS = 4  # assumed: a quarter of the 16 channels of an AMP block


def _is_vector_1x1(spec: ConvSpec, arith: Arithmetic) -> bool:
    return arith.precision is not None and spec.is_1x1


def _is_vector_larger(spec: ConvSpec, arith: Arithmetic) -> bool:
    return arith.precision is not None and not spec.is_1x1


def _is_depthwise(spec: ConvSpec, arith: Arithmetic) -> bool:
    return arith.precision == "half" and spec.extents.in_channels == spec.extents.out_channels == 1


def _is_combinable(spec: ConvSpec, arith: Arithmetic) -> bool:
    """True for groups that can be combined (poplibs `getCombineConvGroupCandidates`)."""
    channels = spec.extents.in_channels
    is_narrow = channels == 1 or (channels == 2 and arith.precision == "half")
    return _is_vector_larger(spec, arith) and spec.extents.groups > 1 and is_narrow


def _has_narrow_groups(spec: ConvSpec, arith: Arithmetic) -> bool:
    """True for convolutions that SLIC vertices compute (poplibs `addSLICConstraints`)."""
    steps = *spec.lhs_dilation, *spec.rhs_dilation, *spec.strides[:-1]
    channels = max(spec.extents.in_channels, spec.extents.out_channels)
    is_plain = all(n == 1 for n in steps) and max(spec.strides, default=1) <= _SLIC_MAX_STRIDE
    return arith.precision == "half" and len(spec.in_field) > 1 and is_plain and channels <= _FEW_CHANNELS


_SLIC_MAX_STRIDE = 2


def _is_outer_product(spec: ConvSpec, arith: Arithmetic) -> bool:
    return _is_vector_1x1(spec, arith) and spec.extents.in_channels == 1


def _is_scalar(spec: ConvSpec, arith: Arithmetic) -> bool:
    return arith.precision is None


_ALL = (
    VertexKind("ConvPartial1x1Out", _is_vector_1x1, _amp_1x1, uses_amp=True),
    VertexKind("ConvPartial1x1OutSwapped", _is_vector_1x1, _amp_1x1_swapped, uses_amp=True, is_swapped=True),
    VertexKind("ConvPartialnx1", _is_vector_larger, _amp_nx1, uses_amp=True),
    VertexKind("ConvPartialnx1Combined", _is_combinable, _amp_combined, uses_amp=True, is_combined=True),
    VertexKind("ConvPartial1x1OutExpanded", _is_vector_larger, _amp_1x1, uses_amp=True, is_expanded=True),
    VertexKind(
        "ConvPartial1x1OutExpandedSwapped",
        _is_vector_larger,
        _amp_1x1_swapped,
        uses_amp=True,
        is_swapped=True,
        is_expanded=True,
    ),
    VertexKind("ConvPartialHorizontalMac", _has_few_channels, _hmac),
    VertexKind("ConvPartialVerticalMac", _is_depthwise, _vmac),
    VertexKind("ConvPartial1x4SLIC", _has_narrow_groups, _slic, is_wide=True),
    VertexKind("OuterProduct", _is_outer_product, _outer_product),
    VertexKind("ConvPartialScalar", _is_scalar, _scalar, language="C++"),
)
KINDS: tuple[VertexKind, ...] = number_values(_ALL)
