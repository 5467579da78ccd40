"""Costs of transfers with the host and streaming memory: cycles of every IPU, bytes of every tile.

Input: a graph and a stream of it. Output: `StreamCost`. Plain syncs and waits have their costs here too.

    stream  ::= latency and bytes over the host link of each machine

Source: constants: `Target`.
Limits: a transfer of a remote buffer has the latency of one with the host (assumed). A transfer beyond the limit of one
is split into several, each with its latency; `ipujax.poplar` refuses it before, as Poplar does. The IPUs of a machine
share its host link in one transfer, those of all replicas too; each has a part of streaming memory, and its rate, for
itself (assumed). Transfers of different steps share nothing, though they may overlap in time: clocks are linear over
(max, +), where a link that is busy would delay whichever step the program names later.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ipujax.runtime.cache import recall
from ipujax.runtime.cost.ipu_window import Window, compact, mapping_range
from ipujax.runtime.exchange import copy_traffic, geometry, mappings_of
from ipujax.runtime.graph import Graph, HostStream, RemoteBuffer, SyncKind
from ipujax.runtime.target import Target
from ipujax.runtime.tensor import Tensor, element_bytes


@dataclass(frozen=True, slots=True, eq=False)
class StreamCounts:
    """Bytes of a transfer between host and IPUs; each array is [num_ipus].

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
    def key(self) -> tuple[object, ...]:
        """Equal for equal counts."""
        arrays = (x.tobytes() for x in (self.ipu_bytes, self.link_bytes, self.earlier))
        return *arrays, self.is_streamed, self.is_resident

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

    def latency_cycles(self, target: Target) -> np.ndarray:
        """Return the cycles of each IPU for the latency of a host exchange, int64[num_ipus].

        The first transfer of an exchange has them, on behalf of all.
        """
        begins = (self.ipu_bytes > 0) & ~self.earlier & (not self.is_resident and not self.is_streamed)
        return np.asarray(begins * int(target.host_latency_seconds * target.clock_hz), np.int64)


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


class _MappedBytes(NamedTuple):
    """Bytes of a tensor on tiles.

    Args:
        first_ipu: first IPU to which a variable of the tensor is mapped.
        of_tiles: of each tile from the first of that IPU on, to the last IPU with such a variable.
        of_ipus: of each IPU, int64[num_ipus].
    """

    first_ipu: int
    of_tiles: np.ndarray
    of_ipus: np.ndarray


def _mapped_bytes(graph: Graph, tensor: Tensor) -> _MappedBytes:
    """Return the bytes of a tensor on tiles, computed once for tensors of equal views and mappings."""
    mappings = mappings_of(tensor, graph)

    def compute() -> _MappedBytes:
        window = Window.of(map(mapping_range, mappings), graph.target)
        tile_bytes = tensor_tile_bytes(graph, tensor)
        ipu_bytes = tile_bytes.reshape(graph.target.num_ipus, -1).sum(1)
        of_tiles = compact(tile_bytes[window.first_tile :][: window.tiles].copy())
        return _MappedBytes(window.first_ipu, of_tiles, ipu_bytes)

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
