"""Copies of huge views that are not slices of variables: views of such a view would list all its elements."""

from __future__ import annotations

from ipujax.lowering.layout import linear_mapping, map_linearly
from ipujax.runtime.graph import Builder, Copy
from ipujax.runtime.tensor import Concat, Node, Reshaped, Tensor

# Assumed: each listed element of a view takes 16 bytes and 20 ns of the compiler.
_MAX_LISTED_ELEMENTS = 1 << 25


def copied_if_huge(builder: Builder, x: Tensor) -> Tensor:
    """Returns the tensor, or a copy in a variable if further views of it would list very many elements."""
    graph = builder.graph
    if x.size <= _MAX_LISTED_ELEMENTS or not _is_reshaped(x.node):
        return x
    map_linearly(graph, x)
    out = graph.add_variable(x.shape, x.dtype, f"{builder.name}/rearranged", linear_mapping(graph, x.size, x.dtype))
    builder.prog.add(Copy(x, out, f"{builder.name}/rearrange", graph.origin))
    return out


def _is_reshaped(node: Node) -> bool:
    return isinstance(node, Reshaped) or (isinstance(node, Concat) and any(map(_is_reshaped, node.parts)))
