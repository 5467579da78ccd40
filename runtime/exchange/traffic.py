"""The exchange between tiles: what each tile receives and sends around a compute set or for a copy.

Input: a vertex group and one of its fields, or the two tensors of a copy, and the graph with the tile mappings. Output:
`Traffic`, bytes and fragments a tile, and from these cycles. Three ways give the same numbers: axis by axis for boxes
on boxes (`exchange.boxes`), element by element where a view takes apart what no two tiles share (`exchange.once`), and
by flat runs for everything else (`exchange.count`). `messages` lists the same exchange.

An element that several tiles need is sent once (multicast) and received by each; one that is needed several times on
one tile, by several vertices or through a broadcast, is received once. What all tiles of an exchange bus need arrives
at the rate of all of them together (`exchange.shared_bus`).

Source of the cycle formulas: reference A2 (bytes over width; control slots a fragment), B5 (cost of a piece copied).
Limits: what has millions of runs is counted by a sample of them, within a few percent (`exchange.sample`). All pairs of
tiles are equally far; reordering inside an operand (a transposed read) is not charged. Views whose elements are
scattered singly over a `Flat` mapping (a flattened transpose) take time by element: 0.02 s a million, 0.15 s where
several tiles need one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import pairwise

import numpy as np

from ipujax.runtime.cache import recall, remembered
from ipujax.runtime.exchange.boxes import count_boxes
from ipujax.runtime.exchange.count import MOST_RUNS, Traffic, count
from ipujax.runtime.exchange.demand import access_demand, copy_demand, copy_grid, grid_of, mappings_of
from ipujax.runtime.exchange.once import count_once, reads_once
from ipujax.runtime.exchange.shared_bus import Buses
from ipujax.runtime.graph import Access, Axis, Graph, VertexGroup, element
from ipujax.runtime.target import Target
from ipujax.runtime.tensor import (
    Affine,
    Blocked,
    Concat,
    Node,
    Reshaped,
    Tensor,
    TileMapping,
    Variable,
    concat,
    concat_nodes,
    element_bytes,
    padded,
    surely_disjoint,
)


def traffic(group: VertexGroup, field: int, graph: Graph, results: bool | None = None) -> Traffic:
    """The exchange of one field of a vertex group.

    Args:
        group: the vertices.
        field: number of the field.
        graph: holds the target and the mappings of the field's variables.
        results: False for the exchange before the compute set, from owners to vertices; True for the one after it, from
            vertices to owners. By default what the field's direction says; a field that is read and written has both,
            and the first is the default.

    Raises:
        GraphError: a variable without a tile mapping.
    """
    access = group.accesses[field]
    writes = not group.codelet.fields[field].is_read if results is None else results
    return _widen(_traffic(group, access, graph, writes), graph.target.num_tiles)


def access_traffic(axes: Sequence[Axis], tile: np.ndarray, access: Access, graph: Graph) -> Traffic:
    """What vertices on a grid would receive through one access.

    Args:
        axes: axes of the grid.
        tile: the tile of each vertex.
        access: to a tensor of mapped variables.
        graph: holds the target and the mappings.
    """
    return _widen(_traffic(grid_of(tuple(axes), tile), access, graph, False), graph.target.num_tiles)


def copy_traffic(source: Tensor, destination: Tensor, graph: Graph) -> Traffic:
    """The exchange of a copy: every tile receives what its part of the destination needs of the source.

    All local bytes are copied on their tile; `copied_bytes` is not meant for copies.

    Args:
        source: tensor that is read.
        destination: tensor of the same shape that is written.
        graph: holds the target and the mappings of all variables.

    Raises:
        GraphError: a variable without a tile mapping.
    """
    return _summed(_copy_windows(source, destination, graph), graph.target.num_tiles)


def _copy_windows(source: Tensor, destination: Tensor, graph: Graph) -> list[_Window]:
    """The traffic of each independent part of a copy."""
    if source.size == 0:
        return []
    parts = independent_parts(source, destination)
    if len(parts) > 1:
        return [window for part in parts for window in _copy_windows(*part, graph)]
    source, destination = _not_reshaped(source, destination)
    grid = copy_grid(source, destination, graph)
    if grid is not None:
        return [_traffic(*grid, graph, False)]
    return [_element_traffic(source, destination, graph)]


def independent_parts(source: Tensor, destination: Tensor) -> list[tuple[Tensor, Tensor]]:
    """A copy of concatenated parts as copies of which no two read one variable, in time linear in the parts."""
    one, other = source.node, destination.node
    if not (isinstance(one, Concat) and isinstance(other, Concat) and one.axis == other.axis):
        return [(source, destination)]
    cuts = sorted(set(one.bounds).intersection(other.bounds))
    sources, destinations = _pieces(one, cuts, source.dtype), _pieces(other, cuts, destination.dtype)
    groups = _sharing([piece.variables() for piece in sources])
    return [
        (concat([sources[n] for n in numbers], one.axis), concat([destinations[n] for n in numbers], one.axis))
        for numbers in groups
    ]


def _pieces(node: Concat, cuts: Sequence[int], dtype: np.dtype) -> list[Tensor]:
    """A concatenation cut at some of its bounds."""
    number_of = {bound: number for number, bound in enumerate(node.bounds)}
    numbers = [(number_of[low], number_of[high]) for low, high in pairwise(cuts)]
    nodes = [concat_nodes(node.axis, node.parts[low:high]) for low, high in numbers]
    return [Tensor(piece, piece.shape, dtype) for piece in nodes]


def _sharing(variables: Sequence[Sequence[Variable]]) -> list[list[int]]:
    """The numbers of the sets of variables that overlap, directly or through others, together."""
    root = list(range(len(variables)))

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


def _not_reshaped(source: Tensor, destination: Tensor) -> tuple[Tensor, Tensor]:
    """Both without a reshape that they share, so that they may be boxes."""
    one, other = source.node, destination.node
    if isinstance(one, Reshaped) and isinstance(other, Reshaped) and one.source.shape == other.source.shape:
        return source.reshape(one.source.shape), destination.reshape(one.source.shape)
    return source, destination


@dataclass(frozen=True, eq=False, slots=True)
class _Window:
    """Traffic of neighbouring tiles, all others having none; arrays begin with tile number `first`."""

    first: int
    traffic: Traffic


def _buses(graph: Graph) -> Buses:
    return Buses(graph.target.tiles_per_exchange_bus, graph.target.tiles_per_ipu)


def _traffic(group: VertexGroup, access: Access, graph: Graph, writes: bool) -> _Window:
    tensor = access.tensor
    mappings = mappings_of(tensor, graph)
    item_bytes = element_bytes(tensor.dtype)
    if tensor.size == 0 or group.num_vertices == 0:
        return _Window(0, _nothing(1))
    if len(mappings) == 1 and _stays(group, access, mappings[0]):
        first, last = _tile_range(mappings[0])
        return _Window(first, _in_place(mappings[0], item_bytes))
    buses = _buses(graph)
    first, last = _around([_ends(group.tile[group.tile >= 0]), *map(_tile_range, mappings)], buses)
    tile = group.tile if first == 0 else np.where(group.tile < 0, group.tile, group.tile - first)
    grid = grid_of(group.axes, tile)
    homes, tiles = tuple(_moved_down(mapping, first) for mapping in mappings), last - first + 1

    def find() -> Traffic:
        return _in_bytes(_counts(grid, access, homes, tiles, writes, buses), item_bytes)

    seen = geometry(tensor)
    cuts = tuple(axis.cuts.tobytes() for axis in grid.axes)
    question = seen, access.dims, cuts, tile.tobytes(), homes, tiles, item_bytes, writes, buses
    return _Window(first, find() if seen is None else recall(("traffic", *question), find))


def _element_traffic(source: Tensor, destination: Tensor, graph: Graph) -> _Window:
    """The exchange of a copy to what is no grid of boxes."""
    item_bytes, buses = element_bytes(source.dtype), _buses(graph)
    mappings = mappings_of(source, graph), mappings_of(destination, graph)
    first, last = _around([_tile_range(mapping) for both in mappings for mapping in both], buses)
    homes, wanted = (tuple(_moved_down(mapping, first) for mapping in one) for one in mappings)
    tiles = last - first + 1

    def find() -> Traffic:
        needs, once = copy_demand(source, destination, wanted, tiles), surely_disjoint([source.node])
        return _in_bytes(count(needs, homes, False, buses, once), item_bytes)

    seen = geometry(source), geometry(destination)
    question = seen, homes, wanted, tiles, item_bytes, buses
    return _Window(first, find() if None in seen else recall(("element traffic", *question), find))


def _around(ends: Sequence[tuple[int, int]], buses: Buses) -> tuple[int, int]:
    """The first and the last tile of some ranges, from a tile on from which buses can be counted."""
    first, last = min(low for low, _ in ends), max(high for _, high in ends)
    return first - first % buses.period, last


def _ends(tiles: np.ndarray) -> tuple[int, int]:
    return int(tiles.min()), int(tiles.max())


@remembered
def _tile_range(mapping: TileMapping) -> tuple[int, int]:
    """The first and the last tile of a mapping of one element or more."""
    return _ends(mapping.tiles)


@remembered
def _moved_down(mapping: TileMapping, by: int) -> TileMapping:
    """The mapping with `by` less for every tile, the same object for the same contents.

    Counts then run over the tiles that take part, not over all IPUs, and are the same on any of them.
    """
    return mapping.on_tiles(mapping.tiles - by)


def _widen(part: _Window, num_tiles: int) -> Traffic:
    """Traffic of some tiles as that of all."""
    members = [getattr(part.traffic, item.name) for item in fields(Traffic)]
    if len(members[0]) == num_tiles:
        return part.traffic
    none, here = _zeros(num_tiles), _zeros(len(members[0]))  # which is what `_in_bytes` has where there is none
    return Traffic(*(none if m is here else _read_only(padded(m, part.first, num_tiles)) for m in members))


def _summed(parts: Sequence[_Window], num_tiles: int) -> Traffic:
    """The sum of traffic in several windows, of all tiles."""
    if len(parts) == 1:
        return _widen(parts[0], num_tiles)
    sums = {item.name: _zeros(num_tiles) for item in fields(Traffic)}
    for part in parts:
        tiles = len(part.traffic.local_bytes)
        for name, total in sums.items():
            values = getattr(part.traffic, name)
            if values is not _zeros(tiles):
                sums[name] = total = total if total.flags.writeable else total.copy()
                total[part.first : part.first + tiles] += values
    return Traffic(*map(_read_only, sums.values()))


def geometry(tensor: Tensor) -> tuple[object, ...] | None:
    """All that an exchange depends on in a view, its variables by number and shape; None for a list of elements."""
    return _geometry(tensor.node, tensor.variables())


def _geometry(node: Node, variables: Sequence[Variable]) -> tuple[object, ...] | None:
    match node:
        case Affine(variable, offset, dims):
            return variables.index(variable), variable.shape, offset, dims
        case Reshaped(source, shape):
            inner = _geometry(source, variables)
            return None if inner is None else (inner, shape)
        case Concat(axis, parts, _):
            inners = tuple(_geometry(part, variables) for part in parts)
            return None if None in inners else (axis, inners)
    return None


def _stays(group: VertexGroup, access: Access, mapping: TileMapping) -> bool:
    """Whether the grid of vertices is the grid of the mapping, box for box and tile for tile."""
    tensor = access.tensor
    if not tensor.is_whole_variable or access.dims != tuple(element(number) for number in range(len(group.axes))):
        return False
    if isinstance(mapping, Blocked):
        same = tensor.shape == mapping.shape and mapping.tile.shape == group.tile.shape
        return (
            same
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
def _nothing(num_tiles: int) -> Traffic:
    none = _zeros(num_tiles)
    return Traffic(none, none, none, none, none, none, none, none)


@remembered
def _in_place(mapping: TileMapping, item_bytes: int) -> Traffic:
    """Everything a mapping holds stays where it is; over the tiles from its first to its last."""
    first, last = _tile_range(mapping)
    none, held = _zeros(last - first + 1), _moved_down(mapping, first).elements_per_tile(last - first + 1)
    local = _read_only(held * item_bytes), _read_only((held > 0).astype(np.int64))
    return Traffic(none, none, none, *local, none, none, none)


def _counts(
    group: VertexGroup,
    access: Access,
    mappings: tuple[TileMapping, ...],
    num_tiles: int,
    writes: bool,
    buses: Buses,
) -> Traffic:
    """Counts in a fast way where one applies, else by runs."""
    counts = None
    if len(mappings) == 1:
        counts = count_boxes(group, access, mappings[0], num_tiles, writes, buses)
    once = counts is None and not writes and reads_once(group, access)
    if once and len(mappings) == 1:
        counts = count_once(group, access, mappings[0], num_tiles)
    if counts is None:
        counts = count(access_demand(group, access, num_tiles, MOST_RUNS), mappings, writes, buses, once)
    return counts


def _in_bytes(counts: Traffic, item_bytes: int) -> Traffic:
    """Read-only, with elements of some bytes in place of one."""
    members = []
    for item in fields(Traffic):
        values = getattr(counts, item.name) * (item_bytes if item.name.endswith("_bytes") else 1)
        members.append(_read_only(values) if values.any() else _zeros(len(values)))
    return Traffic(*members)


# --- cycles -----------------------------------------------------------------------------------------------------------


def receive_cycles(
    received_bytes: np.ndarray, shared_bytes: np.ndarray, fragments: np.ndarray, target: Target
) -> np.ndarray:
    """Cycles each tile spends to receive one operand, int64[num_tiles].

    Args:
        received_bytes: bytes that arrive, int64[num_tiles].
        shared_bytes: the part of them that all tiles of the same exchange bus receive, int64[num_tiles].
        fragments: contiguous parts that arrive, int64[num_tiles].
        target: gives width and control costs.

    Source: reference A2, payload over width or the control slots of each fragment, whichever is more; reference A1, §2
    for the width of tiles that share a bus.
    """
    alone_bytes = received_bytes - shared_bytes + shared_bytes / target.tiles_per_exchange_bus
    payload = np.ceil(alone_bytes / target.exchange_bytes_per_cycle).astype(np.int64)
    return np.maximum(payload, fragments * target.exchange_fragment_cycles)


def exchange_cycles(receiving_cycles: np.ndarray, sent_bytes: np.ndarray, target: Target) -> np.ndarray:
    """Cycles each tile spends in one internal exchange, the sync before it not included.

    Args:
        receiving_cycles: `receive_cycles` of all operands together, int64[num_tiles].
        sent_bytes: bytes that leave, int64[num_tiles].
        target: gives width and start-up cost.

    Returns:
        int64[num_tiles], 0 where a tile neither sends nor receives.

    Source: a tile sends and receives at once (reference A2); B5 for the start.
    """
    sending = np.ceil(sent_bytes / target.exchange_bytes_per_cycle).astype(np.int64)
    work = np.maximum(receiving_cycles, sending)
    return np.where(work > 0, work + target.exchange_startup_cycles, 0)


def copy_cycles(copied_bytes: np.ndarray, copied_fragments: np.ndarray, target: Target) -> np.ndarray:
    """Cycles each tile spends to rearrange bytes in its own memory.

    Args:
        copied_bytes: bytes copied, as `Traffic.copied_bytes`, int64[num_tiles].
        copied_fragments: contiguous parts of those, int64[num_tiles].
        target: gives the cost of a byte, of a part, and of starting at all.

    Returns:
        int64[num_tiles], 0 where nothing is copied.

    Source: reference B5, a fit to copies before and after an exchange on Mk1.
    """
    streamed = np.ceil(copied_bytes / target.memcpy_bytes_per_cycle).astype(np.int64)
    work = target.copy_startup_cycles + streamed + copied_fragments * target.copy_fragment_cycles
    return np.where(copied_bytes > 0, work, 0)
