"""The graph: variables, their tile mappings, and the vertex groups of each compute set.

A `Graph` is a builder. `compile` reads it and never writes it; a graph may grow and be compiled again.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np

from ipujax.runtime.cache import remembered
from ipujax.runtime.errors import GraphError
from ipujax.runtime.graph.forms import ComputeSet, HostStream, Program, RemoteBuffer
from ipujax.runtime.graph.graph_notes import Notes
from ipujax.runtime.graph.program import Function, Sequence as ProgramSequence
from ipujax.runtime.graph.vertex_group import VertexGroup, VertexPart, no_parts
from ipujax.runtime.not_copied import OfGraph
from ipujax.runtime.target import Target
from ipujax.runtime.tensor import Origin, Tensor, TileMapping, Variable, check_mapping, dtype_name

_MOST_ITERATIONS = 4  # assumed: iterations that divide the cost per byte; also those of a loop whose count is data
BYTE_COST_CYCLES = 0.5  # assumed: default cost per byte of data or code on the fullest tile


ReplicaAxes = tuple[tuple[str, int], ...]  # name and size, the last varying fastest


@remembered
def of_replicas(target: Target, replicas: int) -> Target:
    """Return the target of all replicas together, from that of one replica."""
    return target if replicas == 1 else target.replace(num_ipus=target.num_ipus * replicas)


@dataclass(frozen=True, slots=True, eq=False)
class Scope:
    """Place in the program where operations are added.

    Args:
        origin: of all that is added.
        parts: returns the equations that vertices compute, if these have several origins.
        iterations: runs of the operations, in the loops around them whose trip count is known.
        byte_cost_cycles: cost per byte on the fullest tile, which planners add.
    """

    origin: Origin = Origin()
    parts: Callable[[], tuple[VertexPart, ...]] = no_parts
    iterations: int = 1
    byte_cost_cycles: float = BYTE_COST_CYCLES


class Graph(OfGraph):
    """Variables, mappings and vertices for one target.

    Args:
        target: machine of one replica.
        replication_factor: number of replicas that run the graph, each on its own IPUs.
        byte_cost_cycles: cost per byte on the fullest tile, which planners add.
        io_tiles: number of tiles of each IPU, the last ones, that only move data; see `Options.io_tiles`.
        planned_tile_bytes: bytes that planners assume a tile has; those of the target when None.

    Attributes:
        off_chip: remote buffers for arguments of a call, or values between its steps, by their memory.
        emissions: results that operations have added, by operation and operands: equal ones are planned once.
        notes: what operations note of themselves, for profiles.
        scope: where in the program operations are added now.
        replica_axes: axes of a mesh whose devices the replicas are; none for others.
    """

    first_tile = 0  # of its tiles, in the graph that has the vertices, see `IpuView`
    next_tile = 0  # first tile of the next small variable
    maps_automatically = True  # whether operations may map variables that have no tile mapping
    owner: object = None  # of its variables, see `Variable.owner`
    tile_noun = "tile"  # of its tiles, in messages
    elements_left_out: Mapping[Variable, np.ndarray] = MappingProxyType({})  # by variables that are mapped in part
    replica_axes: ReplicaAxes = ()
    keeps_layouts = False  # whether elementwise results are mapped as an operand is, however few tiles that uses

    def __init__(
        self,
        target: Target,
        replication_factor: int = 1,
        byte_cost_cycles: float = BYTE_COST_CYCLES,
        io_tiles: int = 0,
        planned_tile_bytes: int | None = None,
    ) -> None:
        self.target = target
        self.replication_factor = replication_factor
        self.io_tiles = io_tiles
        self.planned_tile_bytes = target.bytes_per_tile if planned_tile_bytes is None else planned_tile_bytes
        self.variables: list[Variable] = []
        self.mappings: dict[Variable, TileMapping] = {}
        self.groups: dict[ComputeSet, list[VertexGroup]] = {}
        self.off_chip: dict[Variable, RemoteBuffer] = {}
        self.emissions: dict[Hashable, Any] = {}
        self.notes = Notes()
        self.scope = Scope(byte_cost_cycles=byte_cost_cycles)

    def __repr__(self) -> str:
        return f"{type(self).__name__} of {len(self.variables)} variables and {len(self.groups)} compute sets"

    def flat_copy(self) -> Graph:
        """Return a graph of the same variables and vertices, whose additions leave this one as it is."""
        flat = Graph(self.target, self.replication_factor)
        flat.variables = list(self.variables)
        flat.mappings = dict(self.mappings)
        flat.elements_left_out = self.elements_left_out
        flat.groups = dict(self.groups.items())
        flat.notes = self.notes.copied()
        flat.owner = self.owner
        return flat

    @property
    def origin(self) -> Origin:
        """Origin of all that is added now."""
        return self.scope.origin

    @property
    def padded_lengths(self) -> dict[int, int]:
        """Elements that rows of each padded length take in memory."""
        return {row.length: row.padded_length for row in self.notes.padded_rows}

    @property
    def byte_cost_cycles(self) -> float:
        """Cost per byte on the fullest tile, which planners add now."""
        return self.scope.byte_cost_cycles

    @property
    def system_target(self) -> Target:
        """Target of all replicas together; replica r has IPUs r · n … (r + 1) · n − 1, for n IPUs a replica."""
        return of_replicas(self.target, self.replication_factor)

    @property
    def num_used_ipus(self) -> int:
        """Number of IPUs up to the last one with a vertex, of all replicas together."""
        last = max((int(group.tile.max(initial=0)) for groups in self.groups.values() for group in groups), default=0)
        return (last // self.target.tiles_per_ipu + 1) * self.replication_factor

    @property
    def io_view(self) -> Graph | None:
        """I/O tiles as a graph; None unless the graph is the view of one IPU that has some."""
        return None

    @contextmanager
    def _within(self, scope: Scope) -> Iterator[None]:
        outer = self.scope
        self.scope = scope
        try:
            yield
        finally:
            self.scope = outer

    def debug_origin(
        self, origin: Origin, parts: Callable[[], tuple[VertexPart, ...]] = no_parts
    ) -> AbstractContextManager[None]:
        """Give all that is added inside the context an origin, and its vertices the equations of `parts`."""
        return self._within(replace(self.scope, origin=origin, parts=parts))

    def inside_loop(self, trip_count: int | None) -> AbstractContextManager[None]:
        """Multiply the iterations of the scope by the trip count of a loop, inside the context; None if it is data."""
        count = _MOST_ITERATIONS if trip_count is None else trip_count
        return self._within(replace(self.scope, iterations=max(1, self.scope.iterations * count)))

    def byte_cost_of_iteration(self) -> AbstractContextManager[None]:
        """Divide the cost per byte by the iterations around: a loop needs its memory once, its cycles every time."""
        byte_cost_cycles = self.byte_cost_cycles / min(self.scope.iterations, _MOST_ITERATIONS)
        return self._within(replace(self.scope, byte_cost_cycles=byte_cost_cycles))

    def add_variable(
        self,
        shape: Sequence[int],
        dtype: Any,
        name: str = "",
        mapping: TileMapping | None = None,
        monoid: str | None = None,
    ) -> Tensor:
        """Add a variable and return its tensor.

        Args:
            shape: sizes of its dimensions.
            dtype: NumPy or JAX extended dtype.
            name: debug name.
            mapping: its tile mapping; may be set later.
            monoid: see `Variable.monoid`.

        Raises:
            MappingError: the mapping does not fit shape and target.
        """
        variable = Variable(tuple(int(n) for n in shape), dtype, name, None, monoid, self.origin, owner=self.owner)
        return self._add(variable, mapping)

    def add_constant(self, value: Any, name: str = "", mapping: TileMapping | None = None) -> Tensor:
        """Add a constant, an array of any shape, and return its tensor."""
        # JAX arrays are not converted: NumPy has no dtype of PRNG keys.
        value = value if hasattr(value, "dtype") else np.asarray(value)
        variable = Variable(tuple(value.shape), value.dtype, name, value, None, self.origin, owner=self.owner)
        return self._add(variable, mapping)

    def add_replica_constant(self, values: np.ndarray, name: str = "", mapping: TileMapping | None = None) -> Tensor:
        """Add a constant with a value for each replica, [replicas, *shape], and return its tensor, [*shape]."""
        if self.replication_factor == 1:
            return self.add_constant(values[0], name, mapping)
        shape = values.shape[1:]
        variable = Variable(shape, values.dtype, name, values, None, self.origin, True, self.owner)
        return self._add(variable, mapping)

    def add_off_chip(
        self,
        shape: Sequence[int],
        dtype: Any,
        name: str = "",
        filled_from: HostStream | None = None,
        read_into: HostStream | None = None,
        on_host: bool = False,
    ) -> RemoteBuffer:
        """Add a buffer in streaming memory.

        Args:
            shape: sizes of its dimensions; the first is the number of rows.
            dtype: NumPy dtype.
            name: debug name.
            filled_from: see `RemoteBuffer`.
            read_into: see `RemoteBuffer`.
            on_host: see `RemoteBuffer`.
        """
        memory = Variable(tuple(int(n) for n in shape), dtype, name, None, None, self.origin)
        buffer = self.off_chip[memory] = RemoteBuffer(name, memory, filled_from, read_into, on_host)
        return buffer

    def _add(self, variable: Variable, mapping: TileMapping | None) -> Tensor:
        self.variables.append(variable)
        if mapping is not None:
            self.set_tile_mapping(variable, mapping)
        return Tensor.of(variable)

    def note_role(self, tensor: Tensor, role: str) -> None:
        """Set the role of those variables of a tensor that have none yet."""
        if role:
            for variable in tensor.variables():
                self.notes.roles.setdefault(variable, role)

    def role_of(self, tensor: Tensor) -> str:
        """Return the common role of all variables of a tensor; "" if it is unknown or differs."""
        roles = {self.notes.roles.get(variable, "") for variable in tensor.variables()}
        return roles.pop() if len(roles) == 1 else ""

    def set_tile_mapping(self, variable: Variable, mapping: TileMapping) -> None:
        """Map all elements of a variable to tiles.

        Raises:
            MappingError: the mapping does not have each element once, on tiles of the target.
        """
        check_mapping(mapping, variable.shape, self.target.num_tiles, repr(variable))
        self.mappings[variable] = mapping

    def is_mapped(self, tensor: Tensor) -> bool:
        """Return whether every variable of the tensor has a tile mapping."""
        return all(v in self.mappings for v in tensor.variables())

    def elements_without_tile(self, variable: Variable) -> np.ndarray:
        """Return the flat numbers of the elements of a variable that are mapped to no tile, int64[n]."""
        if variable in self.mappings:
            return np.arange(0)
        return self.elements_left_out.get(variable, np.arange(variable.size))

    def add_compute_set(self, name: str) -> ComputeSet:
        """Add an empty compute set.

        Raises:
            GraphError: the name is no text.
        """
        if not isinstance(name, str):
            raise GraphError("the name of a compute set must be text", expected="text", got=repr(name))
        compute_set = ComputeSet(name, self.origin)
        self.groups[compute_set] = []
        return compute_set

    def add_function(self, program: Program, name: str = "function") -> Function:
        """Return a function: a program that is compiled once and called from several places, by `Call`."""
        return Function(program, name)

    def add_vertices(self, compute_set: ComputeSet, group: VertexGroup) -> None:
        """Add all vertices of a group to a compute set.

        Raises:
            GraphError: see `check_group`.
        """
        check_group(group, compute_set)
        self.groups[compute_set].append(group)


@dataclass(frozen=True, slots=True)
class Builder:
    """Graph and program to which an operation is added, and its debug name.

    Every operation of `popops`, `poplin`, `poprand` and `gcl` in `lowering` takes one as its first argument.
    """

    graph: Graph
    prog: ProgramSequence
    name: str

    def named(self, part: str) -> Builder:
        """Return a builder of a part of the operation, named `name/part`."""
        return replace(self, name=f"{self.name}/{part}")

    def into(self, prog: ProgramSequence) -> Builder:
        """Return a builder that adds to another program of the graph."""
        return replace(self, prog=prog)


def check_group(group: VertexGroup, compute_set: ComputeSet) -> None:
    """Check the connections of a group.

    Raises:
        GraphError: a field is not connected, or to a tensor of another dtype or rank; or not every block has a tile.
    """
    # The verifier checks dtypes again; here the line that adds the vertices is still running.
    codelet = group.codelet
    where = compute_set.origin
    if len(group.accesses) != len(codelet.fields):
        raise GraphError(
            f"{codelet.name} in {compute_set.name} has unconnected fields",
            where=where,
            expected=f"{len(codelet.fields)} connections",
            got=f"{len(group.accesses)}",
        )
    if group.tile.shape != group.grid:
        raise GraphError(
            f"{codelet.name} must have one tile for each block", where=where, expected=group.grid, got=group.tile.shape
        )
    for field, access in zip(codelet.fields, group.accesses, strict=True):
        tensor = access.tensor
        if tensor.dtype != field.dtype:
            raise GraphError(
                f"field {field.name} of {codelet.name} in {compute_set.name} has a tensor of the wrong dtype",
                where=where,
                expected=dtype_name(field.dtype),
                got=dtype_name(tensor.dtype),
            )
        if len(access.dims) != tensor.ndim:
            raise GraphError(
                f"field {field.name} of {codelet.name} in {compute_set.name} needs one index for each dimension",
                where=where,
                expected=f"{tensor.ndim} dimensions",
                got=f"{len(access.dims)}",
            )
