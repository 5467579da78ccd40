"""Trees of an ensemble as tables of nodes, a row for each tree, which levels look up in.

Input: attributes of both forms, whose nodes are in any order. Output: the values of leaves, and `TreeTables`. A graph
that is not a forest is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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


Identity = tuple[int, int]  # number of a tree, number of a node in it


def _column(name: str, values: Any, size: int, dtype: Any, default: float | None = None) -> np.ndarray:
    """Return an attribute with a value for each node; refuse another number of them."""
    if (values is None or not np.size(values)) and default is not None:
        return np.full(size, default, dtype)
    column = np.ravel(np.asarray(() if values is None else values, dtype))
    if len(column) != size:
        raise OnnxError(f"{name} needs a value for each node", expected=size, got=len(column))
    return column


def nodes_by_identity(
    *,
    nodes_treeids: Sequence[int],
    nodes_nodeids: Sequence[int],
    nodes_featureids: Sequence[int],
    nodes_modes: Sequence[str],
    nodes_truenodeids: Sequence[int],
    nodes_falsenodeids: Sequence[int],
    nodes_values: Sequence[float] | None = None,
    nodes_values_as_tensor: np.ndarray | None = None,
    nodes_missing_value_tracks_true: Sequence[int] | None = None,
    nodes_hitrates: Any = None,
    nodes_hitrates_as_tensor: Any = None,
) -> tuple[TreeNodes, Mapping[Identity, int]]:
    """Return the nodes of the form before ai.onnx.ml 5, and their positions by tree and number."""
    # Hit rates are hints to implementations, without part in the result.
    size = len(nodes_nodeids)
    if not size:
        raise OnnxError("the ensemble has no node", expected="trees", got="0 nodes")
    tree = _column("nodes_treeids", nodes_treeids, size, np.int64)
    identities = {identity: n for n, identity in enumerate(zip(nodes_treeids, nodes_nodeids, strict=True))}
    if len(identities) < size:
        raise OnnxError("two nodes of a tree have one number", expected=f"{size} numbers", got=len(identities))
    codes = {name: code for code, name in enumerate((*BRANCHES[:MEMBER], "LEAF"))}
    codes["LEAF"] = LEAF
    unknown = sorted(set(nodes_modes) - set(codes))
    if unknown:
        raise OnnxError("nodes_modes is unknown", expected=f"one of {', '.join(codes)}", got=unknown[0])
    mode = _column("nodes_modes", [codes[name] for name in nodes_modes], size, np.int64)
    names = [f"{number} of tree {t}" for t, number in identities]
    is_tensor = nodes_values_as_tensor is not None and nodes_values_as_tensor.size
    values: Any = nodes_values_as_tensor if is_tensor else np.asarray(nodes_values or (), np.float32)
    ways = (("nodes_truenodeids", nodes_truenodeids), ("nodes_falsenodeids", nodes_falsenodeids))
    numbers = [_column(name, children, size, object) for name, children in ways]
    links = [
        [
            n if code == LEAF else _child(identities, (t, child), names[n])
            for n, (t, child, code) in enumerate(zip(nodes_treeids, children, mode.tolist(), strict=True))
        ]
        for children in numbers
    ]
    missing = _column("nodes_missing_value_tracks_true", nodes_missing_value_tracks_true, size, bool, False)
    feature = _column("nodes_featureids", nodes_featureids, size, np.int64)
    threshold = _column("nodes_values", values, size, values.dtype)
    return TreeNodes(
        tree, names, mode, feature, threshold, np.asarray(links[0]), np.asarray(links[1]), missing
    ), identities


def _child(identities: Mapping[Identity, int], child: Identity, parent: str) -> int:
    if child not in identities:
        message = f"the ensemble's node {parent} has a child that its tree does not have"
        raise OnnxError(message, expected=f"a node of tree {child[0]}", got=child[1])
    return identities[child]


def nodes_by_position(
    *,
    leaves: int,
    tree_roots: Sequence[int],
    nodes_featureids: Sequence[int],
    nodes_modes: np.ndarray,
    nodes_splits: np.ndarray,
    nodes_truenodeids: Sequence[int],
    nodes_trueleafs: Sequence[int],
    nodes_falsenodeids: Sequence[int],
    nodes_falseleafs: Sequence[int],
    nodes_missing_value_tracks_true: Sequence[int] | None = None,
    nodes_hitrates: Any = None,
    membership_values: np.ndarray | None = None,
) -> tuple[TreeNodes, int]:
    """Return the nodes of the form since ai.onnx.ml 5, branches before leaves, and the number of branches."""
    size = len(nodes_featureids)
    codes = _column("nodes_modes", nodes_modes, size, np.int64)
    if size and (codes.min() < 0 or codes.max() > MEMBER):
        raise OnnxError("nodes_modes is unknown", expected=f"codes 0 to {MEMBER}", got=int(codes.max()))
    links = []
    for way, numbers, flags in (
        ("true", nodes_truenodeids, nodes_trueleafs),
        ("false", nodes_falsenodeids, nodes_falseleafs),
    ):
        number = _column(f"nodes_{way}nodeids", numbers, size, np.int64)
        is_leaf = _column(f"nodes_{way}leafs", flags, size, bool)
        outside = (number < 0) | (number >= np.where(is_leaf, leaves, size))
        if outside.any():
            n = int(np.flatnonzero(outside)[0])
            message = f"the ensemble's node {n} has a child that the ensemble does not have"
            raise OnnxError(message, expected=f"one of {size} nodes, {leaves} leaves", got=int(number[n]))
        links.append(np.concatenate([np.where(is_leaf, size + number, number), size + np.arange(leaves)]))
    features = np.concatenate([np.asarray(nodes_featureids, np.int64), np.zeros(leaves, np.int64)])
    splits = np.ravel(nodes_splits)
    threshold = np.concatenate([_column("nodes_splits", splits, size, splits.dtype), np.zeros(leaves, splits.dtype)])
    missing = _column("nodes_missing_value_tracks_true", nodes_missing_value_tracks_true, size, bool, False)
    mode = np.concatenate([codes, np.full(leaves, LEAF)])
    names = [*map(str, range(size)), *(f"{n} of the leaves" for n in range(leaves))]
    tree = _trees(tree_roots, links, size)
    members = _members(codes, membership_values, leaves)
    is_missing = np.concatenate([missing, np.zeros(leaves, bool)])
    used = tree >= 0
    if not used.all():
        message = f"the ensemble's node {names[int(np.flatnonzero(~used)[0])]} belongs to no tree"
        raise OnnxError(message, expected="a root that leads to it", got=list(tree_roots))
    return TreeNodes(tree, names, mode, features, threshold, links[0], links[1], is_missing, members), size


def _trees(roots: Sequence[int], links: Sequence[np.ndarray], branches: int) -> np.ndarray:
    """Return the tree of each node, −1 for those that no root leads to; a node is visited once, cycles too."""
    if not roots or min(roots) < 0 or max(roots) >= max(branches, 1):
        message = "tree_roots names a node that the ensemble does not have"
        raise OnnxError(message, expected=f"0 to {branches - 1}", got=list(roots))
    tree = np.full(len(links[0]), -1)
    level = np.asarray(roots, np.int64)
    if len(np.unique(level)) < len(level):
        raise OnnxError("tree_roots names a node twice", expected="a root for each tree", got=list(roots))
    tree[level] = np.arange(len(level))
    while len(level):
        children = np.concatenate([link[level] for link in links])
        owners = np.concatenate([tree[level]] * 2)
        is_new = tree[children] < 0
        tree[children[is_new]] = owners[is_new]
        level = np.unique(children[is_new])
    return tree


def _members(codes: np.ndarray, values: np.ndarray | None, leaves: int) -> np.ndarray | None:
    """Return the sets of nodes, a row a node, NaN where a set has no more; in the file NaN ends a set."""
    asking = np.flatnonzero(codes == MEMBER)
    if not len(asking):
        return None
    flat = np.ravel(() if values is None else values).astype(np.float32)
    sets = np.split(flat, np.flatnonzero(np.isnan(flat)) + 1)
    sets = [each[~np.isnan(each)] for each in (sets[:-1] if len(sets) and not len(sets[-1]) else sets)]
    if len(sets) != len(asking):
        raise OnnxError("membership_values needs a set for each node that asks", expected=len(asking), got=len(sets))
    table = np.full((len(codes) + leaves, max(1, max(map(len, sets)))), np.nan, np.float32)
    for node, members in zip(asking, sets, strict=True):
        table[node, : len(members)] = members
    return table


def leaf_values(
    kind: str,
    identities: Mapping[Identity, int],
    leaves: tuple[Any, Any, Any, np.ndarray],
    targets: int,
    fill: float,
    nodes: int | None = None,
    dtype: Any = np.float32,
) -> np.ndarray:
    """Return values of nodes, [nodes, targets]: sums where a leaf has several for one target, `fill` where none.

    Args:
        kind: of values, for errors.
        identities: positions of nodes.
        leaves: of each value the tree, the node, the target, and the value.
        targets: number of them.
        fill: for leaves without a value.
        nodes: number of nodes; that of `identities` if None.
        dtype: of the values.
    """
    trees, numbers, ids, weights = leaves
    if not len(trees) == len(numbers) == len(ids) == len(weights):
        message = f"{kind}_treeids, {kind}_nodeids, {kind}_ids and {kind}_weights differ in length"
        raise OnnxError(message, expected=len(weights), got=(len(trees), len(numbers), len(ids)))
    target = np.asarray(ids, np.int64)
    if len(target) and (target.min() < 0 or target.max() >= targets):
        outside = int(target[(target < 0) | (target >= targets)][0])
        raise OnnxError(
            f"a leaf has a value for a {kind} that there is not", expected=f"0 to {targets - 1}", got=outside
        )
    place = np.asarray([_leaf(identities, (int(t), int(n))) for t, n in zip(trees, numbers, strict=True)], np.int64)
    total = np.zeros((len(identities) if nodes is None else nodes, targets))
    np.add.at(total, (place, target), weights)
    if fill:
        has_value = np.zeros(total.shape, bool)
        has_value[place, target] = True
        total = np.where(has_value, total, fill)
    return total.astype(dtype)


def _leaf(identities: Mapping[Identity, int], leaf: Identity) -> int:
    if leaf not in identities:
        message = "a value belongs to a leaf that there is not"
        raise OnnxError(message, expected="a node of the ensemble", got=f"node {leaf[1]} of tree {leaf[0]}")
    return identities[leaf]
