"""Plans of products whose vertices are on the tiles of one operand, so that it is not exchanged.

Each block of that operand is multiplied by all blocks that it meets of the other one. A kind of vertex that reads the
operand in another order has no such plan: an operand is put in another order by an exchange (`rearranged`).

Input: a product and the tile mapping of an operand. Output: plans, proposed beside those that are free to cut.
Limits: products only; the operand is mapped in even or uneven blocks, one a tile.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from ipujax.lowering.layout import mapping_like
from ipujax.lowering.poplin.candidates import Candidates
from ipujax.lowering.poplin.product_plan import Grid, Plan, PlanCost
from ipujax.lowering.poplin.rearranged import rearranged
from ipujax.lowering.poplin.spec import FIELD, GROUPS, IN_CHANNELS, OUT_CHANNELS, ConvSpec, Dims, arithmetic
from ipujax.lowering.poplin.vertex_kinds import KINDS, VertexKind
from ipujax.runtime.cache import remembered
from ipujax.runtime.graph import Graph
from ipujax.runtime.target import Target
from ipujax.runtime.tensor import Blocked, Tensor, blocked_mapping, frozen

# Dimensions of the operands of a product, in the order of their axes.
LHS = (GROUPS, FIELD, IN_CHANNELS)
RHS = (GROUPS, IN_CHANNELS, OUT_CHANNELS)


def blocks_of(graph: Graph, matrices: Tensor) -> Blocked | None:
    """Mapping of [groups, rows, columns] in blocks, one a tile; None for another mapping."""
    if not graph.is_mapped(matrices):
        return None
    mapping = mapping_like(graph, matrices)
    if matrices.shape[0] == 1 and not isinstance(mapping, Blocked):  # a matrix seen as a group of one
        flat = mapping_like(graph, matrices.reshape(matrices.shape[1:]))
        mapping = _with_group(flat) if isinstance(flat, Blocked) else None
    if not isinstance(mapping, Blocked) or not 1 < np.unique(mapping.tile).size == mapping.tile.size:
        return None
    return mapping


@remembered
def _with_group(mapping: Blocked) -> Blocked:
    return blocked_mapping((frozen([0, 1], np.int64), *mapping.cuts), mapping.tile[None])


@remembered
def aligned_plan(
    spec: ConvSpec, dims: tuple[int, ...], blocks: Blocked, target: Target, bound_bytes: float
) -> Plan | None:
    """Fastest plan on the tiles of an operand, `LHS` or `RHS`, that is mapped in `blocks`."""
    grid = _grid(spec, dims, blocks)
    plans = [plan for plan in _plans(spec, dims, grid, target) if plan.temp_bytes <= bound_bytes]
    return min(plans, key=lambda plan: plan.total_cycles, default=None)


def _grid(spec: ConvSpec, dims: tuple[int, ...], blocks: Blocked) -> Grid:
    extents = list(spec.extents)
    cuts = [blocks.cuts[dims.index(d)] if d in dims else frozen([0, n], np.int64) for d, n in enumerate(extents)]
    other_dims = [d for d in range(len(extents)) if d not in dims]
    tile = np.transpose(
        blocks.tile.reshape(blocks.tile.shape + (1,) * len(other_dims)), np.argsort([*dims, *other_dims])
    )
    return Grid(tuple(cuts), frozen(tile, np.int32))


def _plans(spec: ConvSpec, dims: tuple[int, ...], grid: Grid, target: Target) -> Iterator[Plan]:
    splits = Dims.of([len(cut) - 1 for cut in grid.cuts])
    longest = Dims.of([np.array([int(np.diff(cut).max())]) for cut in grid.cuts])
    ones = Dims.of((1,) * len(grid.cuts))
    stays: dict[str, Any] = {"lhs_stays": dims == LHS, "rhs_stays": dims == RHS}
    for kind in KINDS:
        if kind.applies(spec, arithmetic(spec, target)) and not _is_moved(kind, spec, dims, target):
            splits_array = np.array(list(splits), np.int64)[:, None]
            candidate = Candidates(spec, kind, target, ones, splits_array, longest, **stays)
            cost = PlanCost(*(int(n) for n in candidate.cost_parts(np.zeros(1, np.int64))[:, 0]))
            yield Plan(spec, kind, splits, ones, cost, int(candidate.temp_bytes[0]), True, False, aligned_grid=grid)


def _is_moved(kind: VertexKind, spec: ConvSpec, dims: tuple[int, ...], target: Target) -> bool:
    moved = rearranged(kind, spec, target)
    return moved.lhs if dims == LHS else moved.rhs
