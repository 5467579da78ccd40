"""The exchange between tiles: data that each tile receives and sends around a compute set or for a copy.

Input: a vertex group and one of its fields, or the two tensors of a copy, and the graph with the tile mappings. Output:
`Traffic`, bytes and pieces a tile; their cycles are those of `exchange.superstep`. Three counts give the same
numbers: axis by axis for blocks on blocks (`exchange.blocks`), by element for scattered elements that no two tiles
share (`exchange.disjoint_reads`), by flat runs for everything else (`exchange.count`). `messages` lists the same
exchange.

An element that several tiles need is sent once (multicast) and received by each; an element that one tile needs several
times, for several vertices or through a broadcast, is received once. Data that all tiles of an exchange bus need arrive
at the rate of all of them together (`exchange.shared_bus`).

Limits: an exchange of millions of runs is counted by a sample, within a few percent (`exchange.sample`), its receives
within a half. All pairs of tiles are equally far; reordering inside an operand (a transposed read) costs nothing. Views
whose elements are scattered singly over a `Flat` mapping (a flattened transpose) take time by element: 0.02 s a
million, 0.15 s where several tiles need one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from weakref import ref

import numpy as np

from ipujax.runtime.cache import recall, remembered
from ipujax.runtime.exchange.blocks import count_blocks
from ipujax.runtime.exchange.count import MAX_RUNS, Traffic, count_traffic
from ipujax.runtime.exchange.demand import access_demand, copy_demand, copy_grid, grid_of, mappings_of
from ipujax.runtime.exchange.disjoint_reads import count_disjoint_reads, is_disjoint_read
from ipujax.runtime.exchange.shared_bus import Buses
from ipujax.runtime.graph import Access, Axis, Graph, VertexGroup, element, shift_vertices
from ipujax.runtime.tensor import (
    Affine,
    Blocked,
    Concat,
    Indexed,
    Node,
    Reshaped,
    Tensor,
    TileMapping,
    Variable,
    concat,
    concat_nodes,
    element_bytes,
    shift_tiles,
    surely_disjoint,
)


def traffic(
    group: VertexGroup, field: int, graph: Graph, results: bool | None = None, tiles: range | None = None
) -> Traffic:
    """Return the exchange of one field of a vertex group.

    Args:
        group: the vertices.
        field: number of the field.
        graph: has the target and the mappings of the field's variables.
        results: False for the exchange before the compute set, from owners to vertices; True for the one after it, from
            vertices to owners. By default the field's direction decides; a field that is read and written has both
            exchanges, and the default is the one before.
        tiles: the tiles that are counted, all by default.

    Raises:
        GraphError: a variable without a tile mapping.
    """
    writes = not group.codelet.fields[field].is_read if results is None else results
    window = access_window(group, group.accesses[field], graph, writes)
    return traffic_on([window], tiles or range(graph.target.num_tiles))


def access_traffic(axes: Sequence[Axis], tile: np.ndarray, access: Access, graph: Graph) -> Traffic:
    """Return the exchange of vertices on a grid that read through one access, whatever their codelet is.

    Args:
        axes: axes of the grid.
        tile: tile of each vertex, int32[blocks of each axis].
        access: to a tensor of mapped variables.
        graph: has the target and the mappings.
    """
    return traffic_on([access_window(grid_of(tuple(axes), tile), access, graph, False)], range(graph.target.num_tiles))


def copy_traffic(source: Tensor, destination: Tensor, graph: Graph) -> Traffic:
    """Return the exchange of a copy between tensors of one shape.

    All local bytes are copied on their tile; `copied_bytes` has no meaning for copies.

    Raises:
        GraphError: a variable without a tile mapping.
    """
    return traffic_on(copy_windows(source, destination, graph), range(graph.target.num_tiles))


def copy_windows(source: Tensor, destination: Tensor, graph: Graph) -> list[TrafficWindow]:
    """Return the exchange of each independent part of a copy, see `copy_traffic`."""
    if source.size == 0:
        return []
    parts = independent_parts(source, destination)
    if len(parts) > 1:
        return [window for part in parts for window in copy_windows(*part, graph)]
    source, destination = _strip_reshapes(source, destination)
    # As a read of a grid of vertices it has the fast counts and their cache; else elements are listed.
    grid = copy_grid(source, destination, graph)
    if grid is not None:
        return [access_window(*grid, graph, False)]
    return [_element_traffic(source, destination, graph)]


def independent_parts(source: Tensor, destination: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Split a copy of concatenated tensors into (source, destination) pairs of which no two read one variable.

    A copy whose sides are not concatenated along one axis is returned as its only pair. Linear in the parts.
    """
    read = source.node
    written = destination.node
    if not (isinstance(read, Concat) and isinstance(written, Concat) and read.axis == written.axis):
        return [(source, destination)]
    cuts = sorted(set(read.bounds).intersection(written.bounds))
    sources = _split_at(read, cuts, source.dtype)
    destinations = _split_at(written, cuts, destination.dtype)
    groups = _group_overlapping([piece.variables() for piece in sources])
    return [
        (sources[numbers[0]], destinations[numbers[0]])
        if len(numbers) == 1
        else (concat([sources[n] for n in numbers], read.axis), concat([destinations[n] for n in numbers], read.axis))
        for numbers in groups
    ]


def _split_at(node: Concat, cuts: Sequence[int], dtype: np.dtype) -> list[Tensor]:
    number_of = {bound: number for number, bound in enumerate(node.bounds)}
    numbers = [(number_of[low], number_of[high]) for low, high in pairwise(cuts)]
    nodes = [concat_nodes(node.axis, node.parts[low:high]) for low, high in numbers]
    return [Tensor(piece, piece.shape, dtype) for piece in nodes]


def _group_overlapping(variables: Sequence[Sequence[Variable]]) -> list[list[int]]:
    """Group the numbers of sets of variables that overlap, directly or through other sets."""
    root = list(range(len(variables)))  # a union-find forest

    def root_of(number: int) -> int:
        while root[number] != number:
            root[number] = root[root[number]]
            number = root[number]
        return number

    first: dict[Variable, int] = {}
    for number, members in enumerate(variables):
        for variable in members:
            root[root_of(number)] = root_of(first.setdefault(variable, number))
    groups: dict[int, list[int]] = {}
    for number in range(len(variables)):
        groups.setdefault(root_of(number), []).append(number)
    return list(groups.values())


def _strip_reshapes(source: Tensor, destination: Tensor) -> tuple[Tensor, Tensor]:
    """Remove a reshape that both tensors have, so that they may be grids of blocks."""
    read = source.node
    written = destination.node
    if isinstance(read, Reshaped) and isinstance(written, Reshaped) and read.source.shape == written.source.shape:
        return source.reshape(read.source.shape), destination.reshape(read.source.shape)
    return source, destination


_WORD_BYTES = 4  # of the exchange, reference A1
_MEMBERS = tuple(item.name for item in fields(Traffic))
_ARE_BYTES = [name.endswith("_bytes") for name in _MEMBERS]


@dataclass(frozen=True, eq=False, slots=True)
class TrafficWindow:
    """Traffic of neighbouring tiles, all others having none; arrays begin with tile number `first`, of any width."""

    first: int
    traffic: Traffic


def _buses(graph: Graph) -> Buses:
    return Buses(graph.target.tiles_per_exchange_bus, graph.target.tiles_per_ipu)


def access_window(group: VertexGroup, access: Access, graph: Graph, writes: bool) -> TrafficWindow:
    """Return the exchange of one access of a vertex group, see `traffic`, on the tiles that take part."""
    tensor = access.tensor
    mappings = mappings_of(tensor, graph)
    item_bytes = element_bytes(tensor.dtype)
    if tensor.size == 0 or group.num_vertices == 0:
        return TrafficWindow(0, _no_traffic(1))
    group, access = _of_cut_axes(group, access)
    if len(mappings) == 1 and _is_in_place(group, access, mappings[0]):
        first, last = _tile_range(mappings[0])
        return TrafficWindow(first, _in_place_traffic(mappings[0], item_bytes))
    buses = _buses(graph)
    first, last = _common_range([_tile_bounds(group.tile[group.tile >= 0]), *map(_tile_range, mappings)], buses)
    # Tiles are counted from the first that takes part: counts are then short, and equal on any IPU.
    tile = shift_vertices(group.tile, -first)
    grid = grid_of(group.axes, tile)
    homes = tuple(shift_tiles(mapping, -first) for mapping in mappings)
    num_tiles = last - first + 1

    def compute() -> Traffic:
        return _scale_to_bytes(_count_elements(grid, access, homes, num_tiles, writes, buses), item_bytes)

    # Everything that the counts depend on, and nothing of the IPU or the variables: layers share one answer. A list of
    # elements shares it with itself alone: the cost and the counts of its compute set have one.
    view = geometry(tensor) or (ref(tensor.node) if isinstance(tensor.node, Indexed) else None)
    cuts = tuple(axis.cuts.tobytes() for axis in grid.axes)
    key = view, access.dims, cuts, tile.tobytes(), homes, num_tiles, item_bytes, writes, buses
    return TrafficWindow(first, compute() if view is None else recall(("traffic", *key), compute))


def _of_cut_axes(group: VertexGroup, access: Access) -> tuple[VertexGroup, Access]:
    """Return the grid and an access without the axes of one block that the access has not: they make no difference.

    So pushes to stashes of different lengths read their operands alike, and stashes are in place.
    """
    used = {term.axis for dim in access.dims for term in dim.terms}
    axis_numbers = [n for n, axis in enumerate(group.axes) if n in used or axis.blocks != 1] or [0]
    if len(axis_numbers) >= len(group.axes):
        return group, access
    number = {axis: n for n, axis in enumerate(axis_numbers)}
    dims = tuple(replace(d, terms=tuple(replace(t, axis=number[t.axis]) for t in d.terms)) for d in access.dims)
    axes = tuple(group.axes[n] for n in axis_numbers)
    return grid_of(axes, group.tile.reshape([axis.blocks for axis in axes])), replace(access, dims=dims)


def _element_traffic(source: Tensor, destination: Tensor, graph: Graph) -> TrafficWindow:
    """Return the exchange of a copy to a tensor that is not a grid of blocks."""
    item_bytes = element_bytes(source.dtype)
    buses = _buses(graph)
    mappings = mappings_of(source, graph), mappings_of(destination, graph)
    first, last = _common_range([_tile_range(mapping) for both in mappings for mapping in both], buses)
    read_homes, written_homes = (tuple(shift_tiles(mapping, -first) for mapping in both) for both in mappings)
    num_tiles = last - first + 1

    def compute() -> Traffic:
        demand = copy_demand(source, destination, written_homes, num_tiles)
        is_disjoint = surely_disjoint([source.node])
        return _scale_to_bytes(count_traffic(demand, read_homes, False, buses, is_disjoint), item_bytes)

    views = geometry(source), geometry(destination)
    key = views, read_homes, written_homes, num_tiles, item_bytes, buses
    return TrafficWindow(first, compute() if None in views else recall(("element traffic", *key), compute))


def _common_range(ranges: Sequence[tuple[int, int]], buses: Buses) -> tuple[int, int]:
    """Return first and last tile of some ranges together, the first aligned so that buses can be counted from it."""
    first = min(low for low, _ in ranges)
    last = max(high for _, high in ranges)
    return first - first % buses.period, last


def _tile_bounds(tiles: np.ndarray) -> tuple[int, int]:
    return int(tiles.min()), int(tiles.max())


@remembered
def _tile_range(mapping: TileMapping) -> tuple[int, int]:
    """Return the first and the last tile of a mapping of at least one element."""
    return _tile_bounds(mapping.tiles)


def mappings_from(first_tile: int, tensor: Tensor, graph: Graph) -> tuple[TileMapping, ...]:
    """Return the mappings of a tensor's variables with tiles counted from one."""
    mappings = mappings_of(tensor, graph)
    return tuple(shift_tiles(mapping, -first_tile) for mapping in mappings) if first_tile else mappings


def traffic_on(windows: Sequence[TrafficWindow], tiles: range) -> Traffic:
    """Sum the traffic of windows on neighbouring tiles, int64[tiles] each; what is on other tiles is left out."""
    sums = dict.fromkeys(_MEMBERS, _zeros(len(tiles)))
    for window in windows:
        width = len(window.traffic.local_bytes)
        low = max(window.first, tiles.start)
        high = min(window.first + width, tiles.stop)
        # All members without traffic are one array, `_scale_to_bytes` sees to it: an identity test saves the sum.
        window_zeros = _zeros(width)
        for name in sums if low < high else ():
            values = getattr(window.traffic, name)
            if values is not window_zeros:
                if not sums[name].flags.writeable:
                    sums[name] = np.zeros(len(tiles), np.int64)
                part = values[low - window.first : high - window.first].astype(np.int64)
                sums[name][low - tiles.start : high - tiles.start] += part
    return Traffic(*map(_read_only, sums.values()))


def geometry(tensor: Tensor) -> tuple[object, ...] | None:
    """Return all of a view that an exchange depends on, variables by number and shape; None for a list of elements."""
    return _hashable_view(tensor.node, tensor.variables())


def _hashable_view(node: Node, variables: Sequence[Variable]) -> tuple[object, ...] | None:
    """Return a hashable form of a view, its variables by number; None for a view by indices."""
    match node:
        case Affine(variable, offset, dims):
            return variables.index(variable), variable.shape, offset, dims
        case Reshaped(source, shape):
            inner = _hashable_view(source, variables)
            return None if inner is None else (inner, shape)
        case Concat(axis, parts, _):
            inners = tuple(_hashable_view(part, variables) for part in parts)
            return None if None in inners else (axis, inners)
    return None


def _is_in_place(group: VertexGroup, access: Access, mapping: TileMapping) -> bool:
    """Check whether each vertex is where its block is mapped, grid for grid: then nothing is exchanged."""
    tensor = access.tensor
    if not tensor.is_whole_variable or access.dims != tuple(element(number) for number in range(len(group.axes))):
        return False
    if isinstance(mapping, Blocked):
        same_grid = tensor.shape == mapping.shape and mapping.tile.shape == group.tile.shape
        return (
            same_grid
            and all(
                a.cuts is cuts or np.array_equal(a.cuts, cuts) for a, cuts in zip(group.axes, mapping.cuts, strict=True)
            )
            and (mapping.tile is group.tile or np.array_equal(mapping.tile, group.tile))
        )
    if tensor.ndim != 1 or not np.array_equal(mapping.tiles, group.tile):
        return False
    return np.array_equal(mapping.starts, group.axes[0].cuts[:-1])


def _read_only(array: np.ndarray) -> np.ndarray:
    array.setflags(write=False)
    return array


@remembered
def _zeros(num_tiles: int) -> np.ndarray:
    return _read_only(np.zeros(num_tiles, np.int64))


@remembered
def _no_traffic(num_tiles: int) -> Traffic:
    zeros = _zeros(num_tiles)
    return Traffic(*[zeros] * len(_MEMBERS))


@remembered
def _in_place_traffic(mapping: TileMapping, item_bytes: int) -> Traffic:
    """Return the traffic of vertices that read all elements on their own tile; over the tiles of the mapping."""
    first, last = _tile_range(mapping)
    zeros = _zeros(last - first + 1)
    elements = shift_tiles(mapping, -first).elements_per_tile(last - first + 1)
    local = _read_only(elements * item_bytes), _read_only((elements > 0).astype(np.int64))
    return Traffic(zeros, zeros, zeros, zeros, zeros, *local, zeros, zeros, zeros)


def _count_elements(
    group: VertexGroup,
    access: Access,
    mappings: tuple[TileMapping, ...],
    num_tiles: int,
    writes: bool,
    buses: Buses,
) -> Traffic:
    """Count by a special count where one applies, else by runs."""
    counts = None
    if len(mappings) == 1:
        counts = count_blocks(group, access, mappings[0], num_tiles, writes, buses)
    is_disjoint = counts is None and not writes and is_disjoint_read(group, access)
    if is_disjoint and len(mappings) == 1:
        counts = count_disjoint_reads(group, access, mappings[0], num_tiles)
    if counts is None:
        counts = count_traffic(access_demand(group, access, num_tiles, MAX_RUNS), mappings, writes, buses, is_disjoint)
    return counts


def _scale_to_bytes(counts: Traffic, item_bytes: int) -> Traffic:
    """Scale counts of elements to bytes, read-only; members without traffic become the shared zeros."""
    # Fragments of less than a word cannot arrive one behind the other: each takes a receive of its own.
    is_narrow = counts.received_bytes * item_bytes < _WORD_BYTES * counts.fragments
    if is_narrow.any():
        counts = replace(counts, receives=np.where(is_narrow, counts.fragments, counts.receives))
    members = np.stack([getattr(counts, name) for name in _MEMBERS], dtype=np.int64)
    members[_ARE_BYTES] *= item_bytes
    zeros = _zeros(members.shape[1])
    rows = zip(members, members.min(1).tolist(), members.max(1).tolist(), strict=True)
    return Traffic(*(_narrowed(values, low, high) if low or high else zeros for values, low, high in rows))


def _narrowed(counts: np.ndarray, low: int, high: int) -> np.ndarray:
    """Return counts in the narrowest dtype for them, read-only: caches keep most of all counts of a compilation."""
    return _read_only(counts.astype(np.result_type(np.min_scalar_type(low), np.min_scalar_type(high))))
