"""Cost of a compute set: cycles and bytes of every tile, from its vertex groups and the tile mappings.

Input: a graph and a compute set of it. Output: `ComputeSetCost`.

    compute set ::= sync ; exchange of operands ; copies of operands, vertices, copies of results ;
                    (sync ; exchange of results)?

Operands arrive one after the other; a tile sends meanwhile.

The vertices of supervisor codelets on one tile run one after the other, each on all workers. The vertices of worker
codelets go to the workers longest first, ties by order; a tile issues for each worker once in a round of its slots, six
of them however few workers it has, so they take as many times the slowest worker's instructions. The two kinds do not
overlap.
Source: threading and supervisor overhead: poplibs `PerformanceEstimation.hpp` (reference machine.md §1.1). Constants:
`Target`.
Limits: each phase lasts as long as its slowest tile; phases do not overlap.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from ipujax.runtime.cache import recall, recall_stored
from ipujax.runtime.cost.ipu_window import Window, compact, is_count_by_tile, mapping_range, tile_range
from ipujax.runtime.cost.padded_rows import padding_of_group
from ipujax.runtime.cost.rearrangement import field_traffics, field_windows, padded_traffics, rearrangement
from ipujax.runtime.exchange import Traffic, TrafficWindow, exchange_cycles, geometry, mappings_from, receive_cycles
from ipujax.runtime.graph import (
    NO_TILE,
    BlockShapes,
    Codelet,
    ComputeSet,
    Dim,
    Graph,
    Repetition,
    SlowPath,
    SlowReason,
    VertexGroup,
    dim_extent,
    repetitions,
    shift_vertices,
)
from ipujax.runtime.target import Target, issue_round_cycles


@dataclass(frozen=True, slots=True, eq=False)
class ExchangeCost:
    """Cost of one exchange between tiles; each member is int64[tiles].

    Args:
        received_bytes: bytes that each tile receives.
        sent_bytes: bytes that each tile sends, counted once however many tiles receive them.
        receives: parts that each tile receives, each from one tile to successive addresses.
        sends: contiguous parts that each tile sends, counted once however many tiles receive them.
        cycles: cycles of each tile.
    """

    received_bytes: np.ndarray
    sent_bytes: np.ndarray
    receives: np.ndarray
    sends: np.ndarray
    cycles: np.ndarray


_SLOW_TILE = 0.9  # of the cycles of the slowest tile: these limit a compute set, so that equal groups count alike


@dataclass(frozen=True, slots=True, eq=False)
class ComputeSetCost:
    """Cost of one execution of a compute set, tile by tile; arrays are int64[tiles], the tiles of whole IPUs.

    Args:
        compute_set: the compute set.
        first_ipu: the IPU of the first tile of the arrays.
        compute_cycles: cycles of the compute phase: vertices and rearrangement.
        rearrangement_cycles: the part of `compute_cycles` that copies elements on their own tile.
        rearrangement_after_cycles: the part of those that copies results, after the vertices.
        rearrangement_bytes: bytes copied so.
        active_cycles: cycles whose issue slot is of a worker that has a vertex, or part of one, to run; the rest of
            `compute_cycles` are idle slots. A launch counts as its vertex.
        active_by_codelet: active cycles of all tiles, by name of the codelet.
        limiting_by_group: cycles of the vertices of each vertex group, in order, on the tiles that take longest.
        vertices: vertices on each tile.
        before: exchange of operands.
        after: exchange of results that are stored on another tile.
        slow_paths: number of the vertex group, reason and cycles, on the tile that they take longest, of each slow path
            of its vertices and of the copies of its operands and results; these cycles are part of `compute_cycles`.
    """

    compute_set: ComputeSet
    first_ipu: int
    compute_cycles: np.ndarray
    rearrangement_cycles: np.ndarray
    rearrangement_after_cycles: np.ndarray
    rearrangement_bytes: np.ndarray
    active_cycles: np.ndarray
    active_by_codelet: tuple[tuple[str, int], ...]
    limiting_by_group: tuple[int, ...]
    vertices: np.ndarray
    before: ExchangeCost
    after: ExchangeCost
    slow_paths: tuple[tuple[int, SlowReason, int], ...]


def block_shapes(group: VertexGroup) -> BlockShapes:
    """Return the shapes of the blocks that a group's codelet receives, over its grid of vertices.

    Returns:
        Per field, per dimension that is not squeezed: int64, broadcastable to the grid. With fill, unless the codelet
        takes "pads" and so receives its blocks without.
    """
    with_fill = "pads" not in group.codelet.takes
    lengths_of: dict[tuple[Dim, int], np.ndarray] = {}  # most fields of a codelet share their dimensions
    shapes = []
    for access in group.accesses:
        lengths = []
        for number, dim in enumerate(access.dims):
            key = dim, access.tensor.shape[number]
            if dim.is_squeezed:
                continue
            if key not in lengths_of:
                extent = dim_extent(group, access, number)
                # Between two elements of a divided index are divisor − 1 elements of fill.
                inner = np.maximum(extent.length - 1, 0) * dim.divisor + np.minimum(extent.length, 1)
                lengths_of[key] = extent.pad_low + inner + extent.pad_high if with_fill else extent.length
            lengths.append(lengths_of[key])
        shapes.append(tuple(lengths))
    return shapes


def slowest_workers(tile: np.ndarray, cycles: np.ndarray, num_tiles: int, workers: int) -> np.ndarray:
    """Return the cycles of the busiest worker of each tile, int64[num_tiles]."""
    # Vertices (`tile` and `cycles`, int64[n]) go to the least busy worker of their tile, longest first, ties by order.
    order = np.lexsort((-cycles, tile))
    tile = tile[order]
    cycles = cycles[order]
    count = np.bincount(tile, minlength=num_tiles)
    first = np.cumsum(count) - count
    load = np.zeros((num_tiles, workers), np.int64)
    # One round for the n-th longest vertex of all tiles at once.
    for rank in range(int(count.max(initial=0))):
        tiles = np.flatnonzero(count > rank)
        load[tiles, load[tiles].argmin(1)] += cycles[first[tiles] + rank]
    return load.max(1)


def compute_set_cost(graph: Graph, compute_set: ComputeSet) -> ComputeSetCost:
    """Return the cost of one execution of a compute set; those with equal vertices, on any IPUs, share one cost."""
    window = window_of(graph, graph.groups[compute_set])
    key = cost_key(graph, compute_set, window.first_tile)
    count_and_cost = partial(_count_and_cost, graph, compute_set, key)
    if key is None:
        cost = count_and_cost()
    else:
        constants = _constants_read(graph, compute_set)
        is_valid = partial(_is_cost_of, graph=graph, compute_set=compute_set)
        cost = recall_stored(("compute set", key, constants), count_and_cost, ComputeSetCost, is_valid)
    return replace(cost, compute_set=compute_set, first_ipu=window.first_ipu)


# What no cost of vertices, exchanges and copies on tiles reads: a cost is recalled for machines that differ in it.
NOT_OF_TILES = frozenset(
    {
        *("name", "sources", "num_ipus", "bytes_per_tile", "memory_element_bytes", "interleaved_offset_bytes"),
        *("clock_hz", "ipu_watts", "exchange_receive_instructions", "internal_sync_cycles", "global_sync_cycles"),
        *("global_exchange", "sync_pattern", "ipu_link_bytes_per_second", "ipu_links_per_ipu", "ipu_link_efficiency"),
        *("global_exchange_latency_seconds", "ipus_per_pod", "ipus_per_gateway", "gateway_bytes_per_second"),
        *("host_bytes_per_second", "host_latency_seconds", "stream_buffer_limit_bytes", "streaming_memory_bytes"),
        *("streaming_bytes_per_second", "max_remote_transfer_bytes", "available_memory_proportion"),
    }
)
_OF_TILES = tuple(item.name for item in fields(Target) if item.name not in NOT_OF_TILES)


def _constants_read(graph: Graph, compute_set: ComputeSet) -> object:
    """Return the values of all constants that the cost of a compute set may read, with its system's IPUs."""
    target = graph.target
    if any(group.codelet.costed_by != "arrays" for group in graph.groups[compute_set]):
        return target  # code of a user may read any
    return target.num_ipus, *(getattr(target, name) for name in _OF_TILES)


def cost_key(graph: Graph, compute_set: ComputeSet, first_tile: int = 0) -> tuple[object, ...] | None:
    """Return all but the target that the cost of a compute set depends on; None where that is not hashable.

    Args:
        graph: of the compute set.
        compute_set: the compute set.
        first_tile: from which tiles are counted, so that layers on several IPUs are equal.
    """
    key = tuple(_cost_key(group, graph, first_tile) for group in graph.groups[compute_set])
    return None if None in key else key


def _is_cost_of(cost: ComputeSetCost, graph: Graph, compute_set: ComputeSet) -> bool:
    """Return whether a cost, as of the first IPU, is of the tiles, groups and codelets of a compute set."""
    groups = graph.groups[compute_set]
    window = window_of(graph, groups)
    exchanges = (getattr(exchange, item.name) for exchange in (cost.before, cost.after) for item in fields(exchange))
    by_tile = [value for item in fields(cost) if isinstance(value := getattr(cost, item.name), np.ndarray)]
    return (
        cost.first_ipu == 0
        and all(is_count_by_tile(values, window.tiles) for values in (*by_tile, *exchanges))
        and len(cost.limiting_by_group) == len(groups)
        and [name for name, _ in cost.active_by_codelet] == [*dict.fromkeys(group.codelet.name for group in groups)]
        and min((*cost.limiting_by_group, *(cycles for _, cycles in cost.active_by_codelet)), default=0) >= 0
        and all(0 <= group < len(groups) and cycles > 0 for group, _, cycles in cost.slow_paths)
    )


def _cost_key(group: VertexGroup, graph: Graph, first_tile: int) -> tuple[object, ...] | None:
    """Return everything that the cost of a group depends on; None where a list of elements is part of that."""
    tensors = [access.tensor for access in group.accesses]
    views = tuple(map(geometry, tensors))
    if None in views:
        return None
    mapped = tuple((x.dtype, mappings_from(first_tile, x, graph)) for x in tensors)
    tile = shift_vertices(group.tile, -first_tile)
    cuts = tuple(axis.cuts.tobytes() for axis in group.axes)
    padded = tuple(graph.padded_lengths.items())
    return (
        group.codelet,
        padded,
        views,
        mapped,
        tuple(access.dims for access in group.accesses),
        cuts,
        tile.tobytes(),
    )


def _count_and_cost(graph: Graph, compute_set: ComputeSet, keys: tuple[object, ...] | None) -> ComputeSetCost:
    """Return the cost of a compute set, as if on the first IPU; `keys` are those of its groups, see `cost_key`.

    So stages that are equal on other IPUs have equal costs. Compute sets have groups in common, where merging adds
    others: stages push to stashes of different lengths.
    """
    groups = graph.groups[compute_set]
    target = graph.target
    window = window_of(graph, groups)
    parts = group_costs(graph, compute_set, keys, window)
    reads = field_traffics(groups, [part.reads for part in parts], False)
    writes = field_traffics(groups, [part.writes for part in parts], True)
    before, after = (
        rearrangement(rows, is_result, window, graph) for rows, is_result in ((reads, False), (writes, True))
    )
    copied_cycles = before.cycles + after.cycles
    of_vertices = _vertex_costs(groups, [part.vertices for part in parts], window, target)
    return ComputeSetCost(
        compute_set,
        0,  # first IPU
        compact(of_vertices.cycles + copied_cycles),
        compact(copied_cycles),
        compact(after.cycles),
        compact(before.num_bytes + after.num_bytes),
        compact(of_vertices.active),
        tuple(of_vertices.by_codelet.items()),
        of_vertices.by_group,
        compact(of_vertices.vertices),
        exchange_cost([row.traffic for row in reads], window, target),
        exchange_cost([row.traffic for row in writes], window, target),
        (*of_vertices.slow_paths, *before.slow_paths, *after.slow_paths),
    )


def group_costs(
    graph: Graph, compute_set: ComputeSet, keys: Sequence[object] | None, window: Window
) -> list[GroupCost]:
    """Return the costs of the groups of a compute set on the tiles of its window; see `_count_and_cost`."""
    groups = graph.groups[compute_set]
    if keys is None:
        parts = [_group_cost(group, graph, window.first_tile) for group in groups]
    else:
        beside = _constants_read(graph, compute_set)
        parts = [
            recall(("vertices", key, beside), partial(_group_cost, group, graph, window.first_tile))
            for key, group in zip(keys, groups, strict=True)
        ]
    return [
        GroupCost(
            part.vertices,
            padded_traffics(group, part.reads, graph, False, window.tiles),
            padded_traffics(group, part.writes, graph, True, window.tiles),
        )
        for group, part in zip(groups, parts, strict=True)
    ]


def window_of(graph: Graph, groups: Sequence[VertexGroup]) -> Window:
    """Return the IPUs of vertices and of all that they are connected to."""
    # Of whole IPUs: a compute set of one IPU then has arrays of one IPU, in a pod of any size.
    ranges = [tile_range(group.tile) for group in groups]
    ranges += [mapping_range(graph.mappings[v]) for g in groups for a in g.accesses for v in a.tensor.variables()]
    return Window.of(ranges, graph.target)


def exchange_cost(traffics: Sequence[Traffic], window: Window, target: Target) -> ExchangeCost:
    """Return the cost of one exchange of all of some traffic, by tiles of a window."""
    received = window.total(t.received_bytes for t in traffics)
    sent = window.total(t.sent_bytes for t in traffics)
    if not received.any() and not sent.any():  # no exchange at all: without its start-up cycles
        return ExchangeCost(*[window.zeros] * 5)
    receives = window.total(t.receives for t in traffics)
    sends = window.total(t.sends for t in traffics)
    receiving = window.zeros
    for t in traffics:
        if t.received_bytes.any():
            operand = receive_cycles(t.received_bytes, t.shared_bytes, t.receives, target, t.fragments)
            receiving = receiving + operand  # operands arrive one after the other
    cycles = exchange_cycles(receiving, sent, target, sends)
    return ExchangeCost(compact(received), compact(sent), compact(receives), compact(sends), compact(cycles))


class _VertexCosts(NamedTuple):
    """Costs of the vertices of a compute set, on the tiles of its window.

    Args:
        cycles: of each tile, int64[tiles].
        active: cycles whose issue slot is of a worker with a vertex to run, int64[tiles].
        by_group: cycles of each group on the slowest tiles.
        by_codelet: active cycles on all tiles, by the name of the codelet.
        vertices: number on each tile, int64[tiles].
        slow_paths: number of a group, reason, cycles of its slowest tile.
    """

    cycles: np.ndarray
    active: np.ndarray
    by_group: tuple[int, ...]
    by_codelet: Counter[str]
    vertices: np.ndarray
    slow_paths: tuple[tuple[int, SlowReason, int], ...]


def _vertex_costs(
    groups: Sequence[VertexGroup], parts: Sequence[_GroupCycles], window: Window, target: Target
) -> _VertexCosts:
    """Return the costs of vertices: those of supervisors run one after the other, others share the tile's workers."""
    tiles = window.tiles
    total, active, vertices = (np.zeros(tiles, np.int64) for _ in range(3))
    tiles_of_groups: list[np.ndarray] = []
    by_codelet = Counter[str]()
    worker_vertices: list[tuple[np.ndarray, np.ndarray]] = []
    slow_paths: list[tuple[int, SlowReason, int]] = []
    for number, (group, part) in enumerate(zip(groups, parts, strict=True)):
        tile = part.tile
        on_tile = np.bincount(tile, part.cycles, tiles).astype(np.int64)
        vertices += np.bincount(tile, minlength=tiles)
        busy_slots = on_tile
        if part.idle_slots is not None:  # workers whose supervisor has no part for them are not active
            busy_slots = np.bincount(tile, part.cycles - part.idle_slots, tiles).astype(np.int64)
        active += busy_slots
        tiles_of_groups.append(on_tile)
        by_codelet[group.codelet.name] += int(busy_slots.sum())
        for reason, cycles in part.slow_paths:
            slow_cycles = int(np.bincount(tile, cycles, tiles).max())
            slow_paths += [(number, reason, slow_cycles)] if slow_cycles else []
        if group.codelet.supervisor:
            total += on_tile
        else:
            worker_vertices.append((tile, part.cycles))
    if worker_vertices:
        tile, cycles = (np.concatenate(parts) for parts in zip(*worker_vertices, strict=True))
        busy = np.bincount(tile, minlength=tiles) > 0
        slowest = slowest_workers(tile, cycles, tiles, target.worker_contexts)
        total += np.where(busy, target.supervisor_overhead_cycles + issue_round_cycles(target) * slowest, 0)
    # A group that is done earlier takes no time of the compute set, however many tiles it has.
    is_slow = total >= _SLOW_TILE * total.max(initial=0)
    by_group = tuple(int(on_tile[is_slow].sum()) for on_tile in tiles_of_groups)
    return _VertexCosts(total, active, by_group, by_codelet, vertices, tuple(slow_paths))


@dataclass(frozen=True, slots=True, eq=False)
class _GroupCycles:
    """Cycles of the vertices of a group, int64[vertices]; `idle_slots` are None where all workers are busy."""

    tile: np.ndarray  # counted from the first of a window
    cycles: np.ndarray  # rounded up, with those of slow paths
    idle_slots: np.ndarray | None
    slow_paths: tuple[tuple[SlowReason, np.ndarray], ...]  # reason, cycles


@dataclass(frozen=True, slots=True, eq=False)
class GroupCost:
    """Cycles of the vertices of a group, and the exchanges of fields that it reads and writes, on tiles of a window."""

    vertices: _GroupCycles
    reads: Sequence[Traffic]
    writes: Sequence[Traffic]


@dataclass(frozen=True, slots=True, eq=False)
class _CompactGroupCost:
    """A `GroupCost` as caches have it: exchanges of the tiles that take part, in few bytes, counted from a first."""

    vertices: _GroupCycles
    reads: Sequence[TrafficWindow]
    writes: Sequence[TrafficWindow]


def _group_cost(group: VertexGroup, graph: Graph, first_tile: int) -> _CompactGroupCost:
    reads = field_windows(group, graph, False, first_tile)
    writes = field_windows(group, graph, True, first_tile)
    return _CompactGroupCost(_group_cycles(group, graph, first_tile), reads, writes)


def _group_cycles(group: VertexGroup, graph: Graph, first_tile: int) -> _GroupCycles:
    """Return the cycles of the vertices of a group by the formulas of their codelet; tiles count from `first_tile`."""
    codelet = group.codelet
    target = graph.target
    shapes = block_shapes(group)
    has_slow_paths = codelet.slow_paths is not None
    rows = repetitions(group) if has_slow_paths else ()
    paths = slow_paths_of(codelet, shapes, rows, graph.padded_lengths, target)
    slow_cycles = sum(path.cycles for path in paths)
    cycles = whole_vertex_cycles(codelet, shapes, target, padding_of_group(group, graph.padded_lengths), slow_cycles)
    idle_slots = _idle_slots(codelet, shapes, cycles, target)
    is_vertex = group.tile != NO_TILE

    def of_vertices(values: np.ndarray) -> np.ndarray:
        # Shapes, and so cycles, broadcast to the grid: an axis that cuts nothing of the blocks has length 1.
        return np.broadcast_to(values, group.grid)[is_vertex]

    return _GroupCycles(
        group.tile[is_vertex].astype(np.int64) - first_tile,
        of_vertices(cycles),
        None if idle_slots is None else of_vertices(idle_slots),
        tuple((path.reason, of_vertices(path.cycles)) for path in paths),
    )


def slow_paths_of(
    codelet: Codelet,
    shapes: BlockShapes,
    rows: Sequence[Repetition | None],
    padded_rows: Collection[int],
    target: Target,
) -> list[SlowPath]:
    """Return the slow paths of vertices, by the shapes and repetitions of their blocks; padded rows take none."""
    paths = [] if codelet.slow_paths is None else codelet.slow_paths(shapes, rows, target)
    return [path for path in paths if path.reason.row not in padded_rows]


def whole_vertex_cycles(
    codelet: Codelet, shapes: BlockShapes, target: Target, padding: float, slow_cycles: Any
) -> np.ndarray:
    """Return the cycles of vertices with blocks of some shapes, rounded up.

    Args:
        codelet: its formula.
        shapes: of the blocks of its fields.
        target: a target, or an array of machines.
        padding: elements with padding over those without.
        slow_cycles: of slow paths, on top.
    """
    cycles = np.asanyarray(codelet.cycles(shapes, target))
    if padding > 1:
        cycles = np.ceil(cycles * padding)
    cycles = cycles + slow_cycles
    return (np.ceil(cycles) if cycles.dtype.kind == "f" else cycles).astype(np.int64)


def _idle_slots(codelet: Codelet, shapes: BlockShapes, cycles: np.ndarray, target: Target) -> np.ndarray | None:
    """Return the cycles of vertices whose issue slot is of a worker without a part of its supervisor's vertex."""
    # int64, broadcastable to the grid; None for vertices of workers, which `slowest_workers` distributes.
    # All parts take equally long, so the worker of most parts sets the time: n parts keep six workers busy for n of
    # every 6 * ceil(n / 6) slots.
    if not codelet.supervisor or codelet.parts is None:
        return None
    parts = np.asarray(codelet.parts(shapes, target))
    slots = issue_round_cycles(target) * np.maximum(1, -(-parts // target.worker_contexts))
    return cycles * (slots - parts) // slots
