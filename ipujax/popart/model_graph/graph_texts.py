"""The graph of a session as text: operations as JSON, and as a DOT file."""

from __future__ import annotations

import json

from ipujax.popart.model_graph.annotated_graph import AnnotatedGraph


def ir_text(graph: AnnotatedGraph) -> str:
    """Return the operations of a graph as JSON, with their annotations.

    Args:
        graph: of a session.
    """
    operations = [
        {
            "type": node.op_type,
            "domain": node.domain or "ai.onnx",
            "name": node.name,
            "inputs": list(node.inputs),
            "outputs": list(node.outputs),
            "attributes": {name: str(value) for name, value in {**node.attributes, **notes}.items()},
        }
        for node, notes in graph.annotated_nodes()
    ]
    return json.dumps({"maingraph": operations})


def dot_text(graph: AnnotatedGraph) -> str:
    """Return a graph in DOT, operations as nodes and tensors as edges.

    Args:
        graph: of a session.
    """
    lines = ["digraph main {"]
    producers: dict[str, int] = {}
    for i, node in enumerate(graph.graph.nodes):
        lines.append(f'  n{i} [label="{node.op_type}\\n{node.name}"];')
        for name in node.inputs:
            if name in producers:
                lines.append(f'  n{producers[name]} -> n{i} [label="{name}"];')
        producers |= dict.fromkeys(node.outputs, i)
    return "\n".join([*lines, "}", ""])
