"""The size limit of stream copies: the check, and the split of larger copies.

Input: a program. Output: an error that names the limit, or a program in which large copies are several, with syncs
between them, so that one host buffer is enough for all parts.
Source: Poplar & PopLibs user guide, "Stream buffer size limit". The limit is on the bytes of each IPU; the split counts
all bytes of a copy, so that no part exceeds the limit for any tile mapping.
"""

from __future__ import annotations

from dataclasses import replace

from ipujax.poplar.engine.streams import StreamPart
from ipujax.runtime.cost import tensor_tile_bytes
from ipujax.runtime.errors import EngineError
from ipujax.runtime.graph import (
    Call,
    Function,
    Graph,
    HostStream,
    Program,
    Sequence,
    StreamIn,
    StreamOut,
    Sync,
    distinct,
)
from ipujax.runtime.tensor import Tensor, element_bytes


def check_stream_sizes(graph: Graph, program: Program) -> None:
    """Raise EngineError for a stream copy that moves more to or from an IPU than its stream buffer has room for."""
    limit_bytes = graph.target.stream_buffer_limit_bytes
    for node in distinct(program):
        match node:
            case StreamIn(stream, tensor, origin) | StreamOut(tensor, stream, origin):
                # A tensor within the limit is so on any IPU: only larger ones are worth the count by tile.
                if tensor.size * element_bytes(tensor.dtype) <= limit_bytes or not graph.is_mapped(tensor):
                    continue
                ipu_bytes = int(tensor_tile_bytes(graph, tensor).reshape(graph.target.num_ipus, -1).sum(1).max())
                if ipu_bytes > limit_bytes:
                    raise EngineError(
                        f"one copy of stream {stream.name} is over the stream buffer size limit",
                        where=origin,
                        expected=f"at most {limit_bytes:,} bytes an IPU",
                        got=f"{ipu_bytes:,} bytes",
                        hint='Engine(…, {"streams.splitLargeCopies": "true"}), or several smaller copies',
                    )


def split_large_copies(program: Program, limit_bytes: int) -> Program:
    """Split every stream copy over the limit into copies within it."""
    # A function that is called twice must stay one function.
    functions: dict[Function, Function] = {}

    def visit(node: Program) -> Program:
        match node:
            case StreamIn(stream, tensor) | StreamOut(tensor, stream):
                # Tensors in copies of users' streams are flat.
                if tensor.size * element_bytes(tensor.dtype) > limit_bytes and tensor.ndim == 1:
                    return _split_copy(node, stream, tensor, limit_bytes)
            case Call(function):
                if function not in functions:
                    functions[function] = replace(function, body=visit(function.body))
                return replace(node, function=functions[function])
        return node.rebuild([visit(child) for child in node.children()])

    return visit(program)


def _split_copy(node: StreamIn | StreamOut, stream: HostStream, tensor: Tensor, limit_bytes: int) -> Program:
    """Return copies of the parts of one transfer, a sync between any two."""
    part_elements = max(1, limit_bytes // element_bytes(tensor.dtype))
    program = Sequence()
    for start in range(0, tensor.size, part_elements):
        part = tensor[start : start + part_elements]
        shape = part.shape
        name = stream.name
        part_stream = StreamPart(name, shape, stream.dtype, broadcast=stream.broadcast, transfer=stream, start=start)
        if start:  # the host refills its one buffer between parts
            program.add(Sync("external", node.origin))
        is_in = isinstance(node, StreamIn)
        program.add(StreamIn(part_stream, part, node.origin) if is_in else StreamOut(part, part_stream, node.origin))
    return program
