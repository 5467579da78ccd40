"""The size limit of stream copies: the check, and the split of copies that are over it.

Input: a program. Output: an error that names the limit, or a program in which large copies are several, with syncs
between them so that one host buffer does for all parts.
Source: Poplar & PopLibs user guide, "Stream buffer size limit". The limit is on each IPU's own bytes; the split counts
all bytes of a copy, so that no part is over it wherever its tensor lies.
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
    """Refuses a stream copy that moves more to or from one IPU than a stream buffer of the target holds.

    Raises:
        EngineError: naming the stream, the limit and the option that splits.
    """
    limit_bytes = graph.target.stream_buffer_limit_bytes
    for node in distinct(program):
        match node:
            case StreamIn(stream, tensor, origin) | StreamOut(tensor, stream, origin):
                if tensor.size * element_bytes(tensor.dtype) <= limit_bytes or not graph.is_mapped(tensor):
                    continue
                most = int(tensor_tile_bytes(graph, tensor).reshape(graph.target.num_ipus, -1).sum(1).max())
                if most > limit_bytes:
                    raise EngineError(
                        f"one copy of stream {stream.name} is over the stream buffer size limit",
                        where=origin,
                        expected=f"at most {limit_bytes:,} bytes an IPU",
                        got=f"{most:,} bytes",
                        hint='Engine(…, {"streams.splitLargeCopies": "true"}), or several smaller copies',
                    )


def split_large_copies(program: Program, limit_bytes: int) -> Program:
    """Splits every stream copy over the limit into copies within it."""
    functions: dict[Function, Function] = {}

    def visit(node: Program) -> Program:
        match node:
            case StreamIn(stream, tensor) | StreamOut(tensor, stream):
                if tensor.size * element_bytes(tensor.dtype) > limit_bytes and tensor.ndim == 1:
                    return _parts(node, stream, tensor, limit_bytes)
            case Call(function):
                if function not in functions:
                    functions[function] = replace(function, body=visit(function.body))
                return replace(node, function=functions[function])
        return node.rebuild([visit(child) for child in node.children()])

    return visit(program)


def _parts(node: StreamIn | StreamOut, stream: HostStream, tensor: Tensor, limit_bytes: int) -> Program:
    """The copies of the parts of one transfer, a sync between any two."""
    step = max(1, limit_bytes // element_bytes(tensor.dtype))
    program = Sequence()
    for start in range(0, tensor.size, step):
        piece = tensor[start : start + step]
        shape, name = piece.shape, stream.name
        part = StreamPart(name, shape, stream.dtype, broadcast=stream.broadcast, whole=stream, start=start)
        if start:
            program.add(Sync("external", node.origin))
        is_in = isinstance(node, StreamIn)
        program.add(StreamIn(part, piece, node.origin) if is_in else StreamOut(piece, part, node.origin))
    return program
