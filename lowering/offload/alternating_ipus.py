"""Phases that take turns on several IPUs: while one computes a phase, another loads the next.

Input: equations with loads and stores, the step of each, and how many IPUs there are. Output: the same equations, each
named after a stage: phase i runs on IPU i modulo their number, its gradient too. Loads of a step are moved up behind
the first equation that is computed in the step before: by then what that one reads has left the other IPU. Updates,
which come last, load and store in batches.
Source: PopART runs phases on two IPUs in turns (execution phase settings, 2 stages).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from ipujax.lowering.jax_compat import JaxprEqn
from ipujax.lowering.jaxpr import PARTS, VIEWS, stage_scope
from ipujax.lowering.offload.batches import batched
from ipujax.lowering.offload.primitives import remote_load_p
from ipujax.lowering.source_info import in_scope

_MOVED = VIEWS | PARTS


def in_turns(
    eqns: Sequence[JaxprEqn], steps: Sequence[int], phases: Sequence[int | None], num_ipus: int, batch_bytes: int
) -> list[JaxprEqn]:
    """The equations, named after stages, loads a step ahead.

    Args:
        eqns: in order of their steps.
        steps: the step of each, see `phase_steps`.
        phases: the phase of each step, None for that of updates.
        num_ipus: IPUs of a replica.
        batch_bytes: of a batch of loads or stores of updates.
    """
    named = [_named(eqn, phases[step], num_ipus) for eqn, step in zip(eqns, steps, strict=True)]
    pairs = zip(steps, named, strict=True)
    by_step = [(phases[step], [eqn for _, eqn in group]) for step, group in groupby(pairs, key=lambda pair: pair[0])]
    done, ahead = list[JaxprEqn](), list[JaxprEqn]()
    for n, (phase, group) in enumerate(by_step):
        if phase is None:
            done += batched(group, batch_bytes)
            continue
        own = group if n == 0 else [eqn for eqn in group if not any(eqn is load for load in ahead)]
        is_last = n + 1 == len(by_step) or by_step[n + 1][0] is None
        following = [] if is_last else by_step[n + 1][1]
        made = {var for eqn in (*group, *following) for var in eqn.outvars}  # such as what is put only here
        ahead = [eqn for eqn in following if _is_load(eqn) and eqn.invars[0] not in made]
        first = next((k for k, eqn in enumerate(own) if _computes(eqn)), len(own) - 1)
        done += [*own[: first + 1], *ahead, *own[first + 1 :]]
    return done


def _named(eqn: JaxprEqn, phase: int | None, num_ipus: int) -> JaxprEqn:
    return eqn if phase is None else in_scope(eqn, stage_scope(phase % num_ipus))


def _is_load(eqn: JaxprEqn) -> bool:
    return eqn.primitive is remote_load_p


def _computes(eqn: JaxprEqn) -> bool:
    return not _is_load(eqn) and eqn.primitive.name not in _MOVED
