"""Gradient nodes of ai.onnx.preview.training: the differentiated part of the graph becomes a subgraph.

Such a node names values of the graph around it: `y`, and `xs` and `zs` that it depends on. Its subgraph is the part of
the graph between them; values that depend on neither come from outside.

Source: ONNX operator Gradient, version 1 of ai.onnx.preview.training.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ipujax.onnx.graphs import Graph, Node, ValueInfo
from ipujax.onnx.onnx_errors import OnnxModelError

BODY = "body"  # attribute that the node gets
_MAX_NODES = 10_000  # assumed: each is traced again
_KEY = ("ai.onnx.preview.training", "Gradient")


def with_gradient_bodies(nodes: Sequence[Node], types: Mapping[str, ValueInfo]) -> tuple[Node, ...]:
    """Return nodes of a graph, in order of evaluation; those that differentiate get an attribute `body`."""
    if not any(map(_is_gradient, nodes)):
        return tuple(nodes)
    result: list[Node] = []
    total = 0
    for node in nodes:
        if not _is_gradient(node):
            result.append(node)
            continue
        body = _body(node, result, types)
        # A part with gradients in it has their parts once more: gradients of gradients double it each time.
        total += sum(1 for _ in body.all_nodes())
        if total > _MAX_NODES:
            message = f"{node.label} and those before it differentiate one another too often"
            raise OnnxModelError(message, expected=f"at most {_MAX_NODES:,} nodes in their parts", got=f"{total:,}")
        result.append(replace(node, attributes={**node.attributes, BODY: body}))
    return tuple(result)


def _is_gradient(node: Node) -> bool:
    return (node.domain, node.op_type) == _KEY


def _body(node: Node, before: Sequence[Node], types: Mapping[str, ValueInfo]) -> Graph:
    inputs = [*node.attributes["xs"], *node.attributes.get("zs", ())]
    target = node.attributes["y"]
    inside = _on_the_way(before, set(inputs), target)

    def info(name: str) -> ValueInfo:
        return types.get(name, ValueInfo(name, None, None))

    return Graph(node.name, tuple(map(info, inputs)), (info(target),), {}, inside, frozenset())


def _on_the_way(nodes: Sequence[Node], inputs: set[str], target: str) -> tuple[Node, ...]:
    """Nodes that depend on the inputs, and that the target depends on."""
    after = set(inputs)
    depending = []
    for node in nodes:
        if after.intersection(_read(node)):
            # a node that computes an input of the part is not in it: that value is given
            after.update(node.outputs)
            depending.append(node)
    needed = {target}
    inside = []
    for node in reversed(depending):
        if needed.intersection(node.outputs) and not inputs.intersection(node.outputs):
            needed.update(_read(node))
            inside.append(node)
    return tuple(reversed(inside))


def _read(node: Node) -> set[str]:
    """Values that a node and its subgraphs read."""
    inner = (name for graph in node.subgraphs() for each in graph.all_nodes() for name in each.inputs)
    results = (output.name for graph in node.subgraphs() for output in graph.outputs)
    return {*node.inputs, *inner, *results}
