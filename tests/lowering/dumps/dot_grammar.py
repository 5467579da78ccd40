"""Reads DOT by its grammar, as far as dumps use it: statements that end in `;`. Other text fails an assertion.

Source: https://graphviz.org/doc/info/lang.html
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_TOKEN = re.compile(r'\s*("(?:[^"\\]|\\.)*"|[A-Za-z_]\w*|-?\d+(?:\.\d+)?|->|[{}\[\]=,;])')


@dataclass
class Graph:
    """A graph or cluster: its name, labels of its own nodes by key, edges, and the clusters inside it."""

    name: str
    nodes: dict[str, str] = field(default_factory=dict)
    edges: list[tuple[str, str]] = field(default_factory=list)
    clusters: list[Graph] = field(default_factory=list)
    label: str = ""

    def all_nodes(self) -> dict[str, str]:
        actual = dict(self.nodes)
        for cluster in self.clusters:
            inside = cluster.all_nodes()
            assert not actual.keys() & inside.keys()
            actual |= inside
        return actual

    def all_clusters(self) -> list[Graph]:
        return [*self.clusters, *(inner for cluster in self.clusters for inner in cluster.all_clusters())]


def read(text: str) -> Graph:
    """The graph of a text; all its edges are between nodes that it has."""
    tokens = list[str]()
    at = 0
    while text[at:].strip():
        match = _TOKEN.match(text, at)
        assert match, f"no token: {text[at : at + 40]!r}"
        tokens.append(match[1])
        at = match.end()
    tokens.reverse()
    assert tokens.pop() == "digraph"
    graph = _body(tokens, unquoted(tokens.pop()))
    assert not tokens
    nodes = graph.all_nodes()
    assert all(end in nodes for part in (graph, *graph.all_clusters()) for edge in part.edges for end in edge)
    return graph


def unquoted(token: str) -> str:
    """The text of an ID."""
    return re.sub(r"\\(.)", lambda m: "\n" if m[1] == "n" else m[1], token[1:-1]) if token[0] == '"' else token


def _body(tokens: list[str], name: str) -> Graph:
    graph = Graph(name)
    assert tokens.pop() == "{"
    while (token := tokens.pop()) != "}":
        if token == "subgraph":
            cluster = tokens.pop()
            assert cluster.startswith("cluster_")
            graph.clusters.append(_body(tokens, cluster))
            continue
        following = tokens.pop()
        if following == "=":
            value = unquoted(tokens.pop())
            graph.label = value if token == "label" else graph.label
        elif following == "->":
            graph.edges.append((token, tokens.pop()))
            _attributes(tokens)
        else:
            tokens.append(following)
            attributes = _attributes(tokens)
            if token not in ("node", "edge"):
                assert token not in graph.nodes
                graph.nodes[token] = attributes["label"]
        assert tokens.pop() == ";"
    return graph


def _attributes(tokens: list[str]) -> dict[str, str]:
    actual: dict[str, str] = {}
    if tokens[-1] != "[":
        return actual
    tokens.pop()
    while True:
        key = tokens.pop()
        equals = tokens.pop()
        value = tokens.pop()
        assert equals == "=" and re.fullmatch(r"\w+", key)
        actual[key] = unquoted(value)
        if (end := tokens.pop()) == "]":
            return actual
        assert end == ","
