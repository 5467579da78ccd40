"""Dependences of the values of a jaxpr on its arguments, and which of its equations are those of a gradient.

Input: a jaxpr with JAX's names `jvp(…)` and `transpose(…)` on the equations of gradients. Output: for each result the
arguments that it is computed from, through loops, branches and functions too; the arguments that gradients read.
Sets of arguments are whole numbers: bit n stands for argument n.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from operator import or_
from typing import NamedTuple

from ipujax.lowering.jax_compat import Atom, Jaxpr, JaxprEqn, Literal, Var, shape_of
from ipujax.lowering.jaxpr.control_bodies import Body, bodies
from ipujax.lowering.jaxpr.nested import variables, variables_read
from ipujax.lowering.primitives import record_of
from ipujax.lowering.source_info import name_stack
from ipujax.runtime.tensor import part_of_name

_SUMS = frozenset(("psum", "all_reduce", "psum_invariant", "reduce_scatter"))  # of gradients over replicas


class Dependence(NamedTuple):
    """Dependence of a value on arguments and gradients.

    Args:
        arguments: bits of the arguments that it is computed from outside of gradients.
        is_from_gradient: True if it is computed from a result of a backward pass.
        by_element: bits of the arguments of its shape, or whose parts it joins, that it is computed from element by
            element, also in gradients.
    """

    arguments: int = 0
    is_from_gradient: bool = False
    by_element: int = 0

    @property
    def is_from_gradient_alone(self) -> bool:
        """True for a gradient, or a value that is computed from gradients."""
        return self.is_from_gradient and not self.arguments

    def union(self, other: Dependence) -> Dependence:
        """Dependence of a value that is computed from two."""
        return Dependence(
            self.arguments | other.arguments,
            self.is_from_gradient or other.is_from_gradient,
            self.by_element | other.by_element,
        )


_NOTHING = Dependence()
_MOVES = ("part", "joined")  # costs of equations whose results have elements of operands of other shapes


class ArgumentFlow:
    """Dataflow of a jaxpr.

    Args:
        jaxpr: the entire function.

    Attributes:
        results: dependence of each result.
        differentiated: bits of the arguments that equations of a gradient read.
        gradient_shapes: shapes of results of the backward pass that the rest reads.
        sums: results of loops, pipelines and collectives that are computed from gradients only.
    """

    def __init__(self, jaxpr: Jaxpr) -> None:
        self.differentiated = 0
        self.gradient_shapes: set[tuple[int, ...]] = set()
        self.sums: set[Var] = set()
        self._backward: set[Var] = set()
        self._of_branches: dict[Var, Dependence] = {}  # of results of equations, joined over the branches seen so far
        arguments = {var: Dependence(1 << n, by_element=1 << n) for n, var in enumerate(jaxpr.invars)}
        self.results = self._walk_equations(jaxpr, arguments)

    def _walk_equations(self, jaxpr: Jaxpr, dependences: dict[Var, Dependence]) -> list[Dependence]:
        """Return for each result of a jaxpr the arguments of the program, and whether gradients, that it depends on.

            An equation of a gradient, one with a part of training, ends the dependence on arguments, which are noted as
            differentiated; its results depend on a gradient if their operands do or it is of the backward pass.
            Dependence by
        element, of a value that may be an argument's new value, goes on through all equations.

            Args:
                jaxpr: the jaxpr.
                dependences: those of its inputs; updated: gets those of all values.
        """
        for eqn in jaxpr.eqns:
            part = part_of_name(name_stack(eqn))
            of_operands, by_element_of_shape = _dependence_on_operands(eqn, dependences)
            if part:  # forward, recomputed or backward
                self.differentiated |= of_operands.arguments
                arguments = 0
                is_from_gradient = of_operands.is_from_gradient or part == "backward"
            else:
                self._note_gradients(variables_read(eqn))
                arguments = of_operands.arguments
                is_from_gradient = of_operands.is_from_gradient
            for var in eqn.outvars:
                # Arguments of the result's shape that it may be the new value of; of rows that moved, of any shape.
                by_element = 0
                if by_element_of_shape:
                    is_moved = record_of(eqn).cost in _MOVES
                    shapes = by_element_of_shape if is_moved else (shape_of(var),)
                    by_element = reduce(or_, (by_element_of_shape.get(shape, 0) for shape in shapes))
                dependences[var] = Dependence(arguments, is_from_gradient, by_element)
            if part == "backward":
                self._backward.update(eqn.outvars)
            if not part:
                inner_bodies = bodies(eqn)
                for body in inner_bodies:
                    self._walk_body(body, eqn, dependences)
                # Sums of gradients over iterations, micro-batches or replicas are gradients too.
                if inner_bodies or eqn.primitive.name in _SUMS:
                    self.sums.update(var for var in eqn.outvars if dependences[var].is_from_gradient_alone)
        self._note_gradients(variables(jaxpr.outvars))
        return _dependences_of(jaxpr.outvars, dependences)

    def _note_gradients(self, variables_of_rest: Sequence[Var]) -> None:
        self.gradient_shapes.update(shape_of(var) for var in variables_of_rest if var in self._backward)

    def _walk_body(self, body: Body, eqn: JaxprEqn, dependences: dict[Var, Dependence]) -> None:
        """Find on which arguments of the program results of a loop, branch or call depend, by one of its bodies.

        Results of several bodies, branches, depend on the union. A loop is walked twice: in the second iteration its
        carries depend on what the first one has computed.

        Args:
            body: the body.
            eqn: the loop, branch or call.
            dependences: those of all values around it; updated: gets those of the results.
        """
        jaxpr = body.jaxpr.jaxpr
        first_inputs = _dependences_of(body.of_operands(eqn.invars), dependences)
        results = self._walk_equations(jaxpr, dict(zip(jaxpr.invars, first_inputs, strict=True)))
        inputs = [*first_inputs]
        inputs[body.inputs.carries] = map(
            Dependence.union, first_inputs[body.inputs.carries], results[body.results.carries]
        )
        if inputs != first_inputs:
            # In the second walk weights depend on all that updates them, which no gradient reads.
            differentiated_in_first = self.differentiated
            results = self._walk_equations(jaxpr, dict(zip(jaxpr.invars, inputs, strict=True)))
            self.differentiated = differentiated_in_first
        for var, dependence in zip(eqn.outvars, results, strict=True):
            dependences[var] = self._of_branches.get(var, _NOTHING).union(dependence)
            self._of_branches[var] = dependences[var]


def _dependence_on_operands(
    eqn: JaxprEqn, dependences: Mapping[Var, Dependence]
) -> tuple[Dependence, dict[tuple[int, ...], int]]:
    """Return which arguments of the program the operands of an equation depend on: all together, and by element.

    The latter, bit masks of arguments, by shape of the operands: a result of that shape is taken to be computed from
    them element by element, as an updated weight from the old one; not so in products.
    """
    arguments = 0  # a bit for each
    is_from_gradient = False
    by_element: dict[tuple[int, ...], int] = {}
    for var in variables_read(eqn):
        dependence = dependences.get(var, _NOTHING)
        arguments |= dependence.arguments
        is_from_gradient |= dependence.is_from_gradient
        if dependence.by_element and record_of(eqn).cost != "product":
            by_element[shape_of(var)] = by_element.get(shape_of(var), 0) | dependence.by_element
    return Dependence(arguments, is_from_gradient), by_element


def _dependences_of(atoms: Sequence[Atom], dependences: Mapping[Var, Dependence]) -> list[Dependence]:
    return [_NOTHING if isinstance(atom, Literal) else dependences.get(atom, _NOTHING) for atom in atoms]
