"""Costs of copies, host streams and remote buffers: cycles and bytes of every tile, and of the links between IPUs.

Input: a graph and a copy or stream of it. Output: `CopyCost` or `StreamCost`. A plain sync has its `SyncCost` here too.

    copy    ::= sync ; exchange ; copying on the own tile, or sync of all IPUs ; exchange over the links between IPUs
    stream  ::= latency and bytes over the host link of each machine

Between replicas the flow from one to another is that of a copy in a system of two: the source in the first, the
destination in the second. Every pair of the replica map adds these flows to the links of the whole system (`links`),
and the cost of every replica is that of the slowest. A replica that both sends and receives does so at the same time;
one that copies to itself costs as if another sent the data.

Bytes between IPUs are the exchange of a system with one tile an IPU.
Source: constants: `Target`; links: `links`.
Limits: a transfer of a remote buffer has the latency of one with the host (assumed). A transfer beyond the limit of one
is split into several, each with its latency; `ipujax.poplar` refuses it before, as Poplar does. The IPUs of a machine
share its host link in one transfer, those of all replicas too; each has a part of streaming memory, and its rate, for
itself (assumed). Transfers of different steps share nothing, though they may overlap in time: clocks are linear over
(max, +), where a link that is busy would delay whichever step the program names later.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ipujax.runtime.cache import recall, remembered
from ipujax.runtime.cost.compute_set import ExchangeCost
from ipujax.runtime.cost.ipu_window import Window, compact, mapping_range
from ipujax.runtime.cost.links import Flows, link_cycles
from ipujax.runtime.cost.padded_rows import padding_of_tensor, with_padding
from ipujax.runtime.errors import GraphError
from ipujax.runtime.exchange import (
    Traffic,
    atom_cycles,
    copy_cycles,
    copy_traffic,
    exchange_cycles,
    geometry,
    independent_parts,
    mappings_of,
    receive_cycles,
    shortest_atom,
    slow_bytes,
)
from ipujax.runtime.graph import (
    Copy,
    CrossReplicaCopy,
    Graph,
    HostStream,
    RemoteBuffer,
    SlowReason,
    SyncKind,
    of_replicas,
)
from ipujax.runtime.target import Target
from ipujax.runtime.tensor import (
    Tensor,
    TileMapping,
    element_bytes,
    pad_tiles,
    renumber_tiles,
    substitute,
    surely_disjoint,
)


@dataclass(frozen=True, slots=True, eq=False)
class CopyCost:
    """Cost of one copy; arrays are int64[tiles], the tiles of whole IPUs, but for those by IPU.

    Args:
        first_ipu: the IPU of the first tile of the arrays.
        exchange: data that tiles send and receive, within an IPU and beyond.
        copy_cycles: cycles of copying on the own tile.
        flows: bytes between IPUs; None when all stays inside.
        link_cycles: cycles of each IPU for data that leaves or reaches it, int64[num_ipus]; None as `flows`.
        slow_path: why rows are copied by atoms of less than a vector; None if none is.
    """

    first_ipu: int
    exchange: ExchangeCost
    copy_cycles: np.ndarray
    flows: Flows | None = None
    link_cycles: np.ndarray | None = None
    slow_path: SlowReason | None = None

    @property
    def is_global(self) -> bool:
        """True if data moves between IPUs."""
        return self.flows is not None


@dataclass(frozen=True, slots=True, eq=False)
class StreamCounts:
    """What a transfer between host and IPUs moves; each array is [num_ipus].

    Args:
        ipu_bytes: bytes of each IPU, int64.
        link_bytes: bytes over the link that it takes, which IPUs of a machine share, int64.
        earlier: whether the IPU took part in transfers before it that are the same host exchange.
        is_streamed: whether the other side is streaming memory, not the host.
        is_resident: whether the value stays on the device, so that nothing moves.
    """

    ipu_bytes: np.ndarray
    link_bytes: np.ndarray
    earlier: np.ndarray
    is_streamed: bool
    is_resident: bool

    @property
    def moves(self) -> np.ndarray:
        """Whether each IPU takes part in this transfer or in those before it, bool[num_ipus]."""
        return np.asarray(self.earlier | ((self.ipu_bytes > 0) & (not self.is_resident)))

    def cycles(self, target: Target) -> np.ndarray:
        """Return the cycles of each IPU, int64[num_ipus, machines]; 0 for those that take no part."""
        limit = target.max_remote_transfer_bytes if self.is_streamed else target.stream_buffer_limit_bytes
        bytes_per_second = target.streaming_bytes_per_second if self.is_streamed else target.host_bytes_per_second
        ipu_bytes, link_bytes, earlier = (x[:, None] for x in (self.ipu_bytes, self.link_bytes, self.earlier))
        # The latency of an IPU's first exchange was in the cost of the earlier transfer already. Their number is whole,
        # also where rates are not rounded.
        exchanges = np.ceil(ipu_bytes / np.asarray(limit)) - earlier
        seconds = exchanges * target.host_latency_seconds + link_bytes / bytes_per_second
        # IPUs without bytes take no part, though `seconds` may be negative for them.
        cycles = np.where(ipu_bytes > 0, np.ceil(seconds * target.clock_hz), 0).astype(np.int64)
        return np.asanyarray(cycles * (not self.is_resident))


@dataclass(frozen=True, slots=True, eq=False)
class StreamCost:
    """Cost of one transfer between host and IPUs.

    Args:
        first_ipu: the IPU of the first tile of `tile_bytes`.
        tile_bytes: bytes that each tile sends or receives, int64[tiles], the tiles of whole IPUs.
        cycles: cycles of each IPU, int64[num_ipus]; 0 for a resident stream, whose value stays on the device.
        counts: what it moves.
    """

    first_ipu: int
    tile_bytes: np.ndarray
    cycles: np.ndarray
    counts: StreamCounts

    @property
    def earlier(self) -> np.ndarray:
        """Whether each IPU took part in transfers before it that are the same host exchange, bool[num_ipus]."""
        return self.counts.earlier


@dataclass(frozen=True, slots=True, eq=False)
class WaitCost:
    """Wait of some IPUs, in rising order, for a transfer to end."""

    ipus: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class SyncCost:
    """Sync without an exchange; `kind` says of which tiles or IPUs, see `program.Sync`."""

    kind: SyncKind


@dataclass(frozen=True, slots=True, eq=False)
class CopyCounts:
    """What a copy moves; arrays are int64[tiles], the tiles of a window, but for those by IPU.

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
        copied_cycles = compact(copy_cycles(self.local_bytes, self.local_fragments, target, self.slow_cycles))
        links = None
        if self.link_flows is not None:
            links = link_cycles(self.link_flows, target).reshape(-1, target.num_ipus).max(0)
        exchange = self._exchange_cost(target)
        return CopyCost(self.window.first_ipu, exchange, copied_cycles, self.flows, links, self.slow_path)

    def _exchange_cost(self, target: Target) -> ExchangeCost:
        if not self.received_bytes.any() and not self.sent_bytes.any():
            return ExchangeCost(*[self.window.zeros] * 5)
        received = (self.received_bytes, self.shared_bytes, self.receives)
        receiving = receive_cycles(*received, target, self.fragments)
        cycles = exchange_cycles(receiving, self.sent_bytes, target, self.sends)
        values = (self.received_bytes, self.sent_bytes, self.receives, self.sends, cycles)
        return ExchangeCost(*map(compact, values))


def copy_cost(graph: Graph, copy: Copy) -> CopyCost:
    """Return the cost of one run of a copy."""
    return copy_counts(graph, copy).cost(graph.target)


def copy_counts(graph: Graph, copy: Copy) -> CopyCounts:
    """Return what one run of a copy moves."""
    target = graph.target
    variables = (*copy.source.variables(), *copy.destination.variables())
    window = Window.of([mapping_range(graph.mappings[v]) for v in variables], target)
    lengths = graph.padded_lengths
    factor = max(padding_of_tensor(tensor, lengths) for tensor in (copy.source, copy.destination))
    # Of the IPUs that take part: a pod has many more.
    tiles = range(window.first_tile, window.first_tile + window.tiles)
    traffic = with_padding(copy_traffic(copy.source, copy.destination, graph, tiles), factor)
    counts: dict[str, Any] = {name: getattr(traffic, name) for name in _COPIED}
    slow_cycles = window.zeros
    uneven = shortest_atom([copy.source, copy.destination], lengths)
    slow_path = None
    if uneven is not None:
        # All local bytes are copied; those of one part begin with a vector.
        slow = slow_bytes(replace(traffic, copied_bytes=traffic.local_bytes), uneven.atom_bytes, 1)
        counts |= {name: np.where(slow > 0, 0, counts[name]) for name in ("local_bytes", "local_fragments")}
        slow_cycles = np.ceil(atom_cycles(slow, uneven.atom_bytes)).astype(np.int64)
        slow_path = uneven.because("copied") if slow.any() else None
    flows = _flows(graph, copy) if window.num_ipus > 1 else None
    if flows is None or not len(flows.senders):
        return CopyCounts(window, **counts, slow_cycles=slow_cycles, slow_path=slow_path)
    # That tiles share a bus is known of the exchange inside an IPU only.
    counts["shared_bytes"] = window.zeros
    return CopyCounts(window, **counts, slow_cycles=slow_cycles, flows=flows, link_flows=flows, slow_path=slow_path)


_COPIED = (
    *("received_bytes", "shared_bytes", "receives", "fragments", "sent_bytes", "sends"),
    *("local_bytes", "local_fragments"),
)


def stream_cost(
    graph: Graph, stream: HostStream | RemoteBuffer, tensor: Tensor, *, after: StreamCost | None = None
) -> StreamCost:
    """Return the cost of one transfer between a stream of the host and a tensor, in either direction.

    Every machine has one link to the host, which the bytes of its IPUs take together, and every IPU its own link to
    streaming memory. A host exchange has one latency; a large transfer is several exchanges.
    `after` is the transfer before it if both are one host exchange, see `walks.joining_streams`.
    """
    first_ipu, tile_bytes, ipu_bytes = _mapped_bytes(graph, tensor)
    is_streamed = isinstance(stream, RemoteBuffer) and not stream.on_host
    earlier = np.zeros(graph.target.num_ipus, bool) if after is None else after.counts.moves
    link_bytes = ipu_bytes if is_streamed else _host_link_bytes(ipu_bytes, graph)
    counts = StreamCounts(ipu_bytes, link_bytes, earlier, is_streamed, stream.resident)
    return StreamCost(first_ipu, tile_bytes, counts.cycles(graph.target)[:, 0], counts)


def _host_link_bytes(ipu_bytes: np.ndarray, graph: Graph) -> np.ndarray:
    """Return the bytes over the host link of each IPU's machine, in the replica of most bytes, int64[num_ipus]."""
    bytes_of_all = np.tile(ipu_bytes, graph.replication_factor)
    machine = np.arange(bytes_of_all.size) // graph.target.ipus_per_gateway
    by_machine = np.bincount(machine, bytes_of_all).astype(np.int64)
    return by_machine[machine].reshape(-1, ipu_bytes.size).max(0)


def _mapped_bytes(graph: Graph, tensor: Tensor) -> tuple[int, np.ndarray, np.ndarray]:
    """Return the first IPU with bytes of a tensor, its bytes on each tile from there on, and on each IPU."""
    mappings = mappings_of(tensor, graph)

    def compute() -> tuple[int, np.ndarray, np.ndarray]:
        window = Window.of(map(mapping_range, mappings), graph.target)
        tile_bytes = tensor_tile_bytes(graph, tensor)
        ipu_bytes = tile_bytes.reshape(graph.target.num_ipus, -1).sum(1)
        return window.first_ipu, compact(window.total([tile_bytes])), ipu_bytes

    view = geometry(tensor)
    key = "mapped bytes", view, tensor.dtype, mappings, graph.target.num_ipus, graph.target.tiles_per_ipu
    return compute() if view is None else recall(key, compute)


def wait_cost(graph: Graph, tensor: Tensor) -> WaitCost:
    """Return the IPUs that wait for a transfer of a tensor."""
    tiles_per_ipu = graph.target.tiles_per_ipu
    ipus = {int(ipu) for v in tensor.variables() for ipu in np.unique(graph.mappings[v].tiles // tiles_per_ipu)}
    return WaitCost(tuple(sorted(ipus)))


def tensor_tile_bytes(graph: Graph, tensor: Tensor) -> np.ndarray:
    """Return the bytes of a tensor on each tile, int64[num_tiles]."""
    variables = tensor.variables()
    if len(variables) == 1 and tensor.size == variables[0].size and tensor.is_writable:
        elements = graph.mappings[variables[0]].elements_per_tile(graph.target.num_tiles)
        return elements * element_bytes(tensor.dtype)
    return copy_traffic(tensor, tensor, graph).local_bytes  # a copy onto itself moves nothing: all bytes are local


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


def _flows(graph: Graph, copy: Copy) -> Flows:
    """Return the bytes of a copy between IPUs."""
    # Most parts of a copy between many IPUs, such as one a stage, are between two of them.
    num = graph.target.num_ipus
    senders: list[int] = []
    receivers: list[int] = []
    num_bytes: list[int] = []
    for source, destination in independent_parts(copy.source, copy.destination):
        sender = _only_ipu(graph, source)
        receiver = _only_ipu(graph, destination)
        rows: tuple[Sequence[int], Sequence[int], Sequence[int]]
        if sender is not None and receiver is not None and (sender == receiver or surely_disjoint([source.node])):
            rows = [sender], [receiver], [source.size * element_bytes(source.dtype)]
        else:
            rows = _flows_of_part(graph, copy, source, destination)
        for values, new_values in zip((senders, receivers, num_bytes), rows, strict=True):
            values.extend(new_values)
    return Flows.of(num, senders, receivers, num_bytes)


def _flows_of_part(
    graph: Graph, copy: Copy, source: Tensor, destination: Tensor
) -> tuple[Sequence[int], Sequence[int], Sequence[int]]:
    """Return senders, receivers and bytes of a part of a copy between several IPUs."""
    num = graph.target.num_ipus
    direct = _ipu_traffic(source, destination, graph)
    sources = np.flatnonzero(direct.sent_bytes)
    destinations = np.flatnonzero(direct.received_bytes)
    # With one sender or one receiver its counts are the flows; else each pair needs a count of its own.
    if len(sources) <= 1:
        received = direct.received_bytes[destinations]
        return np.repeat(sources, len(destinations)).tolist(), destinations.tolist(), received.tolist()
    if len(destinations) == 1:
        return sources.tolist(), np.repeat(destinations, len(sources)).tolist(), direct.sent_bytes[sources].tolist()
    if not set(source.variables()).isdisjoint(destination.variables()):
        raise GraphError(
            f"copy {copy.name} moves a variable onto itself between several IPUs",
            where=copy.origin,
            expected="different variables as source and destination",
        )
    # Bytes that are local after shifting the destination by -k are those that IPU s sends to IPU s + k.
    shifts = sorted({int(d - s) % num for s in sources for d in destinations} - {0})
    local = [_ipu_traffic(source, destination, graph, -shift).local_bytes[sources] for shift in shifts]
    receivers = [(sources + shift) % num for shift in shifts]
    return np.tile(sources, len(shifts)).tolist(), np.concatenate(receivers).tolist(), np.concatenate(local).tolist()


def cross_replica_cost(graph: Graph, copy: CrossReplicaCopy) -> CopyCost:
    """Return the cost of one run of a copy between replicas, for each of them; `graph` is of one replica."""
    return cross_replica_counts(graph, copy).cost(graph.target)


def cross_replica_counts(graph: Graph, copy: CrossReplicaCopy) -> CopyCounts:
    """Return what one run of a copy between replicas moves in each of them; `graph` is of one replica."""
    target = graph.target
    pair = _between_two(graph, copy)
    assert pair.flows is not None or not copy.source.size, "two replicas share no IPU"
    num_ipus = target.num_ipus
    tiles = target.num_tiles
    no_flows = Flows.of(2 * num_ipus, [], [], [])
    pair_flows = no_flows if pair.flows is None else pair.flows
    flows = pair_flows.between_replicas([(a, b) for a, b in copy.replica_map if a != b], graph.replication_factor)
    # Of the two replicas one sends and one receives; a replica of a ring does both, so it has the sum of their counts.
    parts = {name: pad_tiles(getattr(pair, name), pair.window.first_tile, 2 * tiles) for name in _EXCHANGED}
    counts = {name: part[:tiles] + part[tiles:] for name, part in parts.items()}
    window = Window(0, num_ipus, target.tiles_per_ipu)
    moved = dict.fromkeys((*_COPIED, "slow_cycles"), window.zeros) | counts
    return CopyCounts(window, **moved, flows=pair_flows.folded(), link_flows=flows)


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
