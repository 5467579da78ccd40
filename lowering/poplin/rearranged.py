"""Operands and results of a convolution that a plan keeps in another order than the layer, and their rearrangement.

A layer keeps its operands in groups of channels, for the form in which it usually runs: convolutions as they are,
products with operands swapped. A plan of the other form, one that gathers windows into channels, or one whose channels
do not fill the groups of its vertices reads and writes another order. Its operands are then received in full, since no
tile can keep them where they are used, and copied once on the tile; its results are copied on the tile.

Source: poplibs `ConvModel.cpp`, `addTransformCycleEstimate`: which operands are rearranged, and that each is exchanged
and copied; `Convolution.cpp`: a fast transpose moves 64 bits a cycle, which is the rate of any copy, and every tile
that receives data in another order rearranges it. An atom of a copy is the largest unit that divides a run of channels:
64, 32 or 16 bits (`addTransformCycleEstimate`, atom sizes).
Limits: an operand that PopLibs rearranges once for more than seven tiles is copied by each of them; weight updates have
no rule of their own.
"""

from __future__ import annotations

import numpy as np

from ipujax.lowering.poplin.cycles import Count, amp_block, product
from ipujax.lowering.poplin.spec import ConvSpec, Dims, Rearranged, arithmetic
from ipujax.lowering.poplin.vertex_kinds import (
    VertexKind,
    gathered_bytes,
    input_lengths,
    output_lengths,
    weight_lengths,
)
from ipujax.runtime.exchange import copy_cycles
from ipujax.runtime.target import Target
from ipujax.runtime.tensor import element_bytes


def rearranged(kind: VertexKind, spec: ConvSpec, target: Target) -> Rearranged:
    """Operands and result that a kind of vertex has in another order than the layer."""
    arith = arithmetic(spec, target)
    if arith.precision is None:
        return Rearranged(False, False, False)  # a plain loop over elements has no order of its own
    is_turned = kind.is_swapped != spec.is_product or kind.is_combined
    if not kind.uses_amp:
        return Rearranged(is_turned, is_turned, is_turned)
    amp = amp_block(target, arith.precision)
    extents = spec.extents
    # Of several kernel rows, up to four are put side by side in a group: see `amp_nx1_cycles`.
    group = amp.in_channels if spec.is_1x1 else amp.in_channels // _KERNEL_ROWS_IN_GROUP
    pads_ins = extents.in_channels % group != 0
    outs = extents.batch * int(product(extents.field)) if kind.is_swapped else extents.out_channels
    pads_outs = outs % amp.out_channels != 0
    all_operands = is_turned or kind.is_expanded or pads_ins
    # The operand whose blocks the AMP loads as weights has output channels, or rows where operands are swapped.
    lhs = all_operands or (pads_outs and kind.is_swapped)
    rhs = all_operands or (pads_outs and not kind.is_swapped)
    return Rearranged(lhs, rhs, is_turned or pads_outs)


_KERNEL_ROWS_IN_GROUP = 4


def rearrangement_cycles(
    kind: VertexKind, spec: ConvSpec, block: Dims[Count], target: Target, slots: Count = 1
) -> Count:
    """Tile cycles of copying the operands of a block before it is computed, and its results after that.

    Partial results, of several `slots`, are not copied: the vertices that combine them write the order of the layer.
    """
    needs_copy = rearranged(kind, spec, target) if spec.rearranged is None else spec.rearranged
    inputs = product(input_lengths(spec, block)) * element_bytes(spec.lhs_dtype)
    weights = product(weight_lengths(block)) * element_bytes(spec.rhs_dtype)
    results = product(output_lengths(block)) * element_bytes(spec.out_dtype)
    if kind.is_expanded:
        inputs = gathered_bytes(kind, spec, block)
    before = needs_copy.lhs * _atoms(inputs, block.in_channels * element_bytes(spec.lhs_dtype), target)
    before = before + needs_copy.rhs * _atoms(weights, block.in_channels * element_bytes(spec.rhs_dtype), target)
    channels = product((block.batch, *block.field)) if kind.is_swapped else block.out_channels
    after = needs_copy.result * (slots == 1) * _atoms(results, channels * element_bytes(spec.out_dtype), target)
    return copy_cycles(before, 0, target) + copy_cycles(after, 0, target)


def _atoms(num_bytes: Count, run_bytes: Count, target: Target) -> Count:
    """Bytes that a full-width copy moves while bytes in runs of some length are copied atom by atom."""
    # The largest atom is a vector, however many of its bytes are copied in a cycle.
    atom_bytes = np.gcd(np.asarray(run_bytes).astype(np.int64), target.vector_width_bytes)
    return num_bytes * target.vector_width_bytes // atom_bytes
