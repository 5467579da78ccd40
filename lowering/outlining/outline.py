"""Pass `outline`: runs of equations that a jaxpr has several times become functions, lowered once.

    h1 = tanh(x @ w1); y1 = x + tanh(h1 @ w1)        y1 = function_call[layer](w1, x)
    h2 = tanh(y1 @ w2); y2 = y1 + tanh(h2 @ w2)      y2 = function_call[layer](w2, y1)

Such are layers that Python's loops or calls have written, their gradients, and what a checkpoint computes again. Runs
are found in each jaxpr by itself, in the bodies of loops too, see `repeats`; a run becomes a function where that gains,
see `function_call`. What has effects, or meets other replicas, is in no run. No run is in two stages, nor in a forward
and a backward part; where there are stages, what is in none is placed equation by equation first, and then outlined by
`outline_placed`: the update of an optimiser.

A view that is needed behind a run is viewed again there. The equations of a function belong to all its callers: their
name stacks are what the callers' have in common at both ends, their source lines those of the first. The equation that
calls has the line of the first of its run.
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
from ipujax.runtime.graph import BYTE_PRICE_CYCLES

_FUSED = "fused"  # the primitive of pass `fuse`: one vertex, which calls nothing


def outline(jaxpr: ClosedJaxpr, byte_price: float = BYTE_PRICE_CYCLES) -> ClosedJaxpr:
    """Returns an equal jaxpr in which repeated runs worth it are functions.

    Args:
        jaxpr: what has the runs.
        byte_price: cycles that a byte on the fullest tile is worth.
    """
    return outliner(byte_price)(jaxpr)


def outliner(byte_price: float = BYTE_PRICE_CYCLES) -> Rewrite:
    """The same pass for several jaxprs: one that several of them hold stays one."""
    numbers = EquationNumbers()

    def with_equations(jaxpr: ClosedJaxpr, eqns: Sequence[JaxprEqn]) -> ClosedJaxpr:
        done = [_rewritten(eqn, in_function if eqn.primitive is function_call_p else inside) for eqn in eqns]
        is_same = len(done) == len(jaxpr.eqns) and all(map(operator.is_, done, jaxpr.eqns))
        return jaxpr if is_same else ClosedJaxpr(jaxpr.jaxpr.replace(eqns=done), jaxpr.consts)

    @once
    def inside(jaxpr: ClosedJaxpr) -> ClosedJaxpr:
        return with_equations(jaxpr, _outlined(jaxpr.jaxpr, numbers, byte_price))

    @once
    def in_function(jaxpr: ClosedJaxpr) -> ClosedJaxpr:
        """A function, whose code is there once: only loops inside of it are outlined."""
        return with_equations(jaxpr, jaxpr.eqns)

    return inside


def _rewritten(eqn: JaxprEqn, rewrite: Rewrite) -> JaxprEqn:
    if eqn.primitive.name == _FUSED:
        return eqn
    return with_inner(eqn, rewrite)


def outline_placed(
    jaxpr: Jaxpr, places: Sequence[int | None], byte_price: float = BYTE_PRICE_CYCLES
) -> tuple[Jaxpr, list[int]]:
    """The same for the equations of a jaxpr with stages that are in none, once each has its place.

    Args:
        jaxpr: equations with stages, and without.
        places: for each equation where it runs, None for one that runs in several places.
        byte_price: cycles that a byte on the fullest tile is worth.

    Returns:
        The jaxpr with calls, and for each of its equations the number of one that it was made of.
    """
    groups = np.full(len(jaxpr.eqns), -1)
    for n, (eqn, place) in enumerate(zip(jaxpr.eqns, places, strict=True)):
        if place is not None and not _is_apart(eqn):
            groups[n] = place
    eqns, sources = _with_calls(jaxpr, groups, EquationNumbers(), byte_price)
    return jaxpr.replace(eqns=list(eqns)), sources


def _outlined(jaxpr: Jaxpr, numbers: EquationNumbers, byte_price: float) -> Sequence[JaxprEqn]:
    """The equations of a jaxpr, with calls in place of runs."""
    return _with_calls(jaxpr, _groups(jaxpr), numbers, byte_price)[0]


def _with_calls(
    jaxpr: Jaxpr, groups: np.ndarray, numbers: EquationNumbers, byte_price: float
) -> tuple[Sequence[JaxprEqn], list[int]]:
    """The equations with calls in place of runs, and the number of one that each was made of."""
    if np.count_nonzero(groups >= 0) < 2:
        return jaxpr.eqns, list(range(len(jaxpr.eqns)))
    calls: dict[int, tuple[int, list[JaxprEqn]]] = {}  # by where a run begins: its length, what takes its place
    uses = last_uses(jaxpr)
    for repeat in find_repeats(Dataflow(jaxpr, numbers), groups, byte_price):
        for start, eqns in zip(repeat.starts, Run(jaxpr, repeat, uses).calls(), strict=True):
            calls[start] = repeat.length, eqns
    done, sources, at = list[JaxprEqn](), list[int](), 0
    while at < len(jaxpr.eqns):
        length, eqns = calls.get(at, (1, [jaxpr.eqns[at]]))
        done += eqns
        sources += [at] * len(eqns)
        at += length
    return (done if calls else jaxpr.eqns), sources


def _groups(jaxpr: Jaxpr) -> np.ndarray:
    """For each equation the part of the program it may be in a run with, −1 for one in no run, int64."""
    staged, known = has_stages(jaxpr), dict[tuple[StageName, int | None], int]()
    groups = np.full(len(jaxpr.eqns), -1)
    for n, eqn in enumerate(jaxpr.eqns):
        name = stage_name(eqn)
        apart = _is_apart(eqn) or (staged and (name.stage is None or stages_inside(eqn)))
        if not apart:
            part = StageName(name.stage, name.is_backward, is_recomputed=False)
            groups[n] = known.setdefault((part, phase_of(eqn)), len(known))
    return groups


def _is_apart(eqn: JaxprEqn) -> bool:
    """Whether an equation is in no run: it has effects, meets other replicas or streaming memory."""
    return bool(eqn.effects) or is_collective(eqn) or eqn.primitive in MOVES
