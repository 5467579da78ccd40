"""Connects streams to buffers and callbacks on the host, for one replica or several.

Input: a stream, and a buffer or a callback. Output: a channel. A stream with separate data for each
replica has a channel for each, and its transfers are [replicas, elements]; any other stream has one channel.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ipujax.poplar.engine.streams import CallbackChannel, CircularBuffer, ReplicaChannels, StreamCallback
from ipujax.poplar.types import DataStream
from ipujax.runtime.errors import ArgumentError, EngineError

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
