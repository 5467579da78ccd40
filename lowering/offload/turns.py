"""Phases that take turns on several IPUs: while one computes a phase, another loads the next.

Input: equations with loads and stores, the step of each, and how many IPUs there are. Output: the same equations, each
named after a stage: phase i runs on IPU i modulo their number, its gradient too. Loads of a step are moved up behind
the first equation that is computed in the step before: by then what that one reads has left the other IPU.
Source: PopART runs phases on two IPUs in turns (execution phase settings, 2 stages).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from ipujax.lowering.jax_compat import JaxprEqn, in_scope
from ipujax.lowering.jaxpr import PARTS, VIEWS, phase_of, stage_scope
from ipujax.lowering.offload.primitives import remote_load_p

_MOVED = VIEWS | PARTS


def in_turns(eqns: Sequence[JaxprEqn], steps: Sequence[int], num_ipus: int) -> list[JaxprEqn]:
    """The equations, named after stages, loads a step ahead.

    Args:
        eqns: in order of their steps.
        steps: the step of each, see `phase_steps`.
        num_ipus: IPUs of a replica.
    """
    count = 1 + max(phase for eqn in eqns if (phase := phase_of(eqn)) is not None)
    named = [_named(eqn, step, count, num_ipus) for eqn, step in zip(eqns, steps, strict=True)]
    pairs = zip(steps, named, strict=True)
    by_step = [(step, [eqn for _, eqn in group]) for step, group in groupby(pairs, key=lambda pair: pair[0])]
    done = list[JaxprEqn]()
    for n, (step, group) in enumerate(by_step):
        own = group if n == 0 or step == 2 * count else [eqn for eqn in group if not _is_load(eqn)]
        is_last = n + 1 == len(by_step) or by_step[n + 1][0] == 2 * count
        ahead = [] if is_last else [eqn for eqn in by_step[n + 1][1] if _is_load(eqn)]
        first = next((k for k, eqn in enumerate(own) if _computes(eqn)), len(own) - 1)
        done += [*own[: first + 1], *ahead, *own[first + 1 :]]
    return done


def _named(eqn: JaxprEqn, step: int, count: int, num_ipus: int) -> JaxprEqn:
    if step == 2 * count:
        return eqn
    phase = step if step < count else 2 * count - 1 - step
    return in_scope(eqn, stage_scope(phase % num_ipus))


def _is_load(eqn: JaxprEqn) -> bool:
    return eqn.primitive is remote_load_p


def _computes(eqn: JaxprEqn) -> bool:
    return not _is_load(eqn) and eqn.primitive.name not in _MOVED
