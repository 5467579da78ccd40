"""A jaxpr as DOT: a node an equation, an edge a value, a box a jaxpr that equations hold.

Input: a jaxpr. Output: text of DOT. A jaxpr that several equations hold (a function) is drawn once, and dashed edges
lead from each of these equations to its first. Literals are part of the equation they are operands of.
"""

from __future__ import annotations

from collections.abc import Sequence

from ipujax.lowering.dumps.dot import Dot
from ipujax.lowering.dumps.jaxpr_parts import bodies_of, literal_text, short_type
from ipujax.lowering.jax_compat import Atom, ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var
from ipujax.lowering.source_info import source_line


def jaxpr_dot(jaxpr: ClosedJaxpr, name: str) -> str:
    """The text of a jaxpr.

    Args:
        jaxpr: what to draw.
        name: its title.
    """
    drawing = _Drawing(name)
    drawing.draw(jaxpr.jaxpr, "")
    drawing.draw_bodies()
    return drawing.dot.text()


class _Drawing:
    """A drawing of a jaxpr and of those inside it, each once."""

    def __init__(self, name: str) -> None:
        self.dot = Dot(name)
        self._makers: dict[Var, str] = {}  # the node that each value comes from
        self._bodies: dict[int, tuple[Jaxpr, str]] = {}  # those found, by identity: they hold what the equations hold
        self._callers: list[tuple[str, int]] = []
        self._entries: dict[int, str] = {}

    def draw(self, jaxpr: Jaxpr, title: str) -> str:
        """Draws the values and equations of one jaxpr, and returns the first node, "" if there is none."""
        inputs = [self._source(var, "constant", title) for var in jaxpr.constvars]
        inputs += [self._source(var, "input", title) for var in jaxpr.invars]
        equations = [self._equation(eqn) for eqn in jaxpr.eqns]
        outputs = [self._output(atom, number) for number, atom in enumerate(jaxpr.outvars)]
        return [*inputs, *equations, *outputs, ""][0]

    def draw_bodies(self) -> None:
        """Draws the jaxprs that equations hold, and those inside them."""
        while waiting := [key for key in self._bodies if key not in self._entries]:
            for key in waiting:
                jaxpr, title = self._bodies[key]
                with self.dot.cluster(title):
                    self._entries[key] = self.draw(jaxpr, title)
        for node, key in self._callers:
            if self._entries[key]:  # a jaxpr without values and equations has no node
                self.dot.edge(node, self._entries[key], dashed=True)

    def _source(self, var: Var, what: str, title: str) -> str:
        kind = f"{what} of {title}" if title else what
        self._makers[var] = self.dot.node(f"{kind}\n{short_type(var)}", "ellipse")
        return self._makers[var]

    def _equation(self, eqn: JaxprEqn) -> str:
        literals = [literal_text(atom) for atom in eqn.invars if isinstance(atom, Literal)]
        operands = f"({', '.join(literals)})" if literals else ""
        results = ", ".join(map(short_type, eqn.outvars))
        label = "\n".join(filter(None, (f"{eqn.primitive.name}{operands}", results, source_line(eqn))))
        node = self.dot.node(label)
        self._edges(eqn.invars, node)
        self._makers.update(dict.fromkeys(eqn.outvars, node))
        for key, bodies in bodies_of(eqn).items():
            for body in bodies:
                self._bodies.setdefault(id(body), (body, f"{eqn.primitive.name} {eqn.params.get('name') or key}"))
                self._callers.append((node, id(body)))
        return node

    def _output(self, atom: Atom, number: int) -> str:
        text = f"\n{literal_text(atom)}" if isinstance(atom, Literal) else ""
        node = self.dot.node(f"output {number}{text}", "ellipse")
        self._edges([atom], node)
        return node

    def _edges(self, atoms: Sequence[Atom], node: str) -> None:
        for atom in atoms:
            if not isinstance(atom, Literal):
                self.dot.edge(self._makers[atom], node, short_type(atom))
