"""Huge views that are no slices of variables, copied to variables: a view of them would list all their elements."""

from __future__ import annotations

from ipujax.lowering.layout import linear_mapping, map_linearly
from ipujax.runtime.graph import Copy, Graph, Sequence
from ipujax.runtime.tensor import Concat, Node, Reshaped, Tensor

_MOST_LISTED = 1 << 25  # elements of a view that may be listed, assumed: 16 bytes and 20 ns each


def copied_if_huge(graph: Graph, x: Tensor, prog: Sequence, name: str) -> Tensor:
    """Returns the tensor, or a copy in a variable if further views of it would enumerate very many elements.

    Args:
        graph: graph to add to.
        x: any view.
        prog: program to add the copy to.
        name: debug name.
    """
    if x.size <= _MOST_LISTED or not _is_reshaped(x.node):
        return x
    map_linearly(graph, x)
    out = graph.add_variable(x.shape, x.dtype, f"{name}/rearranged", linear_mapping(graph, x.size, x.dtype))
    prog.add(Copy(x, out, f"{name}/rearrange", graph.origin))
    return out


def _is_reshaped(node: Node) -> bool:
    return isinstance(node, Reshaped) or (isinstance(node, Concat) and any(map(_is_reshaped, node.parts)))
