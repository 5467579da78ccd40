"""Phases that alternate between IPUs: while one IPU computes a phase, another loads the next.

Input: equations with loads and stores, the step of each, and the number of IPUs. Output: the same equations, each named
after a stage: phase i runs on IPU i modulo their number, its gradient too. Loads of a step are moved up to after the
first computing equation of the previous step: by then that one's operands have left the other IPU. Updates, which come
last, load and store in batches.
I/O tiles fetch what their IPU loads next, as far ahead as they have room; only loads beyond that are moved up. Then a
batch is of one IPU, and the moves of an update are named after a stage too.
Source: PopART alternates phases between two IPUs (execution phase settings, 2 stages).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, groupby

from ipujax.lowering.jax_compat import JaxprEqn, Var, shape_of
from ipujax.lowering.jaxpr import stage_scope, value_bytes, variables_read
from ipujax.lowering.offload.batches import batch_transfers, in_batches, overlapped
from ipujax.lowering.offload.io_tiles import IoTiles, moved_bytes
from ipujax.lowering.offload.primitives import MOVES, remote_load_p
from ipujax.lowering.primitives import record_of
from ipujax.lowering.source_info import in_scope


def alternate_ipus(
    eqns: Sequence[JaxprEqn],
    steps: Sequence[int],
    phases: Sequence[int | None],
    num_ipus: int,
    batch_bytes: int,
    io_tiles: IoTiles | None = None,
) -> list[JaxprEqn]:
    """The equations, named after stages, with loads ahead: phase i is stage i modulo `num_ipus`, on the IPU of it.

    Args:
        eqns: equations with loads and stores, in the order of their steps.
        steps: step of each.
        phases: phase of each step, None for updates.
        num_ipus: IPUs that phases alternate between.
        batch_bytes: bytes of loads, or stores, that go together.
        io_tiles: tiles that move them, None if all tiles do.
    """
    ipu_of_step = [None if phase is None else phase % num_ipus for phase in phases]
    pairs = zip(steps, eqns, strict=True)
    groups = [
        _Part(step, ipu_of_step[step], [eqn for _, eqn in group])
        for step, group in groupby(pairs, key=lambda pair: pair[0])
    ]
    parts = _with_early_loads(groups, io_tiles)
    if io_tiles is None:
        # Equations of updates (None) have no stage yet: they go with their operands later.
        named = (part.eqns if part.ipu is None else _named(part.eqns, part.ipu) for part in parts)
        return list(chain.from_iterable(batch_transfers(of_part, batch_bytes) for of_part in named))
    batches = [in_batches(run.eqns, batch_bytes, run.ipu, run.step) for run in _runs_of_one_ipu(parts)]
    return overlapped(list(chain.from_iterable(batches)), io_tiles)


@dataclass(frozen=True, slots=True)
class _IpuRun:
    """Equations that follow each other on one IPU, in one step."""

    step: int
    ipu: int
    eqns: Sequence[JaxprEqn]


@dataclass(frozen=True, slots=True)
class _Part:
    """Equations that follow each other, their step, and the IPU of their phase; None for an update."""

    step: int
    ipu: int | None
    eqns: Sequence[JaxprEqn]


def _named(eqns: Sequence[JaxprEqn], ipu: int) -> list[JaxprEqn]:
    return [in_scope(eqn, stage_scope(ipu)) for eqn in eqns]


def _with_early_loads(groups: Sequence[_Part], io_tiles: IoTiles | None) -> list[_Part]:
    """The equations of each step, with loads of the next step behind the first computing one.

    Those are all loads that can be early, or with I/O tiles the ones that these have no room for.

    Args:
        groups: the equations of each step, in order.
        io_tiles: tiles that fetch loads ahead; None if no tiles do.
    """
    parts: list[_Part] = []
    early_loads: list[JaxprEqn] = []  # loads of this step that are in parts of the step before
    for n, group in enumerate(groups):
        remaining = [eqn for eqn in group.eqns if not any(eqn is load for load in early_loads)]
        is_last = n + 1 == len(groups) or groups[n + 1].ipu is None
        if group.ipu is None or is_last:
            early_loads = []
            parts.append(_Part(group.step, group.ipu, remaining))
            continue
        following = groups[n + 1]
        # Values that these two steps put in streaming memory are not there yet.
        defined = {var for eqn in (*group.eqns, *following.eqns) for var in eqn.outvars}
        loads = [eqn for eqn in following.eqns if _is_load(eqn) and eqn.invars[0] not in defined]
        early_loads = loads if io_tiles is None else _beyond_room(loads, io_tiles)
        # Behind the first equation that computes, so that they move while this IPU computes, and after what it loads
        # for that; behind all if none does, or there is nothing to load.
        end = 1 + next((n for n, eqn in enumerate(remaining) if _computes(eqn)), len(remaining) - 1)
        if not early_loads:
            end = len(remaining)
        cut = (
            _Part(group.step, group.ipu, remaining[:end]),
            _Part(following.step, following.ipu, early_loads),
            _Part(group.step, group.ipu, remaining[end:]),
        )
        parts += [part for part in cut if part.eqns]
    return parts


def _beyond_room(loads: Sequence[JaxprEqn], io_tiles: IoTiles) -> list[JaxprEqn]:
    """The loads of a step that must run early, in the step before, as I/O tiles cannot fetch them ahead.

    I/O tiles hold the last loads, as many as they have room for, until the step begins; a value that is too large for
    them goes straight to the tiles that compute.
    """
    early_loads: list[JaxprEqn] = []
    held_bytes = 0  # of loads that I/O tiles move, from this one to the last
    for load in reversed(loads):
        held_bytes += moved_bytes(load) * io_tiles.moves(load)
        if held_bytes > io_tiles.room_bytes or not io_tiles.moves(load):
            early_loads.insert(0, load)
    return early_loads


def _runs_of_one_ipu(parts: Iterable[_Part]) -> Iterator[_IpuRun]:
    """Yield runs of equations that follow each other on one IPU, to be put in batches of loads and stores.

    Equations of a phase, and loads and stores of an update, are named after the stage of their IPU.
    """
    ipu_of: dict[Var, int] = {}
    for part in parts:
        if part.ipu is not None:
            for eqn in part.eqns:
                for var in variables_read(eqn):
                    ipu_of.setdefault(var, part.ipu)
                ipu_of.update(dict.fromkeys(eqn.outvars, part.ipu))
            yield _IpuRun(part.step, part.ipu, _named(part.eqns, part.ipu))
            continue
        pairs = zip(_ipus_of_update(part.eqns, ipu_of), part.eqns, strict=True)
        for ipu, run in groupby(pairs, key=lambda pair: pair[0]):
            eqns = [in_scope(eqn, stage_scope(ipu)) if eqn.primitive in MOVES else eqn for _, eqn in run]
            yield _IpuRun(part.step, ipu, eqns)


def _ipus_of_update(eqns: Sequence[JaxprEqn], ipu_of_value: Mapping[Var, int]) -> list[int]:
    """The IPU of each equation: that of most bytes of its operands, scalars left out, else that of its first user."""
    ipu_of = dict(ipu_of_value)
    by_operands: list[int | None] = []  # None without operands on an IPU
    for eqn in eqns:
        num_bytes = Counter[int]()
        for var in variables_read(eqn):
            if var in ipu_of and shape_of(var):
                num_bytes[ipu_of[var]] += value_bytes(var.aval)
        by_operands.append(max(num_bytes, key=num_bytes.__getitem__, default=None))
        if by_operands[-1] is not None:
            ipu_of.update(dict.fromkeys(eqn.outvars, by_operands[-1]))
    ipu_of_user: dict[Var, int] = {}
    ipus: list[int] = []
    for eqn, ipu in zip(reversed(eqns), reversed(by_operands), strict=True):
        of_users = (ipu_of_user[var] for var in eqn.outvars if var in ipu_of_user)
        ipus.append(next(of_users, 0) if ipu is None else ipu)
        ipu_of_user.update(dict.fromkeys(variables_read(eqn), ipus[-1]))
    return ipus[::-1]


def _is_load(eqn: JaxprEqn) -> bool:
    return eqn.primitive is remote_load_p


def _computes(eqn: JaxprEqn) -> bool:
    return not _is_load(eqn) and record_of(eqn).cost not in ("view", "part")
