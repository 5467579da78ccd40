"""What copies, host streams and remote buffers cost: cycles and bytes of every tile, and of the links between IPUs.

Input: a graph and a copy or stream of it. Output: `CopyCost` or `StreamCost`. A plain sync has its `SyncCost` here too.

    copy    ::= sync ; exchange ; copying on the own tile, or sync of all IPUs ; exchange over the links between IPUs
    stream  ::= latency and bytes over the host link of each IPU

Bytes between IPUs are found by asking for the exchange of a system with one tile an IPU.
Source: constants: `Target`; links: `links`.
Limits: a transfer of a remote buffer has the latency of one with the host (assumed). What exceeds the limit of one
transfer is moved in several, each with its latency; `ipujax.poplar` refuses it before, as Poplar does. Transfers of
different IPUs share nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ipujax.runtime.cache import recall, remembered
from ipujax.runtime.cost.compute_set import ExchangeCost, exchange_cost
from ipujax.runtime.cost.ipu_window import Window, compact, mapping_range
from ipujax.runtime.cost.links import link_cycles
from ipujax.runtime.errors import GraphError
from ipujax.runtime.exchange import Traffic, copy_cycles, copy_traffic, geometry, independent_parts, mappings_of
from ipujax.runtime.graph import Copy, Graph, HostStream, RemoteBuffer, SyncKind
from ipujax.runtime.target import Target
from ipujax.runtime.tensor import Tensor, TileMapping, element_bytes, surely_disjoint


@dataclass(frozen=True, slots=True, eq=False)
class CopyCost:
    """What one copy costs; arrays are int64[tiles], the tiles of whole IPUs, but for those by IPU.

    Args:
        first_ipu: the IPU of the first tile of the arrays.
        exchange: what tiles send and receive, within an IPU and beyond.
        copy_cycles: cycles of copying on the own tile.
        flows: bytes from each IPU (row) to each other (column), int64[num_ipus, num_ipus]; None when all stays inside.
        link_cycles: cycles each IPU needs for what leaves it and comes to it, int64[num_ipus]; None as `flows`.
    """

    first_ipu: int
    exchange: ExchangeCost
    copy_cycles: np.ndarray
    flows: np.ndarray | None = None
    link_cycles: np.ndarray | None = None

    @property
    def is_global(self) -> bool:
        """Whether data moves between IPUs."""
        return self.flows is not None


@dataclass(frozen=True, slots=True, eq=False)
class StreamCost:
    """What one transfer between host and IPUs costs.

    Args:
        first_ipu: the IPU of the first tile of `tile_bytes`.
        tile_bytes: bytes each tile sends or receives, int64[tiles], the tiles of whole IPUs.
        cycles: cycles each IPU needs, int64[num_ipus]; 0 for a resident stream, whose value stays on the device.
        earlier: whether each IPU took part in transfers before it that are the same host exchange, bool[num_ipus].
    """

    first_ipu: int
    tile_bytes: np.ndarray
    cycles: np.ndarray
    earlier: np.ndarray


@dataclass(frozen=True, slots=True, eq=False)
class WaitCost:
    """What waits for a transfer, which takes as long as that needs.

    Args:
        ipus: who waits, rising.
    """

    ipus: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class SyncCost:
    """A sync for its own sake.

    Args:
        kind: who waits for whom, see `program.Sync`.
    """

    kind: SyncKind


def copy_cost(graph: Graph, copy: Copy) -> CopyCost:
    """What one run of a copy costs."""
    target = graph.target
    variables = (*copy.source.variables(), *copy.destination.variables())
    window = Window.of([mapping_range(graph.mappings[v]) for v in variables], target)
    moved = copy_traffic(copy.source, copy.destination, graph)
    copied, fragments = window.total([moved.local_bytes]), window.total([moved.local_fragments])
    copied_cycles = compact(copy_cycles(copied, fragments, target))
    flows = _flows(graph, copy) if window.num_ipus > 1 else None
    if flows is None or not flows.any():
        exchange = exchange_cost([moved], window, target)
        return CopyCost(window.first_ipu, exchange, copied_cycles)
    # Only the exchange inside an IPU is known to join the tiles of a bus.
    exchange = exchange_cost([replace(moved, shared_bytes=np.zeros_like(moved.shared_bytes))], window, target)
    return CopyCost(window.first_ipu, exchange, copied_cycles, flows, link_cycles(flows, target))


def stream_cost(
    graph: Graph, stream: HostStream | RemoteBuffer, tensor: Tensor, *, after: StreamCost | None = None
) -> StreamCost:
    """What one transfer between the host and a tensor costs, in either direction.

    Every IPU has its own link to the host and pays the latency once a host exchange, of which large ones take several.

    Args:
        graph: holds the tile mappings.
        stream: the host's side.
        tensor: the device's side.
        after: the transfer before it, if both are one host exchange, see `steps.joining_streams`.
    """
    target = graph.target
    first_ipu, tile_bytes, per_ipu = _held(graph, tensor)
    limit, bytes_per_second = target.stream_buffer_limit_bytes, target.host_bytes_per_second
    if isinstance(stream, RemoteBuffer) and not stream.on_host:
        limit, bytes_per_second = target.max_remote_transfer_bytes, target.streaming_bytes_per_second
    earlier = np.zeros(target.num_ipus, bool) if after is None else after.earlier | (after.cycles > 0)
    exchanges = -(-per_ipu // limit) - earlier
    seconds = exchanges * target.host_latency_seconds + per_ipu / bytes_per_second
    cycles = np.where(per_ipu > 0, np.ceil(seconds * target.clock_hz), 0).astype(np.int64)
    return StreamCost(first_ipu, tile_bytes, cycles * (not stream.resident), earlier)


def _held(graph: Graph, tensor: Tensor) -> tuple[int, np.ndarray, np.ndarray]:
    """The first IPU that has some of a tensor, bytes of each tile from there on and of each IPU; of equal ones found
    once."""
    mappings = mappings_of(tensor, graph)

    def find() -> tuple[int, np.ndarray, np.ndarray]:
        window, tile_bytes = Window.of(map(mapping_range, mappings), graph.target), tensor_tile_bytes(graph, tensor)
        per_ipu = tile_bytes.reshape(graph.target.num_ipus, -1).sum(1)
        return window.first_ipu, compact(window.total([tile_bytes])), per_ipu

    view = geometry(tensor)
    return find() if view is None else recall(("held", view, tensor.dtype, mappings, graph.target), find)


def wait_cost(graph: Graph, tensor: Tensor) -> WaitCost:
    """Who waits for a transfer of a tensor."""
    tiles_per_ipu = graph.target.tiles_per_ipu
    ipus = {int(ipu) for v in tensor.variables() for ipu in np.unique(graph.mappings[v].tiles // tiles_per_ipu)}
    return WaitCost(tuple(sorted(ipus)))


def tensor_tile_bytes(graph: Graph, tensor: Tensor) -> np.ndarray:
    """Bytes of a tensor on each tile, int64[num_tiles]."""
    variables = tensor.variables()
    if len(variables) == 1 and tensor.size == variables[0].size and tensor.is_writable:
        elements = graph.mappings[variables[0]].elements_per_tile(graph.target.num_tiles)
        return elements * element_bytes(tensor.dtype)
    return copy_traffic(tensor, tensor, graph).local_bytes


@remembered
def _ipu_target(target: Target) -> Target:
    """The system with one tile an IPU."""
    return target.replace(tiles_per_ipu=1)


@remembered
def _on_ipus(mapping: TileMapping, tiles_per_ipu: int, shift: int, num_ipus: int) -> TileMapping:
    """The mapping with IPU (i + shift) mod num_ipus in place of the tiles of IPU i."""
    return mapping.on_tiles((mapping.tiles // tiles_per_ipu + shift) % num_ipus)


def _ipu_traffic(source: Tensor, destination: Tensor, graph: Graph, shift: int = 0) -> Traffic:
    """The traffic of a copy with IPUs for tiles, the destination's IPUs shifted cyclically."""
    target = graph.target
    ipus = Graph(_ipu_target(target))
    for variables, by in ((source.variables(), 0), (destination.variables(), shift)):
        for variable in variables:
            mapping = graph.mappings[variable]
            ipus.mappings[variable] = _on_ipus(mapping, target.tiles_per_ipu, by, target.num_ipus)
    return copy_traffic(source, destination, ipus)


def _only_ipu(graph: Graph, tensor: Tensor) -> int | None:
    """The IPU that has all variables of a tensor, None if several do."""
    window = Window.of([mapping_range(graph.mappings[v]) for v in tensor.variables()], graph.target)
    return window.first_ipu if window.num_ipus == 1 else None


def _flows(graph: Graph, copy: Copy) -> np.ndarray:
    """Bytes a copy moves from each IPU (row) to each other (column), int64[num_ipus, num_ipus]."""
    # Most parts of a copy between many IPUs, such as one a stage, are between two of them.
    num = graph.target.num_ipus
    flows = np.zeros((num, num), np.int64)
    for source, destination in independent_parts(copy.source, copy.destination):
        home, end = _only_ipu(graph, source), _only_ipu(graph, destination)
        if home is not None and end is not None and (home == end or surely_disjoint([source.node])):
            flows[home, end] += source.size * element_bytes(source.dtype) * (home != end)
            continue
        direct = _ipu_traffic(source, destination, graph)
        sources, destinations = np.flatnonzero(direct.sent_bytes), np.flatnonzero(direct.received_bytes)
        if len(sources) <= 1:
            flows[np.ix_(sources, destinations)] += direct.received_bytes[destinations]
        elif len(destinations) == 1:
            flows[sources, destinations[0]] += direct.sent_bytes[sources]
        else:
            if not set(source.variables()).isdisjoint(destination.variables()):
                raise GraphError(
                    f"copy {copy.name} moves a variable onto itself between several IPUs", where=copy.origin
                )
            # What is local after shifting the destination by k is what IPU s sends to IPU s - k.
            for shift in sorted({int(d - s) % num for s in sources for d in destinations} - {0}):
                local = _ipu_traffic(source, destination, graph, -shift).local_bytes
                flows[sources, (sources + shift) % num] += local[sources]
    return flows
