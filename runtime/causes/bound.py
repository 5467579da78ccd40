"""Bounds of the cycles of a run: least of any plan of its function, and least of its own supersteps.

Input: an executable, and how often each of its steps ran. Output: a `Bound`. No plan takes fewer cycles, because

    one IPU       phases do not overlap. Host: all bytes of its streams at the rate of the link, a latency each way.
                  Sync, exchange, compute: of the longest dependence path of the function, see `LeastWork`. Every
                  compute set takes the mean of its tiles at least, and each busy tile a smallest vertex beside its
                  work: so the work of all tiles at peak rates over the tiles, and a smallest vertex for each compute
                  set of the path, are a bound too, and so is each mean of both by weights
    several IPUs  a run takes as long as the busiest IPU works, at least the mean of all; and as the longest path
    I/O tiles     transfers of remote buffers may overlap all else: the longer of both

Of a program without a function, built by hand, a plan is a mapping to tiles: its compute sets stay as they are.
Its own supersteps at their least keep sync, start-up, host and links; vertices and payload are spread evenly over the
tiles of their IPU, and nothing is copied on a tile.
Limits: what streaming memory moves counts nothing in the first figure.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from math import floor

import numpy as np

from ipujax.runtime.causes.variants import Run, whole_work
from ipujax.runtime.compile import Executable
from ipujax.runtime.cost import ComputeSetCost, CopyCost, ExchangeCost, StreamCost
from ipujax.runtime.files.figure_kinds import Large
from ipujax.runtime.graph import (
    HostStream,
    Leaf,
    LeastWork,
    Program,
    RemoteBuffer,
    RemoteIn,
    RemoteOut,
    StreamIn,
    StreamOut,
)
from ipujax.runtime.target import Target
from ipujax.runtime.tensor import element_bytes, pad_tiles
from ipujax.runtime.timeline import Recording
from ipujax.runtime.timeline.clocks import COMPUTE, EXCHANGE


@dataclass(frozen=True, slots=True)
class Bound:
    """Least cycles of a run; those of phases add up to `cycles`.

    Args:
        cycles: least cycles of any plan of the function on this machine.
        host_cycles: the part of the host exchange.
        exchange_cycles: of exchanges between tiles.
        sync_cycles: of syncs.
        compute_cycles: of computing.
        own_steps_cycles: least cycles of the program's own supersteps, each at its least.
    """

    cycles: Large
    host_cycles: Large
    exchange_cycles: Large
    sync_cycles: Large
    compute_cycles: Large
    own_steps_cycles: Large


@dataclass(frozen=True, slots=True)
class _Phases:
    """Cycles by phase, not rounded."""

    host: float = 0.0
    exchange: float = 0.0
    sync: float = 0.0
    compute: float = 0.0

    @property
    def total(self) -> float:
        return self.host + self.exchange + self.sync + self.compute


def bound_of_run(
    executable: Executable, program: Program, recording: Recording | None, runs: Mapping[Program, int]
) -> Bound:
    """Return the bounds of a run; arguments as `causes_of_run`.

    Raises:
        ProfileError: a trip count is data.
    """
    phases = _least_phases(executable, runs)
    host, exchange, sync, compute = map(floor, (phases.host, phases.exchange, phases.sync, phases.compute))
    own_steps = Run(executable, program, recording).cycles([_own_work(executable)])[0] if executable.steps else 0
    return Bound(host + exchange + sync + compute, host, exchange, sync, compute, own_steps)


def _least_phases(executable: Executable, runs: Mapping[Program, int]) -> _Phases:
    """Return the largest of the lower bounds of a run, by phase: no plan is faster than any of them."""
    target = executable.target
    host = _host(executable, runs)
    work_of_target = executable.graph.notes.least_work
    if work_of_target is None:
        device, work = _of_compute_sets(executable, runs)
    else:
        work_of_function = work_of_target(target)
        device, work = _of_path(work_of_function, target), _Phases(compute=work_of_function.tile_cycles)
    if target.num_ipus == 1:
        together = _Phases(host.moved_bytes + host.latency, device.exchange, device.sync, device.compute)
        return max(together, _Phases(host=host.overlapped), key=lambda x: x.total)
    mean = _Phases(host=(host.moved_bytes + host.latency) / target.num_ipus, compute=work.compute / target.num_tiles)
    overlapped = _Phases(host=host.overlapped / target.num_ipus)
    return max(mean, device, overlapped, key=lambda x: x.total)


def _of_path(work_of_target: LeastWork, target: Target) -> _Phases:
    """Return the phases of the longest path, of one IPU with the work of the mean tile, by its weights."""
    sync = work_of_target.path_supersteps * float(target.internal_sync_cycles)
    exchange = work_of_target.path_exchanges * work_of_target.exchange_cycles
    compute = work_of_target.cycles(target.tiles_per_ipu) - sync - exchange
    return _Phases(exchange=exchange, sync=sync, compute=max(0.0, compute))


def _of_compute_sets(executable: Executable, runs: Mapping[Program, int]) -> tuple[_Phases, _Phases]:
    """Return the phases of one IPU for the compute sets of a program in any mapping, and their work on all tiles."""
    target = executable.target
    sync = compute = work = 0.0
    for leaf, cost in executable.costs.items():
        if isinstance(cost, ComputeSetCost) and (count := runs.get(leaf, 0)):
            active = int(cost.active_cycles.sum())
            sync += count * target.internal_sync_cycles * bool(cost.vertices.any())
            compute += count * max(active / target.tiles_per_ipu, int(_longest_vertex(cost).max()))
            work += count * active
    device = _Phases(sync=sync, compute=compute) if target.num_ipus == 1 else _Phases()
    return device, _Phases(compute=work)


def _longest_vertex(cost: ComputeSetCost) -> np.ndarray:
    """Return for each tile cycles that its longest vertex takes at least, those of the mean, int64[tiles]."""
    longest: np.ndarray = cost.active_cycles // np.maximum(cost.vertices, 1)
    return longest


@dataclass(frozen=True, slots=True)
class _Host:
    """Cycles of the host: of bytes that nothing overlaps, of those that may, and latencies."""

    moved_bytes: float
    overlapped: float
    latency: float


def _host(executable: Executable, runs: Mapping[Program, int]) -> _Host:
    """Return the least cycles of all IPUs together for the host: each byte crosses a link once, at its rate."""
    target = executable.target
    # By channel, and whether it moves to the tiles.
    bytes_of: dict[tuple[HostStream | RemoteBuffer, bool], int] = defaultdict(int)
    most_of: dict[tuple[HostStream | RemoteBuffer, bool], int] = {}
    for leaf, cost in executable.costs.items():
        if not isinstance(cost, StreamCost) or cost.counts.is_streamed or cost.counts.is_resident:
            continue
        assert isinstance(leaf, StreamIn | StreamOut | RemoteIn | RemoteOut), "only transfers have such a cost"
        channel = leaf.stream if isinstance(leaf, StreamIn | StreamOut) else leaf.buffer
        is_in = isinstance(leaf, StreamIn | RemoteIn)
        key = channel, is_in
        bytes_of[key] += runs.get(leaf, 0) * int(cost.counts.ipu_bytes.sum())
        if isinstance(leaf, RemoteIn | RemoteOut):  # a plan may load a row once that this one loads again
            memory = leaf.buffer.memory
            most_of[key] = memory.size * element_bytes(memory.dtype)
    moved_bytes = {key: min(count, most_of.get(key, count)) for key, count in bytes_of.items() if count}
    cycles_per_byte = target.clock_hz / target.host_bytes_per_second * _sharing(executable)
    may_overlap = executable.graph.io_tiles > 0
    overlapped = sum(count for key, count in moved_bytes.items() if may_overlap and key in most_of)
    directions = set() if may_overlap else {is_in for _, is_in in moved_bytes}
    latency = len(directions) * target.host_latency_seconds * target.clock_hz
    return _Host((sum(moved_bytes.values()) - overlapped) * cycles_per_byte, overlapped * cycles_per_byte, latency)


def _sharing(executable: Executable) -> int:
    """Return how many IPUs of as many replicas share a host link in one transfer, fewest of any IPU of a replica."""
    target = executable.target
    replicas = np.arange(executable.graph.replication_factor)
    machines = (replicas * target.num_ipus + np.arange(target.num_ipus)[:, None]) // target.ipus_per_gateway
    return min(int(np.bincount(row).max()) for row in machines)


def _own_work(executable: Executable) -> np.ndarray:
    """Return the work of all steps, each at its least, int64[steps, num_ipus, 5]."""
    target = executable.target
    work = executable.once(whole_work).copy()
    for row, node in zip(work, executable.steps, strict=True):
        cost = executable.costs.get(node) if isinstance(node, Leaf) else None
        if not isinstance(cost, ComputeSetCost | CopyCost):
            continue
        exchanges = [cost.before, cost.after] if isinstance(cost, ComputeSetCost) else [cost.exchange]
        exchange = np.sum([_even_exchange(each, target) for each in exchanges], axis=0)
        compute = _even_compute(cost, target) if isinstance(cost, ComputeSetCost) else np.zeros_like(exchange)
        for phase, cycles in ((EXCHANGE, exchange), (COMPUTE, compute)):
            row[:, phase] = np.minimum(row[:, phase], pad_tiles(cycles, cost.first_ipu, target.num_ipus))
    return work


def _even_compute(cost: ComputeSetCost, target: Target) -> np.ndarray:
    """Return the cycles of each IPU with its vertices on all tiles alike, those of one vertex at least, int64[ipus]."""
    active, longest = (x.reshape(-1, target.tiles_per_ipu) for x in (cost.active_cycles, _longest_vertex(cost)))
    cycles: np.ndarray = np.maximum(-(-active.sum(1) // target.tiles_per_ipu), longest.max(1))
    return cycles


def _even_exchange(exchange: ExchangeCost, target: Target) -> np.ndarray:
    """Return the cycles of each IPU with what it receives on all tiles alike, int64[ipus]."""
    received, cycles = (x.reshape(-1, target.tiles_per_ipu) for x in (exchange.received_bytes, exchange.cycles))
    lanes = target.tiles_per_ipu * target.tiles_per_exchange_bus * target.exchange_bytes_per_cycle
    payload = np.ceil(received.sum(1) / lanes).astype(np.int64)
    even: np.ndarray = np.where(cycles.any(1), target.exchange_startup_cycles + payload, 0)
    return even
