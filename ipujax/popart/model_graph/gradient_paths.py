"""Tensors that a loss depends on by a path with gradients: not through whole numbers, nor through detached tensors."""

from __future__ import annotations

import jax.numpy as jnp

from ipujax.onnx.graphs import Node
from ipujax.popart.model_graph.annotated_graph import AnnotatedGraph

_DETACHED = ("Detach",)
# Operands that results depend on in value alone.
_WITHOUT_GRADIENT = {"Dropout": (1, 2), "Shape": (0,), "Size": (0,), "OneHot": (0, 1), "Where": (0,)}


def names_with_gradients(graph: AnnotatedGraph, loss: str) -> frozenset[str]:
    """Return the names of the tensors that have a gradient.

    Args:
        graph: of a session.
        loss: name of the loss.
    """
    names = {loss}
    # Nodes are in topological order, so one pass backwards reaches all that the loss depends on.
    for node in reversed(graph.graph.nodes):
        if node.op_type in _DETACHED or not _has_gradient(node, names):
            continue
        without = _WITHOUT_GRADIENT.get(node.op_type, ())
        names |= {name for i, name in enumerate(node.inputs) if name and i not in without}
        for subgraph in node.subgraphs():
            names |= {name for inner in subgraph.all_nodes() for name in inner.inputs if name}
    return frozenset(names)


def _has_gradient(node: Node, names: set[str]) -> bool:
    """Return whether a result that the loss depends on has floating-point elements."""
    dtypes = node.output_dtypes or (None,) * len(node.outputs)
    return any(
        name in names and (dtype is None or jnp.issubdtype(dtype, jnp.floating))
        for name, dtype in zip(node.outputs, dtypes, strict=False)
    )
