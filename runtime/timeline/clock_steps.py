"""Clock steps of leaves, from their costs on tiles.

Input: the costs of the leaves of a program. Output: a `ClockStep` for every leaf and for every decision of
data-dependent control. On one IPU each phase lasts as long as its slowest tile.

    Execute              sync, exchange, compute; if results move: sync, exchange
    Copy inside IPUs     sync, exchange, compute (copying on the own tile)
    Copy between IPUs    lockstep: a global sync of all IPUs, then those that exchange work
                         buffered: a sender waits until its destination has been read, and works; a receiver waits
                         where it reads or writes the destination
    CrossReplicaCopy     a global sync of the IPUs that send or receive, which then work; all others go on
    StreamIn, StreamOut, RemoteIn, RemoteOut  host exchange; first a sync of each zone with IPUs in it
                         if it overlaps: by the I/O tiles of the IPU, while its other tiles go on; a value that those
                         of an IPU store is read after that, on any IPU
    Wait                 until transfers of a tensor are over
    Sync                 internal: each IPU by itself; external: all IPUs together
    decision             all IPUs agree: an internal sync on one IPU, a global one on several

All replicas run alike, so each IPU of a `CrossReplicaCopy` stands for its counterparts in the other replicas: a
collective inside a stage stops the IPUs of that stage. A copy with `is_collective` is one between parts of a graph.
Source: lockstep is how PopART runs pipelines, buffered is the model of the closed forms for pipeline schedules (design
§5).
Source of sync zones for host exchanges: PopART user guide, "Sync patterns".
Limits: the sync group of a lockstep exchange is the system. An exchange between IPUs lasts, on each IPU, as long as the
slower of its links and its busiest tile; exchanges of different steps share no link, though they may overlap in time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain, count
from typing import Any

import numpy as np

from ipujax.runtime.analysis import Effects, EffectsOf
from ipujax.runtime.cost import (
    ComputeSetCost,
    ComputeSetCycles,
    CopyCost,
    CopyCycles,
    StreamCost,
    StreamCycles,
    SyncCost,
    WaitCost,
    slowest_tiles,
    slowest_tiles_of_copy,
)
from ipujax.runtime.exchange import sync_cycles
from ipujax.runtime.graph import Copy, CrossReplicaCopy, Decision, Leaf, Program, RemoteIn, RemoteOut, distinct
from ipujax.runtime.target import Target, machines_of
from ipujax.runtime.tensor import Variable
from ipujax.runtime.timeline.clocks import GLOBAL_EXCHANGE, PHASES, SYNC, ClockStep

Cost = ComputeSetCost | CopyCost | StreamCost | SyncCost | WaitCost
LeafCycles = ComputeSetCycles | CopyCycles | StreamCycles | SyncCost | WaitCost
Costs = Mapping[Leaf, LeafCycles]


def clock_steps(
    program: Program, costs: Mapping[Leaf, Cost], effects: EffectsOf, target: Target
) -> tuple[dict[Program, ClockStep], int]:
    """Return the clock step of each leaf and decision of a program, from costs by tile; see `steps_of_cycles`."""
    cycles = {leaf: _cycles_of_ipus(cost, target) for leaf, cost in costs.items()}
    return steps_of_cycles(program, cycles, effects, target)


def _cycles_of_ipus(cost: Cost, target: Target) -> LeafCycles:
    match cost:
        case ComputeSetCost():
            return slowest_tiles(cost, target)
        case CopyCost():
            return slowest_tiles_of_copy(cost, target)
        case StreamCost():
            return StreamCycles(cost.cycles, cost.earlier)
    return cost


def steps_of_cycles(
    program: Program, costs: Costs, effects: EffectsOf, target: Target
) -> tuple[dict[Program, ClockStep], int]:
    """Return the clock step of each leaf and decision of a program.

    Args:
        program: the control tree.
        costs: the cycles of each leaf, of one target or of machines that differ in rates.
        effects: the effects of its nodes.
        target: the system; of machines, those as an array.

    Returns:
        (steps, slots): the steps by node, and the number of rows of the clock state beside the IPUs.
    """
    rows = count(target.num_ipus)  # numbers of the rows behind the clocks of the IPUs
    slots = _exchange_slots(costs, target, rows)
    io_tiles = _io_tile_rows(costs, rows)
    slots |= _transfer_slots(costs, rows)
    steps: dict[Program, ClockStep] = {}
    for node in distinct(program):
        if isinstance(node, Decision):
            steps[node] = _add_waits(_decision(target), node.decider.variables(), (), slots)
        elif isinstance(node, Leaf):
            effect = effects(node) if slots else Effects()  # only waits for slots need them
            step = _transfer_step(node, costs[node], target, slots, io_tiles) or _step_of_leaf(
                node, costs[node], target, slots
            )
            step = _after_stores(node, step, slots)
            # A sender into a slot waits for the slot itself, not for the arrivals that it overwrites.
            steps[node] = _add_waits(step, effect.reads, () if step.fills else effect.writes, slots)
    return steps, next(rows) - target.num_ipus


@dataclass(frozen=True, slots=True, eq=False)
class _Slot:
    """Rows of the clock state of a variable, or of a remote buffer, that buffered exchanges or I/O tiles write.

    Args:
        free: row of the time since when it is free.
        arrivals: by receiving IPU, row of the time of the last arrival.
    """

    free: int
    arrivals: dict[int, int]


_Slots = Mapping[Variable, _Slot]


def _io_tile_rows(costs: Costs, rows: Iterator[int]) -> dict[int, int]:
    """Return the row of the clock of each IPU's I/O tiles, of those that have transfers."""
    busy = {ipu for _, cost in _overlapping_transfers(costs) for ipu in _busy(cost.cycles)}
    return {ipu: next(rows) for ipu in sorted(busy)}


def _transfer_slots(costs: Costs, rows: Iterator[int]) -> dict[Variable, _Slot]:
    """Return the rows of clocks of variables that I/O tiles load or store, and of buffers that are read after that."""
    slots: dict[Variable, _Slot] = {}
    loaded = {leaf.buffer.memory for leaf in costs if isinstance(leaf, RemoteIn)}
    for leaf, cost in _overlapping_transfers(costs):
        for variable in _moved(leaf):
            if variable is leaf.buffer.memory and variable not in loaded:
                continue
            if variable not in slots:
                slots[variable] = _Slot(next(rows), {ipu: next(rows) for ipu in _busy(cost.cycles)})
    return slots


def _overlapping_transfers(costs: Costs) -> Iterator[tuple[RemoteIn | RemoteOut, StreamCycles]]:
    """Yield the transfers for which following steps do not wait, unless they need the data."""
    for leaf, cost in costs.items():
        if isinstance(leaf, RemoteIn | RemoteOut) and leaf.overlaps and isinstance(cost, StreamCycles):
            yield leaf, cost


def _moved(leaf: RemoteIn | RemoteOut) -> tuple[Variable, ...]:
    """Return the variables that a transfer loads or stores, and the memory that it stores to."""
    if isinstance(leaf, RemoteIn):
        return tuple(leaf.destination.variables())
    return (*leaf.source.variables(), leaf.buffer.memory)


def _after_stores(leaf: Leaf, step: ClockStep, slots: _Slots) -> ClockStep:
    """Make a load wait for the stores of I/O tiles to its buffer: those of the IPU, or its I/O tiles if they load."""
    if not isinstance(leaf, RemoteIn) or leaf.buffer.memory not in slots:
        return step
    clocks = [clock for clock, _, _ in step.transfers] or step.ipus
    stores = sorted(slots[leaf.buffer.memory].arrivals.values())
    return replace(step, awaits=tuple((clock, row) for clock in clocks for row in stores))


def _transfer_step(
    leaf: Leaf, cost: LeafCycles, target: Target, slots: _Slots, io_tiles: Mapping[int, int]
) -> ClockStep | None:
    """Return the step of a transfer on I/O tiles, None for any other leaf."""
    if not isinstance(leaf, RemoteIn | RemoteOut) or not leaf.overlaps:
        return None
    assert isinstance(cost, StreamCycles)
    ipus = _busy(cost.cycles)
    written = [slots[variable] for variable in _moved(leaf) if variable in slots]
    return ClockStep(
        _work(target),
        ipus,
        transfers=tuple((io_tiles[ipu], ipu, _number(cost.cycles[ipu])) for ipu in ipus),
        delivers=tuple((slot.arrivals[ipu], (io_tiles[ipu],)) for slot in written for ipu in ipus),
    )


def _exchange_slots(costs: Costs, target: Target, rows: Iterator[int]) -> dict[Variable, _Slot]:
    """Return a slot for each variable that is a destination of buffered exchanges."""
    if target.global_exchange == "lockstep":
        return {}
    slots: dict[Variable, _Slot] = {}
    for leaf, cost in costs.items():
        if (
            isinstance(leaf, Copy)
            and isinstance(cost, CopyCycles)
            and cost.flows is not None
            and not leaf.is_collective
        ):
            for variable in leaf.destination.variables():
                slot = slots[variable] if variable in slots else slots.setdefault(variable, _Slot(next(rows), {}))
                for receiver in np.unique(cost.flows.receivers).tolist():
                    if receiver not in slot.arrivals:
                        slot.arrivals[receiver] = next(rows)
    return slots


def _add_waits(step: ClockStep, reads: Iterable[Variable], writes: Iterable[Variable], slots: _Slots) -> ClockStep:
    """Make a step also wait for arrivals in slots that it reads or overwrites, and free the slots that it reads."""
    read = {slots[variable] for variable in reads if variable in slots}
    awaited = read | {slots[variable] for variable in writes if variable in slots}
    awaits = sorted((ipu, row) for slot in awaited for ipu, row in slot.arrivals.items() if ipu in step.ipus)
    return replace(step, frees=tuple(sorted(slot.free for slot in read)), awaits=(*step.awaits, *awaits))


def _step_of_leaf(leaf: Leaf, cost: LeafCycles, target: Target, slots: _Slots) -> ClockStep:
    """Return the work of a leaf on each IPU, and the IPUs that it joins; copies between IPUs by `global_exchange`."""
    all_ipus = tuple(range(target.num_ipus))
    match cost:
        case ComputeSetCycles():
            work = _compute_set_work(cost, target)
            return ClockStep(work, _busy(work))
        case StreamCycles():
            return _host_exchange(cost, target)
        case WaitCost(ipus):
            return ClockStep(_work(target), ipus)
        case SyncCost(kind):
            if kind == "external":
                return _sync_all(target, target.global_sync_cycles)
            return ClockStep(_work(target, sync=sync_cycles(1, target)), all_ipus)
    work = _copy_work(cost, target)
    if cost.flows is None:
        return ClockStep(work, _busy(work))
    if isinstance(leaf, CrossReplicaCopy) or (isinstance(leaf, Copy) and leaf.is_collective):
        return _after_sync(work, _busy(work), target)
    if target.global_exchange == "lockstep":
        return _after_sync(work, all_ipus, target)
    assert isinstance(leaf, Copy)
    senders, receivers = (tuple(np.unique(ipus).tolist()) for ipus in (cost.flows.senders, cost.flows.receivers))
    work[[ipu for ipu in range(target.num_ipus) if ipu not in senders], GLOBAL_EXCHANGE] = (
        0  # receivers wait, and do not work
    )
    ipus = tuple(sorted({*senders, *receivers, *_busy(work)}))
    filled = [slots[variable] for variable in leaf.destination.variables()]
    senders_to = {ipu: tuple(cost.flows.senders[cost.flows.receivers == ipu].tolist()) for ipu in receivers}
    delivers = tuple((slot.arrivals[ipu], senders_to[ipu]) for slot in filled for ipu in receivers)
    return ClockStep(work, ipus, senders=senders, fills=tuple(slot.free for slot in filled), delivers=delivers)


def _after_sync(work: np.ndarray, ipus: tuple[int, ...], target: Target) -> ClockStep:
    """Return the step of work that begins with a global sync of some IPUs."""
    work[list(ipus), SYNC] = target.global_sync_cycles
    return ClockStep(work, ipus, barriers=(ipus,) if ipus else ())


def _host_exchange(cost: StreamCycles, target: Target) -> ClockStep:
    """Return the step of a transfer: an external sync of its zones, and the exchange."""
    work = _work(target, host_exchange=cost.cycles)
    busy = _busy(work)
    # Transfers one after the other are one host exchange: a zone syncs for the first of them only.
    zones = tuple(tuple(zone) for zone in host_sync_zones(target) if not cost.earlier[list(zone)].any())
    synced = tuple(zone for zone in zones if any(ipu in zone for ipu in busy))
    for zone in synced:
        work[list(zone), SYNC] = target.global_sync_cycles
    return ClockStep(work, tuple(sorted({*busy, *chain(*synced)})), barriers=synced)


def host_sync_zones(target: Target) -> tuple[range, ...]:
    """Return the groups of several IPUs that sync before an exchange with the host, by `Target.sync_pattern`."""
    step = {"full": 1, "ping_pong": 2, "single_pipeline": target.num_ipus}[target.sync_pattern]
    zones = (range(first, target.num_ipus, step) for first in range(step))
    return tuple(zone for zone in zones if len(zone) > 1)


def _work(target: Target, **cycles: Any) -> np.ndarray:
    """Return the cycles of each phase on each IPU, int64[num_ipus, 5, *machines], 0 for phases that are not named."""
    machines, dtype = machines_of(target)
    work = np.zeros((target.num_ipus, len(PHASES), *machines), dtype)
    for phase, values in cycles.items():
        work[:, PHASES.index(phase)] = values
    return work


def _busy(work: np.ndarray) -> tuple[int, ...]:
    """Return the IPUs with cycles, of [num_ipus, …]."""
    return tuple(np.flatnonzero(work.reshape(len(work), -1).any(1)).tolist())


def _number(cycles: Any) -> Any:
    """Return the cycles of one target as an int, those of machines as an array."""
    return int(cycles) if np.ndim(cycles) == 0 else cycles


def _of_ipus(flags: Any, cycles: np.ndarray) -> np.ndarray:
    """Return flags of IPUs, bool[num_ipus], with the dimensions of cycles, [num_ipus, *machines]."""
    return flags.reshape(-1, *[1] * (cycles.ndim - 1))


def _compute_set_work(cost: ComputeSetCycles, target: Target) -> np.ndarray:
    before, after = cost.before, cost.after
    # One sync before the exchange of operands and compute, one more before results are sent.
    steps = (before > 0) | (after > 0) | _of_ipus(cost.has_vertices, before)
    syncs = steps.astype(np.int64) + (after > 0)
    return _work(target, compute=cost.compute, exchange=before + after, sync=sync_cycles(syncs, target))


def _copy_work(cost: CopyCycles, target: Target) -> np.ndarray:
    """Return the work of a copy on each IPU: in global exchange on those that exchange with others, else in its own."""
    ports, copying = cost.ports, cost.copying
    if cost.flows is None or cost.links is None:
        sync = sync_cycles((ports > 0) | (copying > 0), target)
        return _work(target, compute=copying, exchange=ports, sync=sync)
    # On an IPU that exchanges with others all of its exchange counts as global: ports and links are busy together.
    crosses = _of_ipus(cost.flows.crossing(), ports)
    between = np.where(crosses, np.maximum(ports, cost.links), 0)
    inside = np.where(crosses, 0, ports)
    return _work(target, compute=copying, exchange=inside, global_exchange=between)  # syncs: see `_after_sync`


def _decision(target: Target) -> ClockStep:
    return _sync_all(target, target.internal_sync_cycles if target.num_ipus == 1 else target.global_sync_cycles)


def _sync_all(target: Target, cycles: int) -> ClockStep:
    """Return a sync of all IPUs that lasts some cycles."""
    all_ipus = tuple(range(target.num_ipus))
    return ClockStep(_work(target, sync=cycles), all_ipus, barriers=(all_ipus,))
