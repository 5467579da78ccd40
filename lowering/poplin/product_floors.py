"""Least cycles of products: what no plan of one goes below, however it is split over tiles and steps.

Input: dtypes of the operands, a target. Output: peak rate of a tile, and cycles of the smallest vertex.
Source: the formulas of `cycles`: of the AMP at the largest vertices, of each kind at blocks of one element; of other
kinds the most multiply-adds that an instruction does.
Limits: products of sparse operands, and by other algorithms than the sum of all products (Winograd), have no vertices.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ipujax.lowering.poplin import cycles as formula
from ipujax.lowering.poplin.cycles import Precision
from ipujax.lowering.poplin.spec import arithmetic_of
from ipujax.runtime.cache import remembered, remembered_small
from ipujax.runtime.target import Target, issue_round_cycles

# Multiply-adds of one instruction without the AMP, derived: 64 bits of both operands in a dot product, 8 groups of half
# precision in a depthwise one; and of a SLIC pass: 4 positions by 4 channels by 4.
_VECTOR_MACS: Mapping[Precision, int] = {"half": 8, "float": 2}
_SLIC_MACS = 64
_MANY = 64  # blocks of the AMP of a vertex on which its start is spread
_FEW_ROWS = 512  # up to which every number of rows is tried; of more only the last, and the last that fill all workers
_SINGLE = np.int64(1)

_Smallest = Callable[[Target, Precision, bool], Any]
# Each vertex kind on one element; the last argument says whether sums are half precision.
_SMALLEST: tuple[_Smallest, ...] = (
    lambda target, precision, half: formula.amp_1x1_cycles(target, precision, _SINGLE, _SINGLE, _SINGLE, _SINGLE, half),
    lambda target, precision, half: formula.amp_nx1_cycles(
        target, precision, _SINGLE, _SINGLE, (_SINGLE,), _SINGLE, _SINGLE, _SINGLE, half
    ),
    lambda target, precision, half: formula.hmac_cycles(
        target, precision, _SINGLE, _SINGLE, _SINGLE, _SINGLE, _SINGLE, _SINGLE, half
    ),
    lambda target, precision, half: formula.vmac_cycles(target, _SINGLE, (_SINGLE,), _SINGLE, half),
    lambda target, precision, half: formula.slic_cycles(target, _SINGLE, _SINGLE, (_SINGLE,), 1, _SINGLE, 1, half),
    lambda target, precision, half: formula.outer_product_cycles(target, precision, _SINGLE, _SINGLE),
)


@dataclass(frozen=True, slots=True)
class ProductExtents:
    """Largest extents of a vertex of a product.

    Args:
        rows: results of one output channel, or output channels of one result if these are more.
        inner: products of one result.
        is_slic: whether a SLIC vertex may compute it: few channels, and a field of two dimensions at least.
    """

    rows: int
    inner: int
    is_slic: bool = False


@remembered_small
def multiply_add_cycles(
    lhs_dtype: Any, rhs_dtype: Any, extents: ProductExtents, vertex_cycles: float, target: Target
) -> float:
    """Tile cycles of one multiply-add at the best rate of any vertex, `vertex_cycles` of each vertex left out.

    `extents` bound those of the vertex. A pass of the AMP loads weights and starts its workers for the rows that a
    vertex has, and the first pass over inner products stores zeros; larger vertices spread both over more
    multiply-adds.
    """
    arithmetic = arithmetic_of(lhs_dtype, rhs_dtype, target)
    precision = arithmetic.precision
    if precision is None:
        # A plain loop: workers take turns, each with one instruction a round.
        return arithmetic.instructions_per_mac * float(issue_round_cycles(target)) / target.worker_contexts
    amp = _amp_cycles(precision, extents.rows, extents.inner, vertex_cycles, target)
    is_slic = extents.is_slic and precision == "half"
    return min(amp, 1 / (_SLIC_MACS if is_slic else _VECTOR_MACS[precision]))


@remembered
def _amp_cycles(precision: Precision, rows: int, inner: int, vertex_cycles: float, target: Target) -> float:
    """Least cycles of a multiply-add on the AMP (matrix unit) by any vertex: no plan of a product is costed below it.

    Tried are vertices with a kernel of one element and with a large one, and of so many output channels and groups that
    the cycles of their start hardly count for one multiply-add. Cycles a row are fewest for few rows, whose workers
    leave the loop early, or for as many as workers share evenly.

    Args:
        precision: types of operands and partial sums.
        rows: rows of the vertex, at most.
        inner: inner products of the vertex, at most; a large kernel has whole blocks of them in any case.
        vertex_cycles: least cycles of any vertex, which the floor of a compute set counts once, not by multiply-add.
        target: the machine.
    """
    block = formula.amp_block(target, precision)
    # Rows of all workers together.
    tried_rows = {*range(1, min(rows, _FEW_ROWS) + 1), rows, rows - rows % target.worker_contexts} - {0}
    counts = np.array(sorted(tried_rows), np.int64)
    channels = _MANY * block.out_channels
    kernel = (np.int64(16), np.int64(16))  # 16 is a multiple of the 1, 2 or 4 rows of a filter in one pass
    units = []  # cycles of a multiply-add
    for half_sums in (False, True):
        # Inner products are the input channels; whole blocks of them leave no unit idle.
        for length in {inner, inner - inner % block.in_channels} - {0}:
            cycles = formula.amp_1x1_cycles(
                target,
                precision,
                rows=counts,
                in_channels=length,
                out_channels=channels,
                groups=_MANY,
                half_sums=half_sums,
            )
            units.append((cycles - vertex_cycles) / (counts * length * channels * _MANY))
        length = _MANY * block.in_channels
        cycles = formula.amp_nx1_cycles(
            target,
            precision,
            rows=1,
            width=counts,
            kernel=kernel,
            in_channels=length,
            out_channels=channels,
            groups=_MANY,
            half_sums=half_sums,
        )
        units.append((cycles - vertex_cycles) / (counts * length * channels * _MANY * np.prod(kernel)))
    return float(min(unit.min() for unit in units))


@remembered_small
def smallest_product_cycles(lhs_dtype: Any, rhs_dtype: Any, target: Target) -> float:
    """Tile cycles of the smallest vertex of a product."""
    precision = arithmetic_of(lhs_dtype, rhs_dtype, target).precision
    if precision is None:
        return float(formula.scalar_mac_cycles(target, 1, _SINGLE, _SINGLE))
    return float(min(smallest(target, precision, half) for smallest in _SMALLEST for half in (False, True)))
