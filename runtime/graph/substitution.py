"""Views of tensors with some variables replaced by others.

Input: a tensor, and replacements of the same shape for some variables. Output: the same view of the replacements, in
time proportional to the pieces of the view, not to its elements.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ipujax.runtime.tensor import Affine, Concat, Indexed, Node, Reshaped, Tensor, Variable

Table = Mapping[Variable, Variable]  # one to one: a view of two variables that became one would show elements twice


def substitute(tensor: Tensor, table: Table) -> Tensor:
    """Return a tensor with the variables in `table`, which are distinct, replaced; itself if it has none of them."""
    if not any(variable in table for variable in tensor.variables()):
        return tensor
    return Tensor(_node(tensor.node, table), tensor.shape, tensor.dtype)


def _node(node: Node, table: Table) -> Node:
    match node:
        case Affine(variable):
            return replace(node, variable=table.get(variable, variable))
        case Concat(_, parts):
            return replace(node, parts=tuple(_node(part, table) for part in parts))
        case Reshaped(source):
            inner = _node(source, table)
            assert isinstance(inner, (Affine, Concat)), "a substitution keeps the kind of a node"
            return replace(node, source=inner)
        case Indexed(variables):
            return replace(node, variables=tuple(table.get(v, v) for v in variables))
    raise AssertionError(f"unknown view {node!r}")
