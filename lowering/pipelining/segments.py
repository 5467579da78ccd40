"""Segments of a micro-batch, between which it may be cut into stages, and what belongs to each.

Input: an inlined jaxpr without stages. Output: a segment for each equation. Each forward equation that depends on
parameters and differs between micro-batches is a segment, in program order. A backward equation belongs to the first
segment whose values or parameters it needs. What is the same for all micro-batches, or depends on no parameter,
belongs where it is used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ipujax.lowering.ipus import variables
from ipujax.lowering.jax_compat import Jaxpr, JaxprEqn, Var
from ipujax.lowering.pipelining.layers import finest, is_layer_loop
from ipujax.lowering.pipelining.primitive import PipelineSpec
from ipujax.lowering.pipelining.row_shards import Bounds
from ipujax.lowering.source_info import name_stack


@dataclass(frozen=True, slots=True)
class Segments:
    """The segments of equations.

    Args:
        segments: for each equation the segment it goes with, −1 where it goes where it is used.
        is_same: for each equation whether it computes the same for all micro-batches.
        num_segments: how many segments there are.
    """

    segments: tuple[int, ...]
    is_same: list[bool]
    num_segments: int


def find_segments(body: Jaxpr, spec: PipelineSpec) -> Segments:
    """Assigns the equations of a micro-batch to segments.

    Args:
        body: computes it.
        spec: how micro-batches go through it.
    """
    found = dependence(body, spec)
    forward = [n for n, is_forward in enumerate(found.forward) if is_forward]
    segments = _segments(body.eqns, forward, found.is_same, found.same)
    return Segments(tuple(segments), found.is_same, len(forward))


def layer_loops(body: Jaxpr, spec: PipelineSpec) -> dict[int, Bounds]:
    """The loops over layers of a micro-batch, by the index of their equations, and where they may be cut.

    Args:
        body: computes it.
        spec: how micro-batches go through it.
    """
    found = dependence(body, spec)
    parameters = found.same & found.trained
    return {
        n: finest(eqn.params["length"])
        for n, eqn in enumerate(body.eqns)
        if found.forward[n] and is_layer_loop(eqn, parameters)
    }


def same_values(body: Jaxpr, spec: PipelineSpec) -> set[Var]:
    """The variables that are the same for all micro-batches.

    Args:
        body: computes one.
        spec: how micro-batches go through it.
    """
    return dependence(body, spec).same


def is_backward(eqn: JaxprEqn) -> bool:
    """Whether an equation belongs to a gradient."""
    return "transpose(" in name_stack(eqn)


@dataclass(frozen=True, slots=True)
class Dependence:
    """Dependence of equations on parameters and on micro-batches.

    Args:
        same: the variables that are the same for all micro-batches.
        trained: those that depend on parameters.
        is_same: for each equation whether it computes the same for all micro-batches.
        forward: for each equation whether it is a segment.
    """

    same: set[Var]
    trained: set[Var]
    is_same: list[bool]
    forward: list[bool]


def dependence(body: Jaxpr, spec: PipelineSpec) -> Dependence:
    """Finds the equations and variables that depend on parameters, or on the micro-batch.

    Args:
        body: computes one micro-batch.
        spec: how micro-batches go through it.
    """
    same: set[Any] = {var for var, role in zip(body.invars, spec.roles, strict=True) if role == "same"}
    same.update(body.constvars)
    trained = {var for var in same if var.aval.shape}  # and what comes of them; the others are settings
    forward: list[bool] = []
    is_same: list[bool] = []
    for eqn in body.eqns:
        read = variables(eqn.invars)
        is_same.append(not eqn.effects and all(var in same for var in read))
        if is_same[-1]:
            same.update(eqn.outvars)
        is_trained = any(var in trained for var in read)
        if is_trained:
            trained.update(eqn.outvars)
        forward.append(is_trained and not is_same[-1] and not is_backward(eqn))
    return Dependence(same, trained, is_same, forward)


def _segments(eqns: Sequence[JaxprEqn], forward: Sequence[int], is_same: Sequence[bool], same: set[Var]) -> list[int]:
    """The segment each equation goes with."""
    segments = [-1] * len(eqns)
    last: dict[Var, int] = {}  # the last segment that has a value
    for segment, n in enumerate(forward):
        segments[n] = segment
        for var in variables(eqns[n].invars):
            last[var] = segment
        for var in eqns[n].outvars:
            last[var] = segment
    for n in reversed(range(len(eqns))):  # what is computed once is where its uses are
        if is_same[n]:
            uses = [last[var] for var in eqns[n].outvars if var in last]
            for var in variables(eqns[n].invars):
                last[var] = max([last.get(var, -1), *uses])
    for n, eqn in enumerate(eqns):
        if is_same[n]:
            known = [last[var] for var in variables(eqn.invars) if var in last]
            for var in eqn.outvars:
                last.setdefault(var, max(known, default=len(forward) - 1))
        elif segments[n] < 0 and is_backward(eqn):
            known = [last[var] for var in variables(eqn.invars) if last.get(var, -1) >= 0]
            segments[n] = min(known, default=len(forward) - 1)
            last.update(dict.fromkeys(eqn.outvars, segments[n]))
    return segments
