"""Roles of the variables that hold no value of a jaxpr: copies, partial results, intermediates.

Input: a graph and its program. Output: every variable of the graph that is not a constant has a role.
"""

from __future__ import annotations

from ipujax.runtime.graph import Copy, Graph, Program, distinct
from ipujax.runtime.tensor import Tensor
from ipujax.runtime.tensor.roles import INTERMEDIATES, PARTIALS


def note_other_roles(graph: Graph, program: Program) -> None:
    """Gives copies the role of their source, and other variables that of partials or intermediates."""
    for node in distinct(program):
        if isinstance(node, Copy) and _fills_variable(node.destination):
            # A copy of part of a variable says nothing of the other elements.
            graph.note_role(node.destination, graph.role_of(node.source))
    for variable in graph.variables:
        if not variable.is_constant:
            graph.notes.roles.setdefault(variable, PARTIALS if variable.monoid else INTERMEDIATES)


def _fills_variable(tensor: Tensor) -> bool:
    variables = tensor.variables()
    return len(variables) == 1 and variables[0].size == tensor.size
