"""Single vertices, and their vertex groups.

Input: for each vertex its compute set, codelet, tile and connections, stored in flat lists. Output: for a compute set
the `VertexGroup`s of the runtime: the vertices of one codelet whose fields have equal shapes, on one IPU, are one group
with an axis "vertex" of a block each. A field with equal connections in all of them has no index along that axis; any
other is one tensor with a row a vertex (see `stacking`).

Groups are built on request, and again after a change to a vertex of the compute set.
Limits: a write race inside a compute set is found here among the vertices of a group, else by the verifier.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ipujax.poplar.types import cast_values
from ipujax.poplar.vertex.codelets import (
    Shapes,
    codelet_with_state,
    connected_fields,
    field_number,
    num_elements,
    vertex_codelet,
    with_cycles,
)
from ipujax.poplar.vertex.stacking import is_same, repeated_element, stacked
from ipujax.poplar.vertex.vertex import NUM_DIMS, Vertex, VertexField
from ipujax.runtime.errors import GraphError, Place, VerifyError, shown_place, whole_number
from ipujax.runtime.graph import NO_TILE, Access, Axis, Codelet, ComputeSet, VertexGroup, block, element
from ipujax.runtime.not_copied import OfGraph
from ipujax.runtime.tensor import Origin, Tensor, concat, dtype_name, even_cuts
from ipujax.runtime.verify import element_name


class VertexRef(OfGraph):
    """A vertex of a graph; `vertex["name"]` is one of its fields."""

    __slots__ = ("number", "store")

    def __init__(self, store: VertexStore, number: int) -> None:
        self.store = store
        self.number = number

    def __getitem__(self, name: str) -> FieldRef:
        return FieldRef(self, field_number(self.codelet, name))

    @property
    def codelet(self) -> type[Vertex]:
        """Codelet of the vertex."""
        return self.store.codelets[self.number]

    def __repr__(self) -> str:
        return self.store.name(self.number)


class FieldRef(OfGraph):
    """A field of a vertex, for `connect`."""

    __slots__ = ("number", "vertex")

    def __init__(self, vertex: VertexRef, number: int) -> None:
        self.vertex = vertex
        self.number = number

    @property
    def field(self) -> VertexField:
        """Declaration of the field in the codelet."""
        return self.vertex.codelet.fields[self.number]

    def __repr__(self) -> str:
        return f"field {self.field.name} of {self.vertex!r}"


class VectorListTensors:
    """Connection of a vector list: its vectors as one tensor, and the length of each."""

    __slots__ = ("lengths", "tensor")

    def __init__(self, vectors: Sequence[Tensor]) -> None:
        self.tensor = concat(vectors)
        self.lengths = tuple(vector.size for vector in vectors)


class VertexStore:
    """All single vertices of a graph, by number."""

    def __init__(self, num_tiles: int, tiles_per_ipu: int) -> None:
        self._num_tiles = num_tiles
        self._tiles_per_ipu = tiles_per_ipu
        self.codelets: list[type[Vertex]] = []
        self._compute_sets: list[ComputeSet] = []
        self._ranks: list[int] = []  # number of each vertex in its compute set, for its name
        self._places: list[Place | None] = []
        self._tiles: list[int] = []
        self._connections: list[list[Any]] = []  # one a field: Tensor, VectorListTensors, number, or None
        self._estimates: dict[int, int] = {}
        self._members: dict[ComputeSet, list[int]] = {}  # vertices of each compute set
        # Groups of each compute set; an entry is dropped when a vertex of the set changes.
        self._groups: dict[ComputeSet, list[VertexGroup]] = {}
        self._codelets: dict[tuple[type[Vertex], Shapes], Codelet] = {}  # those without state

    def __len__(self) -> int:
        return len(self.codelets)

    def name(self, number: int) -> str:
        """Name of a vertex in errors."""
        compute_set = self._compute_sets[number]
        rank = self._ranks[number]
        return f"vertex {rank} ({self.codelets[number].vertex_name}) of compute set {compute_set.name}"

    def add(self, compute_set: ComputeSet, cls: type[Vertex], place: Place | None) -> VertexRef:
        """Add a vertex without connections or tile."""
        number = len(self.codelets)
        self.codelets.append(cls)
        self._compute_sets.append(compute_set)
        self._places.append(place)
        self._tiles.append(NO_TILE)
        self._connections.append([None] * len(cls.fields))
        members = self._members.setdefault(compute_set, [])
        self._ranks.append(len(members))
        members.append(number)
        self._groups.pop(compute_set, None)  # built again at the next request
        return VertexRef(self, number)

    def remove_last(self, vertex: VertexRef) -> None:
        """Remove the vertex that was added last."""
        assert vertex.number == len(self.codelets) - 1, "only the last vertex can be removed"
        compute_set = self._compute_sets[-1]
        for table in (self.codelets, self._compute_sets, self._ranks, self._places, self._tiles, self._connections):
            table.pop()
        self._members[compute_set].pop()
        self._groups.pop(compute_set, None)

    def number_of(self, vertex: Any) -> int:
        """Number of a vertex; raises GraphError for anything but a vertex of this graph."""
        if not isinstance(vertex, VertexRef):
            raise GraphError(f"{vertex!r} must be a vertex", expected="a result of graph.add_vertex")
        if vertex.store is not self:
            raise GraphError(f"{vertex!r} belongs to another graph")
        return vertex.number

    def field_numbers_of(self, field: Any) -> tuple[int, int]:
        """Return the numbers of a vertex and of its field; raises GraphError for anything but a field of this graph."""
        if not isinstance(field, FieldRef):
            names = [f.name for f in field.codelet.fields] if isinstance(field, VertexRef) else []
            hint = " or ".join(f'vertex["{name}"]' for name in names)
            raise GraphError(f"{field!r} must be a field of a vertex", expected='vertex["name"]', hint=hint or None)
        return self.number_of(field.vertex), field.number

    def connect(self, vertex: int, field_index: int, tensors: Any) -> None:
        """Connect a field to a tensor, a vector list to several; raises GraphError for a misfit or a second one."""
        field = self.codelets[vertex].fields[field_index]
        if self._connections[vertex][field_index] is not None:
            defect = "has a value already" if field.is_state else "is connected twice"
            raise GraphError(f"field {field.name} of {self.name(vertex)} {defect}")
        if field.is_state:
            raise GraphError(
                f"field {field.name} of {self.name(vertex)} is state, not connected to tensors",
                hint="graph.set_initial_value",
            )
        # Checked before anything changes, so that a refused connection leaves the vertex as it was.
        self._connections[vertex][field_index] = self._check_connection(vertex, field, tensors)
        self._groups.pop(self._compute_sets[vertex], None)

    def set_state(self, vertex: int, field_index: int, value: Any) -> None:
        """Set the value of a state field; raises GraphError for a connected field, or more than one number."""
        field = self.codelets[vertex].fields[field_index]
        if not field.is_state:
            raise GraphError(f"field {field.name} of {self.name(vertex)} is not state", hint="graph.connect")
        message = f"value of {field.name} of {self.name(vertex)}"
        number = cast_values(value, field.dtype, message)
        if number.shape != ():
            raise GraphError(message, expected="one number", got=f"shape {number.shape}")
        self._connections[vertex][field_index] = number[()]
        self._groups.pop(self._compute_sets[vertex], None)

    def set_tile(self, vertex: int, tile: int) -> None:
        """Map a vertex to a tile of the target."""
        self._tiles[vertex] = whole_number(tile, f"{self.name(vertex)} is mapped to tile {tile}", self._num_tiles - 1)
        self._groups.pop(self._compute_sets[vertex], None)

    def set_estimate(self, vertex: int, cycles: int) -> None:
        """Set the cycles of one run of a vertex on a worker, 0 to `MAX_COUNT`."""
        self._estimates[vertex] = whole_number(cycles, f"cycles of {self.name(vertex)}")
        self._groups.pop(self._compute_sets[vertex], None)

    def _check_connection(self, vertex: int, field: VertexField, tensors: Any) -> Any:
        """Return the connection of a field by its kind: a tensor, or the tensors of a vector list."""
        if field.kind != "list":
            return self._checked_tensor(vertex, field, tensors)
        if isinstance(tensors, Tensor) and tensors.ndim == 2:
            tensors = list(tensors)  # its rows
        if not isinstance(tensors, list | tuple) or not tensors:
            raise self._misfit(vertex, field, "vectors, or one tensor of two dimensions", tensors)
        return VectorListTensors([self._checked_tensor(vertex, field, vector) for vector in tensors])

    def _checked_tensor(self, vertex: int, field: VertexField, tensor: Any) -> Tensor:
        """Return a connected tensor in the rank of its field; refuse another type or shape."""
        num_dims = NUM_DIMS[field.kind]
        if not isinstance(tensor, Tensor):
            raise self._misfit(vertex, field, "a tensor", tensor)
        if tensor.dtype != field.dtype:
            raise self._misfit(vertex, field, dtype_name(field.dtype), dtype_name(tensor.dtype))
        if tensor.ndim == num_dims:
            return tensor
        if num_dims == 0 and tensor.size == 1:  # a view of one element, such as x[0:1]
            return tensor.reshape(())
        expected = "one element" if num_dims == 0 else "one dimension"
        raise self._misfit(vertex, field, expected, f"shape {list(tensor.shape)}")

    def _misfit(self, vertex: int, field: VertexField, expected: str, got: object) -> GraphError:
        message = f"field {field.name} of {self.name(vertex)} does not match its connection"
        return GraphError(message, expected=expected, got=got)

    def groups(self, compute_set: ComputeSet) -> list[VertexGroup]:
        """Return the vertex groups of a compute set; raises GraphError for unmapped vertices or unconnected fields."""
        if compute_set not in self._members:
            return []
        if compute_set not in self._groups:
            by_shape = self._sort_by_shape(self._members[compute_set])
            self._groups[compute_set] = [self._build_group(cls, shapes, v) for (cls, shapes, _), v in by_shape.items()]
        return self._groups[compute_set]

    def _sort_by_shape(self, vertices: list[int]) -> dict[tuple[type[Vertex], Shapes, int], list[int]]:
        """Return the vertices that can be one group: of one codelet and IPU, with connections of equal shapes."""
        vertices_by_shape: dict[tuple[type[Vertex], Shapes, int], list[int]] = {}
        # Once a class, not once a vertex: a graph may have 100,000 of them.
        connected = {cls: _connected_numbers(cls) for cls in {self.codelets[v] for v in vertices}}
        for vertex in vertices:
            cls = self.codelets[vertex]
            tile = self._tiles[vertex]
            row = self._connections[vertex]
            if tile == NO_TILE:
                raise GraphError(
                    f"{self.name(vertex)} has no tile", where=self._where(vertex), hint="graph.set_tile_mapping"
                )
            if None in row and any(row[n] is None for n, _ in connected[cls]):
                raise self._unconnected(vertex)
            shapes = tuple([row[n].shape if is_one_tensor else row[n].lengths for n, is_one_tensor in connected[cls]])
            vertices_by_shape.setdefault((cls, shapes, tile // self._tiles_per_ipu), []).append(vertex)
        return vertices_by_shape

    def _unconnected(self, vertex: int) -> GraphError:
        pairs = zip(self.codelets[vertex].fields, self._connections[vertex], strict=True)
        names = [field.name for field, connection in pairs if connection is None and not field.is_state]
        message = f"field {', '.join(names)} of {self.name(vertex)} is not connected"
        return GraphError(message, where=self._where(vertex), hint="graph.connect")

    def _where(self, vertex: int) -> str | None:
        place = self._places[vertex]
        return None if place is None else shown_place(place)

    def _build_group(self, cls: type[Vertex], shapes: Shapes, vertices: list[int]) -> VertexGroup:
        """Build the group of vertices that `_sort_by_shape` puts together: a block each along the axis "vertex"."""
        rows = [self._connections[v] for v in vertices]
        fields = [
            (field, shape, [_tensor(row[number]) for row in rows])
            for (field, shape, number) in zip(
                connected_fields(cls), shapes, [n for n, _ in _connected_numbers(cls)], strict=True
            )
            if num_elements(field, shape)  # the codelet has no field for an empty connection
        ]
        # One axis for each size of a block dimension: dimensions of equal size share it, and none is cut.
        extents = sorted({n for _, _, tensors in fields for n in tensors[0].shape})
        axes = [Axis("vertex", even_cuts(len(vertices), len(vertices)))]
        axes += [Axis(f"n{n}", even_cuts(n, 1)) for n in extents]
        accesses = []
        for field, _, tensors in fields:
            dims = tuple(element(1 + extents.index(n)) for n in tensors[0].shape)
            # A shared write would be a race, so only a single vertex writes a tensor without the axis "vertex".
            is_plain = len(tensors) == 1 and tensors[0].is_writable if field.is_written else is_same(tensors)
            if is_plain:
                accesses.append(Access(tensors[0], dims))
            else:
                accesses.append(Access(self._stack_tensors(field, tensors, vertices), (block(0), *dims)))
        tile = np.array([self._tiles[v] for v in vertices], np.int32).reshape(-1, *(1 for _ in extents))
        state = {f.attribute: self._state_values(f, n, vertices) for n, f in enumerate(cls.fields) if f.is_state}
        # A state of each vertex is a table in the codelet, which the block number of "vertex" indexes.
        codelet = codelet_with_state(cls, shapes, state) if state else self._codelet_without_state(cls, shapes)
        if not self._estimates.keys().isdisjoint(vertices):
            cycles = np.array([self._estimates.get(v, -1) for v in vertices], np.int64)
            codelet = with_cycles(codelet, cycles.reshape(tile.shape))
        origin = Origin.at(self._places[vertices[0]])
        return VertexGroup(codelet, tuple(axes), tuple(accesses), tile, ("vertex",) if state else (), origin)

    def _codelet_without_state(self, cls: type[Vertex], shapes: Shapes) -> Codelet:
        """Return the codelet of all such vertices of the graph: its code is in the memory of a tile once."""
        key = cls, shapes
        if key not in self._codelets:
            self._codelets[key] = vertex_codelet(cls, shapes)
        return self._codelets[key]

    def _stack_tensors(self, field: VertexField, tensors: list[Tensor], vertices: list[int]) -> Tensor:
        """Return the stacked tensor of a field; a written field may have no repeated element."""
        tensor = stacked(tensors)
        if not field.is_written or tensor.is_writable:
            return tensor
        repetition = repeated_element(tensor)
        assert repetition is not None, "a stacked tensor that is not writable has a repeated element"
        variable, flat, row, duplicate_row = repetition
        vertex = vertices[row]
        duplicate = vertices[duplicate_row]
        names = f"{self.name(vertex)}, added at {self._where(vertex)}, and {self.name(duplicate)}"
        raise VerifyError(
            "write-race",
            f"{element_name(flat, {variable: 0})} is written twice through field {field.name}, by {names}",
            where=self._where(duplicate),
            expected="disjoint regions",
        )

    def _state_values(self, field: VertexField, field_number: int, vertices: list[int]) -> np.ndarray:
        """Return the value of a state field of each vertex, its own or the codelet's default; refuse none."""
        set_values = [self._connections[v][field_number] for v in vertices]
        values = [field.default if value is None else value for value in set_values]
        if None in values:
            vertex = vertices[values.index(None)]
            raise GraphError(
                f"state {field.name} of {self.name(vertex)} has no value",
                where=self._where(vertex),
                hint="graph.set_initial_value, or a default in the codelet",
            )
        return np.array(values).astype(field.dtype)


def _connected_numbers(cls: type[Vertex]) -> list[tuple[int, bool]]:
    """Number of each connected field, and True if its connection is one tensor."""
    return [(number, field.kind != "list") for number, field in enumerate(cls.fields) if not field.is_state]


def _tensor(connection: Any) -> Tensor:
    return connection.tensor if isinstance(connection, VectorListTensors) else connection
