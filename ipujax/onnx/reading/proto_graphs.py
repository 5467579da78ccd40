"""Graphs of a model's file, with their subgraphs: visited, and their nodes replaced."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import onnx


def graphs_of(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """Yield a graph and its subgraphs, outermost first; a visit may replace the nodes of its graph."""
    yield graph
    for attribute in (attribute for node in graph.node for attribute in node.attribute):
        for subgraph in (attribute.g, *attribute.graphs) if attribute.HasField("g") or attribute.graphs else ():
            yield from graphs_of(subgraph)


def replace_nodes(graph: onnx.GraphProto, nodes: Iterable[onnx.NodeProto]) -> None:
    """Replace the nodes of a graph by others, some of which may be the graph's own."""
    # Messages of a graph are invalid once they are deleted from it, so copies take their place.
    copies = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
    graph.ClearField("node")
    graph.node.extend(copies)
