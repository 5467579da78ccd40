"""The host's interface to a graph: tensors it reads and writes by name, streams, and remote buffers.

Input: handles. Output: tables of them for the engine. Each replica of a graph has its own streams and remote buffers;
the host sees the tensors of all replicas as one.
Source: Poplar & PopLibs user guide, "Data streams and remote buffers"; poplar::Graph.
"""

from __future__ import annotations

from typing import Any

from ipujax.poplar.types import DataStream, RemoteBuffer, ReplicatedStreamMode, StreamDirection, type_and_shape
from ipujax.runtime.errors import GraphError
from ipujax.runtime.graph import Graph as RuntimeGraph, HostStream, check_owned
from ipujax.runtime.target import Target
from ipujax.runtime.tensor import Tensor


class HostSide(RuntimeGraph):
    """A graph of the runtime with handles for the host; the base of `Graph`."""

    def __init__(self, target: Target, replication_factor: int = 1) -> None:
        super().__init__(target, replication_factor)
        self.host_writes: dict[str, Tensor] = {}
        self.host_reads: dict[str, Tensor] = {}
        self.streams: dict[str, DataStream] = {}
        self.remote_buffers: dict[str, RemoteBuffer] = {}

    def _for_host(self, tensor: Tensor) -> Tensor:
        """Return a tensor in the host's view, with all replicas."""
        return tensor

    def create_host_write(self, handle: str, tensor: Tensor) -> None:
        """Let the host write a tensor by this name; with several replicas it is [replicas, *shape].

        Raises:
            GraphError: a duplicate name, a constant, or a view with a repeated element of memory.
        """
        self._check_host_tensor(handle, tensor)
        # A handle of a constant or of a repeated element would write memory that the compiler takes as unchanged.
        if tensor.contains_constant:
            raise GraphError(f"host write {handle} would write to {tensor!r}", got="a constant")
        if not tensor.is_writable:
            message = f"host write {handle} would write to {tensor!r}"
            raise GraphError(message, expected="each element of memory once", got="a view with a repeated element")
        _claim(self.host_writes, handle, self._for_host(tensor), "host write")

    def create_host_read(self, handle: str, tensor: Tensor) -> None:
        """Let the host read a tensor by this name; with several replicas it is [replicas, *shape].

        Raises:
            GraphError: a duplicate name.
        """
        self._check_host_tensor(handle, tensor)
        _claim(self.host_reads, handle, self._for_host(tensor), "host read")

    def _check_host_tensor(self, handle: Any, tensor: Any) -> None:
        if not isinstance(handle, str) or not isinstance(tensor, Tensor):
            got = f"{handle!r}, {tensor!r}"
            raise GraphError("a handle needs a name and a tensor", expected='"name", tensor', got=got)
        check_owned(self, [tensor], f"handle {handle!r}")

    def add_host_to_device_fifo(
        self,
        handle: str,
        dtype: Any,
        num_elements: int,
        replication_mode: ReplicatedStreamMode = ReplicatedStreamMode.REPLICATE,
    ) -> DataStream:
        """Add a stream from the host of `num_elements` a transfer, for each replica or one for all.

        Raises:
            GraphError: a duplicate name, or an invalid replication mode.
        """
        if not isinstance(replication_mode, ReplicatedStreamMode):
            expected = "one of ReplicatedStreamMode"
            raise GraphError(f"replication mode of stream {handle}", expected=expected, got=repr(replication_mode))
        is_broadcast = replication_mode is ReplicatedStreamMode.BROADCAST
        return self._add_stream(handle, dtype, num_elements, "host_to_device", is_broadcast)

    def add_device_to_host_fifo(self, handle: str, dtype: Any, num_elements: int) -> DataStream:
        """Add a stream to the host of `num_elements` a transfer, for each replica.

        Raises:
            GraphError: a duplicate name.
        """
        return self._add_stream(handle, dtype, num_elements, "device_to_host")

    def _add_stream(
        self, handle: str, dtype: Any, num_elements: int, direction: StreamDirection, is_broadcast: bool = False
    ) -> DataStream:
        dtype, (size,) = type_and_shape(dtype, (num_elements,), handle)
        host = HostStream(handle, (size,), dtype, broadcast=is_broadcast)
        stream = DataStream(handle, dtype, size, direction, host, self.origin, self.replication_factor)
        _claim(self.streams, handle, stream, "stream")
        return stream

    def add_remote_buffer(self, handle: str, dtype: Any, num_elements: int, repeats: int = 1) -> RemoteBuffer:
        """Add memory outside of the IPU, of `repeats` rows of `num_elements`, for each replica.

        Raises:
            GraphError: a duplicate name.
        """
        dtype, (size, rows) = type_and_shape(dtype, (num_elements, repeats), handle)
        buffer = RemoteBuffer(handle, dtype, size, rows, self.origin, self.replication_factor)
        _claim(self.remote_buffers, handle, buffer, "remote buffer")
        return buffer


def _claim(table: dict[str, Any], handle: str, entry: Any, kind: str) -> None:
    if not isinstance(handle, str):
        raise GraphError(f"name of a {kind}", expected="text", got=repr(handle))
    if handle in table:
        raise GraphError(f"two {kind} handles are called {handle!r}")
    table[handle] = entry
