"""Bodies of loops and branches that belong to a gradient, and the forward bodies that they derive from.

JAX makes two loops of one that is differentiated. The body of the second has the frames of the first one's equations,
in reverse order, and no name that says so; it reads values that the first has stored for it.

Input: the loops and branches of a program, while calls around them are inlined, those of the forward part first.
Output: for a body of a gradient the forward bodies that it shares values with, and these values.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from ipujax.lowering.jax_compat import Atom, Jaxpr, JaxprEqn, Var
from ipujax.lowering.jaxpr.control_bodies import bodies
from ipujax.lowering.jaxpr.stage_names import is_transposed
from ipujax.lowering.source_info import name_stack

Names = TypeVar("Names")


@dataclass(frozen=True, slots=True)
class GradientBody(Generic[Names]):
    """Body of a gradient.

    Args:
        forward: layer names of the forward bodies that share values with it.
        values: for its inputs that are values of forward bodies: names of those bodies, and the variables inside.
    """

    forward: tuple[Names, ...] = ()
    values: Mapping[Var, tuple[tuple[Names, Var], ...]] = field(default_factory=dict)


class GradientBodies(Generic[Names]):
    """Bodies of one program, complete up to the equation that is being inlined."""

    def __init__(self) -> None:
        self._names: dict[int, Names] = {}  # of forward bodies, by the jaxpr before inlining
        self._results: dict[int, Sequence[Atom]] = {}  # of the same, after inlining
        self._inside: dict[Var, list[tuple[int, Var]]] = defaultdict(list)  # values in bodies, by the value outside
        self._gradients: dict[int, GradientBody[Names]] = {}
        self._jaxprs: list[Jaxpr] = []  # jaxprs whose ids are keys: they must stay alive

    def enter(self, eqn: JaxprEqn, operands: Sequence[Atom], is_in_gradient: bool) -> None:
        """Record which forward values the bodies of a gradient's loop or branch read, before they are inlined.

        Args:
            eqn: the loop or branch; nothing is recorded for a forward one.
            operands: its operands after inlining.
            is_in_gradient: whether the jaxpr around it is a body of a gradient.
        """
        if not (is_in_gradient or is_transposed(name_stack(eqn))):
            return
        for body in bodies(eqn):
            jaxpr = body.jaxpr.jaxpr
            values = {
                var: sources
                for var, atom in zip(jaxpr.invars, body.of_operands(operands), strict=True)
                if isinstance(atom, Var) and (sources := self._values_in_forward_bodies(atom))
            }
            forward = dict.fromkeys(names for sources in values.values() for names, _ in sources)
            self._gradients[id(jaxpr)] = GradientBody(tuple(forward), values)
            self._jaxprs.append(jaxpr)

    def leave(self, eqn: JaxprEqn, operands: Sequence[Atom], results: Sequence[Var]) -> None:
        """Record which values in a forward loop or branch are values around it, for the bodies of its gradient.

        Args:
            eqn: the loop or branch, before its bodies are inlined.
            operands: its operands after inlining.
            results: its results after inlining.
        """
        for body in bodies(eqn):
            jaxpr = body.jaxpr.jaxpr
            number = id(jaxpr)
            if number not in self._names:
                continue
            # A carried value differs in each iteration: only constants, scanned values and stacked results are shared.
            carries = jaxpr.invars[body.inputs.carries]
            for var, atom in zip(jaxpr.invars, body.of_operands(operands), strict=True):
                if isinstance(atom, Var) and var not in carries:
                    self._inside[atom].append((number, var))
            for places in (body.results.constants, body.results.stacks):
                for var, value in zip(results[places], self._results[number][places], strict=True):
                    if isinstance(value, Var):
                        self._inside[var].append((number, value))

    def add(self, jaxpr: Jaxpr, names: Names, results: Sequence[Atom]) -> None:
        """Record the layer names of a forward body, with its results after inlining."""
        self._names[id(jaxpr)] = names
        self._results[id(jaxpr)] = results
        self._jaxprs.append(jaxpr)

    def gradient(self, jaxpr: Jaxpr) -> GradientBody[Names] | None:
        """Return the record of a gradient's body from before inlining; None for another jaxpr."""
        return self._gradients.get(id(jaxpr))

    def _values_in_forward_bodies(self, var: Var) -> tuple[tuple[Names, Var], ...]:
        return tuple((self._names[number], inside) for number, inside in self._inside.get(var, ()))
