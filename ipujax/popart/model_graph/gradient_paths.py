"""Tensors that a loss depends on by a path with gradients: not through whole numbers, nor through detached tensors.

And the rewrites of PopART that such a path needs: a program that turns one off gets PopART's error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import jax.numpy as jnp

from ipujax.onnx.front_end import Node
from ipujax.popart.model_graph.annotated_graph import AnnotatedGraph

_DETACHED = ("Detach",)
# Operands that results depend on in value alone.
_WITHOUT_GRADIENT = {"Dropout": (1, 2), "Shape": (0,), "Size": (0,), "OneHot": (0, 1), "Where": (0,)}


# Operator and operand → the rewrite that makes its gradient. Source: `willow/src/patterns` of github:graphcore/popart.
_PATTERNS = {
    ("Atan2", 0): "Atan2Arg0GradOp",
    ("Atan2", 1): "Atan2Arg1GradOp",
    ("ConvTranspose", 1): "ConvFlipWeightsGradOp",
    ("Cos", 0): "CosGradOp",
    ("Cosh", 0): "CoshOp",
    ("Exp", 0): "ExpGradOp",
    ("Expm1", 0): "Expm1GradOp",
    ("Log1p", 0): "Log1pGradOp",
    ("Reciprocal", 0): "ReciprocalGradOp",
    ("Sqrt", 0): "SqrtGradOp",
    ("Sub", 1): "SubtractArg1GradOp",
}


def missing_pattern(
    graph: AnnotatedGraph, loss: str, sources: Iterable[str], is_enabled: Callable[[str], bool]
) -> str | None:
    """Return the name of a rewrite that gradients of some tensors need and that is turned off; None for none.

    Args:
        graph: of a session.
        loss: name of the loss.
        sources: names of the tensors whose gradients are asked for.
        is_enabled: whether a rewrite is on.
    """
    reached = set(sources)
    with_gradients = names_with_gradients(graph, loss)
    for node in graph.graph.nodes:
        operands = [i for i, name in enumerate(node.inputs) if name in reached]
        if not operands or with_gradients.isdisjoint(node.outputs):
            continue
        reached |= set(node.outputs)
        patterns = (_PATTERNS[node.op_type, i] for i in operands if (node.op_type, i) in _PATTERNS)
        missing = next((pattern for pattern in patterns if not is_enabled(pattern)), None)
        if missing is not None:
            return missing
    return None


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
