"""A graph and its program as DOT: compute sets, copies, streams, and the variables between them.

Input: a graph, a program. Output: text of DOT. Steps are numbered in program order; loops, branches and functions are
clusters of their steps. A variable that steps of several clusters access is drawn outside of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ipujax.lowering.dumps.dot import Dot
from ipujax.runtime.analysis import group_tensors
from ipujax.runtime.graph import (
    Block,
    Branch,
    Call,
    Execute,
    Function,
    Graph,
    Leaf,
    Loop,
    Program,
    VertexGroup,
)
from ipujax.runtime.tensor import Tensor, Variable, dtype_name


def graph_dot(graph: Graph, program: Program, name: str) -> str:
    """Returns the text in DOT of a graph and of a program made of its compute sets and tensors."""
    drawing = _Drawing(graph, name)
    drawing.draw(program)
    drawing.draw_variables()
    return drawing.dot.text()


class _Drawing:
    """Drawing of steps in their clusters, then of variables and an edge for each access."""

    def __init__(self, graph: Graph, name: str) -> None:
        self.dot = Dot(name)
        self._graph = graph
        self._steps: dict[Leaf, str] = {}
        self._calls: list[tuple[str, Function]] = []
        self._functions: dict[Function, str] = {}
        self._edges: list[tuple[str, Variable, bool]] = []  # step, variable, whether it is written

    def draw(self, program: Program) -> None:
        """Draws the steps of a program, and the functions that it calls."""
        self._draw(program)
        # A function may call others, so repeat until all are drawn.
        while undrawn := [function for _, function in self._calls if function not in self._functions]:
            for function in dict.fromkeys(undrawn):
                with self.dot.cluster(f"function {function.name}"):
                    self._functions[function] = self.dot.node(function.name, "plaintext")
                    self._draw(function.body)
        for node, function in self._calls:
            self.dot.edge(node, self._functions[function], dashed=True)

    def draw_variables(self) -> None:
        """Draws the variables that steps read or write, and an edge for each access."""
        nodes: dict[Variable, str] = {}
        for step, variable, is_written in self._edges:
            if variable not in nodes:
                text = f"{variable.name}\n{dtype_name(variable.dtype)}{list(variable.shape)}"
                nodes[variable] = self.dot.node(text, "ellipse")
            ends = (step, nodes[variable]) if is_written else (nodes[variable], step)
            self.dot.edge(*ends)

    def _draw(self, program: Program) -> None:
        match program:
            case Call(function):
                self._calls.append((self.dot.node(f"call {function.name}"), function))
            case Block():
                for child in program.children():
                    self._draw(child)
            case Loop() | Branch():
                label = _label(program)
                with self.dot.cluster(f"{label} {program.origin.line}".rstrip()):
                    if program.reads:
                        self._add_edges(self.dot.node(label, "diamond"), program.reads, ())
                    for child in program.children():
                        self._draw(child)
            case _ if isinstance(program, Leaf):  # else WriteUndef, which does nothing
                self._draw_step(program)

    def _draw_step(self, leaf: Leaf) -> None:
        """Draws a step; one that is in several places of the program is drawn once."""
        if leaf in self._steps:
            return
        reads = leaf.reads
        writes = leaf.writes
        kind = type(leaf).__name__
        groups: Sequence[VertexGroup] = ()
        if isinstance(leaf, Execute):
            groups = self._graph.groups[leaf.compute_set]
            accesses = [group_tensors(group) for group in groups]
            reads = tuple(tensor for group_reads, _ in accesses for tensor in group_reads)
            writes = tuple(tensor for _, group_writes in accesses for tensor, _ in group_writes)
        vertices = [f"{group.num_vertices:,} × {group.codelet.name}" for group in groups]
        lines = (f"{len(self._steps)}. {kind} {leaf.label}", leaf.shown_origin.line, *vertices)
        self._steps[leaf] = self.dot.node("\n".join(filter(None, lines)))
        self._add_edges(self._steps[leaf], reads, writes)

    def _add_edges(self, node: str, reads: Iterable[Tensor], writes: Iterable[Tensor]) -> None:
        for tensors, is_written in ((reads, False), (writes, True)):
            variables = dict.fromkeys(variable for tensor in tensors for variable in tensor.variables())
            self._edges += [(node, variable, is_written) for variable in variables]


def _label(control: Loop | Branch) -> str:
    if isinstance(control, Branch):
        return type(control).__name__.lower()
    return "loop" if control.trips is None else f"repeat {control.trips}"
