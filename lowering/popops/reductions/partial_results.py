"""Results of a reduction that is split over tiles: a slot of partial results for each block of the reduced dimensions.

Input: the partition of an index space, and its reduced dimensions. Output: a variable for the results on the tiles that
compute them, and the access by which the vertices write it.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from ipujax.runtime.graph import Access, Dim, Graph, Term, element
from ipujax.runtime.tensor import Blocked, Tensor, blocked_mapping, even_cuts


def num_slots(placement: Blocked, axes: Sequence[int]) -> int:
    """Number of blocks into which the reduced dimensions are cut."""
    return prod(len(placement.cuts[d]) - 1 for d in axes)


def partial_results(
    graph: Graph, placement: Blocked, axes: Sequence[int], dtype: Any, monoid: str, name: str
) -> tuple[Tensor, Access]:
    """Variable of the result, or of partial results with slots in dimension 0, and the access that writes it."""
    # `axes` are the reduced dimensions of `placement`, in order; the partial results combine by `monoid`.
    result_dims = [d for d in range(len(placement.cuts)) if d not in axes]
    cuts = tuple(placement.cuts[d] for d in result_dims)
    slots = num_slots(placement, axes)
    shape = tuple(int(cut[-1]) for cut in cuts)
    tiles = np.transpose(placement.tile, [*axes, *result_dims]).reshape([slots, *(len(cut) - 1 for cut in cuts)])
    if slots == 1:
        out = graph.add_variable(shape, dtype, name, blocked_mapping(cuts, tiles[0]))
        return out, Access(out, tuple(map(element, result_dims)))
    mapping = blocked_mapping((even_cuts(slots, slots), *cuts), tiles)
    out = graph.add_variable((slots, *shape), dtype, f"{name}/partials", mapping, monoid)
    split = [d for d in axes if len(placement.cuts[d]) > 2]
    # The slot is the index of a block among those of the reduced dimensions, the last one fastest.
    weights = [num_slots(placement, split[n + 1 :]) for n in range(len(split))]
    slot = Dim(tuple(Term(d, weight, "block") for d, weight in zip(split, weights, strict=True)))
    return out, Access(out, (slot, *map(element, result_dims)))
