"""Poplar's `Graph`: variables, tile mapping by slices, vertices one by one, codelets, and names for the host.

It is a graph of the runtime and works wherever one does: op libraries, `compile`, the engine and the tile interpreter.
`mappings` and `groups` are up to date after each addition. Variables and vertices have only the tiles that the user
gave them, except for the results of library operations.

Methods have Poplar's names in snake_case and Poplar's order of arguments. `add_variable(FLOAT, [4], "v1")` may also be
called as the runtime does, `add_variable((4,), dtype, "v1", mapping)`; so may `add_constant`.

Replicas in both ways of the guide: `Graph(target, replication_factor=4)` is one replica of a whole system, compiled
once; `graph.create_replicated_graph(4)` puts all replicas in one graph.

A variable of a replicated graph is a template: the parent has one instance of it for each replica r, mapped to tile r ·
tiles + t for tile t of the template. Vertices are in the parent's compute sets once a replica. Programs may use
templates; the engine expands each node to one that runs in all replicas (see `engine_programs`). The parent stays
usable by itself, also in the same compute sets and copies; its later changes of one replica are not visible in
templates.

Source: Poplar & PopLibs user guide, tutorials 1 to 7, "Replicated graphs"; poplar::Graph.
Limits: the two ways cannot be combined.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np

from ipujax.poplar.graph.graph_base import SHARED, GraphBase
from ipujax.poplar.graph.groups import TemplateGroups, all_replicas, replicated_graph_of, share_of_tiles
from ipujax.poplar.graph.mapping import Placement
from ipujax.poplar.graph.virtual import VirtualBase, chosen_tiles
from ipujax.runtime.errors import GraphError
from ipujax.runtime.graph import NO_TILE, ComputeSet, VertexGroup, check_owned
from ipujax.runtime.tensor import Tensor, TileMapping, Variable, renumber_tiles, substitute


class ReplicatedBase(GraphBase):
    """Base of graphs that are copied to each share of a parent's tiles.

    Args:
        parent: the graph that it is a view of.
        replicas: number of copies.

    Attributes:
        replicas: number of copies.
        instances: for each template the parent's variable of each replica.
    """

    def __init__(self, parent: GraphBase, replicas: int) -> None:
        if parent.replication_factor > 1:
            raise GraphError("a replicated graph cannot be replicated again", expected="a graph that is not replicated")
        super().__init__(share_of_tiles(parent.target, replicas))
        self.replication_factor = self.replicas = replicas
        self._parent = parent
        self.instances: dict[Variable, tuple[Variable, ...]] = {}
        # For each replica: its instance of each template.
        self._tables: list[dict[Variable, Variable]] = [{} for _ in range(replicas)]
        # int32[replicas, tiles of a replica]: the parent's number of each tile.
        tiles = np.arange(parent.target.num_tiles, dtype=np.int32).reshape(replicas, -1)
        self._tiles_in_top = parent._tiles_in_top_level()[tiles]
        self._groups_by_replica: dict[VertexGroup, tuple[VertexGroup, ...]] = {}
        for shared in SHARED:
            setattr(self, shared, getattr(parent, shared))
        self._placement = _TemplatePlacement(self, parent, tiles)
        self.groups = TemplateGroups(self.vertices, parent.groups)
        parent._top().replicated.append(self)

    def _top(self) -> GraphBase:
        return self._parent._top()

    def _tiles_in_top_level(self) -> np.ndarray:
        raise AssertionError("a tile of a replicated graph is a tile of each replica")

    def _add(self, variable: Variable, mapping: TileMapping | None) -> Tensor:
        instances = tuple(self._instance(variable, replica) for replica in range(self.replicas))
        self.instances[variable] = instances
        for table, instance in zip(self._tables, instances, strict=True):
            self._parent._add(instance, None)
            table[variable] = instance
        return super()._add(variable, mapping)

    def _instance(self, variable: Variable, replica: int) -> Variable:
        # A new object each: variables are compared by identity.
        if variable.by_replica:
            return replace(variable, value=variable.value[replica], by_replica=False)
        return replace(variable)

    def in_replica(self, tensor: Tensor, replica: int) -> Tensor:
        """Return the instance of a template in one replica; a tensor that is not a template stays as it is."""
        return substitute(tensor, self._tables[replica])

    def set_tile_mapping(self, what: Any, mapping: Any) -> None:
        tensor = Tensor.of(what) if isinstance(what, Variable) else what
        if isinstance(tensor, Tensor):
            check_owned(self, [tensor], "graph.set_tile_mapping")
            for variable in tensor.variables():
                if variable not in self.instances:
                    message = f"{variable!r} is not of this replicated graph"
                    raise GraphError(message, hint="map it in the graph that it was added to")
        super().set_tile_mapping(what, mapping)

    def add_compute_set(self, name: str) -> ComputeSet:
        with self._parent.debug_origin(self.origin):
            return self._parent.add_compute_set(name)

    def group_in_replica(self, group: VertexGroup, replica: int) -> VertexGroup:
        """Return the vertices of a group of this graph in one replica, on tiles of the top-level graph."""
        if group not in self._groups_by_replica:
            self._groups_by_replica[group] = tuple(
                self._group_on_tiles_of(group, number) for number in range(self.replicas)
            )
        return self._groups_by_replica[group][replica]

    def _group_on_tiles_of(self, group: VertexGroup, replica: int) -> VertexGroup:
        tile = np.where(group.tile == NO_TILE, NO_TILE, self._tiles_in_top[replica][group.tile]).astype(np.int32)
        accesses = (replace(access, tensor=self.in_replica(access.tensor, replica)) for access in group.accesses)
        return replace(group, tile=tile, accesses=tuple(accesses))

    def groups_of_replicas(self, compute_set: ComputeSet) -> list[VertexGroup]:
        """Return the vertex groups of all replicas in a compute set, on tiles of the top-level graph."""
        groups = self.groups[compute_set]
        return [self.group_in_replica(group, replica) for replica in range(self.replicas) for group in groups]


class _TemplatePlacement(Placement):
    """Tile mappings of templates, in tiles of a replica; maps their instances to the parent's tiles."""

    def __init__(self, graph: ReplicatedBase, parent: GraphBase, tiles: np.ndarray) -> None:
        super().__init__()
        self._template_placement = Placement()
        self._graph = graph
        self._parent = parent
        self._tiles = tiles

    def mappings(self) -> dict[Variable, TileMapping]:
        return self._template_placement.mappings()

    def place_variable(self, variable: Variable, mapping: TileMapping) -> None:
        self._template_placement.place_variable(variable, mapping)
        for instance, tiles in zip(self._graph.instances[variable], self._tiles, strict=True):
            instance_mapping = renumber_tiles(mapping, tiles)
            assert instance_mapping is not None, "the mapping was checked against the target of a replica"
            self._parent._placement.place_variable(instance, instance_mapping)

    def place(self, tensor: Tensor, tile: int | np.ndarray) -> None:
        self._template_placement.place(tensor, tile)
        for replica, tiles in enumerate(self._tiles):
            parent_tile = tiles[tile]
            instance = self._graph.in_replica(tensor, replica)
            self._parent._placement.place(instance, parent_tile if isinstance(tile, np.ndarray) else int(parent_tile))

    def tiles(self, tensor: Tensor) -> np.ndarray:
        return self._template_placement.tiles(tensor)


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
