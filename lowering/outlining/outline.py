"""Pass `outline`: runs of equations that a jaxpr repeats become functions, lowered once.

    h1 = tanh(x @ w1); y1 = x + tanh(h1 @ w1)        y1 = function_call[layer](w1, x)
    h2 = tanh(y1 @ w2); y2 = y1 + tanh(h2 @ w2)      y2 = function_call[layer](w2, y1)

Typical runs are layers written by Python loops or calls, their gradients, and recomputation of a checkpoint. Each
jaxpr is searched by itself, see `repeats`; a run becomes a function where that saves cycles, see `function_call`.
No run has effects or collectives, or spans two stages or a forward and a backward part. Equations without a stage,
as an optimiser's, are placed first and then outlined by `outline_placed`. The equations of a function have the
common beginning and end of its callers' name stacks, and the source lines of the first run.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

import numpy as np

from ipujax.lowering.gcl import is_collective
from ipujax.lowering.jax_compat import ClosedJaxpr, Jaxpr, JaxprEqn
from ipujax.lowering.jaxpr import (
    EquationNumbers,
    Rewrite,
    StageName,
    equations_inside,
    has_stages,
    once,
    phase_of,
    stage_name,
    stages_inside,
    with_inner,
)
from ipujax.lowering.offload import MOVES
from ipujax.lowering.outlining.dataflow import Dataflow, last_uses
from ipujax.lowering.outlining.function_call import function_call_p
from ipujax.lowering.outlining.outlined_run import Run
from ipujax.lowering.outlining.repeats import find_repeats
from ipujax.runtime.graph import BYTE_COST_CYCLES

_FUSED = "fused"  # the primitive of pass `fuse`: one vertex, which calls nothing


def outline(jaxpr: ClosedJaxpr, byte_cost: float = BYTE_COST_CYCLES) -> ClosedJaxpr:
    """Returns an equal jaxpr with functions for repeated runs; `byte_cost` is the cost per byte of code in cycles."""
    return outliner(byte_cost)(jaxpr)


def outliner(byte_cost: float = BYTE_COST_CYCLES) -> Rewrite:
    """Pass `outline` for several jaxprs: a jaxpr that several of them contain stays one object."""
    numbers = EquationNumbers()

    def with_equations(jaxpr: ClosedJaxpr, eqns: Sequence[JaxprEqn]) -> ClosedJaxpr:
        rewritten = [_rewritten(eqn, in_function if eqn.primitive is function_call_p else rewrite_body) for eqn in eqns]
        # An unchanged jaxpr stays the same object, so that jaxprs shared by callers stay shared.
        is_same = len(rewritten) == len(jaxpr.eqns) and all(map(operator.is_, rewritten, jaxpr.eqns))
        return jaxpr if is_same else ClosedJaxpr(jaxpr.jaxpr.replace(eqns=rewritten), jaxpr.consts)

    @once
    def rewrite_body(jaxpr: ClosedJaxpr) -> ClosedJaxpr:
        return with_equations(jaxpr, _outlined(jaxpr.jaxpr, numbers, byte_cost))

    @once
    def in_function(jaxpr: ClosedJaxpr) -> ClosedJaxpr:
        """Outlines only loops of a function: its own code exists once."""
        return with_equations(jaxpr, jaxpr.eqns)

    return rewrite_body


def _rewritten(eqn: JaxprEqn, rewrite: Rewrite) -> JaxprEqn:
    if eqn.primitive.name == _FUSED:
        return eqn
    return with_inner(eqn, rewrite)


def outline_placed(
    jaxpr: Jaxpr, places: Sequence[int | None], byte_cost: float = BYTE_COST_CYCLES
) -> tuple[Jaxpr, list[int]]:
    """Outlines the equations without a stage of a jaxpr with stages, once each is placed.

    Args:
        jaxpr: equations with stages, and without.
        places: IPU of each equation, None for one that runs on several.
        byte_cost: cost per byte on the fullest tile, in cycles.

    Returns:
        The jaxpr with calls, and for each of its equations the number of one that it replaces.
    """
    groups = np.full(len(jaxpr.eqns), -1)
    for n, (eqn, place) in enumerate(zip(jaxpr.eqns, places, strict=True)):
        if place is not None and not _is_apart(eqn):
            # Only equations of one IPU may be one run.
            groups[n] = place
    eqns, sources = _with_calls(jaxpr, groups, EquationNumbers(), byte_cost)
    return jaxpr.replace(eqns=list(eqns)), sources


def _outlined(jaxpr: Jaxpr, numbers: EquationNumbers, byte_cost: float) -> Sequence[JaxprEqn]:
    return _with_calls(jaxpr, _groups(jaxpr), numbers, byte_cost)[0]


def _with_calls(
    jaxpr: Jaxpr, groups: np.ndarray, numbers: EquationNumbers, byte_cost: float
) -> tuple[Sequence[JaxprEqn], list[int]]:
    """Equations with calls in place of runs, and the number of one that each replaces."""
    if np.count_nonzero(groups >= 0) < 2:
        return jaxpr.eqns, list(range(len(jaxpr.eqns)))
    calls: dict[int, tuple[int, list[JaxprEqn]]] = {}  # first equation of a run → its length and its replacement
    uses = last_uses(jaxpr)
    for repeat in find_repeats(Dataflow(jaxpr, numbers), groups, byte_cost):
        for start, eqns in zip(repeat.starts, Run(jaxpr, repeat, uses).calls(), strict=True):
            calls[start] = repeat.length, eqns
    rewritten: list[JaxprEqn] = []
    sources: list[int] = []
    position = 0
    while position < len(jaxpr.eqns):
        length, eqns = calls.get(position, (1, [jaxpr.eqns[position]]))
        rewritten += eqns
        sources += [position] * len(eqns)
        position += length
    return (rewritten if calls else jaxpr.eqns), sources


def _groups(jaxpr: Jaxpr) -> np.ndarray:
    """Part of the program whose runs each equation may join, −1 for none, int64[equations]."""
    staged = has_stages(jaxpr)
    group_numbers: dict[tuple[StageName, int | None], int] = {}
    groups = np.full(len(jaxpr.eqns), -1)
    for n, eqn in enumerate(jaxpr.eqns):
        name = stage_name(eqn)
        apart = _is_apart(eqn) or (staged and (name.stage is None or stages_inside(eqn)))
        if not apart:
            part = StageName(name.stage, name.is_backward, is_recomputed=False)
            groups[n] = group_numbers.setdefault((part, phase_of(eqn)), len(group_numbers))
    return groups


def _is_apart(eqn: JaxprEqn) -> bool:
    """True if an equation is in no run: it has effects, or moves data to other replicas or streaming memory."""
    return bool(eqn.effects) or is_collective(eqn) or any(x.primitive in MOVES for x in (eqn, *equations_inside(eqn)))
