"""Drawings in DOT, the graph language of Graphviz, of a jaxpr, and of a graph and its program.

Both are drawn from their JSON, so that both dumps show the same. Of a jaxpr a node is an equation, an edge a value, a
cluster a jaxpr that equations hold; literals are part of the equation they are operands of. Of a graph the nodes are
steps, numbered as in its JSON, and the variables between them; clusters are loops, branches and functions, and a
variable that steps of several clusters access is drawn outside of them. A jaxpr or function that several equations or
calls hold is drawn once, and dashed edges lead from each of these to its first node.
Input: a jaxpr, or a graph and a program. Output: text that `dot -Tsvg` draws.
Source: https://graphviz.org/doc/info/lang.html
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from ipujax.lowering.dumps.json_forms import JaxprList, Json, drawn_json
from ipujax.lowering.jax_compat import ClosedJaxpr
from ipujax.runtime.graph import Graph, Program

_INDENT = "  "


class Dot:
    """A directed graph that is being written.

    Args:
        name: its title.
    """

    def __init__(self, name: str) -> None:
        self._lines = [f"digraph {quoted(name)} {{", '  node [shape=box, fontname="sans-serif", fontsize=10];']
        self._depth = 1
        self._nodes = 0
        self._clusters = 0
        self._add(f'label={quoted(name)}; labelloc=t; fontname="sans-serif"; edge [fontsize=9];')

    def node(self, label: str, shape: str = "box") -> str:
        """Adds a node with a label of one or several lines, and returns its key; `shape` is one of Graphviz."""
        key = f"n{self._nodes}"
        self._nodes += 1
        self._add(f"{key} [label={quoted(label)}, shape={shape}];")
        return key

    def edge(self, source: str, destination: str, label: str = "", *, dashed: bool = False) -> None:
        """Adds an edge between two nodes, by their keys."""
        attributes = [f"label={quoted(label)}"] * bool(label) + ["style=dashed"] * dashed
        shown = f" [{', '.join(attributes)}]" if attributes else ""
        self._add(f"{source} -> {destination}{shown};")

    @contextmanager
    def cluster(self, label: str) -> Iterator[None]:
        """A box around the nodes that are added inside."""
        self._add(f"subgraph cluster_{self._clusters} {{")
        self._clusters += 1
        self._depth += 1
        self._add(f"label={quoted(label)};")
        yield
        self._depth -= 1
        self._add("}")

    def text(self) -> str:
        """The whole graph."""
        return "\n".join([*self._lines, "}"]) + "\n"

    def _add(self, line: str) -> None:
        self._lines.append(_INDENT * self._depth + line)


def quoted(text: str) -> str:
    """A text as a string of DOT, in which nothing has a meaning of its own."""
    printable = "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in text)
    escaped = printable.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'


def jaxpr_dot(jaxpr: ClosedJaxpr, name: str) -> str:
    """Return the drawing of a jaxpr, with a title."""
    jaxprs = JaxprList()
    jaxprs.number_of(jaxpr)
    drawing = _JaxprDrawing(name)
    drawing.draw(jaxprs.json())
    return drawing.dot.text()


class _JaxprDrawing:
    """A drawing of jaxprs that are given as JSON."""

    def __init__(self, name: str) -> None:
        self.dot = Dot(name)
        self._makers: dict[str, tuple[str, str]] = {}  # value → the node that computes it, and its type
        self._titles: dict[int, str] = {}  # number of a jaxpr → the first equation that holds it, and its parameter
        self._callers: list[tuple[str, int]] = []  # node of an equation, and number of a jaxpr that it holds

    def draw(self, jaxprs: Iterable[Json]) -> None:
        """Draws jaxprs as DOT: the first one bare, each other, which an equation of an earlier one holds, in a cluster.

        Drawing the equation has noted the title of the cluster. Edges from equations to the jaxprs that they hold come
        last, when all have nodes.

        Args:
            jaxprs: entries of `JaxprList.json`, each after one that holds it.
        """
        first, *inner_jaxprs = jaxprs
        entries = [self._jaxpr(first, "")]
        for number, jaxpr in enumerate(inner_jaxprs, 1):
            with self.dot.cluster(self._titles[number]):
                entries.append(self._jaxpr(jaxpr, self._titles[number]))
        for node, number in self._callers:
            if entries[number]:  # a jaxpr without values and equations has no node
                self.dot.edge(node, entries[number], dashed=True)

    def _jaxpr(self, jaxpr: Json, title: str) -> str:
        """Draws values and equations, and returns the first node, "" if there is none."""
        inputs = [self._source(value, "constant", title) for value in jaxpr["constants"]]
        inputs += [self._source(value, "input", title) for value in jaxpr["inputs"]]
        equations = [self._equation(equation) for equation in jaxpr["equations"]]
        outputs = [self._output(operand, number) for number, operand in enumerate(jaxpr["outputs"])]
        return [*inputs, *equations, *outputs, ""][0]

    def _source(self, value: Json, kind: str, title: str) -> str:
        """Draws an input or a constant of a jaxpr, by its `kind`; returns its node."""
        role = f"{kind} of {title}" if title else kind
        node = self.dot.node(f"{role}\n{value['type']}", "ellipse")
        self._makers[value["name"]] = node, value["type"]
        return node

    def _equation(self, equation: Json) -> str:
        """Draws an equation in JSON as a node with edges from its operands; returns the node's name.

        Notes the jaxprs that it holds, which `draw` draws later.
        """
        primitive = equation["primitive"]
        literals = [operand["literal"] for operand in equation["inputs"] if isinstance(operand, dict)]
        operands = f"({', '.join(literals)})" if literals else ""
        results = ", ".join(value["type"] for value in equation["outputs"])
        node = self.dot.node("\n".join(filter(None, (f"{primitive}{operands}", results, equation["line"]))))
        for operand in equation["inputs"]:
            self._edge(operand, node)
        self._makers.update({value["name"]: (node, value["type"]) for value in equation["outputs"]})
        for parameter, numbers in equation["bodies"].items():
            for number in numbers:
                self._titles.setdefault(number, f"{primitive} {equation['params'].get('name') or parameter}")
                self._callers.append((node, number))
        return node

    def _output(self, operand: Any, number: int) -> str:
        text = f"\n{operand['literal']}" if isinstance(operand, dict) else ""
        node = self.dot.node(f"output {number}{text}", "ellipse")
        self._edge(operand, node)
        return node

    def _edge(self, operand: Any, node: str) -> None:
        """Draws the edge of an operand, unless it is a literal."""
        if isinstance(operand, str):
            maker, short_type = self._makers[operand]
            self.dot.edge(maker, node, short_type)


def graph_dot(graph: Graph, program: Program, name: str) -> str:
    """Return the drawing of a graph and of a program made of its compute sets and tensors, with a title."""
    drawing = _GraphDrawing(name, drawn_json(graph, program))
    drawing.draw()
    return drawing.dot.text()


class _GraphDrawing:
    """A drawing of steps in their clusters, then of variables and an edge for each access."""

    def __init__(self, name: str, graph: Json) -> None:
        self.dot = Dot(name)
        self._graph = graph
        self._steps: dict[int, str] = {}  # number of a step → its node
        self._calls: list[tuple[str, int]] = []  # node of a call, and number of its function
        self._edges: list[tuple[str, int, bool]] = []  # step, variable, whether it is written

    def draw(self) -> None:
        """Draws a graph as DOT: its program, the functions that are called in clusters, and the variables accessed."""
        self._draw(self._graph["program"])
        entries = []
        for function in self._graph["functions"]:
            with self.dot.cluster(f"function {function['name']}"):
                entries.append(self.dot.node(function["name"], "plaintext"))
                self._draw(function["body"])
        for node, number in self._calls:
            self.dot.edge(node, entries[number], dashed=True)
        variables: dict[int, str] = {}
        for step, number, is_written in self._edges:
            if number not in variables:
                variable = self._graph["variables"][number]
                text = f"{variable['name']}\n{variable['dtype']}{variable['shape']}"
                variables[number] = self.dot.node(text, "ellipse")
            ends = (step, variables[number]) if is_written else (variables[number], step)
            self.dot.edge(*ends)

    def _draw(self, node: Json) -> None:
        """Draws a node of the program tree, in JSON, with all inside of it.

        A call or a step is one node; a loop or branch is a cluster, with a diamond for the value that decides it.
        """
        if "function" in node:
            name = self._graph["functions"][node["function"]]["name"]
            self._calls.append((self.dot.node(f"call {name}"), node["function"]))
        elif "step" in node:
            self._draw_step(node)
        elif "title" in node:
            with self.dot.cluster(f"{node['title']} {node['line']}".rstrip()):
                if node["reads"]:
                    self._add_edges(self.dot.node(node["title"], "diamond"), [node])
                self._draw_children(node)
        else:
            self._draw_children(node)

    def _draw_children(self, node: Json) -> None:
        for child in node["children"]:
            self._draw(child)

    def _draw_step(self, node: Json) -> None:
        """Draws a step, once however many places of the program it is in."""
        if node["step"] in self._steps:
            return
        groups = self._graph["compute_sets"][node["compute_set"]]["groups"] if "compute_set" in node else []
        vertices = [f"{group['vertices']:,} × {group['codelet']}" for group in groups]
        lines = (f"{node['step']}. {node['type']} {node['name']}", node["line"], *vertices)
        self._steps[node["step"]] = self.dot.node("\n".join(filter(None, lines)))
        self._add_edges(self._steps[node["step"]], groups or [node])

    def _add_edges(self, node: str, accesses: Iterable[Json]) -> None:
        for field in ("reads", "writes"):
            numbers = dict.fromkeys(number for access in accesses for number in access[field])
            self._edges += [(node, number, field == "writes") for number in numbers]
