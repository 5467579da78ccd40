"""Assignments: the mesh axes that split each factor of an equation.

Splitting a factor over mesh axes splits every dimension that it runs over, and the equation is computed on blocks. If
it is reduced, devices then have partial results, which combine to the result.
Idea: sharding rules of Shardy (openxla/shardy, docs/sharding_representation.md).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any

from ipujax.lowering.partition.resharding import resharding_cycles
from ipujax.lowering.partition.specs import Axes, MeshAxes, Spec, divides
from ipujax.lowering.primitives import Factors, Labels
from ipujax.runtime.target import Target

Assignment = Mapping[int, Axes]  # axes of each factor that is split


def axes_of(labels: Labels, assignment: Assignment) -> tuple[Axes, ...]:
    """Axes of each dimension of a value."""
    return tuple(tuple(axis for f in factors for axis in assignment.get(f, ())) for factors in labels)


def leading_axes_of(factors: Factors, labels: Labels, assignment: Assignment, mesh: MeshAxes) -> tuple[Axes, ...]:
    """Axes of each dimension of a value, without those whose blocks would not be contiguous."""
    return axes_of(tuple(_factors_of_blocks(factors, dim, assignment, mesh) for dim in labels), assignment)


def _factors_of_blocks(
    factors: Factors, dim: tuple[int, ...], assignment: Assignment, mesh: MeshAxes
) -> tuple[int, ...]:
    """Factors of a dimension (the indices that it joins), major to minor, that split it in contiguous blocks.

    They end with the first of which a block has several indices: a split of the next one would take a part of each.
    """
    with_several_indices = (n for n, f in enumerate(dim) if mesh.size(assignment.get(f, ())) != factors.sizes[f])
    return dim[: next(with_several_indices, len(dim)) + 1]


def _is_contiguous(factors: Factors, assignment: Assignment, mesh: MeshAxes) -> bool:
    """True if every dimension is split in contiguous blocks."""
    return all(
        axes_of(labels, assignment) == leading_axes_of(factors, labels, assignment, mesh)
        for labels in (*factors.operands, *factors.results)
    )


def projected(factors: Factors, labels: Labels, spec: Spec, mesh: MeshAxes) -> dict[int, Axes]:
    """Mesh axes that split each factor of a value, from the axes that split its dimensions.

    A factor is an index of an equation: several where dimensions are joined, as in the reshape [2, 3] → [6]. A
    dimension gives its axes to its factors in order, each as many as divide it; the last axes may fit none.

    Args:
        factors: sizes of the factors.
        labels: factors of each dimension of the value, major to minor.
        spec: axes of each dimension, major to minor; they go to its factors in this order.
        mesh: the mesh.
    """
    axes_of_factor: dict[int, Axes] = {}
    for dim, dim_axes in zip(labels, spec.dims, strict=True):
        remaining = list(dim_axes)
        for factor in dim:
            fitting: list[str] = []
            while remaining and factors.sizes[factor] % mesh.size((*fitting, remaining[0])) == 0:
                fitting.append(remaining.pop(0))
            axes_of_factor[factor] = tuple(fitting)
            # A minor factor is split only where each block has one index of the major one.
            if mesh.size(fitting) != factors.sizes[factor]:
                break
    return axes_of_factor


@dataclass(frozen=True, slots=True)
class Decision:
    """Choice for one equation.

    Args:
        assignment: axes of each factor that is split.
        cycles: estimated cycles: collectives of operands and results, and multiply-adds.
    """

    assignment: Assignment
    cycles: float

    def reduced_axes(self, factors: Factors) -> dict[str, str]:
        """Monoid of each axis that splits a reduced factor."""
        return {axis: monoid for f, monoid in factors.reductions.items() for axis in self.assignment.get(f, ())}


@dataclass(frozen=True, slots=True)
class Values:
    """The values of one equation: types and specs.

    Args:
        operand_avals: type of each operand.
        operand_specs: spec of each operand.
        result_avals: type of each result.
        result_specs: required spec of each result; None where any will do.
        sums_of: number of executions of the equation after which one sum of partial results is taken, for each result;
            1 for all when empty.
    """

    operand_avals: Sequence[Any]
    operand_specs: Sequence[Spec]
    result_avals: Sequence[Any]
    result_specs: Sequence[Spec | None]
    sums_of: Sequence[int] = ()


def decide(factors: Factors, values: Values, mesh: MeshAxes, target: Target) -> Decision:
    """The assignment of least cost among those that operands or required results suggest for each axis."""
    return next(iter(ranked(factors, values, mesh, target)), Decision({}, cycles=0.0))


def ranked(factors: Factors, values: Values, mesh: MeshAxes, target: Target) -> list[Decision]:
    """Ways to split an equation over devices that its operands or required results suggest, by estimated cycles.

    An assignment has the mesh axes that split each factor, an index of the equation such as i of [i, k] · [k, j].
    """
    suggestions = _suggested_axes(factors, values, mesh)
    decisions = (
        Decision(assignment, _assignment_cycles(factors, assignment, values, mesh, target))
        for assignment in _possible_assignments(factors, suggestions, mesh)
    )
    # Of equal costs the first: an axis stays where the result, then the first operand, has it.
    return sorted(decisions, key=lambda decision: decision.cycles)


def needed_specs(factors: Factors, assignment: Assignment, operand_specs: Sequence[Spec]) -> list[Spec]:
    """Spec of each operand that an assignment needs; unreduced sums stay unreduced."""
    return [
        Spec(axes_of(labels, assignment), spec.unreduced)
        for labels, spec in zip(factors.operands, operand_specs, strict=True)
    ]


def _suggested_axes(factors: Factors, values: Values, mesh: MeshAxes) -> list[dict[int, Axes]]:
    """Mesh axes that each operand or result, as it is split, suggests for the factors (indices) of an equation.

    Results come first: of assignments of equal cost the first is taken.
    """
    pairs = [
        *(
            (labels, spec)
            for labels, spec in zip(factors.results, values.result_specs, strict=True)
            if spec is not None
        ),
        *zip(factors.operands, values.operand_specs, strict=True),
    ]
    return [projected(factors, labels, spec, mesh) for labels, spec in pairs]


def _possible_assignments(
    factors: Factors, suggestions: Sequence[Mapping[int, Axes]], mesh: MeshAxes
) -> Iterator[dict[int, Axes]]:
    """Assignments with each axis at one of the factors that are suggested for it, or at none, the last option;
    only those whose blocks are contiguous and of one size.

    Args:
        factors: sizes of the factors, and those of each dimension of operands and results.
        suggestions: axes of factors that suit one operand or result each.
        mesh: the mesh.
    """
    options: dict[str, list[int | None]] = {}  # factors suggested for each axis, then None for no factor
    for suggestion in suggestions:
        for factor, axes in suggestion.items():
            for axis in axes:
                options_of_axis = options.setdefault(axis, [])
                if factor not in options_of_axis:
                    options_of_axis.append(factor)
    for options_of_axis in options.values():
        options_of_axis.append(None)
    for choice in product(*options.values()):
        assignment: dict[int, Axes] = {}
        for axis, chosen in zip(options, choice, strict=True):
            if chosen is not None:
                assignment[chosen] = (*assignment.get(chosen, ()), axis)
        ordered = {factor: _in_suggested_order(axes, factor, suggestions) for factor, axes in assignment.items()}
        divides_all = all(factors.sizes[factor] % mesh.size(axes) == 0 for factor, axes in ordered.items())
        if divides_all and _is_contiguous(factors, ordered, mesh):
            yield ordered


def _in_suggested_order(axes: Axes, factor: int, suggestions: Sequence[Mapping[int, Axes]]) -> Axes:
    """Axes of a factor in the order of the first suggestion that has them all there; as they are without one."""
    for suggestion in suggestions:
        suggested = suggestion.get(factor, ())
        if set(axes) <= set(suggested):
            return tuple(axis for axis in suggested if axis in axes)
    return axes


def _assignment_cycles(
    factors: Factors, assignment: Assignment, values: Values, mesh: MeshAxes, target: Target
) -> float:
    """Cycles of an equation on blocks, and of moving operands and results to the specs needed.

    Infinite for an assignment under which a dimension of an operand or result has no blocks of one size.
    """
    cycles = 0.0
    required = needed_specs(factors, assignment, values.operand_specs)
    for aval, spec, needed in zip(values.operand_avals, values.operand_specs, required, strict=True):
        if not divides(aval.shape, needed, mesh):
            return float("inf")
        cycles += resharding_cycles(aval, spec, needed, mesh, target)
    # Costed as a sum, whatever the monoid.
    reduced_axes = {axis for f in factors.reductions for axis in assignment.get(f, ())}
    sums_of = values.sums_of or (1,) * len(values.result_avals)
    results = zip(factors.results, values.result_avals, values.result_specs, sums_of, strict=True)
    for labels, aval, result_spec, executions in results:
        dims = axes_of(labels, assignment)
        after = Spec(dims) if result_spec is None else result_spec
        before = Spec(dims, frozenset(reduced_axes) | after.unreduced)
        if not divides(aval.shape, before, mesh):
            return float("inf")
        share = executions if after.dims == dims else 1  # a sum alone can wait; a result that is split anew cannot
        cycles += resharding_cycles(aval, before, after, mesh, target) / share
    # Points of the equation's index space that one device computes.
    points = prod(factors.sizes.values()) / mesh.size(axis for axes in assignment.values() for axis in axes)
    return cycles + _compute_cycles(points, factors.macs, target)


def _compute_cycles(points: float, macs: int, target: Target) -> float:
    """Cycles on the tiles of one IPU at their peak rate, float32."""
    tiles = target.tiles_per_ipu
    if macs:
        return points * macs / (tiles * target.fp32_amp_macs_per_cycle)
    # A word of 4 bytes an element is stored at the ports' peak.
    return points * 4 / (tiles * target.store_bytes_per_cycle)
