"""A jaxpr as DOT: a node an equation, an edge a value, a cluster a jaxpr that equations hold.

Input: a jaxpr. Output: text of DOT, drawn from the jaxpr's JSON, so that both dumps show the same. A jaxpr that several
equations hold (a function) is drawn once, and dashed edges lead from each of these equations to its first node.
Literals are part of the equation they are operands of.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ipujax.lowering.dumps.dot import Dot
from ipujax.lowering.dumps.jaxpr_json import JaxprList, Json
from ipujax.lowering.jax_compat import ClosedJaxpr


def jaxpr_dot(jaxpr: ClosedJaxpr, name: str) -> str:
    """Returns the text in DOT of a jaxpr, with a title."""
    jaxprs = JaxprList()
    jaxprs.number_of(jaxpr)
    drawing = _Drawing(name)
    drawing.draw(jaxprs.json())
    return drawing.dot.text()


class _Drawing:
    """A drawing of jaxprs that are given as JSON."""

    def __init__(self, name: str) -> None:
        self.dot = Dot(name)
        self._makers: dict[str, tuple[str, str]] = {}  # value → the node that makes it, and its type
        self._titles: dict[int, str] = {}  # number of a jaxpr → its first equation and parameter
        self._callers: list[tuple[str, int]] = []

    def draw(self, jaxprs: Iterable[Json]) -> None:
        """Draws jaxprs: the first bare, each other one, which an earlier one holds, in a cluster."""
        first, *held = jaxprs
        entries = [self._jaxpr(first, "")]
        for number, jaxpr in enumerate(held, 1):
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
        role = f"{kind} of {title}" if title else kind
        node = self.dot.node(f"{role}\n{value['type']}", "ellipse")
        self._makers[value["name"]] = node, value["type"]
        return node

    def _equation(self, equation: Json) -> str:
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
