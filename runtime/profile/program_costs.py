"""The program tree with what each part of it costs.

Input: an `Executable`, its `Numbering`, and the `Timeline` of a run. Output: `ProgramNode`s: plain values, which also
make JSON-able data and are made of it. What takes no time is left out; sequences in sequences are one.
Limits: a step that several calls run is shown at each, with its share of the cycles by how often they run it, decisions
that are data apart. When the tree would pass `MOST_NODES`, functions show what is in them at one call only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence as Rows
from dataclasses import dataclass
from typing import Any

import numpy as np

from ipujax.runtime.compile import Executable
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

MOST_NODES = 6_000


@dataclass(frozen=True, slots=True)
class ProgramNode:
    """One node of the tree.

    Args:
        type: its tag, as in the graph profile.
        name: its debug name, or what it does.
        line: the line of source it comes from, empty when none is known.
        cycles: on the IPU that spends most on it, all runs together; idle time left out.
        runs: how often it runs.
        children: what is in it.
    """

    type: str
    name: str
    line: str
    cycles: int
    runs: int
    children: tuple[ProgramNode, ...] = ()

    def walk(self) -> Iterator[ProgramNode]:
        """This node and all inside it, parents first."""
        yield self
        for child in self.children:
            yield from child.walk()

    def data(self) -> list[Any]:
        """The tree as JSON-able data."""
        return [self.type, self.name, self.line, self.cycles, self.runs, [child.data() for child in self.children]]

    @classmethod
    def of_data(cls, data: Rows[Any]) -> ProgramNode:
        """The tree of such data.

        Args:
            data: as `data` makes it.

        Raises:
            TypeError, ValueError: data of something else.
        """
        kind, name, line, cycles, runs, children = data
        return cls(str(kind), str(name), str(line), int(cycles), int(runs), tuple(map(cls.of_data, children)))


def program_costs(executable: Executable, program: Program, ids: Numbering, timeline: Timeline) -> ProgramNode:
    """The tree of a run.

    Args:
        executable: what ran.
        program: the part of it that ran.
        ids: its numbering.
        timeline: the run.
    """
    return _Tree(executable, program, ids, timeline).root()


class _Tree:
    """One walk; owns what it has met."""

    def __init__(self, executable: Executable, program: Program, ids: Numbering, timeline: Timeline) -> None:
        self.executable, self.program, self.ids, self.runs = executable, program, ids, timeline.executions
        self.weights = run_counts(program)
        self.is_large = fold(_num_nodes)(program) > MOST_NODES
        self.shown: set[Function] = set()

    def root(self) -> ProgramNode:
        found = self.nodes(self.program, 1)
        if len(found) == 1:
            return found[0][0]
        cycles = self.total(found)
        return ProgramNode("Sequence", "the whole program", "", int(cycles.max()), 1, tuple(one for one, _ in found))

    def total(self, found: Rows[tuple[ProgramNode, np.ndarray]]) -> np.ndarray:
        """Cycles on each IPU of some nodes, int64[num_ipus]."""
        none = np.zeros(self.executable.target.num_ipus, np.int64)
        return np.asarray(sum((cycles for _, cycles in found), none))

    def nodes(self, node: Program, times: int) -> list[tuple[ProgramNode, np.ndarray]]:
        """What stands for a node in its parent, each with its cycles on each IPU; nothing for what takes no time."""
        if isinstance(node, Sequence) and not isinstance(node, Collective):
            return [found for child in node.children() for found in self.nodes(child, times)]
        if not self.ids.programs_of(node) or isinstance(node, WriteUndef):
            return []
        children = [found for child in node.children() for found in self.nodes(child, times * node.child_runs)]
        cycles, runs, (name, line) = self.total(children), times, _label(node)
        if node in self.executable.steps:
            all_runs = self.runs.get(node, 0)
            runs = round(all_runs * times / max(1, self.weights[node]))
            work = self.executable.steps[node].work.sum(1).astype(object)  # products of counts pass 64 bits
            cycles = cycles + (work * all_runs * times // max(1, self.weights[node])).astype(np.int64)
        if isinstance(node, Call):
            if self.is_large and node.function in self.shown:
                children, name = [], f"{name} (shown at its first call)"
            self.shown.add(node.function)
        kind, inside = self.ids.type_of(node), tuple(one for one, _ in children)
        return [(ProgramNode(kind, name, line, int(cycles.max()), runs, inside), cycles)]


def _num_nodes(node: Program, children: list[int]) -> int:
    """Nodes of the tree, functions at each of their calls."""
    return 1 + sum(children)


def _label(node: Program) -> tuple[str, str]:
    """What a node is called, and its line."""
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
