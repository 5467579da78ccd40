"""Graphs of a file, with their subgraphs: visited, their depth checked, and their nodes replaced."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import onnx

from ipujax.onnx.onnx_errors import OnnxModelError

# Protobuf reads messages nested 100 deep, and a subgraph is nested three deep in the graph around it.
_MAX_DEPTH = 30


def graphs_of(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """Yield a graph and its subgraphs, outermost first; a visit may replace the nodes of its graph."""
    yield graph
    for node in graph.node:
        for subgraph in subgraphs_of(node):
            yield from graphs_of(subgraph)


def subgraphs_of(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    """Yield the graphs among the attributes of a node."""
    for attribute in node.attribute:
        yield from ([attribute.g] if attribute.HasField("g") else [])
        yield from attribute.graphs


def all_nodes(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    """Yield nodes, each before those of its subgraphs."""
    for node in nodes:
        yield node
        for graph in subgraphs_of(node):
            yield from all_nodes(graph.node)


def check_depth(model: onnx.ModelProto) -> None:
    """Refuse subgraphs that are nested too deep for protobuf, onnx and Python, which visit them recursively."""
    nodes = [*model.graph.node, *(node for function in model.functions for node in function.node)]
    depth = 0
    while nodes:
        if depth > _MAX_DEPTH:
            message = "subgraphs are nested too deep"
            hint = "export the model again"
            raise OnnxModelError(message, expected=f"at most {_MAX_DEPTH} levels", got="more", hint=hint)
        nodes = [inner for node in nodes for graph in subgraphs_of(node) for inner in graph.node]
        depth += 1


def replace_nodes(graph: onnx.GraphProto, nodes: Iterable[onnx.NodeProto]) -> None:
    """Replace the nodes of a graph by others, some of which may be the graph's own."""
    # Messages of a graph are invalid once they are deleted from it, so copies take their place.
    copies = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
    graph.ClearField("node")
    graph.node.extend(copies)
