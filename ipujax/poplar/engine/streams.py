"""Data streams on the host: circular buffers, callbacks with prefetching, printing and aborting.

A stream with separate data for each replica has a channel for each, and its transfers are [replicas, elements]; any
other stream has one channel. Input: transfers of a running program, one by one. Output: their values; see
`runtime.host.host.Host`.

    buffer    transfer k reads or writes row k modulo the number of rows; the array is accessed at that moment
    callback  host to device: `fetch` fills a buffer, or `prefetch` filled it ahead of time; then `complete`
              device to host: `fetch` receives the data; then `complete`

One thread a stream makes up to `depth` prefetches ahead, in order. A prefetch that returns False stops the queue until
the next `fetch`, so that transfers stay in order. Prefetched data stay for the next run.
Source: Poplar & PopLibs user guide, "Host-side stream access"; poplar/StreamCallback.hpp for the names.
Limits: the 128 MB limit is on one IPU's bytes of one copy (the guide, "Stream buffer size limit"), taken as MiB.

The text of a tensor for `PrintTensor` has elements in braces, each innermost row on a line of its own:

    v1: {1,1.5,2,2.5}          v3: {
                                {5,4.5},
                                {4,3.5}
                               }

Source: outputs in tutorials 1 and 2 of the Poplar & PopLibs user guide. Numbers have six significant digits, as C++
streams write them (assumed of Poplar, and right for every number the guide shows).
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from threading import Event
from typing import Any, TextIO

import jax
import numpy as np

from ipujax.poplar.program import AbortStream, PrintStream
from ipujax.poplar.types import DataStream
from ipujax.runtime.errors import ArgumentError, EngineError
from ipujax.runtime.graph import HostStream
from ipujax.runtime.tensor import dtype_name


def format_tensor(value: np.ndarray) -> str:
    """Return the text of an array of any shape; a scalar has no braces."""
    if value.ndim == 0:
        return _number(value[()])
    if value.ndim == 1:
        return "{" + ",".join(map(_number, value)) + "}"
    return "{\n" + _rows(value, 1) + "\n}"


def _rows(value: np.ndarray, depth: int) -> str:
    """Return the blocks of an array of two or more dimensions, indented by one blank a level."""
    indent = " " * depth
    if value.ndim == 2:
        return ",\n".join(indent + format_tensor(row) for row in value)
    return ",\n".join(f"{indent}{{\n{_rows(block, depth + 1)}\n{indent}}}" for block in value)


def _number(value: Any) -> str:
    # Kind "V": types that NumPy itself lacks, such as bfloat16.
    return format(float(value), "g") if value.dtype.kind in "fV" else str(int(value))


class StreamCallback(ABC):
    """A callback of a stream on the host; override `fetch`, and the other methods as needed."""

    @abstractmethod
    def fetch(self, buffer: np.ndarray) -> None:
        """Fill the flat buffer of a transfer to the device, or read that of a transfer from it."""

    def prefetch(self, buffer: np.ndarray) -> bool:
        """Fill a buffer ahead of time, in order, from another thread; returns False if there is no data yet."""
        del buffer
        return False

    def complete(self) -> None:  # noqa: B027 - an optional hook
        """Handle the end of a transfer."""


class _Function(StreamCallback):
    """Plain function as a callback, without prefetching."""

    def __init__(self, fun: Callable[[np.ndarray], Any], *, fills: bool) -> None:
        self._fun = fun
        self._fills = fills

    def fetch(self, buffer: np.ndarray) -> None:
        # A function that returns data instead of filling the buffer would send zeros in silence.
        returned = self._fun(buffer)
        if self._fills and isinstance(returned, np.ndarray | jax.Array | list | tuple):
            message = f"stream callback {getattr(self._fun, '__qualname__', self._fun)} does not fill its buffer"
            got = f"it returned a {type(returned).__name__}"
            raise EngineError(message, got=got, hint="buffer[:] = data")


def as_callback(callback: StreamCallback | Callable[[np.ndarray], Any], *, fills: bool = False) -> StreamCallback:
    """Wrap a function as a callback, one that has to fill its buffer if `fills`; a callback stays as it is."""
    if isinstance(callback, StreamCallback):
        return callback
    if not callable(callback):
        expected = "a StreamCallback or a function of a numpy array"
        raise ArgumentError("a stream is connected to something that cannot be called", expected=expected, got=callback)
    return _Function(callback, fills=fills)


@dataclass(slots=True)
class CircularBuffer:
    """NumPy array [rows, elements of a transfer] that a stream reads or writes row by row, cyclically."""

    rows: np.ndarray
    _next_row: int = 0

    @classmethod
    def of(cls, stream: HostStream, array: Any, *, is_written: bool) -> CircularBuffer:
        """Connect an array to a stream; raises ArgumentError for a wrong type, size or layout, or read-only memory."""
        (elements,) = stream.shape
        name = stream.name
        expected = f"a contiguous numpy array of {dtype_name(stream.dtype)}, n × {elements} elements"
        if not isinstance(array, np.ndarray) or array.dtype != stream.dtype or not array.flags.c_contiguous:
            got = f"{array.dtype}{list(array.shape)}" if isinstance(array, np.ndarray) else type(array).__name__
            raise ArgumentError(f"stream {name} cannot use this buffer", expected=expected, got=got)
        if not array.size or array.size % elements:
            message = f"the buffer of stream {name} is not a whole number of transfers"
            raise ArgumentError(message, expected=expected, got=f"{array.size} elements")
        if is_written and not array.flags.writeable:
            raise ArgumentError(f"the buffer of stream {name} is read-only", expected="a buffer that can be written")
        return cls(array.reshape(-1, elements))

    def pull(self) -> np.ndarray:
        """Return the next row."""
        return self._advance().copy()  # the user may change the array during the run

    def push(self, value: np.ndarray) -> None:
        """Overwrite the next row."""
        self._advance()[:] = value

    def _advance(self) -> np.ndarray:
        row = self.rows[self._next_row]
        self._next_row = (self._next_row + 1) % len(self.rows)
        return row


class CallbackChannel:
    """Stream connected to a callback.

    Args:
        stream: the stream, for size and type of a transfer.
        callback: the callback.
        depth: number of prefetches that may be ready or in progress, for a stream to the device.
    """

    def __init__(self, stream: HostStream, callback: StreamCallback, depth: int) -> None:
        self._stream = stream
        self._callback = callback
        self._depth = depth
        self._executor = ThreadPoolExecutor(1, thread_name_prefix=f"prefetch {stream.name}") if depth else None
        # In the order of submission, which is the order of transfers: the executor has one thread.
        self._ahead: deque[Future[np.ndarray | None]] = deque()
        self._stopped = Event()

    def pull(self) -> np.ndarray:
        """Return the next value, prefetched or from `fetch`."""
        value = self._take_prefetched()
        if value is None:
            value = self._buffer()
            self._callback.fetch(value)
        self._callback.complete()
        # Prefetches begin after the first transfer, so that the callback sees transfers in order.
        if self._executor is not None:
            while len(self._ahead) < self._depth:
                self._ahead.append(self._executor.submit(self._prefetch))
        return value

    def push(self, value: np.ndarray) -> None:
        """Pass a copy of a value to the callback."""
        self._callback.fetch(np.array(value))
        self._callback.complete()

    def _buffer(self) -> np.ndarray:
        return np.zeros(self._stream.shape, self._stream.dtype)

    def _take_prefetched(self) -> np.ndarray | None:
        """Return the oldest value that was fetched ahead; None where there is none, or the callback had none."""
        if not self._ahead:
            return None
        try:
            value = self._ahead.popleft().result()
        except BaseException:
            self._restart()
            raise
        if value is None:
            self._restart()  # `fetch` has the next transfer, and the queue starts after it
        return value

    def _restart(self) -> None:
        """Discard the prefetches queued after a failed one; none of them has run."""
        while self._ahead:
            self._ahead.popleft().result()
        self._stopped.clear()

    def _prefetch(self) -> np.ndarray | None:
        """Run one prefetch in the thread; returns None if it, or an earlier one, had no data."""
        if self._stopped.is_set():
            return None
        buffer = self._buffer()
        try:
            has_data = self._callback.prefetch(buffer)
        except BaseException:
            self._stopped.set()
            raise
        if not has_data:
            self._stopped.set()
        return buffer if has_data else None


Channel = CircularBuffer | CallbackChannel


class ReplicaChannels:
    """Stream with separate data for each replica; a transfer is [replicas, elements]."""

    def __init__(self, replicas: int) -> None:
        self._channels: list[Channel | None] = [None] * replicas

    def connect(self, channel: Channel, replica: int | None = None) -> None:
        """Connect one replica, or all to one channel, which is then used in the order of their numbers."""
        for number in range(len(self._channels)):
            if replica is None or number == replica:
                self._channels[number] = channel

    def missing(self) -> list[int]:
        """Return the replicas that are not connected."""
        return [number for number, channel in enumerate(self._channels) if channel is None]

    def pull(self) -> np.ndarray:
        """Return the next value of every replica."""
        return np.stack([channel.pull() for channel in self._channels if channel is not None])

    def push(self, value: np.ndarray) -> None:
        """Pass on a value of every replica."""
        for channel, replica_value in zip(self._channels, value, strict=True):
            if channel is not None:
                channel.push(replica_value)


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class StreamPart(HostStream):
    """Part of a transfer that is too large for one copy; the host sees the entire transfer.

    Args:
        transfer: the stream of the entire transfer.
        start: number of its first element in the transfer.
    """

    transfer: HostStream
    start: int

    @property
    def stop(self) -> int:
        """One past its last element."""
        return self.start + self.shape[-1]


class StreamHost:
    """Answers all transfers of an engine, see `runtime.host.host.Host`.

    Attributes:
        channels: channel of each stream, by handle.
        print_to: text stream for printed tensors; `sys.stderr` at that moment when None.
    """

    def __init__(self) -> None:
        self.channels: dict[str, Channel | ReplicaChannels] = {}
        self.print_to: TextIO | None = None
        # The buffers of transfers in parts, from the first part to the last.
        self._split_transfers: dict[HostStream, np.ndarray] = {}

    def pull(self, stream: HostStream) -> np.ndarray:
        """Return the next value of a stream to the device."""
        if not isinstance(stream, StreamPart):
            return _broadcast_to_replicas(stream, self.channels[stream.name].pull())
        if stream.start == 0:
            self._split_transfers[stream.transfer] = self.channels[stream.transfer.name].pull()
        buffer = self._split_transfers[stream.transfer]
        if stream.stop == buffer.shape[-1]:
            del self._split_transfers[stream.transfer]
        return _broadcast_to_replicas(stream, buffer[..., stream.start : stream.stop])

    def push(self, stream: HostStream, value: np.ndarray) -> None:
        """Pass a value from the device to its channel, print it, or end the run."""
        match stream:
            case PrintStream():
                for name, replica_value in _split_replicas(stream, value):
                    text = f"{stream.title}{name}: {format_tensor(replica_value)}"
                    print(text, file=self.print_to or sys.stderr, flush=True)
            case AbortStream():
                for name, replica_value in _split_replicas(stream, value):
                    _abort(stream, name, replica_value)
            case StreamPart(transfer=transfer):
                buffer = self._split_transfers.setdefault(
                    transfer, np.zeros((*value.shape[:-1], *transfer.shape), transfer.dtype)
                )
                buffer[..., stream.start : stream.stop] = value
                if stream.stop == buffer.shape[-1]:
                    self.channels[transfer.name].push(self._split_transfers.pop(transfer))
            case _:
                self.channels[stream.name].push(value)


def _broadcast_to_replicas(stream: HostStream, value: np.ndarray) -> np.ndarray:
    """Return the value to the device, broadcast if all replicas receive the same."""
    return np.broadcast_to(value, stream.shape) if value.ndim < len(stream.shape) else value


def _split_replicas(stream: PrintStream | AbortStream, value: np.ndarray) -> list[tuple[str, np.ndarray]]:
    """Return the value of each replica, with a suffix that names the replica if there are several."""
    if stream.replicated or value.ndim > len(stream.shape):
        return [(f" (replica {replica})", replica_value) for replica, replica_value in enumerate(value)]
    return [("", value)]


def _abort(stream: AbortStream, name: str, value: np.ndarray) -> None:
    if stream.is_flag and not value:
        return
    text = None if stream.is_flag else format_tensor(value)
    message = (
        f"the program ended itself{name}: {stream.message}" if stream.message else f"the program ended itself{name}"
    )
    raise EngineError(message, where=stream.where, got=text)


AnyChannel = CircularBuffer | CallbackChannel | ReplicaChannels


def buffer_channel(stream: DataStream, buffer: Any) -> AnyChannel:
    """Connect a stream to an array of transfers, [replicas, …] for separate data; raises ArgumentError for a misfit."""
    is_written = stream.direction == "device_to_host"
    if not stream.is_by_replica:
        return CircularBuffer.of(stream.host, buffer, is_written=is_written)
    if not isinstance(buffer, np.ndarray) or buffer.ndim < 2 or len(buffer) != stream.replicas:
        message = f"stream {stream.handle} has data for each replica"
        got = list(buffer.shape) if isinstance(buffer, np.ndarray) else type(buffer).__name__
        raise ArgumentError(message, expected=f"an array [{stream.replicas}, …]", got=got)
    channels = ReplicaChannels(stream.replicas)
    for replica, replica_buffer in enumerate(buffer):
        channels.connect(CircularBuffer.of(stream.host, replica_buffer, is_written=is_written), replica)
    return channels


def callback_channel(
    stream: DataStream, callback: StreamCallback, depth: int, replica: int | None, current: AnyChannel | None
) -> AnyChannel:
    """Return the channel that connects a stream to a callback in one replica, or in all when `replica` is None."""
    # Other replicas keep their callbacks in `current`.
    if replica is not None:
        if stream.replicas > 1 and not stream.is_by_replica:
            raise EngineError(f"stream {stream.handle} is broadcast", hint="connect it once, without a replica")
        if not isinstance(replica, int | np.integer) or not 0 <= replica < stream.replicas:
            expected = f"0 … {stream.replicas - 1}"
            raise EngineError(f"stream {stream.handle} has no replica {replica!r}", expected=expected)
    channel = CallbackChannel(stream.host, callback, depth)
    if not stream.is_by_replica:
        return channel
    channels = current if isinstance(current, ReplicaChannels) else ReplicaChannels(stream.replicas)
    channels.connect(channel, replica)
    return channels


def unconnected(channel: AnyChannel | None) -> str | None:
    """Return the reason that a stream cannot be used yet, in words that follow its name; None if it is connected."""
    if channel is None:
        return "is not connected"
    missing = channel.missing() if isinstance(channel, ReplicaChannels) else []
    return f"is not connected for replica {', '.join(map(str, missing))}" if missing else None
