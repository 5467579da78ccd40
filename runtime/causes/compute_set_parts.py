"""What compute sets take on the tiles of an IPU: their least cycles, equal tiles, and which of them multiply matrices.

Input: a graph and its compute sets. Output: cycles of tiles and IPUs, and sets of compute sets.
Limits: vertices of code that a user has costed have no least cycles.
"""

from __future__ import annotations

import numpy as np

from ipujax.runtime.cache import remembered
from ipujax.runtime.cost import slowest_workers, whole_vertex_cycles
from ipujax.runtime.graph import NO_TILE, Codelet, ComputeSet, Graph, VertexGroup
from ipujax.runtime.target import Target, issue_round_cycles


def cycles_of_small_vertices(
    graph: Graph, compute_set: ComputeSet, first_ipu: int, num_tiles: int, elements: int
) -> np.ndarray:
    """Return the cycles of each tile whose vertices have few elements in each field.

    With one element: work that is on a tile however it is spread. Without any: to start the vertices.

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
        tiles = np.unique(group.tile[group.tile != NO_TILE]) - first_ipu * target.tiles_per_ipu
        if group.codelet.supervisor:
            cycles[tiles] += _cycles_of_vertex(group, elements, target)
        else:
            of_workers.append((tiles, np.full(len(tiles), _cycles_of_vertex(group, elements, target))))
    if of_workers:
        tiles, each = (np.concatenate(parts) for parts in zip(*of_workers, strict=True))
        slowest = slowest_workers(tiles, each, num_tiles, target.worker_contexts)
        cycles += np.where(slowest, target.supervisor_overhead_cycles + issue_round_cycles(target) * slowest, 0)
    return cycles


def cycles_of_ipus(
    cycles: np.ndarray, starts: np.ndarray, least: np.ndarray, is_started: bool, is_equal: bool, target: Target
) -> np.ndarray:
    """Return the compute cycles of each IPU from those of its tiles, int64[num_ipus].

    Args:
        cycles: of each tile of whole IPUs.
        starts: those of them that start vertices.
        least: those of them that stay on a tile however work is spread, with those of `starts`.
        is_started: whether vertices start in no time.
        is_equal: whether each tile has its least cycles and the mean of all others.
        target: tiles of an IPU.
    """
    of_tiles = cycles.reshape(-1, target.tiles_per_ipu)
    start = np.minimum(of_tiles, starts.reshape(of_tiles.shape)) * is_started
    if not is_equal:
        return np.asarray((of_tiles - start).max(1))
    first = np.minimum(of_tiles, least.reshape(of_tiles.shape))
    mean = np.ceil((of_tiles - first).mean(1)).astype(np.int64)
    return np.minimum((of_tiles - start).max(1), (first - start).max(1) + mean)


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


def products(graph: Graph) -> frozenset[ComputeSet]:
    """Return the compute sets that multiply matrices, or combine partial results of those, as one plan has them."""
    fields = [
        (compute_set, group.codelet, field, access.tensor)
        for compute_set, groups in graph.groups.items()
        for group in groups
        for field, access in zip(group.codelet.fields, group.accesses, strict=True)
    ]
    products = {compute_set for compute_set, codelet, _, _ in fields if codelet.is_product}
    partials = {
        variable
        for _, codelet, field, tensor in fields
        if codelet.is_product and field.is_written
        for variable in tensor.variables()
        if variable.monoid
    }
    return frozenset(
        products.union(
            compute_set
            for compute_set, _, field, tensor in fields
            if field.is_read and not partials.isdisjoint(tensor.variables())
        )
    )
