"""Segments of a micro-batch, between which it may be cut into stages, and the equations of each.

Input: an inlined jaxpr without stages. Output: a segment for each equation. Each forward equation that depends on
parameters and differs between micro-batches is a segment, in program order. A backward equation belongs to the first
segment whose values or parameters it needs. An equation that is the same for all micro-batches, or depends on no
parameter, belongs to its users.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ipujax.lowering.ipus import variables
from ipujax.lowering.jax_compat import Jaxpr, JaxprEqn, Var
from ipujax.lowering.pipelining.layers import finest_bounds, is_layer_loop
from ipujax.lowering.pipelining.primitive import PipelineSpec
from ipujax.lowering.pipelining.row_shards import Bounds
from ipujax.lowering.primitives import has_state
from ipujax.lowering.source_info import name_stack


@dataclass(frozen=True, slots=True)
class Segments:
    """The segments of equations.

    Args:
        eqns: the equations of a micro-batch.
        segments: segment of each equation, −1 for one that belongs to its users.
        is_same: for each equation whether it computes the same for all micro-batches.
        num_segments: number of segments.
    """

    eqns: Sequence[JaxprEqn]
    segments: tuple[int, ...]
    is_same: list[bool]
    num_segments: int

    def rows(self) -> Iterator[tuple[JaxprEqn, int, bool]]:
        """Yields each equation, its segment, and whether it computes the same for all micro-batches."""
        return zip(self.eqns, self.segments, self.is_same, strict=True)


def find_segments(body: Jaxpr, spec: PipelineSpec) -> Segments:
    """Assigns the equations of a micro-batch to segments."""
    flow = dependence(body, spec)
    first_eqns = [n for n, is_forward in enumerate(flow.forward) if is_forward]
    segments = _segment_of_each(body.eqns, first_eqns, flow.is_same)
    return Segments(body.eqns, tuple(segments), flow.is_same, len(first_eqns))


def layer_loops(body: Jaxpr, spec: PipelineSpec) -> dict[int, Bounds]:
    """Finest bounds of the loops over layers of a micro-batch, by the index of their equations."""
    flow = dependence(body, spec)
    parameters = flow.same & flow.trained
    return {
        n: finest_bounds(eqn.params["length"])
        for n, eqn in enumerate(body.eqns)
        if flow.forward[n] and is_layer_loop(eqn, parameters)
    }


def same_values(body: Jaxpr, spec: PipelineSpec) -> set[Var]:
    """The variables of a micro-batch that are the same for all micro-batches."""
    return dependence(body, spec).same


def is_backward(eqn: JaxprEqn) -> bool:
    """True if an equation belongs to a gradient."""
    return "transpose(" in name_stack(eqn)


@dataclass(frozen=True, slots=True)
class Dependence:
    """Dependence of equations on parameters and on micro-batches.

    Args:
        same: variables that are the same for all micro-batches.
        trained: variables that depend on parameters.
        is_same: for each equation whether it computes the same for all micro-batches.
        forward: for each equation whether it begins a segment: it depends on both, and is no gradient.
    """

    same: set[Var]
    trained: set[Var]
    is_same: list[bool]
    forward: list[bool]


def dependence(body: Jaxpr, spec: PipelineSpec) -> Dependence:
    """Finds the equations and variables of a micro-batch that depend on parameters, or differ between micro-batches."""
    same: set[Any] = {var for var, role in zip(body.invars, spec.roles, strict=True) if role == "same"}
    same.update(body.constvars)
    trained = {var for var in same if var.aval.shape}  # scalars are settings, such as a temperature
    forward: list[bool] = []
    is_same: list[bool] = []
    for eqn in body.eqns:
        operands = variables(eqn.invars)
        is_same.append(not eqn.effects and not has_state(eqn) and all(var in same for var in operands))
        if is_same[-1]:
            same.update(eqn.outvars)
        is_trained = any(var in trained for var in operands)
        if is_trained:
            trained.update(eqn.outvars)
        forward.append(is_trained and not is_same[-1] and not is_backward(eqn))
    return Dependence(same, trained, is_same, forward)


def _segment_of_each(eqns: Sequence[JaxprEqn], first_eqns: Sequence[int], is_same: Sequence[bool]) -> list[int]:
    """The segment of each equation, −1 for one that belongs to its users.

    Args:
        eqns: equations of a micro-batch.
        first_eqns: number of the forward equation by which each segment begins, in order. What else a segment computes
            forward is where it is read, and so belongs to its users.
        is_same: for each equation whether it computes the same for all micro-batches, and so has no segment.
    """
    segments = [-1] * len(eqns)
    # Last segment that defines or reads a variable, itself or by values computed from it once for all micro-batches.
    last_segment: dict[Var, int] = {}
    for segment, n in enumerate(first_eqns):
        segments[n] = segment
        for var in (*variables(eqns[n].invars), *eqns[n].outvars):
            last_segment[var] = segment
    for n in reversed(range(len(eqns))):
        if is_same[n]:
            user_segments = [last_segment[var] for var in eqns[n].outvars if var in last_segment]
            for var in variables(eqns[n].invars):
                last_segment[var] = max([last_segment.get(var, -1), *user_segments])
    for n, eqn in enumerate(eqns):
        operand_segments = [last_segment[var] for var in variables(eqn.invars) if var in last_segment]
        if is_same[n]:
            # What only gradients read is used last where its operands are.
            for var in eqn.outvars:
                last_segment.setdefault(var, max(operand_segments, default=len(first_eqns) - 1))
        elif segments[n] < 0 and is_backward(eqn):
            # Gradients run from the last segment to the first, so the operand of the first one is there last.
            # One that reads nothing of the forward part begins the gradient, with the last segment.
            using_segments = [segment for segment in operand_segments if segment >= 0]  # −1: used by no segment
            segments[n] = min(using_segments, default=len(first_eqns) - 1)
            last_segment.update(dict.fromkeys(eqn.outvars, segments[n]))
    return segments
