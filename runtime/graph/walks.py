"""Walks over the program tree, each node once: listing, folding and counting its nodes.

Input: a program. Output: its nodes, the values of a fold, or numbers of runs. The body of a function is walked once
however often it is called: a walk is linear in the number of distinct nodes and edges.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import TypeVar

from ipujax.runtime.graph.forms import Loop, Program
from ipujax.runtime.graph.program import Call, Sequence

Value = TypeVar("Value")


def distinct(program: Program, *, into_calls: bool = True) -> Iterator[Program]:
    """Every node of the tree once, parents first.

    Args:
        program: the tree.
        into_calls: whether the bodies of functions belong to it.
    """
    seen: set[Program] = set()
    todo = [program]
    while todo:
        node = todo.pop()
        if node not in seen:
            seen.add(node)
            yield node
            if into_calls or not isinstance(node, Call):
                todo.extend(reversed(node.children()))


def fold(combine: Callable[[Program, list[Value]], Value]) -> Callable[[Program], Value]:
    """Makes a function of a program that combines each node with the values of its children, once for each node.

    Args:
        combine: computes the value of a node from the node and the values of its children, in order.
    """
    known: dict[Program, Value] = {}

    def value(program: Program) -> Value:
        if program not in known:
            known[program] = combine(program, [value(child) for child in program.children()])
        return known[program]

    return value


def run_counts(program: Program, *, into_calls: bool = True) -> Counter[Program]:
    """Runs of each node in one run of a program, if every decision runs each of its children once; parents first.

    Args:
        program: the tree.
        into_calls: whether the bodies of functions belong to it.
    """
    order = _children_first(program, into_calls)[::-1]
    counts = Counter(dict.fromkeys(order, 0))
    counts[program] = 1
    for node in order:
        if into_calls or not isinstance(node, Call):
            for child in node.children():
                counts[child] += counts[node] * node.child_runs
    return counts


def _children_first(program: Program, into_calls: bool) -> list[Program]:
    """Every node of the tree once, each after all nodes inside it."""
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
    """The loops of a program whose trip count is data, in order."""
    return [node for node in distinct(program) if isinstance(node, Loop) and node.trips is None]


def iteration(loop: Loop) -> Program:
    """The program that one more iteration of a loop runs: its body and, if it has one, its test."""
    return loop.body if loop.test is None else Sequence(loop.body, loop.test)
