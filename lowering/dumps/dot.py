"""DOT, the graph language of Graphviz: nodes, edges and clusters, with names of any characters.

Input: labels and keys of nodes. Output: text that `dot -Tsvg` draws.
Source: https://graphviz.org/doc/info/lang.html
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

_INDENT = "  "


class Dot:
    """A directed graph that is being written.

    Args:
        name: its title.
    """

    def __init__(self, name: str) -> None:
        self._lines = [f"digraph {quoted(name)} {{", '  node [shape=box, fontname="sans-serif", fontsize=10];']
        self._depth, self._nodes, self._clusters = 1, 0, 0
        self._add(f'label={quoted(name)}; labelloc=t; fontname="sans-serif"; edge [fontsize=9];')

    def node(self, label: str, shape: str = "box") -> str:
        """Adds a node with a label of one or several lines, and returns its key; `shape` is one of Graphviz."""
        key = f"n{self._nodes}"
        self._nodes += 1
        self._add(f"{key} [label={quoted(label)}, shape={shape}];")
        return key

    def edge(self, source: str, destination: str, label: str = "", *, dashed: bool = False) -> None:
        """Adds an edge between two nodes, by their keys."""
        attributes = [f"label={quoted(label)}"] * bool(label) + ["style=dashed"] * dashed
        shown = f" [{', '.join(attributes)}]" if attributes else ""
        self._add(f"{source} -> {destination}{shown};")

    @contextmanager
    def cluster(self, label: str) -> Iterator[None]:
        """A box around the nodes that are added inside."""
        self._add(f"subgraph cluster_{self._clusters} {{")
        self._clusters += 1
        self._depth += 1
        self._add(f"label={quoted(label)};")
        yield
        self._depth -= 1
        self._add("}")

    def text(self) -> str:
        """The whole graph."""
        return "\n".join([*self._lines, "}"]) + "\n"

    def _add(self, line: str) -> None:
        self._lines.append(_INDENT * self._depth + line)


def quoted(text: str) -> str:
    """A text as a string of DOT, in which nothing has a meaning of its own."""
    printable = "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in text)
    escaped = printable.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
