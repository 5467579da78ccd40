"""Poplar's data types, and handles of memory outside the device: streams and remote buffers.

A type is a numpy dtype, so that it can be given wherever ipujax takes a dtype.
Source: Poplar & PopLibs user guide, "Using the Poplar library" and "Data streams and remote buffers".
Limits: no 64-bit and no 8-bit floating-point types.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

import numpy as np

from ipujax.runtime.graph import HostStream, program as remote_memory
from ipujax.runtime.not_copied import OfGraph
from ipujax.runtime.tensor import Origin

Type = np.dtype

FLOAT = np.dtype(np.float32)
HALF = np.dtype(np.float16)
INT = np.dtype(np.int32)
UNSIGNED_INT = np.dtype(np.uint32)
SHORT = np.dtype(np.int16)
UNSIGNED_SHORT = np.dtype(np.uint16)
CHAR = np.dtype(np.int8)
SIGNED_CHAR = np.dtype(np.int8)
UNSIGNED_CHAR = np.dtype(np.uint8)
BOOL = np.dtype(np.bool_)

StreamDirection = Literal["host_to_device", "device_to_host"]


class ReplicatedStreamMode(Enum):
    """Data that a stream delivers to the replicas of a graph: separate data for each, or the same for all."""

    REPLICATE = "replicate"
    BROADCAST = "broadcast"


@dataclass(frozen=True, eq=False, slots=True)
class DataStream(OfGraph):
    """Unidirectional stream between host and device; created by `Graph.add_host_to_device_fifo` and its counterpart.

    Args:
        handle: name of the stream, by which the engine connects it to a buffer or a callback.
        dtype: type of its elements.
        num_elements: elements of one transfer.
        direction: "host_to_device" or "device_to_host".
        host: the runtime's channel, of one flat value a transfer.
        origin: the user's line that added it.
        replicas: replicas of the graph it was added to.
    """

    handle: str
    dtype: np.dtype
    num_elements: int
    direction: StreamDirection
    host: HostStream
    origin: Origin = Origin()
    replicas: int = 1

    @property
    def is_by_replica(self) -> bool:
        """True if each of several replicas has separate data."""
        return self.replicas > 1 and not self.host.broadcast

    @property
    def replication_mode(self) -> ReplicatedStreamMode:
        """The replication mode of the stream."""
        return ReplicatedStreamMode.BROADCAST if self.host.broadcast else ReplicatedStreamMode.REPLICATE

    @property
    def num_bytes(self) -> int:
        """Bytes of one transfer."""
        return self.num_elements * self.dtype.itemsize


@dataclass(frozen=True, eq=False, slots=True)
class RemoteBuffer(OfGraph):
    """Memory outside the IPU; created by `Graph.add_remote_buffer`.

    Args:
        handle: name of the buffer.
        dtype: type of its elements.
        num_elements: elements of one row.
        repeats: number of rows, each of which can be read and written by itself.
        origin: the user's line that added it.
        replicas: replicas of the graph it was added to, each with a separate buffer.

    Attributes:
        remote: the runtime's memory.
    """

    handle: str
    dtype: np.dtype
    num_elements: int
    repeats: int = 1
    origin: Origin = Origin()
    replicas: int = 1
    remote: remote_memory.RemoteBuffer = field(init=False)

    def __post_init__(self) -> None:
        remote = remote_memory.RemoteBuffer.of(self.handle, self.dtype, self.num_elements, self.repeats)
        object.__setattr__(self, "remote", remote)
