"""The program of a profile as trees and counts of plain values: its cycles by node, and what each pass changed.

Input: an executable, its ids and the timeline of a run; for each pass the number of equations of each kind after it.
Output: `ProgramNode`s, and a `PassChange` for each pass: the equations that it added and removed.
Nodes without time are left out; nested sequences are one. Equations are of one kind if they agree in primitive, types
and line: names of values make no difference, of which a removed equation changes all that follow. The changes between
two passes are the sums of those from one to the other.
Limits: a step that several calls run is in the tree at each, with cycles in proportion to the runs from it, as if data
decided alike in all calls. In trees above `MAX_NODES`, the nodes of a function are at its first call only. Equations
that only moved are no change.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence as Rows
from dataclasses import dataclass
from typing import Any

import numpy as np

from ipujax.runtime.compile import Executable
from ipujax.runtime.files.figure_kinds import LARGE, Row, Tree
from ipujax.runtime.files.kinds import Anything, List, Text
from ipujax.runtime.graph import (
    Call,
    Collective,
    Decision,
    Function,
    Leaf,
    Loop,
    Program,
    Sequence,
    WriteUndef,
    fold,
    run_counts,
)
from ipujax.runtime.profile.attribution import label
from ipujax.runtime.sections.ids import Numbering
from ipujax.runtime.tensor import Origin
from ipujax.runtime.timeline import Timeline

MAX_NODES = 6_000
MAX_DEPTH = 160  # of saved trees of a program; readers of JSON, and Python, go some 1,000 objects deep
PROGRAM_TREE = Tree(Row((Text(), Text(), Text(), LARGE, LARGE, List(Anything()))), 5, MAX_DEPTH)


@dataclass(frozen=True, slots=True)
class ProgramNode:
    """One node of the tree.

    Args:
        type: its tag, as in the graph profile.
        name: its debug name, or a phrase such as "8 times".
        line: its line of source, empty if unknown.
        cycles: busy cycles of the IPU with most of them, all runs together.
        runs: number of runs.
        children: the nodes in it.
    """

    type: str
    name: str
    line: str
    cycles: int
    runs: int
    children: tuple[ProgramNode, ...] = ()

    def walk(self) -> Iterator[ProgramNode]:
        """Yield this node and all inside it, parents first."""
        yield self
        for child in self.children:
            yield from child.walk()

    def to_data(self) -> list[Any]:
        """Return the tree as JSON-able data."""
        return [self.type, self.name, self.line, self.cycles, self.runs, [child.to_data() for child in self.children]]

    @classmethod
    def from_data(cls, data: Rows[Any]) -> ProgramNode:
        """Return the tree of `to_data`."""
        kind, name, line, cycles, runs, children = data
        return cls(kind, name, line, cycles, runs, tuple(map(cls.from_data, children)))


def program_costs(executable: Executable, program: Program, ids: Numbering, timeline: Timeline) -> ProgramNode:
    """Return the tree of a run's program, with the ids of its executable."""
    return _Tree(executable, program, ids, timeline).root()


class _Tree:
    """Walk over a program that makes the tree; of a large one, functions are expanded at their first call alone."""

    def __init__(self, executable: Executable, program: Program, ids: Numbering, timeline: Timeline) -> None:
        self.executable = executable
        self.program = program
        self.ids = ids
        self.runs = timeline.executions  # of each step in the run
        self.weights = run_counts(program)  # runs of each node if every decision ran each child once
        self.is_large = fold(_num_nodes)(program) > MAX_NODES
        self.expanded: set[Function] = set()  # in the tree already
        # What is inside of a node that runs so many times, and its cycles: calls of a function have the same.
        self.known: dict[tuple[object, int], tuple[list[tuple[ProgramNode, np.ndarray]], np.ndarray]] = {}

    def root(self) -> ProgramNode:
        nodes = self.nodes(self.program, 1)
        if len(nodes) == 1:
            return nodes[0][0]
        cycles = self.total(nodes)
        return ProgramNode("Sequence", "the whole program", "", int(cycles.max()), 1, tuple(node for node, _ in nodes))

    def total(self, nodes: Rows[tuple[ProgramNode, np.ndarray]]) -> np.ndarray:
        """Return the cycles on each IPU of some nodes, int64[num_ipus]."""
        zeros = np.zeros(self.executable.target.num_ipus, np.int64)
        return np.asarray(sum((cycles for _, cycles in nodes), zeros))

    def nodes(self, node: Program, times: int) -> list[tuple[ProgramNode, np.ndarray]]:
        """Return the tree nodes of a node that runs some times, each with its cycles on each IPU, int64[num_ipus]."""
        if isinstance(node, Sequence) and not isinstance(node, Collective):
            return [pair for child in node.children() for pair in self.nodes(child, times)]
        if not self.ids.programs_of(node) or isinstance(node, WriteUndef):
            return []
        inside = node.function if isinstance(node, Call) else node, times * node.child_runs
        if inside not in self.known:
            pairs = [pair for child in node.children() for pair in self.nodes(child, inside[1])]
            self.known[inside] = pairs, self.total(pairs)
        children, cycles = self.known[inside]
        runs = times
        name, line = _name_and_line(node)
        if node in self.executable.steps:
            # Runs of the step in all calls, divided by their share of its static runs.
            all_runs = self.runs.get(node, 0)
            runs = round(all_runs * times / max(1, self.weights[node]))
            work = self.executable.steps[node].work.sum(1).astype(object)  # products of counts pass 64 bits
            cycles = cycles + (work * all_runs * times // max(1, self.weights[node])).astype(np.int64)
        if isinstance(node, Call):
            if self.is_large and node.function in self.expanded:
                children = []
                name = f"{name} (shown at its first call)"
            self.expanded.add(node.function)
        tree_node = ProgramNode(
            self.ids.type_of(node), name, line, int(cycles.max()), runs, tuple(child for child, _ in children)
        )
        return [(tree_node, cycles)]


def _num_nodes(node: Program, children: list[int]) -> int:
    """Return the number of nodes of the tree, functions counted at each of their calls."""
    return 1 + sum(children)


def _name_and_line(node: Program) -> tuple[str, str]:
    """Return the name and the line of a node, both empty for a sequence."""
    match node:
        case Loop(trips=int() as count):
            return f"{count:,} times", _line(node.origin)
        case Call(function):
            return function.name, ""
        case Collective():
            return node.name, _line(node.origin)
        case Decision():
            return "decided by data", _line(node.origin)
    if isinstance(node, Leaf):
        origin, name = label(node)
        return name, _line(origin)
    return "", ""


def _line(origin: Origin) -> str:
    return "" if origin == Origin() else str(origin)


EquationKind = tuple[str, str, str]  # primitive, types "f32[8] f32[8] → f32[8]", line of source


@dataclass(frozen=True, slots=True)
class PassChange:
    """Changes that a pass made.

    Args:
        name: of the pass; the first is the trace, which adds all equations.
        equations: after it in order, each with the number of equations that it is inside.
        changes: number of equations of a kind that it added, below 0 if it removed them, most first.
    """

    name: str
    equations: Rows[tuple[EquationKind, int]]
    changes: tuple[tuple[EquationKind, int], ...]

    @property
    def num_equations(self) -> int:
        """Number of equations after it, those inside other equations included."""
        return len(self.equations)


def pass_changes(lists: Mapping[str, Rows[tuple[EquationKind, int]]]) -> tuple[PassChange, ...]:
    """Return the change of each pass, from the equations after each by its name, in order."""
    changes: list[PassChange] = []
    equations_before: Rows[tuple[EquationKind, int]] = ()
    before = Counter[EquationKind]()
    for name, equations in lists.items():
        is_same = equations is equations_before
        after = before if is_same else Counter(kind for kind, _ in equations)
        added = {} if is_same else {kind: after[kind] - before[kind] for kind in (*after, *before)}
        rows = sorted((row for row in added.items() if row[1]), key=lambda row: (-abs(row[1]), row))
        changes.append(PassChange(name, equations, tuple(rows)))
        before, equations_before = after, equations
    return tuple(changes)
