"""Loops that stream: rows in the host's memory of which each iteration moves its own.

Input: an `Executable`. Output: a row for each loop whose body, apart from loops inside, moves such rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ipujax.runtime.compile import Executable
from ipujax.runtime.graph import Graph, Leaf, Program, RemoteIn, RemoteOut, Repeat, distinct
from ipujax.runtime.tensor import Origin, Tensor, element_bytes


@dataclass(frozen=True, slots=True)
class StreamedLoop:
    """A loop that moves rows between the host's memory and the tiles in each iteration.

    Args:
        iterations: its trip count.
        bytes_in: bytes that an iteration of one replica loads.
        bytes_out: bytes that it stores.
        origin: origin of the loop.
    """

    iterations: int
    bytes_in: int
    bytes_out: int
    origin: Origin


def streamed_loops(executable: Executable) -> tuple[StreamedLoop, ...]:
    """Return the loops of a program that stream, in program order."""
    loops = (node for node in distinct(executable.program) if isinstance(node, Repeat))
    rows = (_row(executable.graph, loop) for loop in loops)
    return tuple(row for row in rows if row.bytes_in + row.bytes_out)


def _row(graph: Graph, loop: Repeat) -> StreamedLoop:
    num_bytes = {RemoteIn: 0, RemoteOut: 0}
    for leaf in _own_leaves(loop.body):
        if isinstance(leaf, (RemoteIn, RemoteOut)) and _is_on_host(graph, leaf):
            num_bytes[type(leaf)] += _bytes(leaf.destination if isinstance(leaf, RemoteIn) else leaf.source)
    return StreamedLoop(loop.count, num_bytes[RemoteIn], num_bytes[RemoteOut], loop.origin)


def _own_leaves(node: Program) -> Iterator[Leaf]:
    """Leaves of a body, without those of loops inside."""
    if isinstance(node, Leaf):
        yield node
    elif not isinstance(node, Repeat):
        for child in node.children():
            yield from _own_leaves(child)


def _is_on_host(graph: Graph, leaf: RemoteIn | RemoteOut) -> bool:
    buffer = graph.off_chip.get(leaf.buffer.memory)
    return buffer is not None and buffer.on_host


def _bytes(tensor: Tensor) -> int:
    return tensor.size * element_bytes(tensor.dtype)
