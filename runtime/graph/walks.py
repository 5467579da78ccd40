"""Walks over the program tree, each node once: lists, folds and counts of its nodes.

The steps of a program are its leaves, with transfers that share a host exchange, and names of loops.

Input: a program. Output: its nodes, the values of a fold, or numbers of runs. The body of a function is walked once for
all its calls: a walk is linear in the number of distinct nodes and edges.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import TypeVar

from ipujax.runtime.graph.forms import Block, Leaf, Loop, Program
from ipujax.runtime.graph.program import Call, RemoteIn, RemoteOut, Sequence, StreamIn, StreamOut, Wait, WriteUndef

Value = TypeVar("Value")


def distinct(program: Program, *, into_calls: bool = True) -> Iterator[Program]:
    """Yield every node of the tree once, parents first; bodies of functions only `into_calls`."""
    visited: set[Program] = set()
    stack = [program]
    while stack:
        node = stack.pop()
        if node not in visited:
            visited.add(node)
            yield node
            if into_calls or not isinstance(node, Call):
                stack.extend(reversed(node.children()))  # the last one is popped first


def fold(combine: Callable[[Program, list[Value]], Value]) -> Callable[[Program], Value]:
    """Return a function that computes a value of a program from those of its children, once for each node.

    Args:
        combine: returns the value of a node from the node and the values of its children, in order.
    """
    cached: dict[Program, Value] = {}  # by identity, and for the life of the returned function

    def value(program: Program) -> Value:
        if program not in cached:
            cached[program] = combine(program, [value(child) for child in program.children()])
        return cached[program]

    return value


def run_counts(program: Program, *, into_calls: bool = True) -> Counter[Program]:
    """Count the runs of each node in one run of a program, if every decision runs each child once; parents first."""
    # Parents first: the count of a node is final before it is passed on to its children.
    order = _children_first(program, into_calls)[::-1]
    counts = Counter(dict.fromkeys(order, 0))
    counts[program] = 1
    for node in order:
        if into_calls or not isinstance(node, Call):
            for child in node.children():
                counts[child] += counts[node] * node.child_runs
    return counts


def _children_first(program: Program, into_calls: bool) -> list[Program]:
    """Return every node of a program once, each behind its children; bodies of functions only `into_calls`."""
    order: dict[Program, None] = {}

    def visit(node: Program) -> None:
        if into_calls or not isinstance(node, Call):
            for child in node.children():
                if child not in order:
                    visit(child)
        order[node] = None

    visit(program)
    return list(order)


def data_loops(program: Program) -> list[Loop]:
    """Return the loops of a program whose trip count is data, in order."""
    return [node for node in distinct(program) if isinstance(node, Loop) and node.trips is None]


def iteration(loop: Loop) -> Program:
    """Return the program of one iteration of a loop: its body, and its test if there is one."""
    return loop.body if loop.test is None else Sequence(loop.body, loop.test)


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
