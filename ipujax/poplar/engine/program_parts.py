"""Parts of a program that a graph has made: compute sets, streams and remote buffers; others are refused.

Tensors of another graph are refused by the verifier, and where they are added.
"""

from __future__ import annotations

from collections.abc import Iterable

from ipujax.poplar.graph import Graph
from ipujax.runtime.errors import GraphError
from ipujax.runtime.graph import Execute, HostStream, Program, RemoteIn, RemoteOut, StreamIn, StreamOut, distinct


def check_parts(graph: Graph, programs: Iterable[Program]) -> None:
    """Refuse programs with parts of another graph.

    Raises:
        GraphError: naming the compute set, the stream or the remote buffer.
    """
    streams = {stream.host for stream in graph.streams.values()}
    buffers = {buffer.remote for buffer in graph.remote_buffers.values()}
    for node in (node for program in programs for node in distinct(program)):
        match node:
            case Execute(compute_set):
                graph.check_compute_set(compute_set)
            # Streams of other classes are made by programs, such as those that print, and belong to no graph.
            case StreamIn(stream) | StreamOut(_, stream) if type(stream) is HostStream and stream not in streams:
                raise _foreign(f"stream {stream.name}", node, "graph.add_host_to_device_fifo or its counterpart")
            case RemoteIn(buffer) | RemoteOut(_, buffer) if buffer not in buffers:
                raise _foreign(f"remote buffer {buffer.name}", node, "graph.add_remote_buffer")


def _foreign(name: str, node: StreamIn | StreamOut | RemoteIn | RemoteOut, hint: str) -> GraphError:
    return GraphError(
        f"{name} belongs to another graph", where=node.origin, expected="one of the engine's graph", hint=hint
    )
