"""Numbers the equations of a micro-batch: where it may be cut into stages, and what goes with what.

Input: an inlined jaxpr without stages. Output: a number for each equation. Forward equations that depend on parameters
and differ between micro-batches are numbered in program order. A backward equation goes with the first of them whose
values or parameters it needs. What is the same for all micro-batches, or depends on no parameter, goes where it is
used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ipujax.lowering.ipus import variables
from ipujax.lowering.jax_compat import Jaxpr, JaxprEqn, Var, name_stack
from ipujax.lowering.pipelining.layers import finest, is_layer_loop
from ipujax.lowering.pipelining.primitive import PipelineSpec
from ipujax.lowering.pipelining.row_shards import Bounds


@dataclass(frozen=True, slots=True)
class Numbering:
    """The numbers of equations.

    Args:
        numbers: for each equation the number it goes with, −1 where it goes where it is used.
        is_same: for each equation whether it computes the same for all micro-batches.
        count: how many numbers there are.
    """

    numbers: tuple[int, ...]
    is_same: list[bool]
    count: int


def numbered(body: Jaxpr, spec: PipelineSpec) -> Numbering:
    """Numbers the equations of a micro-batch.

    Args:
        body: computes it.
        spec: how micro-batches go through it.
    """
    found = _dependence(body, spec)
    forward = [n for n, is_forward in enumerate(found.forward) if is_forward]
    numbers = _numbers(body.eqns, forward, found.is_same, found.same)
    return Numbering(tuple(numbers), found.is_same, len(forward))


def layer_loops(body: Jaxpr, spec: PipelineSpec) -> dict[int, Bounds]:
    """The loops over layers of a micro-batch, by the number of their equations, and where they may be cut.

    Args:
        body: computes it.
        spec: how micro-batches go through it.
    """
    found = _dependence(body, spec)
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
    return _dependence(body, spec).same


def is_backward(eqn: JaxprEqn) -> bool:
    """Whether an equation belongs to a gradient."""
    return "transpose(" in name_stack(eqn)


@dataclass(frozen=True, slots=True)
class _Dependence:
    """What depends on what.

    Args:
        same: the variables that are the same for all micro-batches.
        trained: those that come of parameters.
        is_same: for each equation whether it computes the same for all micro-batches.
        forward: for each equation whether it is to be numbered.
    """

    same: set[Var]
    trained: set[Var]
    is_same: list[bool]
    forward: list[bool]


def _dependence(body: Jaxpr, spec: PipelineSpec) -> _Dependence:
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
    return _Dependence(same, trained, is_same, forward)


def _numbers(eqns: Sequence[JaxprEqn], forward: Sequence[int], is_same: Sequence[bool], same: set[Var]) -> list[int]:
    """The number each equation goes with."""
    numbers = [-1] * len(eqns)
    last: dict[Var, int] = {}  # the last number on whose stage a value is at hand
    for number, n in enumerate(forward):
        numbers[n] = number
        for var in variables(eqns[n].invars):
            last[var] = number
        for var in eqns[n].outvars:
            last[var] = number
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
        elif numbers[n] < 0 and is_backward(eqn):
            known = [last[var] for var in variables(eqn.invars) if last.get(var, -1) >= 0]
            numbers[n] = min(known, default=len(forward) - 1)
            last.update(dict.fromkeys(eqn.outvars, numbers[n]))
    return numbers
