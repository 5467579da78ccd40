"""Where the weights of a dense layer are to lie, with all passes in mind that use them.

The forward pass places them. The backward pass reads them again, and the update makes a gradient of their shape, which
is best computed where they lie. So a plan of the forward pass is judged by what it is charged and by what the other
passes are then expected to cost at least: where the weights lie, or cut freely with an exchange.

Input: the product of the forward pass, and which passes follow. Output: a plan that suits all of them, and the cycles
of the others.
Source: PopLibs' joint plans of fully connected layers: the batch is not split, so that each weight is used on one tile,
and the cuts of the three passes are the same (`ConvModel.cpp`; reference machine.md §2).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from ipujax.lowering.poplin.aligned import OUT, RHS, plan_where
from ipujax.lowering.poplin.candidates import Candidates
from ipujax.lowering.poplin.following import Operation, elementwise_cycles_on, moving_cycles
from ipujax.lowering.poplin.plan import MATMUL_STEP_AXES, Plan, PlanCost, plan_convolution
from ipujax.lowering.poplin.spec import FIELD, IN_CHANNELS, OUT_CHANNELS, ConvSpec, Dims, arithmetic
from ipujax.lowering.poplin.vertex_kinds import KINDS
from ipujax.runtime.mapping import Blocked, blocked_mapping
from ipujax.runtime.target import Target
from ipujax.runtime.variable import element_bytes


@dataclass(frozen=True, slots=True)
class Later:
    """What follows a pass of a dense layer: the forward pass the others, the update of its weights an optimizer.

    Args:
        side: which operand of the pass the weights are, 0 or 1; it says nothing of an update.
        has_backward: whether the gradient of the other operand is computed from them.
        elementwise: the operations on arrays of their shape that follow their gradient, as of an optimizer.
        is_update: whether the pass is the update, the product that computes that gradient.
    """

    side: int
    has_backward: bool
    elementwise: tuple[Operation, ...] = ()
    is_update: bool = False


@dataclass(frozen=True, slots=True)
class _Layer:
    """Extents of a layer, and where they are in the forward pass: the batch, the inputs it sums over, its features."""

    batch: int
    inputs: int
    features: int
    batch_axis: int
    feature_axis: int

    @staticmethod
    def of(spec: ConvSpec, later: Later) -> _Layer:
        batch_axis, feature_axis = (FIELD, OUT_CHANNELS) if later.side else (OUT_CHANNELS, FIELD)
        extents = list(spec.extents)
        return _Layer(extents[batch_axis], extents[IN_CHANNELS], extents[feature_axis], batch_axis, feature_axis)


def later_cycles(spec: ConvSpec, later: Later, boxes: Blocked | None, target: Target, bound_bytes: float) -> int:
    """Expected cycles of the passes after the forward pass, when the weights lie in some boxes.

    Args:
        spec: the product of the forward pass.
        later: which passes.
        boxes: of the weights [1, inputs, features], one a tile; None when they lie otherwise.
        target: the machine.
        bound_bytes: most that operands and results of a vertex may take.
    """
    layer = _Layer.of(spec, later)
    update = _update_spec(spec, layer)
    size = layer.inputs * layer.features
    moving = moving_cycles(size * element_bytes(spec.out_dtype), target)
    total = min(_free_cycles(update, target) + moving, _cycles_where(update, OUT, boxes, target, bound_bytes))
    total += elementwise_cycles_on(boxes, size, spec.out_dtype, later.elementwise, target)
    if later.has_backward:
        backward, turned = _backward_spec(spec, layer), None if boxes is None else _turned(boxes)
        total += min(_free_cycles(backward, target), _cycles_where(backward, RHS, turned, target, bound_bytes))
    return int(total)


@lru_cache(maxsize=4096)
def joint_plan(spec: ConvSpec, later: Later, target: Target, bound_bytes: float) -> tuple[Plan, int] | None:
    """The plan of the forward pass that is expected to be best for all passes in its cuts, and cycles of the others.

    The batch is not split.

    Args:
        spec: the product of the forward pass, whose weights may be placed.
        later: the passes that follow.
        target: the machine.
        bound_bytes: most that operands and results of a vertex may take, in any pass.
    """
    best: tuple[Plan, int] | None = None
    layer = _Layer.of(spec, later)
    for forward in _candidates(spec, target):
        unsplit = np.flatnonzero(forward.splits[layer.batch_axis] == 1)
        parts = forward.cost_parts(unsplit)
        cycles, temp_bytes = parts.sum(0), forward.temp_bytes[unsplit]
        for others in _other_passes(forward, unsplit, layer, later):
            per_kind = [(one.cost_parts(np.arange(len(unsplit))).sum(0), one.temp_bytes) for one in others]
            cycles = cycles + np.minimum.reduce([cost for cost, _ in per_kind])
            temp_bytes = np.maximum(temp_bytes, np.minimum.reduce([size for _, size in per_kind]))
        fits = np.flatnonzero(temp_bytes <= bound_bytes)
        if fits.size and (best is None or cycles[fits].min() < best[0].total_cycles + best[1]):
            chosen = fits[int(cycles[fits].argmin())]
            splits = Dims.of([int(n) for n in forward.splits[:, unsplit[chosen]]])
            cost = PlanCost(*(int(n) for n in parts[:, chosen]))
            size = int(forward.temp_bytes[unsplit[chosen]])
            plan = Plan(spec, forward.kind, splits, forward.grains, cost, size, True, False)
            best = plan, int(cycles[chosen]) - plan.total_cycles
    return best


@lru_cache(maxsize=4096)
def spread_plans(spec: ConvSpec, target: Target, bound_bytes: float) -> tuple[Plan, ...]:
    """For some numbers of tiles the best plan that spreads whole results over as many, or up to twice as many.

    An update by itself needs few tiles when the batch is small; what follows it on arrays of its shape wants many.

    Args:
        spec: the product of the update.
        target: the machine.
        bound_bytes: most that operands and results of a vertex may take.
    """
    best: dict[int, Plan] = {}
    for candidates in _candidates(spec, target):
        tiles = np.where(candidates.slots == 1, np.prod(candidates.splits, axis=0), 0)
        for least in (n for n in _SPREADS if n <= target.tiles_per_ipu):
            left = np.flatnonzero((tiles // least == 1) & (candidates.temp_bytes <= bound_bytes))
            if not left.size:
                continue
            chosen = left[int(candidates.bound_cycles[left].argmin())]
            splits = Dims.of([int(n) for n in candidates.splits[:, chosen]])
            cost = PlanCost(*(int(n) for n in candidates.cost_parts(np.array([chosen]))[:, 0]))
            size = int(candidates.temp_bytes[chosen])
            plan = Plan(spec, candidates.kind, splits, candidates.grains, cost, size, True, False)
            if least not in best or plan.total_cycles < best[least].total_cycles:
                best[least] = plan
    return tuple(dict.fromkeys(best.values()))


_SPREADS = (64, 128, 256, 512, 1024)  # the same for any number of tiles


def _other_passes(forward: Candidates, numbers: np.ndarray, layer: _Layer, later: Later) -> Iterator[list[Candidates]]:
    """For each other pass its candidates of every kind of vertex, in the cuts of some of the forward pass."""
    spec, target = forward.spec, forward.target
    features = forward.splits[layer.feature_axis, numbers], list(forward.block)[layer.feature_axis][numbers]
    inputs = forward.splits[IN_CHANNELS, numbers], forward.block.in_channels[numbers]
    batch = np.ones_like(features[0]), np.full_like(features[0], layer.batch)
    one = np.ones_like(features[0]), np.ones_like(features[0])
    passes = [(_update_spec(spec, layer), (one, one, features, batch, inputs, one), False)]
    if later.has_backward:
        passes.append((_backward_spec(spec, layer), (one, one, inputs, features, batch, one), True))
    for product, rows, weights_stay in passes:
        splits, block = np.stack([split for split, _ in rows]), Dims.of([length for _, length in rows])
        grains = Dims.of((1,) * len(rows))
        yield [
            Candidates(product, kind, target, grains, splits, block, rhs_stays=weights_stay)
            for kind in KINDS
            if kind.applies(product, arithmetic(product, target))
        ]


def _candidates(spec: ConvSpec, target: Target) -> Iterator[Candidates]:
    how = arithmetic(spec, target)
    return (Candidates.of(kind, spec, target) for kind in KINDS if kind.applies(spec, how))


def _product(spec: ConvSpec, rows: int, inner: int, columns: int) -> ConvSpec:
    """A product of operands that lie already, with the dtypes of the forward pass."""
    extents = Dims(1, 1, columns, inner, (rows,), (1,))
    return replace(spec, extents=extents, in_field=(rows,), lhs_is_free=False, rhs_is_free=False)


def _backward_spec(spec: ConvSpec, layer: _Layer) -> ConvSpec:
    """[batch, features] by the weights [features, inputs]."""
    return _product(spec, layer.batch, layer.features, layer.inputs)


def _update_spec(spec: ConvSpec, layer: _Layer) -> ConvSpec:
    """[inputs, batch] by [batch, features]: the gradient of the weights [inputs, features]."""
    return _product(spec, layer.inputs, layer.batch, layer.features)


@lru_cache(maxsize=4096)
def _turned(boxes: Blocked) -> Blocked:
    return blocked_mapping((boxes.cuts[0], boxes.cuts[2], boxes.cuts[1]), np.swapaxes(boxes.tile, 1, 2))


def _free_cycles(spec: ConvSpec, target: Target) -> int:
    return plan_convolution(spec, target, None, MATMUL_STEP_AXES).total_cycles


def _cycles_where(spec: ConvSpec, dims: Any, boxes: Blocked | None, target: Target, bound_bytes: float) -> float:
    plan = None if boxes is None else plan_where(spec, dims, boxes, target, bound_bytes)
    return float("inf") if plan is None else plan.total_cycles
