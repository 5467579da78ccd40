"""Trees of an ensemble as tables of nodes, a row for each tree, which levels look up in.

Input: nodes in any order, with their children. Output: `TreeTables`. A graph that is not a forest is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ipujax.onnx.onnx_errors import OnnxError

BRANCHES = ("BRANCH_LEQ", "BRANCH_LT", "BRANCH_GTE", "BRANCH_GT", "BRANCH_EQ", "BRANCH_NEQ", "BRANCH_MEMBER")
LEQ, LT, GTE, GT, EQ, NEQ, MEMBER = range(len(BRANCHES))
LEAF = len(BRANCHES)


@dataclass(frozen=True, slots=True, eq=False)
class TreeNodes:
    """Nodes of an ensemble, [nodes] each.

    Args:
        tree: number of the tree.
        names: of nodes, for errors.
        mode: code of the comparison, or LEAF.
        feature: that it compares.
        threshold: that it compares with, in the precision of the file.
        when_true: node that follows; a leaf's own.
        when_false: likewise.
        missing_is_true: whether NaN goes to `when_true`.
        members: sets that MEMBER looks in, by node; NaN behind the last.
    """

    tree: np.ndarray
    names: Sequence[str]
    mode: np.ndarray
    feature: np.ndarray
    threshold: np.ndarray
    when_true: np.ndarray
    when_false: np.ndarray
    missing_is_true: np.ndarray
    members: np.ndarray | None = None


@dataclass(frozen=True, slots=True, eq=False)
class TreeTables:
    """Trees side by side, [trees, nodes] each; the root is node 0, a leaf follows itself.

    Args:
        modes: codes of comparisons that occur.
        mode: code of each node.
        feature: that it compares, int32.
        threshold: in the operand's dtype, so that comparisons are those with the file's value.
        when_true: node that follows, int32.
        when_false: likewise.
        missing_is_true: whether NaN goes to `when_true`; None if it never does.
        members: sets, [trees, nodes, members]; None without.
        values: of leaves, [trees, nodes, targets]; `fill` elsewhere.
        depth: levels below the roots.
    """

    modes: tuple[int, ...]
    mode: np.ndarray
    feature: np.ndarray
    threshold: np.ndarray
    when_true: np.ndarray
    when_false: np.ndarray
    missing_is_true: np.ndarray | None
    members: np.ndarray | None
    values: np.ndarray
    depth: int


def tree_tables(nodes: TreeNodes, values: np.ndarray, fill: float, features: int, dtype: Any) -> TreeTables:
    """Return the tables of an ensemble.

    Args:
        nodes: of all trees.
        values: of nodes, [nodes, targets]; `fill` where a leaf has none.
        fill: for places without a node.
        features: of an operand.
        dtype: of the operand.

    Raises:
        OnnxError: a node with two parents, a tree with two roots or none, a cycle, a comparison of a feature that the
            operand does not have.
    """
    is_leaf = nodes.mode == LEAF
    depth = _checked_depth(nodes, is_leaf)
    outside = ~is_leaf & ((nodes.feature < 0) | (nodes.feature >= features))
    if outside.any():
        node = int(np.flatnonzero(outside)[0])
        message = f"the ensemble's node {nodes.names[node]} compares a feature that the operand does not have"
        raise OnnxError(message, expected=f"0 to {features - 1}", got=int(nodes.feature[node]))
    # Roots first within each tree, all else in the order of the file.
    children = np.concatenate([nodes.when_true[~is_leaf], nodes.when_false[~is_leaf]])
    is_child = np.zeros(len(nodes.tree), bool)
    is_child[children] = True
    order = np.lexsort((is_child, nodes.tree))
    _, tree_of_row = np.unique(nodes.tree, return_inverse=True)
    sizes = np.bincount(tree_of_row)
    starts = np.cumsum(sizes) - sizes
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order)) - np.repeat(starts, sizes)
    shape = (len(sizes), int(sizes.max()))

    def table(column: np.ndarray, empty: float, kind: Any) -> np.ndarray:
        result = np.full((*shape, *column.shape[1:]), empty, kind)
        result[tree_of_row, place] = column
        return result

    numbers = np.arange(len(order))
    modes = tuple(sorted(set(nodes.mode[~is_leaf].tolist())))
    missing = nodes.missing_is_true & ~is_leaf
    return TreeTables(
        modes=modes,
        mode=table(nodes.mode, LEAF, np.int32),
        feature=table(np.where(is_leaf, 0, nodes.feature), 0, np.int32),
        threshold=table(_comparable(nodes.threshold, nodes.mode, dtype), 0, dtype),
        when_true=table(place[np.where(is_leaf, numbers, nodes.when_true)], 0, np.int32),
        when_false=table(place[np.where(is_leaf, numbers, nodes.when_false)], 0, np.int32),
        missing_is_true=table(missing, 0, np.bool_) if missing.any() else None,
        members=None if nodes.members is None else table(nodes.members, np.nan, dtype),
        values=table(values, fill, values.dtype),
        depth=depth,
    )


def _checked_depth(nodes: TreeNodes, is_leaf: np.ndarray) -> int:
    """Return the levels below the roots; refuse nodes that are no forest."""
    branches = np.flatnonzero(~is_leaf)
    links = np.stack([nodes.when_true[branches], nodes.when_false[branches]], axis=1)
    foreign = (nodes.tree[links] != nodes.tree[branches][:, None]).any(1)
    if foreign.any():
        raise _no_tree(nodes, int(branches[foreign][0]), "has a child in another tree")
    # A branch both of whose ways lead to one leaf is the form of a tree of one leaf.
    distinct = np.concatenate([links[:, 0], links[links[:, 1] != links[:, 0], 1]])
    parents = np.bincount(distinct, minlength=len(is_leaf))
    if (parents > 1).any():
        raise _no_tree(nodes, int(np.flatnonzero(parents > 1)[0]), "has two parents")
    level = np.flatnonzero(parents == 0)
    _, counts = np.unique(nodes.tree[level], return_counts=True)
    if (counts > 1).any() or len(counts) < len(np.unique(nodes.tree)):
        message = "a tree of the ensemble has another number of roots than one"
        raise OnnxError(message, expected="a root for each tree", got=f"{len(level)} roots")
    visited = len(level)
    depth = 0
    while len(inner := level[~is_leaf[level]]):
        level = np.unique(np.concatenate([nodes.when_true[inner], nodes.when_false[inner]]))
        visited += len(level)
        depth += 1
    if visited < len(is_leaf):
        raise OnnxError("nodes of the ensemble are in a cycle", expected="trees", got=f"{len(is_leaf) - visited} nodes")
    return depth


def _no_tree(nodes: TreeNodes, node: int, fault: str) -> OnnxError:
    message = f"the ensemble's node {nodes.names[node]} {fault}"
    return OnnxError(message, expected="trees, whose nodes have one parent", got="no forest")


def _comparable(threshold: np.ndarray, mode: np.ndarray, dtype: Any) -> np.ndarray:
    """Return thresholds as float32 that float32 values compare with as with the file's doubles."""
    narrow = threshold.astype(np.float32)
    if threshold.dtype == np.float32 or dtype == np.float64:
        return threshold.astype(dtype)
    infinity = np.float32(np.inf)
    below = np.where(narrow > threshold, np.nextafter(narrow, -infinity), narrow)
    above = np.where(narrow < threshold, np.nextafter(narrow, infinity), narrow)
    exact = np.where(narrow == threshold, narrow, np.float32(np.nan))  # nothing equals a value between two floats
    rounded = np.where(np.isin(mode, (LEQ, GT)), below, np.where(np.isin(mode, (LT, GTE)), above, exact))
    return np.where(np.isnan(threshold), narrow, rounded)
