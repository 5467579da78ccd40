"""Results of a reduction that is split over tiles: one slot of partial results for each box along what is reduced.

Input: the index space on tiles, and the dimensions of it that are reduced. Output: a variable for the results where
they are computed, and how the vertices write it.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from ipujax.runtime.graph import Access, Dim, Graph, Term, element
from ipujax.runtime.tensor import Blocked, Tensor, blocked_mapping, even_cuts


def num_slots(placement: Blocked, axes: Sequence[int]) -> int:
    """In how many boxes the reduced dimensions are cut."""
    return prod(len(placement.cuts[d]) - 1 for d in axes)


def partial_results(
    graph: Graph, placement: Blocked, axes: Sequence[int], dtype: Any, monoid: str, name: str
) -> tuple[Tensor, Access]:
    """The result, or partial results in the slots of dimension 0 if there are several, and the access that writes it.

    Args:
        graph: graph to add to.
        placement: the index space on tiles.
        axes: its reduced dimensions, in order.
        dtype: of the results.
        monoid: how they combine.
        name: debug name.
    """
    kept = [d for d in range(len(placement.cuts)) if d not in axes]
    cuts, slots = tuple(placement.cuts[d] for d in kept), num_slots(placement, axes)
    shape = tuple(int(cut[-1]) for cut in cuts)
    boxes = np.transpose(placement.tile, [*axes, *kept]).reshape([slots, *(len(cut) - 1 for cut in cuts)])
    if slots == 1:
        out = graph.add_variable(shape, dtype, name, blocked_mapping(cuts, boxes[0]))
        return out, Access(out, tuple(map(element, kept)))
    placed = blocked_mapping((even_cuts(slots, slots), *cuts), boxes)
    out = graph.add_variable((slots, *shape), dtype, f"{name}/partials", placed, monoid)
    split = [d for d in axes if len(placement.cuts[d]) > 2]
    weights = [num_slots(placement, split[n + 1 :]) for n in range(len(split))]
    slot = Dim(tuple(Term(d, weight, "block") for d, weight in zip(split, weights, strict=True)))
    return out, Access(out, (slot, *map(element, kept)))
