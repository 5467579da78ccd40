"""Builder: the graph and the program to which an operation is added, and its debug name."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ipujax.runtime.graph.graph import Graph
from ipujax.runtime.graph.program import Sequence


@dataclass(frozen=True, slots=True)
class Builder:
    """Graph and program to which an operation is added, and its debug name.

    Every operation of `popops`, `poplin`, `poprand` and `gcl` in `lowering` takes one as its first argument.
    """

    graph: Graph
    prog: Sequence
    name: str

    def named(self, part: str) -> Builder:
        """Return a builder of a part of the operation, named `name/part`."""
        return replace(self, name=f"{self.name}/{part}")

    def into(self, prog: Sequence) -> Builder:
        """Return a builder that adds to another program of the graph."""
        return replace(self, prog=prog)
