"""The graph: variables, their tile mappings, and the vertex groups of each compute set.

A `Graph` is a builder. `compile` reads it and never writes it; a graph may grow and be compiled again.
Planners record plans that exceed the memory proportion as `UnmetBound`, and the profile lists them: PopLibs plans with
ever larger bounds when nothing fits (reference machine.md §2).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from ipujax.runtime.cache import remembered
from ipujax.runtime.errors import GraphError
from ipujax.runtime.graph.forms import Program
from ipujax.runtime.graph.handles import ComputeSet, HostStream, RemoteBuffer
from ipujax.runtime.graph.program import Function
from ipujax.runtime.graph.vertex_group import VertexGroup, VertexPart, no_parts
from ipujax.runtime.target import Target
from ipujax.runtime.tensor import Origin, Tensor, TileMapping, Variable, check_mapping, dtype_name

_MOST_ITERATIONS = 4  # assumed: iterations that divide the cost per byte; also those of a loop whose count is data
BYTE_COST_CYCLES = 0.5  # assumed: default cost per byte of data or code on the fullest tile


@remembered
def of_replicas(target: Target, replicas: int) -> Target:
    """The machine of several replicas, of which `target` is that of one."""
    return target if replicas == 1 else target.replace(num_ipus=target.num_ipus * replicas)


class Graph:
    """Variables, mappings and vertices for one target.

    Args:
        target: the machine the graph is built for; that of one replica where there are several.
        replication_factor: how many replicas run the graph, each on IPUs of its own.
        byte_cost_cycles: cost per byte on the fullest tile, which planners add.
        io_tiles: the last so many tiles of each IPU only move data, see `Options.io_tiles`.

    Attributes:
        fallbacks: the primitive of each compute set that runs one as a single vertex.
        unmet_bounds: operations whose plans take more memory than planners may use.
        libraries: op libraries that the user's program says it uses.
        off_chip: remote buffers that hold arguments of a call, or values between its steps, by their memory.
        emissions: what operations have added, by operation and operands: equal ones are planned once.
        parts: gives the equations that vertices being added compute, where these come from several places.
        roles: what variables are for, see `runtime.tensor.roles`; of those of no known role it has none.
    """

    next_tile = 0  # where the next small variable starts
    iterations = 1  # how often what is being added runs, as far as the loops around it are known
    maps_automatically = True  # whether operations may place what has no tile mapping yet

    def __init__(
        self,
        target: Target,
        replication_factor: int = 1,
        byte_cost_cycles: float = BYTE_COST_CYCLES,
        io_tiles: int = 0,
    ) -> None:
        self.target, self.replication_factor = target, replication_factor
        self.byte_cost_cycles, self.io_tiles = byte_cost_cycles, io_tiles
        self.variables: list[Variable] = []
        self.mappings: dict[Variable, TileMapping] = {}
        self.groups: dict[ComputeSet, list[VertexGroup]] = {}
        self.fallbacks: dict[ComputeSet, str] = {}
        self.unmet_bounds: list[UnmetBound] = []
        self.libraries: set[str] = set()
        self.off_chip: dict[Variable, RemoteBuffer] = {}
        self.emissions: dict[Hashable, Any] = {}
        self.roles: dict[Variable, str] = {}
        self._origin = Origin()
        self.parts = no_parts

    def __repr__(self) -> str:
        return f"{type(self).__name__} of {len(self.variables)} variables and {len(self.groups)} compute sets"

    @property
    def origin(self) -> Origin:
        """Where in the user's program what is being added comes from."""
        return self._origin

    @property
    def system_target(self) -> Target:
        """The machine of all replicas together; replica r has IPUs r · n … of n each."""
        return of_replicas(self.target, self.replication_factor)

    @property
    def num_used_ipus(self) -> int:
        """IPUs up to the last one with a vertex, of all replicas together."""
        last = max((int(group.tile.max(initial=0)) for groups in self.groups.values() for group in groups), default=0)
        return (last // self.target.tiles_per_ipu + 1) * self.replication_factor

    @property
    def io_view(self) -> Graph | None:
        """The tiles that only move data, as a graph; None where the graph is not that of one IPU, or has none."""
        return None

    @contextmanager
    def debug_origin(self, origin: Origin, parts: Callable[[], tuple[VertexPart, ...]] = no_parts) -> Iterator[None]:
        """Attributes everything added inside to `origin`, and divides the cycles of vertices among `parts` if any."""
        outer_origin, outer_parts = self._origin, self.parts
        self._origin, self.parts = origin, parts
        try:
            yield
        finally:
            self._origin, self.parts = outer_origin, outer_parts

    @contextmanager
    def inside_loop(self, trip_count: int | None) -> Iterator[None]:
        """Notes that everything added inside runs in each iteration of a loop; None where the count is data."""
        outer = self.iterations
        self.iterations = max(1, outer * (_MOST_ITERATIONS if trip_count is None else trip_count))
        try:
            yield
        finally:
            self.iterations = outer

    @contextmanager
    def byte_cost_of_iteration(self) -> Iterator[None]:
        """Divide the cost per byte by the iterations around: a loop needs its memory once, its cycles every time."""
        outer = self.byte_cost_cycles
        self.byte_cost_cycles = outer / min(self.iterations, _MOST_ITERATIONS)
        try:
            yield
        finally:
            self.byte_cost_cycles = outer

    def add_variable(
        self,
        shape: Sequence[int],
        dtype: Any,
        name: str = "",
        mapping: TileMapping | None = None,
        monoid: str | None = None,
    ) -> Tensor:
        """Adds a variable and returns the tensor of all of it.

        Args:
            shape: sizes of its dimensions.
            dtype: numpy or JAX extended dtype.
            name: debug name.
            mapping: its tile mapping, if already known.
            monoid: see `Variable.monoid`.

        Raises:
            MappingError: if the mapping does not fit shape and target.
        """
        variable = Variable(tuple(int(n) for n in shape), dtype, name, None, monoid, self.origin)
        return self._add(variable, mapping)

    def add_constant(self, value: Any, name: str = "", mapping: TileMapping | None = None) -> Tensor:
        """Adds a constant, an array of any shape, and returns its tensor."""
        value = value if hasattr(value, "dtype") else np.asarray(value)
        variable = Variable(tuple(value.shape), value.dtype, name, value, None, self.origin)
        return self._add(variable, mapping)

    def add_replica_constant(self, values: np.ndarray, name: str = "", mapping: TileMapping | None = None) -> Tensor:
        """Adds a constant of which each replica has its own, and returns its tensor.

        Args:
            values: [replicas, *shape].
            name: debug name.
            mapping: its tile mapping, if already known.
        """
        if self.replication_factor == 1:
            return self.add_constant(values[0], name, mapping)
        return self._add(Variable(values.shape[1:], values.dtype, name, values, None, self.origin, True), mapping)

    def add_off_chip(
        self,
        shape: Sequence[int],
        dtype: Any,
        name: str = "",
        filled_from: HostStream | None = None,
        read_into: HostStream | None = None,
        on_host: bool = False,
    ) -> RemoteBuffer:
        """Adds a buffer in streaming memory.

        Args:
            shape: sizes of its dimensions; the first is that of its rows.
            dtype: numpy dtype.
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
        """Notes what the variables of a tensor are for; those of which it is known stay what they are."""
        if role:
            for variable in tensor.variables():
                self.roles.setdefault(variable, role)

    def role_of(self, tensor: Tensor) -> str:
        """What all variables of a tensor are for; "" where that is unknown, or not the same."""
        roles = {self.roles.get(variable, "") for variable in tensor.variables()}
        return roles.pop() if len(roles) == 1 else ""

    def set_tile_mapping(self, variable: Variable, mapping: TileMapping) -> None:
        """Maps a whole variable.

        Raises:
            MappingError: if the mapping does not hold each element once, on tiles of the target.
        """
        check_mapping(mapping, variable.shape, self.target.num_tiles, repr(variable))
        self.mappings[variable] = mapping

    def is_mapped(self, tensor: Tensor) -> bool:
        """Whether every variable of the tensor has a tile mapping."""
        return all(v in self.mappings for v in tensor.variables())

    def add_compute_set(self, name: str) -> ComputeSet:
        """Adds an empty compute set.

        Raises:
            GraphError: a name that is no text.
        """
        if not isinstance(name, str):
            raise GraphError("name of a compute set", expected="text", got=repr(name))
        compute_set = ComputeSet(name, self.origin)
        self.groups[compute_set] = []
        return compute_set

    def add_function(self, program: Program, name: str = "function") -> Function:
        """Makes a program that is compiled once and called from several places, by `Call`."""
        return Function(program, name)

    def add_vertices(self, compute_set: ComputeSet, group: VertexGroup) -> None:
        """Adds all vertices of a group to a compute set.

        Raises:
            GraphError: if a field is not connected, or connected to a tensor of another dtype or rank.
        """
        check_group(group, compute_set)
        self.groups[compute_set].append(group)


def check_group(group: VertexGroup, compute_set: ComputeSet) -> None:
    """Refuses a group whose fields are not connected, or to a tensor of another dtype or rank.

    Raises:
        GraphError: naming field, codelet and compute set.
    """
    codelet, where = group.codelet, compute_set.origin
    if len(group.accesses) != len(codelet.fields):
        raise GraphError(
            f"{codelet.name} in {compute_set.name} has unconnected fields",
            where=where,
            expected=f"{len(codelet.fields)} connections",
            got=f"{len(group.accesses)}",
        )
    if group.tile.shape != group.grid:
        raise GraphError(f"{codelet.name}: one tile a block", where=where, expected=group.grid, got=group.tile.shape)
    for field, access in zip(codelet.fields, group.accesses, strict=True):
        tensor = access.tensor
        if tensor.dtype != field.dtype:
            raise GraphError(
                f"field {field.name} of {codelet.name} in {compute_set.name} is connected to another dtype",
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


@dataclass(frozen=True, slots=True)
class UnmetBound:
    """An operation for which no plan within the available memory proportion was found.

    Args:
        name: debug name of the operation.
        bound_bytes: what its operands and results may take of a tile.
        needed_bytes: what they take on the fullest tile.
        origin: where it comes from.
    """

    name: str
    bound_bytes: int
    needed_bytes: int
    origin: Origin

    def __str__(self) -> str:
        return f"{self.name} needs {self.needed_bytes:,} bytes of a tile, of {self.bound_bytes:,} that planners may use"
