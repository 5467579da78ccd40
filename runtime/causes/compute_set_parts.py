"""What compute sets take on the tiles of an IPU: their least cycles, equal tiles; those of products and of look-ups.

Input: a graph and its compute sets. Output: cycles of tiles and IPUs, and sets of compute sets.
Limits: vertices of code that a user has costed have no least cycles.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ipujax.runtime.cache import remembered
from ipujax.runtime.cost import slowest_workers, whole_vertex_cycles
from ipujax.runtime.graph import NO_TILE, Codelet, ComputeSet, Graph, VertexGroup
from ipujax.runtime.target import Target, issue_round_cycles


def cycles_of_small_vertices(
    graph: Graph, compute_set: ComputeSet, first_ipu: int, num_tiles: int, elements: int
) -> np.ndarray:
    """Return the cycles of each tile with one vertex of each group on it, whose fields have 0 or 1 elements.

    Without elements: the start of vertices. With one: the start, and work that cannot be spread over more tiles.

    Args:
        graph: of the compute set.
        compute_set: with vertices on the tiles.
        first_ipu: the IPU of the first tile.
        num_tiles: number of tiles, all those with vertices.
        elements: of each field, 0 or 1.
    """
    target = graph.target
    cycles = np.zeros(num_tiles, np.int64)
    of_workers: list[tuple[np.ndarray, np.ndarray]] = []  # tiles and cycles of their vertices
    for group in graph.groups[compute_set]:
        is_busy = np.zeros(num_tiles, bool)
        is_busy[group.tile[group.tile != NO_TILE] - first_ipu * target.tiles_per_ipu] = True
        tiles = np.flatnonzero(is_busy)
        if group.codelet.supervisor:
            cycles[tiles] += _cycles_of_vertex(group, elements, target)
        else:
            of_workers.append((tiles, np.full(len(tiles), _cycles_of_vertex(group, elements, target))))
    if of_workers:
        tiles, each = (np.concatenate(parts) for parts in zip(*of_workers, strict=True))
        slowest = slowest_workers(tiles, each, num_tiles, target.worker_contexts)
        cycles += np.where(slowest, target.supervisor_overhead_cycles + issue_round_cycles(target) * slowest, 0)
    return cycles


@dataclass(frozen=True, slots=True, eq=False)
class CyclesOfTiles:
    """Compute cycles of the tiles of some IPUs, reduced to each IPU; all members int64[IPUs].

    Args:
        most: cycles of the slowest tile.
        most_started: those of the slowest tile without the start of its vertices.
        most_least: most cycles on a tile that cannot be spread over more tiles.
        most_least_started: the same without the start of vertices.
        mean_further: mean of all other cycles of tiles, rounded up.
    """

    most: np.ndarray
    most_started: np.ndarray
    most_least: np.ndarray
    most_least_started: np.ndarray
    mean_further: np.ndarray

    @classmethod
    def of(cls, cycles: np.ndarray, starts: np.ndarray, least: np.ndarray, target: Target) -> CyclesOfTiles:
        """Return the cycles of IPUs from those of their tiles, int64[tiles].

        Args:
            cycles: of each tile.
            starts: those of them that start vertices.
            least: those of `starts`, and of work that cannot be spread over more tiles.
            target: tiles of an IPU.
        """
        of_tiles = cycles.reshape(-1, target.tiles_per_ipu)
        start = np.minimum(of_tiles, starts.reshape(of_tiles.shape))
        first = np.minimum(of_tiles, least.reshape(of_tiles.shape))
        mean = np.ceil((of_tiles - first).mean(1)).astype(np.int64)
        return cls(of_tiles.max(1), (of_tiles - start).max(1), first.max(1), (first - start).max(1), mean)

    def of_ipus(self, is_started: bool, is_equal: bool) -> np.ndarray:
        """Return the compute cycles of each IPU, int64[IPUs].

        Args:
            is_started: whether vertices start in no time.
            is_equal: whether each tile has its least cycles and the mean of all others.
        """
        most = self.most_started if is_started else self.most
        if not is_equal:
            return most
        least = self.most_least_started if is_started else self.most_least
        return np.minimum(most, least + self.mean_further)


def _cycles_of_vertex(group: VertexGroup, elements: int, target: Target) -> int:
    """Return the cycles of a vertex of a group, those of one worker or a tile, with 0 or 1 elements in each field."""
    codelet = group.codelet
    if codelet.costed_by != "arrays":  # code of a user, which need not know such blocks
        return 0
    ranks = tuple(sum(not dim.is_squeezed for dim in access.dims) for access in group.accesses)
    return _cycles_of_ranks(codelet, ranks, len(group.grid), elements, target)


@remembered
def _cycles_of_ranks(codelet: Codelet, ranks: tuple[int, ...], grid_rank: int, elements: int, target: Target) -> int:
    length = np.full((1,) * grid_rank, elements, np.int64)
    return int(whole_vertex_cycles(codelet, [(length,) * rank for rank in ranks], target, 1, 0).max())


def is_of_scalars(group: VertexGroup) -> bool:
    """Return whether all results of a vertex group are single elements."""
    fields = zip(group.codelet.fields, group.accesses, strict=True)
    return all(access.tensor.size == 1 for field, access in fields if field.is_written)


def with_combinations(graph: Graph, is_of_kind: Callable[[Codelet], bool]) -> frozenset[ComputeSet]:
    """Return the compute sets of a kind of codelet, or that combine partial results of those, as one plan has them."""
    fields = [
        (compute_set, group.codelet, field, access.tensor)
        for compute_set, groups in graph.groups.items()
        for group in groups
        for field, access in zip(group.codelet.fields, group.accesses, strict=True)
    ]
    of_kind = {compute_set for compute_set, codelet, _, _ in fields if is_of_kind(codelet)}
    partials = {
        variable
        for _, codelet, field, tensor in fields
        if is_of_kind(codelet) and field.is_written
        for variable in tensor.variables()
        if variable.monoid
    }
    return frozenset(
        of_kind.union(
            compute_set
            for compute_set, _, field, tensor in fields
            if field.is_read and not partials.isdisjoint(tensor.variables())
        )
    )
