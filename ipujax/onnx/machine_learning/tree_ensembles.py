"""Ensembles of trees for a batch: one lookup a level in the tables of all trees, then sums over the leaves reached.

Tables have a row for each tree, so that trees are independent problems, which planners spread over tiles.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from ipujax.onnx.budget import Budget
from ipujax.onnx.machine_learning.class_scores import (
    DOMAIN,
    POST_TRANSFORMS,
    checked_name,
    class_labels,
    labels_of,
    transformed,
    two_classes,
)
from ipujax.onnx.machine_learning.features import as_rows
from ipujax.onnx.machine_learning.tree_tables import (
    EQ,
    GT,
    GTE,
    LEAF,
    LEQ,
    LT,
    MEMBER,
    NEQ,
    TreeNodes,
    TreeTables,
    leaf_values,
    nodes_by_identity,
    nodes_by_position,
    tree_tables,
)
from ipujax.onnx.onnx_errors import OnnxError
from ipujax.onnx.operators.operand_types import Array, Value
from ipujax.onnx.registry import operator

AGGREGATES = ("AVERAGE", "SUM", "MIN", "MAX")  # in the order of their codes
_LABEL_NAMES = "classlabels_int64s", "classlabels_strings"
_COMPARISONS: Mapping[int, Callable[[Array, Array], Array]] = {
    LEQ: jnp.less_equal,
    LT: jnp.less,
    GTE: jnp.greater_equal,
    GT: jnp.greater,
    EQ: jnp.equal,
    NEQ: jnp.not_equal,
}
# Values of leaves that have none: neutral in a smallest or largest value.
_FILL = {"AVERAGE": 0.0, "SUM": 0.0, "MIN": np.inf, "MAX": -np.inf}


def _leaves(x: Array, tables: TreeTables) -> Array:
    """Return the leaf that each row [N, features] reaches in each tree, [N, trees]."""
    start = jnp.zeros((x.shape[0], tables.mode.shape[0]), jnp.int32)
    if not tables.depth:
        return start
    # A leaf follows itself, so rows that reach one early stay there.
    return lax.fori_loop(0, tables.depth, lambda _, at: _next_level(x, tables, at), start)


def _looked_up(table: np.ndarray, at: Array) -> Array:
    """Return elements [N, trees, …] of a table [trees, nodes, …] at nodes [N, trees]."""
    return jnp.take_along_axis(jnp.asarray(table.swapaxes(0, 1)), at.reshape(*at.shape, *(1,) * (table.ndim - 2)), 0)


def _next_level(x: Array, tables: TreeTables, at: Array) -> Array:
    value = jnp.take_along_axis(x, _looked_up(tables.feature, at), axis=1)
    threshold = _looked_up(tables.threshold, at)
    mode = _looked_up(tables.mode, at) if len(tables.modes) > 1 else None
    is_true = jnp.zeros(value.shape, bool)
    # Most ensembles have one comparison: then no code is looked up.
    for code in tables.modes:
        compared = _is_member(value, tables, at) if code == MEMBER else _COMPARISONS[code](value, threshold)
        is_true = compared if mode is None else jnp.where(mode == code, compared, is_true)
    if tables.missing_is_true is not None:
        is_true = is_true | (jnp.isnan(value) & _looked_up(tables.missing_is_true, at))
    return jnp.where(is_true, _looked_up(tables.when_true, at), _looked_up(tables.when_false, at))


def _is_member(value: Array, tables: TreeTables, at: Array) -> Array:
    assert tables.members is not None
    return jnp.any(_looked_up(tables.members, at) == value[..., None], axis=-1)


def _aggregated(x: Array, tables: TreeTables, aggregate: str, base: Sequence[float]) -> Array:
    """Return the values of the leaves that rows reach, over all trees, [N, targets]."""
    reached = _looked_up(tables.values, _leaves(x, tables))
    if aggregate in ("MIN", "MAX"):
        extreme = (jnp.min if aggregate == "MIN" else jnp.max)(reached, axis=1)
        shifted = extreme + jnp.asarray(np.asarray(base, extreme.dtype)) if len(base) else extreme
        # A target that no leaf reached has is zero, without its base value, as in onnxruntime.
        return jnp.where(jnp.isfinite(extreme), shifted, 0)
    total = jnp.sum(reached, axis=1)
    total = total / tables.mode.shape[0] if aggregate == "AVERAGE" else total
    return total + jnp.asarray(np.asarray(base, total.dtype)) if len(base) else total


def _check_tables(nodes: TreeNodes, targets: int, budget: Budget) -> None:
    """Refuse trees whose tables, as wide as the largest of them, are larger than the budget."""
    if targets < 1:
        raise OnnxError("an ensemble needs a target", expected="an int ≥ 1", got=targets)
    _, sizes = np.unique(nodes.tree, return_counts=True)
    budget.check((len(sizes), int(sizes.max()), targets), np.dtype(np.float32), "the table of an ensemble's leaves")


def _one_of(name: str, values: Any, tensor: np.ndarray | None) -> np.ndarray:
    """Return the attribute that the node has: a list of float32, or a tensor of any precision."""
    if tensor is not None and tensor.size:
        if values is not None and len(values):
            raise OnnxError(f"the node has {name} twice", expected=f"{name} or {name}_as_tensor")
        return np.ravel(tensor)
    return np.asarray(() if values is None else values, np.float32)


def _regression(
    rows: Array, tables: TreeTables, aggregate: str, base: Sequence[float], targets: int, transform: str
) -> Array:
    if len(base) not in (0, targets):
        raise OnnxError("base_values needs a value for each target", expected=targets, got=len(base))
    return transformed(_aggregated(rows, tables, aggregate, base), transform)


@operator("TreeEnsembleRegressor", DOMAIN)
def tree_ensemble_regressor(
    x: Value,
    *,
    aggregate_function: str = "SUM",
    base_values: Sequence[float] = (),
    base_values_as_tensor: np.ndarray | None = None,
    n_targets: int = 1,
    post_transform: str = "NONE",
    target_ids: Sequence[int],
    target_nodeids: Sequence[int],
    target_treeids: Sequence[int],
    target_weights: Sequence[float] = (),
    target_weights_as_tensor: np.ndarray | None = None,
    budget: Budget,
    **nodes: Any,
) -> Array:
    """Predictions [N, targets]: sums, averages or extremes of the leaves reached."""
    rows = as_rows(x)
    checked_name("aggregate_function", aggregate_function, AGGREGATES)
    fill = _FILL[aggregate_function]
    all_nodes, identities = nodes_by_identity(**nodes)
    weights = _one_of("target_weights", target_weights, target_weights_as_tensor)
    leaves = (target_treeids, target_nodeids, target_ids, weights)
    _check_tables(all_nodes, n_targets, budget)
    values = leaf_values("target", identities, leaves, n_targets, fill)
    tables = tree_tables(all_nodes, values, fill, rows.shape[1], rows.dtype)
    base = _one_of("base_values", base_values, base_values_as_tensor)
    return _regression(rows, tables, aggregate_function, base.tolist(), n_targets, post_transform)


@operator("TreeEnsemble", DOMAIN)
def tree_ensemble(
    x: Value,
    *,
    aggregate_function: int = 1,
    leaf_targetids: Sequence[int],
    leaf_weights: np.ndarray,
    n_targets: int = 1,
    post_transform: int = 0,
    budget: Budget,
    **nodes: Any,
) -> Array:
    """Predictions [N, targets], of the form of trees since ai.onnx.ml 5."""
    rows = as_rows(x)
    if not 0 <= aggregate_function < len(AGGREGATES) or not 0 <= post_transform < len(POST_TRANSFORMS):
        message = "aggregate_function or post_transform is unknown"
        raise OnnxError(message, expected="codes 0 to 3, 0 to 4", got=(aggregate_function, post_transform))
    aggregate, transform = AGGREGATES[aggregate_function], POST_TRANSFORMS[post_transform]
    targets = np.asarray(leaf_targetids)
    all_nodes, branches = nodes_by_position(leaves=len(targets), **nodes)
    weights = np.ravel(leaf_weights)
    if len(weights) != len(targets):
        raise OnnxError("leaf_weights needs a value for each leaf", expected=len(targets), got=len(weights))
    identities = {(0, n): branches + n for n in range(len(targets))}
    _check_tables(all_nodes, n_targets, budget)
    leaves = (np.zeros_like(targets), np.arange(len(targets)), targets, weights)
    # Unlike the earlier form, this one has the operand's precision.
    values = leaf_values("leaf", identities, leaves, n_targets, _FILL[aggregate], len(all_nodes.tree), rows.dtype)
    tables = tree_tables(all_nodes, values, _FILL[aggregate], rows.shape[1], rows.dtype)
    return _regression(rows, tables, aggregate, (), n_targets, transform)


@operator("TreeEnsembleClassifier", DOMAIN)
def tree_ensemble_classifier(
    x: Value,
    *,
    base_values: Sequence[float] = (),
    base_values_as_tensor: np.ndarray | None = None,
    class_ids: Sequence[int],
    class_nodeids: Sequence[int],
    class_treeids: Sequence[int],
    class_weights: Sequence[float] = (),
    class_weights_as_tensor: np.ndarray | None = None,
    classlabels_int64s: Sequence[int] | None = None,
    classlabels_strings: Sequence[str] | None = None,
    post_transform: str = "NONE",
    budget: Budget,
    **nodes: Any,
) -> tuple[Array, Array]:
    """Labels [N] and scores [N, classes]; of two classes with weights of one alone, that is the second."""
    rows = as_rows(x)
    labels_given = classlabels_int64s or classlabels_strings or ()
    classes = len(labels_given) or 1 + max(class_ids, default=0)
    all_nodes, identities = nodes_by_identity(**nodes)
    _check_tables(all_nodes, classes, budget)
    labels = class_labels(classlabels_int64s, classlabels_strings, classes, _LABEL_NAMES)
    weights = _one_of("class_weights", class_weights, class_weights_as_tensor)
    leaves = (class_treeids, class_nodeids, class_ids, weights)
    base = _one_of("base_values", base_values, base_values_as_tensor)
    if len(base) not in (0, classes) and not (classes == 2 and len(base) == 1):
        raise OnnxError("base_values needs a value for each class", expected=classes, got=len(base))
    values = leaf_values("class", identities, leaves, classes, np.nan)
    tables = tree_tables(all_nodes, np.nan_to_num(values), 0.0, rows.shape[1], rows.dtype)
    reached = _leaves(rows, tables)
    scores = jnp.sum(_looked_up(tables.values, reached), axis=1)
    if classes == 2:
        is_given = [bool(np.isfinite(values[:, n]).any()) for n in range(2)]
        chosen, results = _of_two(scores, is_given, base, bool((weights >= 0).all()), post_transform)
        return labels_of(labels, chosen), results
    scores = scores + jnp.asarray(base.astype(np.float32)) if len(base) else scores
    is_scored = _scored(values, all_nodes.mode == LEAF, tables, all_nodes, reached) if not len(base) else None
    candidates = scores if is_scored is None else jnp.where(is_scored, scores, -jnp.inf)
    return labels_of(labels, jnp.argmax(candidates, axis=1)), transformed(scores, post_transform)


def _scored(
    values: np.ndarray, is_leaf: np.ndarray, tables: TreeTables, nodes: TreeNodes, reached: Array
) -> Array | None:
    """Return which classes [N, classes] a leaf that was reached has a weight for; None if all leaves have all."""
    has_value = np.isfinite(values)
    if has_value[is_leaf].all():
        return None
    flags = tree_tables(nodes, has_value.astype(np.float32), 0.0, int(tables.feature.max()) + 1, np.float32).values
    return jnp.any(_looked_up(flags, reached) > 0, axis=1)


def _of_two(
    scores: Array, is_given: Sequence[bool], base: np.ndarray, is_probability: bool, post_transform: str
) -> tuple[Array, Array]:
    """Return the chosen class [N] and the scores [N, 2] of two classes, as onnxruntime: the specification is silent.

    Args:
        scores: sums of weights, [N, 2].
        is_given: whether leaves have weights for the first and the second class. Weights of one class alone are those
            of the second, under either number.
        base: none, one, or two.
        is_probability: whether no weight is negative.
        post_transform: of the node.
    """
    first, second = scores[:, :1], scores[:, 1:]
    threshold = 0.5 if is_probability else 0.0
    if not is_given[1]:
        if len(base) == 2:
            raise _ambiguous_base(base)
        score = first + np.float32(base[0]) if len(base) else first
        return (score[:, 0] > threshold).astype(jnp.int32), two_classes(score, post_transform, is_probability)
    if not is_given[0]:
        if len(base):
            raise _ambiguous_base(base)
        return (second[:, 0] > threshold).astype(jnp.int32), transformed(scores, post_transform)
    if len(base) == 2:
        second = first + np.float32(base[1])
        first = -second
    elif len(base):
        first = first + np.float32(base[0])
    results = transformed(jnp.concatenate([first, second], axis=1), post_transform)
    return (second[:, 0] > 0).astype(jnp.int32), results


def _ambiguous_base(base: np.ndarray) -> OnnxError:
    message = "base_values of two classes, one of which has no weights, have no agreed meaning"
    return OnnxError(message, expected="one value, with weights of class 0 alone", got=base.tolist())
