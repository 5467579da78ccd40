"""Aliasing: whether several elements of a view are one element of memory.

Input: a node of `ipujax.runtime.tensor.view`. Output: True or False; `has_distinct_elements` is exact. Tests in order
of cost: strides that nest, flat intervals that do not overlap, static slices of one reshape that are disjoint on an
axis; last, sorting all elements.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np

from ipujax.runtime.tensor.affine import Affine
from ipujax.runtime.tensor.slice_plan import slice_plan
from ipujax.runtime.tensor.view import Concat, Indexed, Node, Reshaped, elements


def leaves(node: Node) -> Iterator[Affine | Indexed]:
    """Yield the affine and indexed leaves of a node, in no order of elements."""
    if isinstance(node, Concat):
        for part in node.parts:
            yield from leaves(part)
    elif isinstance(node, Reshaped):
        yield from leaves(node.source)
    else:
        yield node


def has_distinct_elements(node: Node) -> bool:
    """Check whether no element of a variable appears at two indices of the node; exact."""
    if surely_disjoint([node]):
        return True
    # A stride of 0 settles it; listing the elements comes last, as it takes 16 bytes for each.
    repeats = any(isinstance(leaf, Affine) and leaf.has_broadcast for leaf in leaves(node))
    return not repeats and _has_distinct_indices(node)


def surely_disjoint(nodes: Sequence[Node]) -> bool:
    """Check that no element appears twice in all nodes; False also where only a list of elements could tell."""
    pieces: defaultdict[object, list[Affine]] = defaultdict(list)
    for leaf in (leaf for node in nodes for leaf in leaves(node)):
        if not isinstance(leaf, Affine) or leaf.has_broadcast:
            return False
        if not leaf.is_empty:
            pieces[leaf.variable].append(leaf)
    return all(_are_disjoint(same) for same in pieces.values())


def _are_disjoint(pieces: Sequence[Affine]) -> bool:
    """Check whether pieces of one variable are surely disjoint and each injective."""
    if not all(piece.is_injective for piece in pieces):
        return False
    if len(pieces) == 1:
        return True
    # Sweep over flat intervals: only pieces whose hulls overlap are compared.
    hulls = sorted(((*_hull(piece), i) for i, piece in enumerate(pieces)))
    if all(last < first for (_, last, _), (first, _, _) in pairwise(hulls)):
        return True
    open_hulls: list[tuple[int, int]] = []  # (last element, piece) of the hulls that may overlap the next one
    for first, last, i in hulls:
        open_hulls = [(end, j) for end, j in open_hulls if end >= first]
        if any(not _are_disjoint_slices(pieces[i], pieces[j]) for _, j in open_hulls):
            return False
        open_hulls.append((last, i))
    return True


def _hull(piece: Affine) -> tuple[int, int]:
    reach = [(n - 1) * stride for n, stride in piece.subdims]
    return piece.offset + sum(r for r in reach if r < 0), piece.offset + sum(r for r in reach if r > 0)


def _are_disjoint_slices(a: Affine, b: Affine) -> bool:
    """Check whether two pieces are slices of one reshape with disjoint ranges on some axis."""
    plan_a, plan_b = (slice_plan(piece.variable.shape, piece.offset, piece.dims) for piece in (a, b))
    if plan_a is None or plan_b is None or (plan_a.window, plan_a.radices) != (plan_b.window, plan_b.radices):
        return False
    ranges = zip(plan_a.starts, plan_a.limits, plan_b.starts, plan_b.limits, strict=True)
    return any(limit_a <= start_b or limit_b <= start_a for start_a, limit_a, start_b, limit_b in ranges)


def _has_distinct_indices(node: Node) -> bool:
    which, index = elements(node, node.variables)
    for number in range(len(node.variables)):
        elements_of_variable = np.sort(index[which == number])
        if np.any(elements_of_variable[1:] == elements_of_variable[:-1]):
            return False
    return True
