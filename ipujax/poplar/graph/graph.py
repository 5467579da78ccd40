"""Poplar's `Graph`: variables, tile mapping by slices, vertices one by one, codelets, and names for the host.

It is a graph of the runtime and works wherever one does: op libraries, `compile`, the engine and the tile interpreter.
`mappings` and `groups` are up to date after each addition. Variables and vertices have only the tiles that the user
gave them, except for the results of library operations.

Methods have Poplar's names in snake_case and Poplar's order of arguments. `add_variable(FLOAT, [4], "v1")` may also be
called as the runtime does, `add_variable((4,), dtype, "v1", mapping)`; so may `add_constant`.

Replicas in both ways of the guide: `Graph(target, replication_factor=4)` is one replica of a whole system, compiled
once; `graph.create_replicated_graph(4)` puts all replicas in one graph (see `replicated_graphs`).

Source: Poplar & PopLibs user guide, tutorials 1 to 7, "Replicated graphs"; poplar::Graph.
Limits: the two ways cannot be combined.
"""

from __future__ import annotations

from collections.abc import Iterable

from ipujax.poplar.graph.graph_base import GraphBase
from ipujax.poplar.graph.replica_tensors import all_replicas, replicated_graph_of
from ipujax.poplar.graph.replicated_graphs import ReplicatedBase
from ipujax.poplar.graph.virtual import VirtualBase, chosen_tiles
from ipujax.runtime.errors import GraphError
from ipujax.runtime.graph import check_owned
from ipujax.runtime.tensor import Tensor

# The hint of errors of `replication_factor`, which gives each replica a graph without a parent.
_REPLICATED_GRAPH_HINT = "Graph(target).create_replicated_graph(n), which keeps a graph of all replicas"


class Graph(GraphBase):
    """A graph for one target, built by hand.

    Args:
        target: the machine, or a device for its machine.
        replication_factor: number of copies of the graph, each on an equal share of the machine's IPUs.

    Raises:
        GraphError: a number of replicas that does not divide the IPUs.
    """

    def get_top_level_graph(self) -> Graph:
        """Return the graph that this graph is a view of, or this graph itself.

        Raises:
            GraphError: replicas made by `replication_factor`, which have no parent graph.
        """
        top = self._top()
        assert isinstance(top, Graph)
        if top.replication_factor > 1:
            raise GraphError("replicas of a top-level graph have no graph above them", hint=_REPLICATED_GRAPH_HINT)
        return top

    def create_virtual_graph(self, tiles: int | Iterable[int], upper: int | None = None) -> VirtualGraph:
        """Return a view of this graph that has some of its tiles, numbered from 0.

        Args:
            tiles: with `upper`, the first tile of a range; else the tiles to have of every IPU, as a number, or a list
                of tiles.
            upper: one past the last tile of the range.

        Raises:
            GraphError: tiles the target lacks or named twice, or not equally many of each IPU.
        """
        return VirtualGraph(self, chosen_tiles(self.target, tiles, upper))

    def create_replicated_graph(self, replicas: int) -> ReplicatedGraph:
        """Return a graph of copies, each on an equal share of this graph's tiles; additions apply to all copies.

        Args:
            replicas: number of copies; divides the IPUs, or the tiles of a single one.

        Raises:
            GraphError: a number that does not divide them, or a graph that is replicated already.
        """
        return ReplicatedGraph(self, replicas)

    def get_non_replicated_tensor(self, tensor: Tensor) -> Tensor:
        """Return a tensor of all replicas, `[replicas, *shape]`, for one of a graph by `create_replicated_graph`.

        Raises:
            GraphError: a tensor of no such graph.
        """
        top = self._top()
        if top.replication_factor > 1:
            raise GraphError(
                "replicas of a top-level graph have no graph that sees them all", hint=_REPLICATED_GRAPH_HINT
            )
        check_owned(self, [tensor], "graph.get_non_replicated_tensor")
        if replicated_graph_of(top, tensor) is None:
            raise GraphError(f"{tensor!r} does not belong to a replicated graph", hint="graph.create_replicated_graph")
        return all_replicas(top, tensor)


class VirtualGraph(VirtualBase, Graph):
    """A view of a graph with some of its tiles; made by `Graph.create_virtual_graph`."""


class ReplicatedGraph(ReplicatedBase, Graph):
    """Copies of one graph on shares of a parent's tiles; made by `Graph.create_replicated_graph`."""
