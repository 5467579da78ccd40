"""Base of Poplar's graphs and their views: variables, tile mappings, single vertices, codelets.

Input: additions of a user. Output: a graph of the runtime, complete after each addition. Variables and vertices have
only the tiles that the user gave them, except for the results of library operations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

import numpy as np

from ipujax.poplar.device import Device, Target
from ipujax.poplar.graph.groups import Groups, all_replicas, in_each_replica, share_of_ipus
from ipujax.poplar.graph.host_side import HostSide
from ipujax.poplar.graph.mapping import UNMAPPED, Interval, Placement, intervals_of_tiles, tiles_of_intervals
from ipujax.poplar.types import fill_array, type_and_shape
from ipujax.poplar.vertex import FieldRef, Vertex, VertexRef, VertexStore, codelets_in, field_number
from ipujax.runtime.errors import GraphError, MappingError, user_place
from ipujax.runtime.graph import ComputeSet, VertexGroup, check_group, check_owned, described_gap, tensors_in
from ipujax.runtime.target import Target as RuntimeTarget, nearest
from ipujax.runtime.tensor import Blocked, Flat, Origin, Tensor, TileMapping, Variable, check_mapping

# Attributes that a graph shares with its views: one object each, so that additions to either are visible in both.
SHARED = ("notes", "codelets", "host_writes", "host_reads", "streams", "remote_buffers", "initial_values",
          "owner")  # fmt: skip


class GraphBase(HostSide):
    """Base of graphs and their views.

    Args:
        target: the machine, or a device for its machine.
        replication_factor: number of copies of the graph, each on an equal share of the machine's IPUs.

    Raises:
        GraphError: a number of replicas that does not divide the IPUs.
    """

    maps_automatically = False

    def __init__(self, target: RuntimeTarget | Device, replication_factor: int = 1) -> None:
        machine = target.target if isinstance(target, Device) else Target.of(target)
        machine = Target.of(share_of_ipus(machine, replication_factor))
        self._placement = Placement()
        super().__init__(machine, replication_factor)
        self.vertices = VertexStore(machine.num_tiles, machine.tiles_per_ipu)
        self.groups = groups = Groups(self.vertices)
        self.replicated = groups.replicated
        self.owner = object()
        self.codelets: dict[str, type[Vertex]] = {}
        self.initial_values: dict[Variable, np.ndarray] = {}

    def get_target(self) -> Target:
        """Return the machine the graph is built for."""
        return Target.of(self.target)

    def _top(self) -> GraphBase:
        """Return the top-level graph, which is compiled."""
        return self

    def _tiles_in_top_level(self) -> np.ndarray:
        """Return the top-level graph's number of each tile, int32[num_tiles]."""
        return np.arange(self.target.num_tiles, dtype=np.int32)

    def _for_host(self, tensor: Tensor) -> Tensor:
        return all_replicas(self._top(), tensor)

    def get_replication_factor(self) -> int:
        """Return the number of replicas of the graph."""
        return self.replication_factor

    @property
    def origin(self) -> Origin:
        """The origin of additions: set by `debug_origin`, else the user's current line."""
        return self.scope.origin if self.scope.origin != Origin() else Origin.at(user_place())

    # --- variables ---

    def add_variable(  # type: ignore[override]
        self,
        dtype: Any,
        shape: Any,
        name: str = "",
        mapping: TileMapping | None = None,
        monoid: str | None = None,
    ) -> Tensor:
        """Add a variable; by default without a tile mapping.

        Args:
            dtype: type of its elements, `FLOAT`, `INT`…
            shape: sizes of its dimensions.
            name: debug name.
            mapping: tile mapping as `ipujax.runtime` has it; None leaves the variable unmapped.
            monoid: see `Variable.monoid`.

        Returns:
            A tensor of the entire variable.

        Raises:
            GraphError: an invalid type or shape.
        """
        dtype, shape = type_and_shape(dtype, shape, name)
        return super().add_variable(shape, dtype, name, mapping, monoid)

    def add_constant(  # type: ignore[override]
        self, dtype: Any, shape: Any = "", values: Any = None, name: str = "", mapping: TileMapping | None = None
    ) -> Tensor:
        """Add a constant: `add_constant(FLOAT, [4], [1, 1.5, 2, 2.5], "c1")`.

        Args:
            dtype: type of its elements.
            shape: sizes of its dimensions.
            values: one for all elements, or one for each in row-major order.
            name: debug name.
            mapping: tile mapping in the runtime's form; None leaves the constant unmapped.

        Raises:
            GraphError: another number of values than the shape has elements.
        """
        if not isinstance(dtype, np.dtype | type):  # as the runtime calls it: value, name, mapping
            return super().add_constant(dtype, name or str(shape), mapping if mapping is not None else values)
        dtype, shape = type_and_shape(dtype, shape, name)
        return super().add_constant(fill_array(values, shape, dtype, f"constant {name or 'unnamed'}"), name, mapping)

    def clone(self, tensor: Tensor, name: str = "") -> Tensor:
        """Add a variable with the shape, type and tile mapping of a tensor.

        Raises:
            MappingError: an element of the tensor is mapped to no tile.
        """
        check_owned(self, [tensor], "graph.clone")
        mapping = self._tiles_of(tensor)  # first: a tensor without tiles adds no variable
        variable = super().add_variable(tensor.shape, tensor.dtype, name)
        self.set_tile_mapping(variable, mapping)
        return variable

    def set_initial_value(self, what: Tensor | FieldRef, value: Any) -> None:
        """Set the value of a tensor before the first program runs, or of a state field of a vertex.

        Args:
            what: a tensor, or a state field `vertex["name"]`.
            value: one number for all elements, or an array of the tensor's size.

        Raises:
            GraphError: another number of values than elements, or a constant.
        """
        if isinstance(what, FieldRef):
            self.vertices.set_state(*self.vertices.field_numbers_of(what), value)
            return
        check_owned(self, [what], "graph.set_initial_value")
        # One value for all replicas.
        flat = np.asarray(fill_array(value, what.shape, what.dtype, repr(what))).reshape(-1)
        for tensor in in_each_replica(self._top(), what):
            self._set_initial_elements(tensor, flat)

    def _set_initial_elements(self, tensor: Tensor, values: np.ndarray) -> None:
        # Arrays [size]: the number of the variable in `variables()`, and the flat element in it.
        which, index = (indices.reshape(-1) for indices in tensor.flat_indices())
        for number, variable in enumerate(tensor.variables()):
            if variable.is_constant:
                raise GraphError(f"{variable!r} is a constant", expected="a variable")
            # Elements without an initial value are zero, as memory that was never written.
            array = self.initial_values.setdefault(variable, np.zeros(variable.shape, variable.dtype))
            array.reshape(-1)[index[which == number]] = values[which == number]

    # --- tile mapping ---

    @property
    def mappings(self) -> dict[Variable, TileMapping]:
        """Tile mapping of every variable whose elements are all mapped."""
        return self._placement.mappings()

    @mappings.setter
    def mappings(self, mappings: dict[Variable, TileMapping]) -> None:
        for variable, mapping in mappings.items():
            self._placement.place_variable(variable, mapping)

    def set_tile_mapping(self, what: Any, mapping: Any) -> None:
        """Map a tensor, or a vertex, to tiles.

        Args:
            what: a tensor (any view), a vertex, or a variable.
            mapping: a tile; for a tensor also, for every tile, the `(begin, end)` intervals of its flat elements, as
                `get_tile_mapping` gives them, or the tile of each element as an array; for all of a variable also a
                mapping of the runtime.

        Raises:
            MappingError: a tile the target lacks, or elements mapped to no tile or to two.
            GraphError: a value that is neither a tensor nor a vertex.
        """
        if isinstance(what, VertexRef):
            self.vertices.set_tile(self.vertices.number_of(what), mapping)
            return
        if isinstance(mapping, Blocked | Flat):
            variable = _mapped_variable(what)
            check_owned(self, [Tensor.of(variable)], "graph.set_tile_mapping")
            check_mapping(mapping, variable.shape, self.target.num_tiles, repr(variable))
            self._placement.place_variable(variable, mapping)
            return
        tensor = Tensor.of(what) if isinstance(what, Variable) else what
        if not isinstance(tensor, Tensor):
            raise GraphError("invalid `what` of a tile mapping", expected="a tensor or a vertex", got=repr(what))
        check_owned(self, [tensor], "graph.set_tile_mapping")
        self._placement.place(tensor, self._check_tiles(tensor, mapping))

    def _check_tiles(self, tensor: Tensor, mapping: Any) -> int | np.ndarray:
        """Return the tile, or the tile of each element, from any form of mapping; refuse tiles the target lacks."""
        num_tiles = self.target.num_tiles
        if isinstance(mapping, int | np.integer):
            low = high = int(mapping)
        elif isinstance(mapping, np.ndarray):
            mapping = mapping.reshape(-1)
            if mapping.size != tensor.size or mapping.dtype.kind not in "iu":
                got = f"{mapping.size} of {mapping.dtype}"
                raise MappingError(f"mapping of {tensor!r}", expected=f"{tensor.size} tiles", got=got)
            low, high = (int(mapping.min()), int(mapping.max())) if mapping.size else (0, 0)
        elif isinstance(mapping, list | tuple) and all(isinstance(intervals, list | tuple) for intervals in mapping):
            return tiles_of_intervals(mapping, tensor.size, num_tiles, repr(tensor))
        else:
            expected = "a tile, an array of the tile of each element, or for each tile a list of (begin, end)"
            raise MappingError(f"mapping of {tensor!r}", expected=expected, got=repr(mapping))
        if low < 0 or high >= num_tiles:
            message = f"{tensor!r} is mapped to a tile the target lacks"
            raise MappingError(message, expected=f"0 … {num_tiles - 1}", got=low if low < 0 else high)
        return int(mapping) if isinstance(mapping, int | np.integer) else mapping

    def get_tile_mapping(self, tensor: Tensor) -> list[list[Interval]]:
        """Return for every tile the `(begin, end)` intervals of a tensor's flat elements that are mapped to it.

        Raises:
            MappingError: an element that is mapped to no tile.
        """
        check_owned(self, [tensor], "graph.get_tile_mapping")
        return intervals_of_tiles(self._tiles_of(tensor), self.target.num_tiles)

    def _tiles_of(self, tensor: Tensor) -> np.ndarray:
        tiles = self._placement.tiles(tensor)
        missing = np.flatnonzero(tiles == UNMAPPED)
        if missing.size:
            gap = described_gap(self, repr(tensor), missing, tensor.size)
            raise MappingError(gap.what, expected=gap.expected, got=gap.got, hint=gap.hint)
        return tiles

    @property
    def elements_left_out(self) -> dict[Variable, np.ndarray]:  # type: ignore[override]
        """Elements without a tile of every variable that is mapped in part."""
        return self._placement.elements_left_out()

    def elements_without_tile(self, variable: Variable) -> np.ndarray:
        return np.flatnonzero(self._placement.tiles(Tensor.of(variable)) == UNMAPPED)

    # --- codelets and vertices ---

    def add_codelets(self, source: type[Vertex] | ModuleType | Sequence[type[Vertex]]) -> None:
        """Register codelets by their names.

        Args:
            source: a codelet class, several, or a module: all codelets it defines.

        Raises:
            GraphError: a value that is not a codelet, or another codelet of the same name.
        """
        for cls in codelets_in(source):
            if self.codelets.setdefault(cls.vertex_name, cls) is not cls:
                namesakes = [self.codelets[cls.vertex_name], cls]
                raise GraphError(f"two codelets are called {cls.vertex_name}", got=namesakes)

    def add_vertices(self, compute_set: ComputeSet, group: VertexGroup) -> None:
        """Add all vertices of a group of the runtime to a compute set; see `ipujax.runtime.graph.graph.Graph`."""
        self.check_compute_set(compute_set)
        check_group(group, compute_set)
        self._groups_added(compute_set).append(group)

    def _groups_added(self, compute_set: ComputeSet) -> list[VertexGroup]:
        groups = self.groups
        assert isinstance(groups, Groups)
        return groups.added(compute_set)

    def add_vertex(
        self, compute_set: ComputeSet, codelet: str | type[Vertex], connections: Mapping[str, Any] | None = None
    ) -> VertexRef:
        """Add one vertex to a compute set.

        Args:
            compute_set: of this graph.
            codelet: the name of a codelet that was added, or a codelet class.
            connections: by field, the tensor to connect; for a vector list a list of tensors; for state its value.

        Returns:
            The vertex: `vertex["name"]` is a field, for `connect`.

        Raises:
            GraphError: an unknown codelet, compute set or field, or a tensor that does not fit its field.
        """
        self.check_compute_set(compute_set)
        vertex = self.vertices.add(compute_set, self._codelet(codelet), user_place())
        try:
            for name, connection in (connections or {}).items():
                self._connect(vertex, field_number(vertex.codelet, name), connection)
        except BaseException:
            # A vertex with a refused connection must not stay: the user may catch the error and go on.
            self.vertices.remove_last(vertex)
            raise
        return vertex

    def check_compute_set(self, compute_set: ComputeSet) -> None:
        """Check that a compute set is of this graph.

        Raises:
            GraphError: naming it.
        """
        if compute_set not in self.groups:
            name = getattr(compute_set, "name", repr(compute_set))
            raise GraphError(f"compute set {name} is not of this graph", hint="graph.add_compute_set")

    def _codelet(self, codelet: str | type[Vertex]) -> type[Vertex]:
        """Return a codelet by name, or the class itself, which is added to the graph at its first use."""
        if isinstance(codelet, str):
            if codelet not in self.codelets:
                expected = f"one of {sorted(self.codelets)}" if self.codelets else "graph.add_codelets first"
                message = f"no codelet {codelet!r}"
                hint = nearest(codelet, self.codelets)
                raise GraphError(message, expected=expected, got=repr(codelet), hint=hint)
            return self.codelets[codelet]
        if self.codelets.get(getattr(codelet, "vertex_name", "")) is not codelet:
            self.add_codelets(codelet)
        return codelet

    def _connect(self, vertex: VertexRef, number: int, connection: Any) -> None:
        check_owned(self, tensors_in(connection), "graph.add_vertex")
        store = self.vertices
        is_state = store.codelets[vertex.number].fields[number].is_state
        (store.set_state if is_state else store.connect)(vertex.number, number, connection)

    def connect(self, field: FieldRef, what: Tensor | Sequence[Tensor]) -> None:
        """Connect a field of a vertex.

        Args:
            field: `vertex["name"]`.
            what: a tensor; for a vector list several.

        Raises:
            GraphError: a field that is connected already, or a tensor of another type or shape than the field's.
        """
        check_owned(self, tensors_in(what), "graph.connect")
        self.vertices.connect(*self.vertices.field_numbers_of(field), what)

    def set_perf_estimate(self, vertex: VertexRef, cycles: int) -> None:
        """Set the cycles of one run of a vertex on its worker.

        Raises:
            GraphError: anything else than a whole number from 0 to 4,294,967,295.
        """
        self.vertices.set_estimate(self.vertices.number_of(vertex), cycles)

    set_cycle_estimate = set_perf_estimate  # its older name

    def add_replication_index_constant(self, name: str = "replication index") -> Tensor:
        """Add a constant, UNSIGNED_INT of no dimensions, that holds the number of its replica, unmapped.

        Args:
            name: debug name.
        """
        return self.add_replica_constant(np.arange(self.replication_factor, dtype=np.uint32), name)


def _mapped_variable(tensor: Any) -> Variable:
    if isinstance(tensor, Tensor) and tensor.is_whole_variable:
        return tensor.variables()[0]
    if not isinstance(tensor, Variable):
        raise MappingError(
            f"mapping of {tensor!r}",
            expected="a tensor that is all of one variable",
            hint="give the tile of each element",
        )
    return tensor
