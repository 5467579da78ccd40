"""The leaves of a program tree, and the names people know them by.

A leaf is a program that moves or computes something itself, or waits: Execute, Copy, StreamIn, StreamOut, RemoteIn,
RemoteOut, CrossReplicaCopy, Wait, Sync. Everything else is control.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from ipujax.runtime.graph.forms import Loop, Program
from ipujax.runtime.graph.program import (
    Copy,
    CrossReplicaCopy,
    Execute,
    RemoteIn,
    RemoteOut,
    Sequence,
    StreamIn,
    StreamOut,
    Sync,
    Wait,
    WriteUndef,
)
from ipujax.runtime.graph.walks import data_loops, distinct
from ipujax.runtime.tensor import Origin

_TRANSFERS = (StreamIn, StreamOut, RemoteIn, RemoteOut)

Leaf = Execute | Copy | StreamIn | StreamOut | RemoteIn | RemoteOut | CrossReplicaCopy | Wait | Sync


def leaf_name(leaf: Leaf) -> str:
    """The debug name of a leaf."""
    match leaf:
        case Execute(compute_set):
            return compute_set.name
        case Copy() | CrossReplicaCopy():
            return leaf.name
        case StreamIn(channel, _) | StreamOut(_, channel) | RemoteIn(channel, _) | RemoteOut(_, channel):
            return channel.name
        case Wait():
            return "wait"
        case Sync(kind):
            return f"{kind} sync"
    raise AssertionError(f"not a leaf: {leaf!r}")


def leaf_origin(leaf: Leaf) -> Origin:
    """Where a leaf comes from."""
    origin = leaf.compute_set.origin if isinstance(leaf, Execute) else leaf.origin
    if isinstance(leaf, (StreamIn, StreamOut)) and origin == Origin():
        return Origin(path=f"host stream {leaf.stream.name}")
    return origin


def leaves(program: Program) -> Iterator[Leaf]:
    """Every leaf once, in program order of its first appearance."""
    return (node for node in distinct(program) if isinstance(node, Leaf))


def joining_streams(program: Program) -> dict[Leaf, Leaf]:
    """Transfers that follow another of their kind directly, and that other: both are one host exchange."""
    joining: dict[Leaf, Leaf] = {}
    for node in distinct(program):
        if isinstance(node, Sequence):
            moving = [child for child in node.children() if not is_free(child)]
            for before, child in pairwise(moving):
                if isinstance(child, _TRANSFERS) and isinstance(before, _TRANSFERS) and _kind(before) == _kind(child):
                    joining[child] = before
    return joining


def _kind(transfer: StreamIn | StreamOut | RemoteIn | RemoteOut) -> tuple[type, bool]:
    """The direction of a transfer, and whether I/O tiles move it."""
    return type(transfer), isinstance(transfer, RemoteIn | RemoteOut) and transfer.overlaps


def is_free(node: Program) -> bool:
    """Whether a node takes no time of its own: a stream of what stays on the device, `Wait` or `WriteUndef`."""
    is_resident = isinstance(node, (StreamIn, StreamOut)) and node.stream.resident
    return is_resident or isinstance(node, WriteUndef | Wait)


def while_names(program: Program) -> dict[Loop, tuple[str, ...]]:
    """The names each loop with a data-dependent trip count answers to: `while[k]`, its source line, its path."""
    return {
        loop: tuple(name for name in (f"while[{k}]", loop.origin.line, loop.origin.path) if name)
        for k, loop in enumerate(data_loops(program))
    }
