"""Leaves of a program tree, transfers that share a host exchange, and names of loops."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from ipujax.runtime.graph.forms import Block, Leaf, Loop, Program
from ipujax.runtime.graph.program import RemoteIn, RemoteOut, StreamIn, StreamOut, Wait, WriteUndef
from ipujax.runtime.graph.walks import data_loops, distinct

_TRANSFERS = (StreamIn, StreamOut, RemoteIn, RemoteOut)


def leaves(program: Program) -> Iterator[Leaf]:
    """Yield every leaf once, in program order of its first appearance."""
    return (node for node in distinct(program) if isinstance(node, Leaf))


def joining_streams(program: Program) -> dict[Leaf, Leaf]:
    """Return the transfer before each transfer that shares its host exchange: both of one kind, one after the other."""
    joining: dict[Leaf, Leaf] = {}
    for node in distinct(program):
        if isinstance(node, Block):
            timed_steps = [child for child in node.children() if not is_free(child)]
            for before, child in pairwise(timed_steps):
                if isinstance(child, _TRANSFERS) and isinstance(before, _TRANSFERS) and _kind(before) == _kind(child):
                    joining[child] = before
    return joining


def _kind(transfer: StreamIn | StreamOut | RemoteIn | RemoteOut) -> tuple[type, bool]:
    # Its direction, and whether I/O tiles move it.
    return type(transfer), isinstance(transfer, RemoteIn | RemoteOut) and transfer.overlaps


def is_free(node: Program) -> bool:
    """Return whether a node takes no time itself: a transfer of a resident stream, `Wait` or `WriteUndef`."""
    is_resident = isinstance(node, (StreamIn, StreamOut)) and node.stream.resident
    return is_resident or isinstance(node, WriteUndef | Wait)


def while_names(program: Program) -> dict[Loop, tuple[str, ...]]:
    """Return the names of each loop with a data-dependent trip count: `while[k]`, its source line, its path."""
    return {
        loop: tuple(name for name in (f"while[{k}]", loop.origin.line, loop.origin.path) if name)
        for k, loop in enumerate(data_loops(program))
    }
