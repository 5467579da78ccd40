"""Zeros that vertices of convolutions need around their operands: a copy on every tile, before the vertices.

SLIC vertices read four positions of a kernel row at once, and no padding: rows of the kernel are filled up with zeros,
and the field around with as many, and with its padding. AMP vertices of few channels read several rows of the kernel as
one: so is the outermost dimension of their kernels and fields. PopLibs keeps a constant of zeros on each tile, and
copies it into the gaps each time.

Input: a plan and the windows of its convolution. Output: a `Copy` in the program.
Source: poplibs `poplin/ConvVertices.cpp`, `Padder`, `padKernelSpatialDim`, `truncateDilateAndPadInput`;
`poplin/ConvModel.cpp`, `applyPadding`, for how many zeros there are.
Limits: zeros are a variable of their own, beside the operands; a tile at the edge of the field has those of one side.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np

from ipujax.lowering.poplin.cycles import amp_block
from ipujax.lowering.poplin.spec import Window, arithmetic
from ipujax.lowering.poplin.tile_plan import Plan
from ipujax.runtime.graph import Builder, Copy
from ipujax.runtime.target import Target
from ipujax.runtime.tensor import blocked_mapping, even_cuts, frozen

_SLIC_WINDOW = 4  # positions of a row of the kernel that are read at once
_KERNEL_ROWS = (4, 2, 1)  # rows of the kernel that an AMP vertex may read as one


def add_zero_padding(builder: Builder, plan: Plan, windows: Sequence[Window]) -> None:
    """Adds the copy of zeros to the tiles of a plan, if its vertices need any.

    It counts memory and cycles only: no vertex reads the variable, since the computation pads by itself. `windows` has
    one window for each field dimension.
    """
    zeros = zeros_of_block(plan, windows, builder.graph.target)
    if not zeros:
        return
    graph = builder.graph
    tiles = np.unique(plan.grid().tile[plan.grid().tile >= 0]).astype(np.int32)  # −1 is no tile
    # A row of zeros for each tile.
    cuts = even_cuts(len(tiles), len(tiles)), frozen([0, zeros], np.int64)
    mapping = blocked_mapping(cuts, frozen(tiles[:, None], np.int32))
    shape = len(tiles), zeros
    source = graph.add_constant(np.zeros(shape, plan.spec.lhs_dtype), f"{builder.name}/zeros", mapping)
    padding = graph.add_variable(shape, plan.spec.lhs_dtype, f"{builder.name}/zero padding", mapping)
    builder.prog.add(Copy(source, padding, f"{builder.name}/zero padding", graph.origin))


def zeros_of_block(plan: Plan, windows: Sequence[Window], target: Target) -> int:
    """Zeros that the vertex of the largest block of a plan needs, inputs and weights together."""
    spec = plan.spec
    kind = plan.kind
    multiples = _multiples(plan, target)
    if not any(multiples):
        return 0
    grid = plan.grid()
    batch, groups, outs, ins, *spatial = (int(np.diff(cut).max()) for cut in grid.cuts)
    rank = len(spec.in_field)
    kernel = spatial[rank:]
    # Elements of the input that the block reads along each field dimension.
    field = [
        min((out - 1) * stride + (width - 1) * dilation + 1, size)
        for out, stride, width, dilation, size in zip(
            spatial[:rank], spec.strides, kernel, spec.rhs_dilation, spec.in_field, strict=True
        )
    ]
    # Elements that the kernel gets along each dimension, and the input around its block: as many as the kernel, and the
    # padding of the convolution, which other vertices skip but these read as zeros. A block is at one end of the input
    # (assumed), so the wider padding counts. A SLIC vertex (`is_wide`) reads zeros along all dimensions.
    added = [-width % multiple if multiple else 0 for width, multiple in zip(kernel, multiples, strict=True)]
    around = [
        n * dilation + (max(0, *window.padding) if multiple or kind.is_wide else 0)
        for n, multiple, dilation, window in zip(added, multiples, spec.rhs_dilation, windows, strict=True)
    ]
    weights = groups * outs * ins * (prod(map(sum, zip(kernel, added, strict=True))) - prod(kernel))
    inputs = batch * groups * ins * (prod(map(sum, zip(field, around, strict=True))) - prod(field))
    return int(weights + inputs)


def _multiples(plan: Plan, target: Target) -> list[int]:
    """For each dimension of the kernel the number whose multiple it is filled up to; 0 where it is left as it is.

    A SLIC vertex reads windows of four elements of the last dimension; an AMP vertex reads several rows of the first
    one at once, where input channels leave units for them.
    """
    spec = plan.spec
    kind = plan.kind
    rank = len(spec.in_field)
    if kind.is_wide:
        return [*[0] * (rank - 1), _SLIC_WINDOW]
    precision = arithmetic(spec, target).precision
    if precision is None or not kind.uses_amp or kind.is_expanded or kind.is_combined or spec.is_1x1:
        return [0] * rank
    channels = amp_block(target, precision).in_channels
    rows = next((n for n in _KERNEL_ROWS if spec.extents.in_channels <= channels // n), 1)
    return [rows if rows > 1 else 0, *[0] * (rank - 1)]
