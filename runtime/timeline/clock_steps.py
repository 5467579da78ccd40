"""From what leaves cost, tile by tile, to what they do to the clocks of IPUs.

Input: the costs of the leaves of a program. Output: a `ClockStep` for every leaf and for every decision of
data-dependent control. On one IPU each phase lasts as long as its slowest tile.

    Execute              sync, exchange, compute; if results move: sync, exchange
    Copy inside IPUs     sync, exchange, compute (copying on the own tile)
    Copy between IPUs    lockstep: all IPUs meet in a global sync, then those that exchange work
                         buffered: a sender waits until its destination has been read, and works; a receiver waits
                         where it reads or writes the destination
    CrossReplicaCopy     as lockstep, with the replicas as IPUs of one sync group
    StreamIn, StreamOut, RemoteIn, RemoteOut  host exchange; first the sync zones of the IPUs in it meet
                         if it overlaps: by the I/O tiles of the IPU, while the others go on
    Wait                 until transfers of a tensor are over
    Sync                 internal: each IPU by itself; external: all IPUs meet
    decision             all IPUs agree: an internal sync on one IPU, a global one on several

Source: lockstep is how PopART runs pipelines, buffered is the model of the closed forms for pipeline schedules (design
§5).
Source of sync zones for host exchanges: PopART user guide, "Sync patterns".
Limits: the sync group of a global exchange is the whole system. An IPU's exchange between IPUs lasts as long as its
links or its busiest tile need, whichever is more.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain, count

import numpy as np

from ipujax.runtime.analysis import Effects, EffectsOf
from ipujax.runtime.cost import ComputeSetCost, CopyCost, StreamCost, SyncCost, WaitCost
from ipujax.runtime.graph import (
    Copy,
    CrossReplicaCopy,
    Decision,
    Leaf,
    Program,
    RemoteIn,
    RemoteOut,
    distinct,
)
from ipujax.runtime.target import Target
from ipujax.runtime.tensor import Tensor, Variable, pad_tiles
from ipujax.runtime.timeline.clocks import GLOBAL_EXCHANGE, PHASES, SYNC, ClockStep

Cost = ComputeSetCost | CopyCost | StreamCost | SyncCost | WaitCost
Costs = Mapping[Leaf, Cost]


def clock_steps(
    program: Program, costs: Costs, effects: EffectsOf, target: Target
) -> tuple[dict[Program, ClockStep], int]:
    """What each leaf and decision of a program does to the clocks.

    Args:
        program: the control tree.
        costs: the cost of each leaf.
        effects: the effects of its nodes.
        target: the system.

    Returns:
        (steps, slots): the steps by node, and how many rows the clock state has beside the IPUs.
    """
    rows = count(target.num_ipus)
    slots, io_tiles = _slots(costs, target, rows), _io_tiles(costs, rows)
    slots |= _moved(costs, rows)
    steps: dict[Program, ClockStep] = {}
    for node in distinct(program):
        if isinstance(node, Decision):
            steps[node] = _with_slots(_decision(target), node.decider.variables(), (), slots)
        elif isinstance(node, Leaf):
            does = effects(node) if slots else Effects()
            step = _transfer(node, costs[node], target, slots, io_tiles) or _step(node, costs[node], target, slots)
            steps[node] = _with_slots(step, does.reads, () if step.fills else does.writes, slots)
    return steps, next(rows) - target.num_ipus


@dataclass(frozen=True, slots=True, eq=False)
class _Slot:
    """The rows in the clock state of a destination of buffered exchanges, or of what I/O tiles move.

    Args:
        free: the row of the time since when it is free.
        arrivals: by receiving IPU, the row of the time when what was sent last arrived.
    """

    free: int
    arrivals: dict[int, int]


_Slots = Mapping[Variable, _Slot]


def _io_tiles(costs: Costs, rows: Iterator[int]) -> dict[int, int]:
    """The row of the clock of each IPU's I/O tiles, of those that have something to move."""
    busy = {ipu for _, cost in _overlapping(costs) for ipu in np.flatnonzero(cost.cycles).tolist()}
    return {ipu: next(rows) for ipu in sorted(busy)}


def _moved(costs: Costs, rows: Iterator[int]) -> dict[Variable, _Slot]:
    """What I/O tiles move: when each has arrived last."""
    slots: dict[Variable, _Slot] = {}
    for leaf, cost in _overlapping(costs):
        for variable in _tensor_of(leaf).variables():
            if variable not in slots:
                slots[variable] = _Slot(next(rows), {ipu: next(rows) for ipu in np.flatnonzero(cost.cycles).tolist()})
    return slots


def _overlapping(costs: Costs) -> Iterator[tuple[RemoteIn | RemoteOut, StreamCost]]:
    """Transfers that what follows does not wait for."""
    for leaf, cost in costs.items():
        if isinstance(leaf, RemoteIn | RemoteOut) and leaf.overlaps and isinstance(cost, StreamCost):
            yield leaf, cost


def _tensor_of(leaf: RemoteIn | RemoteOut) -> Tensor:
    return leaf.destination if isinstance(leaf, RemoteIn) else leaf.source


def _transfer(leaf: Leaf, cost: Cost, target: Target, slots: _Slots, io_tiles: Mapping[int, int]) -> ClockStep | None:
    """What a transfer on I/O tiles does; None for any other leaf."""
    if not isinstance(leaf, RemoteIn | RemoteOut) or not leaf.overlaps:
        return None
    assert isinstance(cost, StreamCost)
    ipus = tuple(np.flatnonzero(cost.cycles).tolist())
    moved = [slots[variable] for variable in _tensor_of(leaf).variables()]
    return ClockStep(
        _work(target),
        ipus,
        transfers=tuple((io_tiles[ipu], ipu, int(cost.cycles[ipu])) for ipu in ipus),
        delivers=tuple((slot.arrivals[ipu], (io_tiles[ipu],)) for slot in moved for ipu in ipus),
    )


def _slots(costs: Costs, target: Target, rows: Iterator[int]) -> dict[Variable, _Slot]:
    """The destinations of buffered exchanges."""
    if target.global_exchange == "lockstep":
        return {}
    slots: dict[Variable, _Slot] = {}
    for leaf, cost in costs.items():
        if isinstance(leaf, Copy) and isinstance(cost, CopyCost) and cost.flows is not None and cost.is_global:
            for variable in leaf.destination.variables():
                slot = slots[variable] if variable in slots else slots.setdefault(variable, _Slot(next(rows), {}))
                for receiver in np.flatnonzero(cost.flows.any(0)).tolist():
                    if receiver not in slot.arrivals:
                        slot.arrivals[receiver] = next(rows)
    return slots


def _with_slots(step: ClockStep, reads: Iterable[Variable], writes: Iterable[Variable], slots: _Slots) -> ClockStep:
    """A step that also waits for what was sent to its IPUs and it reads or overwrites, and frees what it has read."""
    read = {slots[variable] for variable in reads if variable in slots}
    awaited = read | {slots[variable] for variable in writes if variable in slots}
    awaits = sorted((ipu, row) for slot in awaited for ipu, row in slot.arrivals.items() if ipu in step.ipus)
    return replace(step, frees=tuple(sorted(slot.free for slot in read)), awaits=tuple(awaits))


def _step(
    leaf: Leaf,
    cost: Cost,
    target: Target,
    slots: _Slots,
) -> ClockStep:
    everyone = tuple(range(target.num_ipus))
    match cost:
        case ComputeSetCost():
            work = _compute_set_work(cost, target)
            return ClockStep(work, _busy(work))
        case StreamCost():
            return _host_exchange(cost, target)
        case WaitCost(ipus):
            return ClockStep(_work(target), ipus)
        case SyncCost(kind):
            if kind == "external":
                return _meeting(target, target.global_sync_cycles)
            return ClockStep(_work(target, sync=target.internal_sync_cycles), everyone)
    if not cost.is_global:
        work = _copy_work(cost, target)
        return ClockStep(work, _busy(work))
    if target.global_exchange == "lockstep" or isinstance(leaf, CrossReplicaCopy):
        return ClockStep(_copy_work(cost, target), everyone, meets=(everyone,))
    assert isinstance(leaf, Copy) and cost.flows is not None
    senders, receivers = (tuple(np.flatnonzero(cost.flows.any(axis)).tolist()) for axis in (1, 0))
    work = _sender_work(cost, target, senders)
    ipus = tuple(sorted({*senders, *receivers, *_busy(work)}))
    filled = [slots[variable] for variable in leaf.destination.variables()]
    senders_to = {ipu: tuple(np.flatnonzero(cost.flows[:, ipu]).tolist()) for ipu in receivers}
    delivers = tuple((slot.arrivals[ipu], senders_to[ipu]) for slot in filled for ipu in receivers)
    return ClockStep(work, ipus, senders=senders, fills=tuple(slot.free for slot in filled), delivers=delivers)


def _host_exchange(cost: StreamCost, target: Target) -> ClockStep:
    """The zones that a transfer touches meet in an external sync, unless they did for the exchange it is part of."""
    work = _work(target, host_exchange=cost.cycles)
    busy = _busy(work)
    zones = tuple(tuple(zone) for zone in host_sync_zones(target) if not cost.earlier[list(zone)].any())
    meets = tuple(zone for zone in zones if any(ipu in zone for ipu in busy))
    for zone in meets:
        work[list(zone), SYNC] = target.global_sync_cycles
    return ClockStep(work, tuple(sorted({*busy, *chain(*meets)})), meets=meets)


def host_sync_zones(target: Target) -> tuple[range, ...]:
    """The groups of several IPUs that sync with each other before they exchange with the host, by `sync_pattern`."""
    step = {"full": 1, "ping_pong": 2, "single_pipeline": target.num_ipus}[target.sync_pattern]
    zones = (range(first, target.num_ipus, step) for first in range(step))
    return tuple(zone for zone in zones if len(zone) > 1)


def _work(target: Target, **cycles: np.ndarray | int) -> np.ndarray:
    """Cycles of each phase on each IPU, int64[num_ipus, 5], from those of some phases."""
    work = np.zeros((target.num_ipus, len(PHASES)), np.int64)
    for phase, values in cycles.items():
        work[:, PHASES.index(phase)] = values
    return work


def _busy(work: np.ndarray) -> tuple[int, ...]:
    return tuple(np.flatnonzero(work.any(1)).tolist())


def _slowest(cycles: np.ndarray, first_ipu: int, target: Target) -> np.ndarray:
    """The cycles of the slowest tile of each IPU, int64[num_ipus], from those of the tiles of some IPUs."""
    return pad_tiles(cycles.reshape(-1, target.tiles_per_ipu).max(1), first_ipu, target.num_ipus)


def _compute_set_work(cost: ComputeSetCost, target: Target) -> np.ndarray:
    before, after, compute, vertices = (
        _slowest(cycles, cost.first_ipu, target)
        for cycles in (cost.before.cycles, cost.after.cycles, cost.compute_cycles, cost.vertices)
    )
    syncs = ((before > 0) | (after > 0) | (vertices > 0)).astype(np.int64) + (after > 0)
    return _work(target, compute=compute, exchange=before + after, sync=target.internal_sync_cycles * syncs)


def _copy_work(cost: CopyCost, target: Target) -> np.ndarray:
    ports, compute = (_slowest(c, cost.first_ipu, target) for c in (cost.exchange.cycles, cost.copy_cycles))
    if cost.flows is None or cost.link_cycles is None:
        sync = target.internal_sync_cycles * ((ports > 0) | (compute > 0))
        return _work(target, compute=compute, exchange=ports, sync=sync)
    crosses = cost.flows.any(0) | cost.flows.any(1)
    between = np.where(crosses, np.maximum(ports, cost.link_cycles), 0)
    inside = np.where(crosses, 0, ports)
    return _work(target, compute=compute, exchange=inside, global_exchange=between, sync=target.global_sync_cycles)


def _sender_work(cost: CopyCost, target: Target, senders: tuple[int, ...]) -> np.ndarray:
    work = _copy_work(cost, target)
    work[:, SYNC] = 0
    receiving_only = np.ones(target.num_ipus, bool)
    receiving_only[list(senders)] = False
    work[receiving_only, GLOBAL_EXCHANGE] = 0
    return work


def _decision(target: Target) -> ClockStep:
    return _meeting(target, target.internal_sync_cycles if target.num_ipus == 1 else target.global_sync_cycles)


def _meeting(target: Target, cycles: int) -> ClockStep:
    """All IPUs wait for one another, and then for a sync of some cycles."""
    everyone = tuple(range(target.num_ipus))
    return ClockStep(_work(target, sync=cycles), everyone, meets=(everyone,))
