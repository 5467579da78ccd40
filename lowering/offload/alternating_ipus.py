"""Phases that alternate between IPUs: while one IPU computes a phase, another loads the next.

Input: equations with loads and stores, the step of each, and the number of IPUs. Output: the same equations, each named
after a stage: phase i runs on IPU i modulo their number, its gradient too. Loads of a step are moved up to after the
first computing equation of the previous step: by then that one's operands have left the other IPU. Updates, which come
last, load and store in batches.
Source: PopART alternates phases between two IPUs (execution phase settings, 2 stages).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from ipujax.lowering.jax_compat import JaxprEqn
from ipujax.lowering.jaxpr import stage_scope
from ipujax.lowering.offload.batches import batch_transfers
from ipujax.lowering.offload.primitives import remote_load_p
from ipujax.lowering.primitives import record_of
from ipujax.lowering.source_info import in_scope


def alternate_ipus(
    eqns: Sequence[JaxprEqn], steps: Sequence[int], phases: Sequence[int | None], num_ipus: int, batch_bytes: int
) -> list[JaxprEqn]:
    """The equations, named after stages, loads a step ahead; `phases` are those of steps, None for updates."""
    staged_eqns = [_in_stage(eqn, phases[step], num_ipus) for eqn, step in zip(eqns, steps, strict=True)]
    pairs = zip(steps, staged_eqns, strict=True)
    by_step = [(phases[step], [eqn for _, eqn in group]) for step, group in groupby(pairs, key=lambda pair: pair[0])]
    ordered: list[JaxprEqn] = []
    early_loads: list[JaxprEqn] = []
    for n, (phase, group) in enumerate(by_step):
        if phase is None:
            ordered += batch_transfers(group, batch_bytes)
            continue
        remaining = group if n == 0 else [eqn for eqn in group if not any(eqn is load for load in early_loads)]
        is_last = n + 1 == len(by_step) or by_step[n + 1][0] is None
        next_group = [] if is_last else by_step[n + 1][1]
        defined = {var for eqn in (*group, *next_group) for var in eqn.outvars}  # such as values put in these steps
        early_loads = [eqn for eqn in next_group if _is_load(eqn) and eqn.invars[0] not in defined]
        first_computing = next((k for k, eqn in enumerate(remaining) if _computes(eqn)), len(remaining) - 1)
        ordered += [*remaining[: first_computing + 1], *early_loads, *remaining[first_computing + 1 :]]
    return ordered


def _in_stage(eqn: JaxprEqn, phase: int | None, num_ipus: int) -> JaxprEqn:
    return eqn if phase is None else in_scope(eqn, stage_scope(phase % num_ipus))


def _is_load(eqn: JaxprEqn) -> bool:
    return eqn.primitive is remote_load_p


def _computes(eqn: JaxprEqn) -> bool:
    return not _is_load(eqn) and record_of(eqn).cost not in ("view", "part")
