"""The same view of other variables.

Input: a tensor, and for some variables another of the same shape that takes its place. Output: the tensor that sees
the others in the same way. No element is listed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ipujax.runtime.tensor import Affine, Concat, Indexed, Node, Reshaped, Tensor, Variable

Table = Mapping[Variable, Variable]


def substituted(tensor: Tensor, table: Table) -> Tensor:
    """A tensor with other variables.

    Args:
        tensor: any view.
        table: for some of its variables another of the same shape and dtype; no two the same.

    Returns:
        The view; the tensor itself where the table names none of its variables.
    """
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
