"""Plan of a convolution or a matrix multiplication: its blocks, their tiles, the kind of vertex, the estimated cost.

`product_plan` makes plans; a plan that was stored in a file is checked here. A plan that needs more of a tile's memory
than it should is recorded in the graph, for the profile and its warnings.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from math import prod
from typing import Any

import numpy as np

from ipujax.lowering.poplin.candidates import output_order
from ipujax.lowering.poplin.rearranged import rearranged
from ipujax.lowering.poplin.spec import FIELD, GROUPS, IN_CHANNELS, ConvSpec, Dims, arithmetic
from ipujax.lowering.poplin.vertex_kinds import VertexKind
from ipujax.runtime.cache import remembered
from ipujax.runtime.graph import Graph, UnmetBound
from ipujax.runtime.target import Target
from ipujax.runtime.tensor import even_cuts, frozen

STEPS = (2, 4, 8, 16)  # numbers of steps that a plan may have beside 1
_MAX_GRAIN = 2**20  # far beyond the blocks of any AMP
_MAX_COUNT = 2**53  # of cycles, bytes or fragments


@dataclass(frozen=True, slots=True)
class PlanCost:
    """Estimated cycles of a plan by category; they add up. `Candidates.cost_parts` has the categories in this order."""

    exchange_cycles: int
    compute_cycles: int
    reduce_exchange_cycles: int
    reduce_compute_cycles: int
    sync_cycles: int

    @property
    def total_cycles(self) -> int:
        """Cycles of all parts together: phases of an IPU follow each other."""
        return (
            self.exchange_cycles
            + self.compute_cycles
            + self.reduce_exchange_cycles
            + self.reduce_compute_cycles
            + self.sync_cycles
        )


@dataclass(frozen=True, slots=True)
class Plan:
    """Split of a convolution over tiles.

    Args:
        spec: the convolution of one step.
        kind: kind of vertex.
        splits: blocks of each dimension.
        grains: multiples that the cuts of each dimension are.
        cost: estimated cycles of one step.
        temp_bytes: operands, results and gathered windows on the fullest tile of a step.
        memory_bound_met: whether `temp_bytes` is within the requested proportion of tile memory; True until a planner
            that has to exceed it says otherwise.
        memory_binds: whether a larger proportion would give a faster plan; likewise.
        steps: number of steps, one after the other.
        step_axis: position in `Dims` of the dimension that steps divide evenly.
        is_loop: whether steps are a loop, of less code, or follow one another, of fewer cycles.
        join_cycles: estimated cycles to copy the results of the steps to one variable.
        maps_linearly: whether the plan maps unmapped operands linearly to its tiles, else block by block.
        spreads_lhs: whether mapped activations are first copied, in groups of channels, to equal parts of all tiles.
        fragments: lower bound of the exchange fragments in which a tile receives mapped operands, in a step.
        aligned_grid: blocks on the tiles of an operand; None for even blocks on the first tiles.
    """

    spec: ConvSpec
    kind: VertexKind
    splits: Dims[int]
    grains: Dims[int]
    cost: PlanCost
    temp_bytes: int
    memory_bound_met: bool = True
    memory_binds: bool = False
    steps: int = 1
    step_axis: int = 0
    is_loop: bool = True
    join_cycles: int = 0
    maps_linearly: bool = False
    spreads_lhs: bool = False
    fragments: int = 0
    aligned_grid: Grid | None = None

    @property
    def total_cycles(self) -> int:
        """Estimated cycles of all steps."""
        return self.steps * self.cost.total_cycles + self.join_cycles

    @property
    def lower_bound_cycles(self) -> int:
        """Lower-bound estimate of the plan's cost in cycles.

        Half of the operands may already be on the tiles that use them, or reach two tiles of a bus at once; one partial
        result may be on the tile that combines them all.
        """
        avoidable = self.cost.exchange_cycles // 2 + self.cost.reduce_exchange_cycles // self.slots
        return self.total_cycles - self.steps * avoidable

    @property
    def tiles_used(self) -> int:
        return prod(self.splits)

    @property
    def slots(self) -> int:
        """Partial results of each output element."""
        return self.splits.in_channels * prod(self.splits.kernel)

    def code(self, target: Target) -> ConvSpec:
        """Convolution that a codelet of the plan computes, without extents."""
        reordered = rearranged(self.kind, self.spec, target)
        return replace(self.spec.code, rearranged=replace(reordered, result=reordered.result and self.slots == 1))

    def grid(self) -> Grid:
        """Blocks of a step, axes in the order of `Dims`; one object for equal plans."""
        return _grid(self) if self.aligned_grid is None else self.aligned_grid


@dataclass(frozen=True, eq=False, slots=True)
class Grid:
    """Blocks and their tiles; equal only to itself, so that values derived from it can be cached.

    Args:
        cuts: boundaries along each axis, int64[blocks + 1].
        tile: tile of each block, int32, one dimension an axis.
    """

    cuts: tuple[np.ndarray, ...]
    tile: np.ndarray


@remembered
def _grid(plan: Plan) -> Grid:
    """Even blocks of a plan, one on each of the first tiles, numbered so that neighbouring tiles share operands.

    Axes are those of `Dims`: batch, groups, channels, then the field (the image's dimensions) and the kernel.
    """
    rows = zip(plan.spec.extents, plan.splits, plan.grains, strict=True)
    cuts = tuple(even_cuts(extent, blocks, grain) for extent, blocks, grain in rows)
    counts = list(plan.splits)
    rank = len(plan.splits.field)
    kernel = range(FIELD + rank, FIELD + 2 * rank)
    # Axes, outermost first, in which tiles count: groups, the reduced ones, then those of outputs.
    order = [GROUPS, IN_CHANNELS, *kernel, *output_order(plan.kind, rank)]
    numbers = np.arange(prod(counts)).reshape([counts[axis] for axis in order])
    return Grid(cuts, frozen(np.transpose(numbers, np.argsort(order)), np.int32))


def is_plan_of(plan: Plan, spec: ConvSpec, target: Target, *_: Any, **__: Any) -> bool:
    """Return whether a stored plan can be one of a convolution, whatever else it was chosen by.

    A file may be damaged: each value must be in the range in which a plan can be lowered and costed.
    """
    rank = len(spec.in_field)
    dims = (plan.spec.extents, plan.splits, plan.grains)
    # As many dimensions of the field as the convolution has, before any is used; positions in `Dims` are 4 + 2 · rank.
    has_rank = all(len(x.field) == len(x.kernel) == rank for x in dims) and len(plan.spec.in_field) == rank
    if not has_rank or plan.steps not in (1, *STEPS) or not 0 <= plan.step_axis < 4 + 2 * rank:
        return False
    extents = list(plan.spec.extents)
    blocks = list(plan.splits)
    counts = [getattr(plan.cost, item.name) for item in fields(plan.cost)]  # cycles of each part of the cost
    counts += [plan.temp_bytes, plan.join_cycles, plan.fragments]
    return (
        min(extents) >= 1
        and spec_of_all_steps(plan) == spec
        and plan.kind.applies(plan.spec, arithmetic(plan.spec, target))
        and all(1 <= n <= extent for n, extent in zip(blocks, extents, strict=True))
        and 1 <= min(plan.grains) <= max(plan.grains) <= _MAX_GRAIN
        and plan.tiles_used <= target.tiles_per_ipu
        # Larger numbers are no cycles or bytes of a real machine.
        and 0 <= min(counts) <= max(counts) <= _MAX_COUNT
        and (plan.aligned_grid is None or _is_grid(plan.aligned_grid, extents, blocks, target))
    )


def _is_grid(grid: Grid, extents: Sequence[int], blocks: Sequence[int], target: Target) -> bool:
    """Return whether a grid from a file has so many `blocks` of each of `extents`, all on tiles of the target."""
    if len(grid.cuts) != len(extents) or grid.tile.dtype != np.int32 or grid.tile.shape != tuple(blocks):
        return False
    rows = zip(grid.cuts, extents, blocks, strict=True)
    are_cuts = all(
        cut.dtype == np.int64
        and cut.shape == (count + 1,)
        and (cut[0], cut[-1]) == (0, extent)
        and bool((np.diff(cut) > 0).all())
        for cut, extent, count in rows
    )
    return are_cuts and bool(grid.tile.min() >= 0 and grid.tile.max() < target.num_tiles)


def spec_of_all_steps(plan: Plan) -> ConvSpec:
    """Convolution of all steps of a plan together."""
    extents = list(plan.spec.extents)
    extents[plan.step_axis] *= plan.steps
    in_field = (extents[FIELD],) if plan.steps > 1 and plan.step_axis == FIELD else plan.spec.in_field
    return replace(plan.spec, extents=Dims.of(extents), in_field=in_field)


def record_unmet_bound(graph: Graph, plan: Plan, available_memory_proportion: float | None, name: str) -> None:
    """Records a plan that exceeds its memory bound; a proportion of 0 asks for least memory and is no bound."""
    share = available_memory_proportion
    share = graph.target.available_memory_proportion if share is None else share
    bound_bytes = int(share * graph.target.bytes_per_tile)
    if share == 0 or plan.temp_bytes <= bound_bytes:
        return
    graph.notes.unmet_bounds.append(UnmetBound(name, bound_bytes, plan.temp_bytes, graph.origin))
