"""Counts of a compute set on its distinct tiles, and the cycles of its phases on each IPU.

Input: a graph and a compute set of it. Output: `ComputeSetCounts`, which knows no target but its tiles;
`compute_set_cycles` are those of arrays of machines, and equal the slowest tiles of `compute_set_cost` on each. Of
1,472 tiles few are distinct: most have blocks of equal shapes.
Limits: vertices of code that a user has costed are computed one machine after another, see `Codelet.costed_by`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ipujax.runtime.cost.busiest_tiles import ExchangeCounts, distinct_columns, distinct_tiles, largest_of_ipus
from ipujax.runtime.cost.compute_set import (
    ComputeSetCost,
    GroupCost,
    block_shapes,
    group_costs,
    slow_paths_of,
    whole_vertex_cycles,
    window_of,
)
from ipujax.runtime.cost.ipu_window import Window
from ipujax.runtime.cost.padded_rows import padding_of_group
from ipujax.runtime.cost.rearrangement import FieldTraffic, field_traffics, rearrangement_counts
from ipujax.runtime.exchange import Traffic, copy_cycles
from ipujax.runtime.graph import NO_TILE, BlockShapes, Codelet, ComputeSet, Graph, Repetition, VertexGroup, repetitions
from ipujax.runtime.target import Machines, Target, issue_round_cycles, recalled_value
from ipujax.runtime.tensor import pad_tiles


@dataclass(frozen=True, slots=True, eq=False)
class ComputeSetCycles:
    """Cycles of the phases of a compute set on each IPU, those of its slowest tile: int64[num_ipus, *machines].

    Args:
        before: of the exchange of operands.
        after: of the exchange of results.
        compute: of vertices and copies on tiles.
        has_vertices: whether the IPU has vertices, bool[num_ipus].
    """

    before: np.ndarray
    after: np.ndarray
    compute: np.ndarray
    has_vertices: np.ndarray


def slowest_tiles(cost: ComputeSetCost, target: Target) -> ComputeSetCycles:
    """Return the cycles of a compute set on each IPU of a target, from those of its tiles."""
    tiles = (cost.before.cycles, cost.after.cycles, cost.compute_cycles, cost.vertices)
    before, after, compute, vertices = (slowest_of_ipus(cycles, cost.first_ipu, target) for cycles in tiles)
    return ComputeSetCycles(before, after, compute, vertices > 0)


def slowest_of_ipus(cycles: np.ndarray, first_ipu: int, target: Target) -> np.ndarray:
    """Return the maximum of each IPU, int64[num_ipus], of cycles on the tiles of some IPUs from `first_ipu` on."""
    return pad_tiles(cycles.reshape(-1, target.tiles_per_ipu).max(1), first_ipu, target.num_ipus)


@dataclass(frozen=True, slots=True, eq=False)
class _Vertices:
    """Vertices of one codelet.

    Args:
        codelet: the codelet.
        shapes: of each distinct vertex, int64[n, 1].
        repetitions: of its fields, on which slow paths depend.
        padded_rows: lengths of rows that are padded, and so take no slow path.
        padding: elements with padding over those without.
        on_tile: how many a tile has, int64[n, tiles].
    """

    codelet: Codelet
    shapes: BlockShapes
    repetitions: tuple[Repetition | None, ...]
    padded_rows: frozenset[int]
    padding: float
    on_tile: np.ndarray

    def cycles(self, target: Target) -> np.ndarray:
        """Return the cycles of each distinct vertex, rounded up, [n, machines]; those of equal vertices are equal."""
        shapes = tuple(tuple((length.shape, length.tobytes()) for length in block) for block in self.shapes)
        key = self.codelet, shapes, self.repetitions, self.padded_rows, self.padding, len(self.on_tile)
        cycles: np.ndarray = recalled_value(target, key, self._compute_cycles)
        return cycles

    def _compute_cycles(self, target: Target) -> np.ndarray:
        paths = slow_paths_of(self.codelet, self.shapes, self.repetitions, self.padded_rows, target)
        slow_cycles = sum(path.cycles for path in paths)
        cycles = whole_vertex_cycles(self.codelet, self.shapes, target, self.padding, slow_cycles)
        machines = cycles.shape[-1] if cycles.ndim else 1
        return np.broadcast_to(cycles.reshape(-1, machines), (len(self.on_tile), machines))


@dataclass(frozen=True, slots=True, eq=False)
class ComputeSetCounts:
    """Counts of a compute set.

    Args:
        first_ipu: first IPU of the window of all others.
        before: exchange of operands.
        after: exchange of results.
        vertices: of each vertex group, on the distinct tiles.
        copied: bytes, fragments and cycles by atoms of operands, then of results, that are copied on each of these
            tiles, int64[6, n].
        ipu: IPU of each, in the window, int64[n].
        has_vertices: whether each IPU of the window has vertices.
    """

    first_ipu: int
    before: ExchangeCounts
    after: ExchangeCounts
    vertices: tuple[_Vertices, ...]
    copied: np.ndarray
    ipu: np.ndarray
    has_vertices: np.ndarray

    @property
    def rows(self) -> int:
        """Elements of the largest array of its formulas, for one machine."""
        return max([len(self.ipu), *(len(each.on_tile) for each in self.vertices)])

    def compute_cycles(self, target: Target) -> np.ndarray:
        """Return the cycles of vertices and of copies on each IPU, [num_ipus, machines]."""
        total = np.zeros((len(self.ipu), 1), np.int64)
        for copied_bytes, fragments, slow_cycles in self.copied.reshape(2, 3, len(self.ipu), 1):
            total = total + copy_cycles(copied_bytes, fragments, target, slow_cycles)
        workers: list[tuple[np.ndarray, np.ndarray]] = []
        for each in self.vertices:
            if each.codelet.supervisor:
                # In floats, of which BLAS multiplies matrices: cycles of a tile are below 2^53.
                sums = each.on_tile.T.astype(float) @ each.cycles(target).astype(float)
                total = total + (sums if total.dtype.kind == "f" else np.rint(sums).astype(np.int64))
            else:
                workers.append((each.on_tile, each.cycles(target)))
        if workers:
            total = total + _worker_cycles(workers, target)
        return largest_of_ipus(total, self.ipu, len(self.has_vertices))


def _worker_cycles(vertices: Sequence[tuple[np.ndarray, np.ndarray]], target: Target) -> np.ndarray:
    """Return the cycles of vertices that workers run, on each tile, [n, machines]; see `slowest_workers`."""
    machines = max(cycles.shape[-1] for _, cycles in vertices)
    cycles = np.concatenate([np.broadcast_to(each, (len(each), machines)) for _, each in vertices])
    number = np.concatenate([on_tile for on_tile, _ in vertices])
    tiles = number.shape[1]
    lists = [np.repeat(np.arange(len(number)), number[:, tile]) for tile in range(tiles)]
    longest = max(map(len, lists), default=0)
    ordered = np.zeros((tiles, longest, machines), cycles.dtype)
    for tile, numbers in enumerate(lists):
        ordered[tile, : len(numbers)] = -np.sort(-cycles[numbers], axis=0)
    load = np.zeros((tiles, target.worker_contexts, machines), cycles.dtype)
    for rank in range(longest):
        idlest = load.argmin(1)[:, None]
        np.put_along_axis(load, idlest, np.take_along_axis(load, idlest, 1) + ordered[:, rank, None], 1)
    busy = (number.sum(0) > 0)[:, None]
    return np.where(busy, target.supervisor_overhead_cycles + issue_round_cycles(target) * load.max(1), 0)


@dataclass(frozen=True, slots=True, eq=False)
class GroupCounts:
    """Counts of a vertex group on the tiles of a window.

    Args:
        vertices: distinct vertices, and how many of each a tile has.
        reads: traffic of the fields that are read.
        writes: traffic of the fields that are written.
        copied: bytes, fragments and cycles by atoms of operands, then of results, that are copied, int64[6, tiles].
    """

    vertices: _Vertices
    reads: Sequence[Traffic]
    writes: Sequence[Traffic]
    copied: np.ndarray


KnownCounts = dict[object, GroupCounts]  # by window and key of the group


def compute_set_counts(
    graph: Graph,
    compute_set: ComputeSet,
    keys: Sequence[object] | None = None,
    earlier_counts: KnownCounts | None = None,
) -> ComputeSetCounts:
    """Return the counts of one execution of a compute set.

    Args:
        graph: of the compute set.
        compute_set: the compute set.
        keys: of its groups, equal for those of equal counts in a window, see `cost_key`; None for none.
        earlier_counts: counts of groups of other compute sets, to which these are added.
    """
    groups = graph.groups[compute_set]
    window = window_of(graph, groups)
    by_group = {} if earlier_counts is None or keys is None else earlier_counts
    counts_of_groups = []
    costs = group_costs(graph, compute_set, keys, window)
    for group, key, cost in zip(groups, keys or range(len(groups)), costs, strict=True):
        place = window.first_tile, window.tiles, key
        if place not in by_group:
            by_group[place] = _group_counts(group, cost, window, graph)
        counts_of_groups.append(by_group[place])
    copied = sum((each.copied for each in counts_of_groups), np.zeros((6, window.tiles), np.int64))
    numbers = [each.vertices.on_tile for each in counts_of_groups]
    counts, ipu = distinct_tiles(np.concatenate([copied, *numbers]), window)
    bounds = np.cumsum([len(copied), *map(len, numbers)])
    vertices = tuple(
        replace(each.vertices, on_tile=counts[low:high])
        for each, low, high in zip(counts_of_groups, bounds[:-1], bounds[1:], strict=True)
    )
    on_any = sum((on_tile.sum(0) for on_tile in numbers), np.zeros(window.tiles, np.int64))
    return ComputeSetCounts(
        window.first_ipu,
        ExchangeCounts.of([traffic for each in counts_of_groups for traffic in each.reads], window),
        ExchangeCounts.of([traffic for each in counts_of_groups for traffic in each.writes], window),
        vertices,
        counts[: len(copied)],
        ipu,
        np.asarray(on_any.reshape(window.num_ipus, -1).any(1)),
    )


def _group_counts(group: VertexGroup, cost: GroupCost, window: Window, graph: Graph) -> GroupCounts:
    reads, writes = (
        field_traffics([group], [traffics], is_result)
        for traffics, is_result in ((cost.reads, False), (cost.writes, True))
    )
    copied = np.concatenate([_copied(reads, False, window, graph), _copied(writes, True, window, graph)])
    return GroupCounts(_distinct_vertices(group, window, graph), cost.reads, cost.writes, copied)


def _copied(rows: Sequence[FieldTraffic], results: bool, window: Window, graph: Graph) -> np.ndarray:
    """Return bytes, fragments and cycles by atoms that are copied on each tile, int64[3, tiles]."""
    counts = rearrangement_counts(rows, results, window, graph)
    return np.stack([counts.fast_bytes, counts.fast_fragments, counts.slow_cycles])


def _distinct_vertices(group: VertexGroup, window: Window, graph: Graph) -> _Vertices:
    """Return the distinct vertices of a group; `on_tile` has the tiles of the window."""
    shapes = block_shapes(group)
    padding = padding_of_group(group, graph.padded_lengths)
    has_slow_paths = group.codelet.slow_paths is not None
    rows_of = (repetitions(group) if has_slow_paths else (), frozenset(graph.padded_lengths), padding)
    is_vertex = group.tile != NO_TILE
    tile = group.tile[is_vertex].astype(np.int64) - window.first_tile
    if group.codelet.costed_by == "vertex":  # its formula is of the whole grid
        numbers = np.zeros((group.tile.size, window.tiles), np.int64)
        numbers[np.flatnonzero(is_vertex), tile] = 1
        return _Vertices(group.codelet, shapes, *rows_of, numbers)
    # Vertices differ in few lengths: most axes are cut into equal blocks, and several fields share an axis.
    lengths = {id(length): length for block in shapes for length in block}
    varying = [key for key, length in lengths.items() if length.size > 1 and (length != length.flat[0]).any()]
    rows = [np.broadcast_to(lengths[key], group.grid)[is_vertex] for key in varying]
    distinct, number = distinct_columns(np.stack(rows) if rows else np.zeros((1, len(tile)), np.int64))
    kinds = distinct.shape[1]
    numbers = np.bincount(number * window.tiles + tile, minlength=kinds * window.tiles).reshape(kinds, window.tiles)
    columns = {key: np.full((kinds, 1), length.flat[0] if length.size else 0) for key, length in lengths.items()}
    columns |= {key: column[:, None] for key, column in zip(varying, distinct, strict=False)}
    blocks = [tuple(columns[id(length)] for length in block) for block in shapes]
    return _Vertices(group.codelet, blocks, *rows_of, numbers)


def compute_set_cycles(counts: ComputeSetCounts, machines: Machines) -> ComputeSetCycles:
    """Return the cycles of a compute set on each IPU of machines that differ in constants: for sweeps over machines."""
    # Formulas of the library compute all machines at once, those of users one target after the other.
    takes_arrays = all(each.codelet.costed_by == "arrays" for each in counts.vertices)
    if takes_arrays:
        compute = machines.evaluate(counts.compute_cycles, counts.rows)
    else:
        compute = machines.evaluate_each(lambda target: counts.compute_cycles(target)[:, 0])
    before = machines.evaluate(counts.before.cycles, len(counts.before.ipu))
    after = machines.evaluate(counts.after.cycles, len(counts.after.ipu))
    has_vertices = counts.has_vertices[:, None]
    before, after, compute, has_vertices = (
        of_all_ipus(values, counts.first_ipu, machines.target) for values in (before, after, compute, has_vertices)
    )
    return ComputeSetCycles(before, after, compute, has_vertices[:, 0])


def of_all_ipus(values: np.ndarray, first_ipu: int, target: Target) -> np.ndarray:
    """Return values of the IPUs of a window, [n, machines], for all IPUs, 0 elsewhere: [num_ipus, machines]."""
    if len(values) == target.num_ipus:
        return values
    padded = np.zeros((target.num_ipus, values.shape[-1]), values.dtype)
    padded[first_ipu : first_ipu + len(values)] = values
    return padded
