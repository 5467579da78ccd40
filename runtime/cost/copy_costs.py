"""Costs of copies: cycles and bytes of every tile, and of the links between IPUs.

Input: a graph and a copy of it. Output: `CopyCost`, from `CopyCounts`, which know no target but its tiles.

    copy    ::= sync ; exchange ; copying on the own tile, or sync of all IPUs ; exchange over the links between IPUs

A pipeline has a copy for each set of stages that send at once: hundreds, of the same few parts. `CopyCosts` counts each
part once, and each IPU once for all copies that move the same on it, or on another IPU.

Between replicas the flow from one to another is that of a copy in a system of two: the source in the first, the
destination in the second. Every pair of the replica map adds these flows to the links of the whole system (`links`),
and the cost of every replica is that of the slowest. A replica that both sends and receives does so at the same time;
one that copies to itself costs as if another sent the data.

Bytes between IPUs are the exchange of a system with one tile an IPU.
Source: constants: `Target`; links: `links`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from ipujax.runtime.cache import remembered
from ipujax.runtime.cost.compute_set import ExchangeCost
from ipujax.runtime.cost.ipu_window import Window, compact, mapping_range
from ipujax.runtime.cost.links import Flows, link_cycles
from ipujax.runtime.cost.padded_rows import padding_of_tensor, with_padding
from ipujax.runtime.errors import GraphError
from ipujax.runtime.exchange import (
    Row,
    Traffic,
    TrafficWindow,
    atom_cycles,
    copy_cycles,
    copy_traffic,
    copy_windows,
    exchange_cycles,
    independent_parts,
    receive_cycles,
    shortest_atom,
    slow_bytes,
    traffic_on,
)
from ipujax.runtime.graph import Copy, CrossReplicaCopy, Graph, SlowReason, of_replicas
from ipujax.runtime.target import Target
from ipujax.runtime.tensor import (
    Node,
    Tensor,
    TileMapping,
    element_bytes,
    pad_tiles,
    renumber_tiles,
    substitute,
    surely_disjoint,
)


@dataclass(frozen=True, eq=False)
class IpuCopyCost:
    """Cost of a copy on one of its IPUs; arrays are int64[tiles of the IPU].

    Args:
        exchange: data that tiles send and receive, within the IPU and beyond.
        copy_cycles: cycles of copying on the own tile.
    """

    exchange: ExchangeCost
    copy_cycles: np.ndarray

    @cached_property
    def most_cycles(self) -> tuple[int, int]:
        """Cycles of the exchange, and of copying, on the slowest tile of each."""
        return int(self.exchange.cycles.max()), int(self.copy_cycles.max())


@dataclass(frozen=True, slots=True, eq=False)
class CopyCost:
    """Cost of one copy.

    Args:
        first_ipu: its first IPU.
        ipus: costs of that and the neighbouring IPUs; those that are equal in copies of a program are one object.
        flows: bytes between IPUs; None when all stays inside.
        link_cycles: cycles of each IPU for data that leaves or reaches it, int64[num_ipus]; None as `flows`.
        slow_path: why rows are copied by atoms of less than a vector; None if none is.
    """

    first_ipu: int
    ipus: tuple[IpuCopyCost, ...]
    flows: Flows | None = None
    link_cycles: np.ndarray | None = None
    slow_path: SlowReason | None = None

    @property
    def exchange(self) -> ExchangeCost:
        """Data that tiles send and receive, within an IPU and beyond; arrays of the tiles of all its IPUs."""
        if len(self.ipus) == 1:
            return self.ipus[0].exchange
        names = (field.name for field in fields(ExchangeCost))
        return ExchangeCost(*(np.concatenate([getattr(ipu.exchange, name) for ipu in self.ipus]) for name in names))

    @property
    def copy_cycles(self) -> np.ndarray:
        """Cycles of copying on the own tile, int64[tiles of all its IPUs]."""
        return self.ipus[0].copy_cycles if len(self.ipus) == 1 else np.concatenate([x.copy_cycles for x in self.ipus])

    @property
    def is_global(self) -> bool:
        """True if data moves between IPUs."""
        return self.flows is not None


@dataclass(frozen=True, slots=True, eq=False)
class CopyCounts:
    """Bytes and messages of a copy; arrays are int64[tiles], the tiles of a window, but for those by IPU.

    Args:
        window: the IPUs of all its tiles.
        received_bytes: bytes that each tile receives.
        shared_bytes: those of them that all tiles of the same bus receive.
        receives: parts that it receives, each from one tile to successive addresses.
        fragments: contiguous parts that it receives.
        sent_bytes: bytes that it sends.
        sends: contiguous parts of those.
        local_bytes: bytes that are copied on the tile.
        local_fragments: contiguous parts of those.
        slow_cycles: cycles of rows that are copied by atoms, in the place of `local_bytes`.
        flows: bytes between IPUs; None when all stays inside.
        link_flows: the same of all IPUs whose links they load, those of other replicas too; None as `flows`.
        slow_path: why rows are copied by atoms; None if none is.
    """

    window: Window
    received_bytes: np.ndarray
    shared_bytes: np.ndarray
    receives: np.ndarray
    fragments: np.ndarray
    sent_bytes: np.ndarray
    sends: np.ndarray
    local_bytes: np.ndarray
    local_fragments: np.ndarray
    slow_cycles: np.ndarray
    flows: Flows | None = None
    link_flows: Flows | None = None
    slow_path: SlowReason | None = None

    def cost(self, target: Target) -> CopyCost:
        """Return the cost on a target; that of its links is of one replica, whose links are slowest."""
        links = None
        if self.link_flows is not None:
            links = link_cycles(self.link_flows, target).reshape(-1, target.num_ipus).max(0)
        width = target.tiles_per_ipu
        ipus = tuple(
            self._ipu_cost(target, slice(first, first + width)) for first in range(0, self.window.tiles, width)
        )
        return CopyCost(self.window.first_ipu, ipus, self.flows, links, self.slow_path)

    def _ipu_cost(self, target: Target, tiles: slice) -> IpuCopyCost:
        """Return the cost on the tiles of one IPU."""
        local = (self.local_bytes[tiles], self.local_fragments[tiles])
        copied_cycles = compact(copy_cycles(*local, target, self.slow_cycles[tiles]))
        received = self.received_bytes[tiles]
        sent = self.sent_bytes[tiles]
        if not received.any() and not sent.any():
            return IpuCopyCost(ExchangeCost(*[np.broadcast_to(np.int64(0), received.shape)] * 5), copied_cycles)
        receives = self.receives[tiles]
        sends = self.sends[tiles]
        receiving = receive_cycles(received, self.shared_bytes[tiles], receives, target, self.fragments[tiles])
        cycles = exchange_cycles(receiving, sent, target, sends)
        return IpuCopyCost(ExchangeCost(*map(compact, (received, sent, receives, sends, cycles))), copied_cycles)


def copy_cost(graph: Graph, copy: Copy) -> CopyCost:
    """Return the cost of one run of a copy."""
    return CopyCosts(graph).cost(copy)


def copy_counts(graph: Graph, copy: Copy) -> CopyCounts:
    """Return the counts of one run of a copy."""
    return CopyCosts(graph).counts(copy)


@dataclass(frozen=True, slots=True, eq=False)
class _Payload:
    """Data that a copy moves.

    Args:
        window: the IPUs of its tiles.
        parts: the exchange of each of its independent parts.
        flows: bytes between IPUs; None when all stays inside.
        padding: the factor by which its rows are longer.
        uneven: the row with the shortest atom; None if all are whole vectors.
    """

    window: Window
    parts: Sequence[TrafficWindow]
    flows: Flows | None
    padding: float
    uneven: Row | None


class CopyCosts:
    """Costs of the copies of a graph; parts and IPUs that several copies have in common are counted once."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._parts: dict[tuple[Node, Node, object], tuple[list[TrafficWindow], _FlowRows]] = {}
        # By the identity of traffic, which `_parts` keeps: equal parts on other IPUs have the same.
        self._ipus: dict[object, CopyCost] = {}

    def cost(self, copy: Copy) -> CopyCost:
        """Return the cost of one run of a copy."""
        target = self._graph.target
        width = target.tiles_per_ipu
        payload = self._payload_of(copy)
        first = payload.window.first_ipu
        parts_of_ipus: list[list[tuple[int, Traffic]]] = [[] for _ in range(payload.window.num_ipus)]
        for part in payload.parts:
            # Without elements the tiles of a part are no tiles of the copy.
            begin = part.first
            end = begin + len(part.traffic.local_bytes)
            for ipu in range(max(first, begin // width), min(first + len(parts_of_ipus), -(-end // width))):
                parts_of_ipus[ipu - first].append((begin - ipu * width, part.traffic))
        costs = [self._ipu_cost(payload, parts) for parts in parts_of_ipus]
        links = None if payload.flows is None else link_cycles(payload.flows, target)
        slow_path = next((cost.slow_path for cost in costs if cost.slow_path is not None), None)
        return CopyCost(first, tuple(cost.ipus[0] for cost in costs), payload.flows, links, slow_path)

    def counts(self, copy: Copy) -> CopyCounts:
        """Return the counts of one run of a copy."""
        payload = self._payload_of(copy)
        return replace(_counts_of(payload), flows=payload.flows, link_flows=payload.flows)

    def _ipu_cost(self, payload: _Payload, parts: Sequence[tuple[int, Traffic]]) -> CopyCost:
        """Return the cost of some traffic of a copy on one IPU, from a tile of it on, but for that of its links."""
        is_global = payload.flows is not None
        key = payload.padding, payload.uneven, is_global, *((first, id(traffic)) for first, traffic in parts)
        if key not in self._ipus:
            window = Window(0, 1, self._graph.target.tiles_per_ipu)
            on_ipu = replace(payload, window=window, parts=[TrafficWindow(*part) for part in parts])
            self._ipus[key] = _counts_of(on_ipu).cost(self._graph.target)
        return self._ipus[key]

    def _payload_of(self, copy: Copy) -> _Payload:
        """Return what a copy moves, as the sum of its independent parts; what equal parts move is computed once."""
        graph = self._graph
        tensors = (copy.source, copy.destination)
        ranges = [mapping_range(graph.mappings[variable]) for tensor in tensors for variable in tensor.variables()]
        parts: list[TrafficWindow] = []
        flows: list[_FlowRows] = []
        for source, destination in independent_parts(*tensors) if copy.source.size else ():
            key = source.node, destination.node, source.dtype
            if key not in self._parts:
                flows_of_part = _flows_of(graph, copy, source, destination)
                self._parts[key] = copy_windows(source, destination, graph), flows_of_part
            parts.extend(self._parts[key][0])
            flows.append(self._parts[key][1])
        rows = zip(*flows, strict=True) if flows else ((), (), ())
        between = Flows.of(graph.target.num_ipus, *([x for values in row for x in values] for row in rows))
        lengths = graph.padded_lengths
        return _Payload(
            window=Window.of(ranges, graph.target),
            parts=parts,
            flows=between if len(between.senders) else None,
            padding=max(padding_of_tensor(tensor, lengths) for tensor in tensors),
            uneven=shortest_atom(tensors, lengths),
        )


def _counts_of(payload: _Payload) -> CopyCounts:
    """Return the counts of a copy on the tiles of its window, without flows."""
    window = payload.window
    uneven = payload.uneven
    traffic = with_padding(traffic_on(payload.parts, window.tile_numbers), payload.padding)
    counts: dict[str, Any] = {name: getattr(traffic, name) for name in _COPIED}
    slow_cycles = window.zeros
    slow_path = None
    if uneven is not None:
        # All local bytes are copied; those of one part begin with a vector.
        slow = slow_bytes(replace(traffic, copied_bytes=traffic.local_bytes), uneven.atom_bytes, 1)
        counts |= {name: np.where(slow > 0, 0, counts[name]) for name in ("local_bytes", "local_fragments")}
        slow_cycles = np.ceil(atom_cycles(slow, uneven.atom_bytes)).astype(np.int64)
        slow_path = uneven.because("copied") if slow.any() else None
    if payload.flows is not None:
        # That tiles share a bus is known of the exchange inside an IPU only.
        counts["shared_bytes"] = window.zeros
    return CopyCounts(window, **counts, slow_cycles=slow_cycles, slow_path=slow_path)


_COPIED = (
    *("received_bytes", "shared_bytes", "receives", "fragments", "sent_bytes", "sends"),
    *("local_bytes", "local_fragments"),
)


@remembered
def _ipu_target(target: Target) -> Target:
    return target.replace(tiles_per_ipu=1)


@remembered
def _on_ipus(mapping: TileMapping, tiles_per_ipu: int, shift: int, num_ipus: int) -> TileMapping:
    """Map to IPU (i + shift) mod num_ipus all that is mapped to tiles of IPU i."""
    return mapping.on_tiles((mapping.tiles // tiles_per_ipu + shift) % num_ipus)


def _ipu_traffic(source: Tensor, destination: Tensor, graph: Graph, shift: int = 0) -> Traffic:
    """Return the traffic of a copy with IPUs for tiles, the destination's IPUs shifted cyclically."""
    target = graph.target
    ipus = Graph(_ipu_target(target))
    for variables, ipu_shift in ((source.variables(), 0), (destination.variables(), shift)):
        for variable in variables:
            mapping = graph.mappings[variable]
            ipus.mappings[variable] = _on_ipus(mapping, target.tiles_per_ipu, ipu_shift, target.num_ipus)
    return copy_traffic(source, destination, ipus)


def _only_ipu(graph: Graph, tensor: Tensor) -> int | None:
    """Return the IPU that has all variables of a tensor; None if several do."""
    window = Window.of([mapping_range(graph.mappings[v]) for v in tensor.variables()], graph.target)
    return window.first_ipu if window.num_ipus == 1 else None


class _FlowRows(NamedTuple):
    """Flows between IPUs, one a row: as `Flows.of` takes them."""

    senders: Sequence[int]
    receivers: Sequence[int]
    num_bytes: Sequence[int]


def _flows_of(graph: Graph, copy: Copy, source: Tensor, destination: Tensor) -> _FlowRows:
    """Return the flows between IPUs of a part of a copy: bytes of each sender for each receiver."""
    # Most parts of a copy between many IPUs, such as one a stage, are between two of them.
    sender = _only_ipu(graph, source)
    receiver = _only_ipu(graph, destination)
    if sender is not None and receiver is not None and (sender == receiver or surely_disjoint([source.node])):
        return _FlowRows([sender], [receiver], [source.size * element_bytes(source.dtype)])
    num_ipus = graph.target.num_ipus
    direct = _ipu_traffic(source, destination, graph)
    sources = np.flatnonzero(direct.sent_bytes)
    destinations = np.flatnonzero(direct.received_bytes)
    # With one sender or one receiver its counts are the flows; else each pair needs a count of its own.
    if len(sources) <= 1:
        senders = np.repeat(sources, len(destinations))
        return _FlowRows(senders.tolist(), destinations.tolist(), direct.received_bytes[destinations].tolist())
    if len(destinations) == 1:
        receivers = np.repeat(destinations, len(sources))
        return _FlowRows(sources.tolist(), receivers.tolist(), direct.sent_bytes[sources].tolist())
    if not set(source.variables()).isdisjoint(destination.variables()):
        raise GraphError(
            f"copy {copy.name} moves a variable onto itself between several IPUs",
            where=copy.origin,
            expected="different variables as source and destination",
        )
    # Bytes that are local after shifting the destination by -k are those that IPU s sends to IPU s + k.
    shifts = sorted({int(d - s) % num_ipus for s in sources for d in destinations} - {0})
    senders = np.tile(sources, len(shifts))
    receivers = np.concatenate([(sources + shift) % num_ipus for shift in shifts])
    sent = [_ipu_traffic(source, destination, graph, -shift).local_bytes[sources] for shift in shifts]
    return _FlowRows(senders.tolist(), receivers.tolist(), np.concatenate(sent).tolist())


def cross_replica_cost(graph: Graph, copy: CrossReplicaCopy) -> CopyCost:
    """Return the cost of one run of a copy between replicas, for each of them; `graph` is of one replica."""
    return cross_replica_counts(graph, copy).cost(graph.target)


def cross_replica_counts(graph: Graph, copy: CrossReplicaCopy) -> CopyCounts:
    """Return what one run of a copy between replicas moves in each of them; `graph` is of one replica."""
    target = graph.target
    num_ipus = target.num_ipus
    tiles = target.num_tiles
    window = Window(0, num_ipus, target.tiles_per_ipu)
    counts: dict[str, Any] = dict.fromkeys((*_COPIED, "slow_cycles"), window.zeros)
    pair_flows = no_flows = Flows.of(2 * num_ipus, [], [], [])
    link_flows = Flows.of(graph.replication_factor * num_ipus, [], [], [])
    for way in copy.ways:
        pair = _between_two(graph, way)
        assert pair.flows is not None or not way.source.size, "two replicas share no IPU"
        flows = no_flows if pair.flows is None else pair.flows
        pair_flows = pair_flows.plus(flows)
        replica_map = [(a, b) for a, b in way.replica_map if a != b]
        link_flows = link_flows.plus(flows.between_replicas(replica_map, graph.replication_factor))
        # Of the two replicas one sends and one receives; a replica of a ring does both, so it has the sum of their
        # counts.
        for name in _EXCHANGED:
            part = pad_tiles(getattr(pair, name), pair.window.first_tile, 2 * tiles)
            counts[name] = counts[name] + part[:tiles] + part[tiles:]
    return CopyCounts(window, **counts, flows=pair_flows.folded(), link_flows=link_flows)


_EXCHANGED = ("received_bytes", "sent_bytes", "receives", "sends")


def _between_two(graph: Graph, copy: CrossReplicaCopy) -> CopyCounts:
    """Return what the copy moves from the first of two replicas to the second, in a system of their IPUs."""
    target = graph.target
    pair = Graph(of_replicas(target, 2))
    for variable in copy.source.variables():
        pair.mappings[variable] = graph.mappings[variable]
    # The destination may be the source's variable: in the system of two it is one of its own, on the second replica.
    received = {variable: replace(variable) for variable in copy.destination.variables()}
    second_tiles = np.arange(target.num_tiles, 2 * target.num_tiles, dtype=np.int32)
    for variable, received_variable in received.items():
        mapping = renumber_tiles(graph.mappings[variable], second_tiles)
        assert mapping is not None, "every tile has its counterpart"
        pair.mappings[received_variable] = mapping
    return copy_counts(pair, Copy(copy.source, substitute(copy.destination, received), copy.name))
