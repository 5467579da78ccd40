"""Plans of the products of a dense layer for a batch of few examples: those for a few more of them, cut down.

What a vertex takes hardly depends on the batch while that is a few rows. So of plans for such batches it is an accident
which is charged least; the weights would lie elsewhere for each batch, and half a batch could be more work than a whole
one. What is planned for a few more examples serves all of these batches.

Limit: where a plan cuts the batch, fewer examples have fewer blocks, and weights lie on fewer tiles.

Input: a product and what it is to a layer. Output: the product of more examples, and its plan as one of fewer.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ipujax.lowering.poplin.joint import Later
from ipujax.lowering.poplin.plan import Grid, Plan
from ipujax.lowering.poplin.spec import FIELD, IN_CHANNELS, OUT_CHANNELS, ConvSpec, Dims
from ipujax.lowering.poplin.trial import Operand
from ipujax.runtime.mapping import frozen
from ipujax.runtime.target import Target

# fitted: of 896 doublings of batches, in training steps of 128 random perceptrons, 24 were less work or took less time
# with it, 30 with 16; before products counted what follows them, of 448 of these 15, with 16 18, without it 55.
FEWEST_EXAMPLES = 8


def batch_axis(later: Later) -> int:
    """Position in `Dims` of the batch: what an update sums over, or the side that is not the weights."""
    if later.is_update:
        return IN_CHANNELS
    return FIELD if later.side else OUT_CHANNELS


def with_batch(spec: ConvSpec, axis: int, batch: int) -> ConvSpec:
    """A product with another batch, `axis` being that of the batch."""
    extents = list(spec.extents)
    extents[axis] = batch
    return replace(spec, extents=Dims.of(extents), in_field=(extents[FIELD],))


def operands_of(spec: ConvSpec, operands: tuple[Operand, ...], later: Later, target: Target) -> tuple[Operand, ...]:
    """Operands of a product of more examples.

    Args:
        spec: that product.
        operands: those of fewer.
        later: which of them are the weights, that do not depend on the batch.
        target: the machine.
    """
    extents = spec.extents
    (rows,), inner, columns = extents.field, extents.in_channels, extents.out_channels
    shapes = (extents.groups, rows, inner), (extents.groups, inner, columns)
    larger = [
        operand if n == later.side and not later.is_update else operand.resized(shape, target)
        for n, (operand, shape) in enumerate(zip(operands, shapes, strict=False))
    ]
    return (*larger, *operands[2:])


def cut_down(plan: Plan, spec: ConvSpec, axis: int) -> Plan:
    """A plan of one step for fewer examples; what it is expected to cost stays that for more."""
    batch = list(spec.extents)[axis]
    splits, grid = list(plan.splits), plan.own_grid
    splits[axis] = min(splits[axis], -(-batch // list(plan.grains)[axis]))
    if grid is not None:  # where weights lie: the batch is whole
        cuts = [frozen([0, batch], np.int64) if n == axis else cut for n, cut in enumerate(grid.cuts)]
        grid = Grid(tuple(cuts), grid.tile)
    return replace(plan, spec=spec, splits=Dims.of(splits), own_grid=grid, planned_spec=plan.spec)
