"""Operands and results of a convolution that a plan keeps in another order than the layer, and their rearrangement.

A layer keeps its operands in groups of channels, for the form in which it usually runs: convolutions as they are,
products with operands swapped. A plan of the other form, one that gathers windows into channels, or one whose channels
do not fill the groups of its vertices reads and writes another order. Its operands are then received in full, since no
tile can keep them where they are used, and copied once on the tile; its results are copied on the tile.

Source: poplibs `ConvModel.cpp`, `addTransformCycleEstimate`: which operands are rearranged, and that each is exchanged
and copied with the channels that it is padded to; `getScaleFactorForTransform`, 5/4 cycles an element;
`popops/Rearrange.cpp`, `canUseFastTranspose`: elements of two bytes alone have a fast transposition, of 64 bits a
cycle, if rows and columns are multiples of four. `Convolution.cpp`: every tile that receives data in another order
rearranges it. Rows of channels that are no whole vectors are copied by atoms, see `runtime.exchange.superstep`.
`ConvVertices.cpp`, `inWindow`: the AMP reads the field of a group of channels in one piece, so that a part with a halo
is put together.
Limits: an operand that PopLibs rearranges once for more than seven tiles is copied by each of them; weight updates have
no rule of their own.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from ipujax.lowering.poplin.cycles import AmpBlock, Count, amp_block, ceil_div, product
from ipujax.lowering.poplin.spec import ConvSpec, Dims, Rearranged, arithmetic
from ipujax.lowering.poplin.vertex_kinds import (
    VertexKind,
    gathered_bytes,
    input_lengths,
    output_lengths,
    weight_lengths,
)
from ipujax.runtime.exchange import atom_bytes_of, atom_cycles, atom_name, copy_cycles
from ipujax.runtime.graph import SlowPath, SlowReason
from ipujax.runtime.target import Target
from ipujax.runtime.tensor import VECTOR_BYTES, element_bytes


def rearranged(kind: VertexKind, spec: ConvSpec, target: Target) -> Rearranged:
    """Operands and result that a kind of vertex has in another order than the layer, so that tiles copy them.

    Args:
        kind: kind of vertex.
        spec: the convolution.
        target: the machine, whose AMP takes blocks of channels.
    """
    arith = arithmetic(spec, target)
    if arith.precision is None:
        return Rearranged(lhs=False, rhs=False, result=False)  # a plain loop over elements has no order of its own
    # Tensors are kept for the usual form: swapped for matrix products, not so for convolutions; groups not combined.
    is_turned = kind.is_swapped != spec.is_product or kind.is_combined
    if not kind.uses_amp:
        return Rearranged(lhs=is_turned, rhs=is_turned, result=is_turned)
    amp = amp_block(target, arith.precision)
    extents = spec.extents
    pads_ins = extents.in_channels % _in_channel_group(spec, amp) != 0
    outs = extents.batch * int(product(extents.field)) if kind.is_swapped else extents.out_channels
    pads_outs = outs % amp.out_channels != 0
    all_operands = is_turned or kind.is_expanded or pads_ins
    # The operand whose blocks the AMP loads as weights has output channels, or rows where operands are swapped.
    lhs = all_operands or (pads_outs and kind.is_swapped)
    rhs = all_operands or (pads_outs and not kind.is_swapped)
    # Channels of a row of activations and weights, and of results.
    ins = extents.in_channels * int(product(extents.kernel) if kind.is_expanded else 1)
    ins *= amp.in_channels // max(1, extents.in_channels) if kind.is_combined else 1
    rows = ins, ins, outs
    # 0 for rows of whole vectors, which are copied fast.
    lhs_row, rhs_row, result_row = (
        n if n * element_bytes(dtype) % VECTOR_BYTES else 0 for n, dtype in zip(rows, _dtypes(spec), strict=True)
    )
    return Rearranged(
        lhs=lhs,
        rhs=rhs,
        result=is_turned or pads_outs,
        rows=(lhs_row, rhs_row, result_row),
        has_halo=not spec.is_1x1,
    )


def _in_channel_group(spec: ConvSpec, amp: AmpBlock) -> int:
    """Input channels of a group: of several kernel rows, up to four are put side by side, see `amp_nx1_cycles`."""
    return amp.in_channels if spec.is_1x1 else amp.in_channels // _KERNEL_ROWS_IN_GROUP


_KERNEL_ROWS_IN_GROUP = 4


def _channel_groups(kind: VertexKind, spec: ConvSpec, target: Target) -> tuple[int, int]:
    """Numbers of input and of output channels of a group as an AMP vertex reads them: blocks are padded to multiples.

    1 for a vertex without AMP, and where other dimensions take the role of the channels.
    """
    precision = arithmetic(spec, target).precision
    if precision is None or not kind.uses_amp:
        return 1, 1
    amp = amp_block(target, precision)
    has_own_ins = not (kind.is_expanded or kind.is_combined)
    return _in_channel_group(spec, amp) if has_own_ins else 1, 1 if kind.is_swapped else amp.out_channels


def rearrangement_cycles(
    kind: VertexKind, spec: ConvSpec, block: Dims[Count], target: Target, slots: Count = 1
) -> Count:
    """Tile cycles of copying the operands of a block before it is computed, and its results after that.

    Args:
        kind: kind of vertex.
        spec: the convolution.
        block: lengths of the block.
        target: the machine.
        slots: partial results of each element; several are not copied: combining them writes the layer's order.
    """
    total = rearrangement_of_whole_rows(kind, spec, block, target, slots)
    for path in slow_rearrangement(kind, spec, block, target, slots):
        total = total + path.cycles
    return total


def rearrangement_of_whole_rows(
    kind: VertexKind, spec: ConvSpec, block: Dims[Count], target: Target, slots: Count = 1
) -> Count:
    """Tile cycles of `rearrangement_cycles` if rows of channels were whole vectors."""
    full_width = _full_width_bytes(kind, spec, block, target, slots)
    operands = full_width.inputs + full_width.weights
    return copy_cycles(operands, 0, target) + copy_cycles(full_width.results, 0, target)


def slow_rearrangement(
    kind: VertexKind, spec: ConvSpec, block: Dims[Count], target: Target, slots: Count = 1
) -> list[SlowPath]:
    """Cycles beyond those of whole rows, with their reason, of operands whose rows of channels are no whole vectors.

    They are copied by atoms, the largest pieces that divide a row.

    Args:
        kind: kind of vertex.
        spec: the convolution.
        block: lengths of the block.
        target: the machine.
        slots: partial results of each element; several are not copied.
    """
    rows = _rearranged_data(kind, spec, target).rows
    moved_bytes = _moved_bytes(kind, spec, block, target, slots)
    full_width = _full_width_bytes(kind, spec, block, target, slots)  # those that are counted as whole vectors
    names = "inputs", "weights", "results"
    paths = []
    for operand_name, row, num_bytes, whole_bytes, dtype in zip(
        names, rows, moved_bytes, full_width, _dtypes(spec), strict=True
    ):
        if row and np.any(num_bytes):
            width = element_bytes(dtype)
            atom = atom_bytes_of(row * width)
            # Whole rows are counted by `rearrangement_of_whole_rows`.
            extra = atom_cycles(num_bytes, atom) - whole_bytes / target.memcpy_bytes_per_cycle
            cycles = np.maximum(0, np.ceil(extra)).astype(np.int64)
            reason = SlowReason(f"{operand_name} rearranged {atom_name(atom)}", row, VECTOR_BYTES // width)
            paths.append(SlowPath(reason, cycles))
    return paths


def _rearranged_data(kind: VertexKind, spec: ConvSpec, target: Target) -> Rearranged:
    """The data that are copied: those of a chosen plan, else what the extents decide."""
    return rearranged(kind, spec, target) if spec.rearranged is None else spec.rearranged


class _MovedBytes(NamedTuple):
    """Bytes of a block that are copied."""

    inputs: Count
    weights: Count
    results: Count


def _moved_bytes(kind: VertexKind, spec: ConvSpec, block: Dims[Count], target: Target, slots: Count) -> _MovedBytes:
    """Bytes that rearrangement copies, with the channels that fill the groups of the vertex."""
    is_copied = _rearranged_data(kind, spec, target)
    ins, outs = _channel_groups(kind, spec, target)
    block = replace(
        block,
        in_channels=ceil_div(block.in_channels, ins) * ins,
        out_channels=ceil_div(block.out_channels, outs) * outs,
    )
    inputs = product(input_lengths(spec, block)) * element_bytes(spec.lhs_dtype)
    if kind.is_expanded:
        inputs = gathered_bytes(kind, spec, block)
    weights = product(weight_lengths(block)) * element_bytes(spec.rhs_dtype)
    results = product(output_lengths(block)) * element_bytes(spec.out_dtype)
    return _MovedBytes(is_copied.lhs * inputs, is_copied.rhs * weights, is_copied.result * (slots == 1) * results)


_SLOW_ELEMENT_CYCLES = 5 / 4  # poplibs `getScaleFactorForTransform`


def _full_width_bytes(
    kind: VertexKind, spec: ConvSpec, block: Dims[Count], target: Target, slots: Count
) -> _MovedBytes:
    """Bytes that a full-width copy moves in the time of `_moved_bytes`, if rows are whole vectors."""
    moved_bytes = _moved_bytes(kind, spec, block, target, slots)
    return _MovedBytes(*map(_as_full_width, moved_bytes, _dtypes(spec)))


def _as_full_width(num_bytes: Count, dtype: Any) -> Count:
    # Only elements of two bytes have a fast transposition, of 64 bits a cycle; others move one by one.
    width = element_bytes(dtype)
    if width == 2:
        return num_bytes
    return np.ceil(num_bytes // width * (_SLOW_ELEMENT_CYCLES * VECTOR_BYTES)).astype(np.int64)


def _dtypes(spec: ConvSpec) -> tuple[Any, Any, Any]:
    return spec.lhs_dtype, spec.rhs_dtype, spec.out_dtype
