"""Models that are linear in features, or in kernels of rows and support vectors: labels of the largest score.

Source: the specification of ai.onnx.ml; Chang and Lin, LIBSVM: a library for support vector machines (2011), section 8,
and Wu, Lin and Weng (2004) for probabilities of several classes from those of pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import jax
import jax.numpy as jnp
import numpy as np

from ipujax.onnx.machine_learning.class_scores import (
    DOMAIN,
    checked_name,
    class_labels,
    labels_of,
    transformed,
    two_classes,
)
from ipujax.onnx.machine_learning.features import as_result, as_rows
from ipujax.onnx.onnx_errors import OnnxError
from ipujax.onnx.operators.operand_types import MAX_SIZE, Array, Value, refuse_outside
from ipujax.onnx.registry import operator

_LABEL_NAMES = "classlabels_ints", "classlabels_strings"


def _products(x: Array, coefficients: Sequence[float], intercepts: Sequence[float], rows: int) -> Array:
    """Return x coefficientsᵀ + intercepts, [N, rows]."""
    if rows <= 0 or len(coefficients) != rows * x.shape[1]:
        message = "the node has another number of coefficients than its features need"
        expected = f"{rows} · {x.shape[1]} features"
        raise OnnxError(message, expected=expected, got=len(coefficients))
    if intercepts and len(intercepts) != rows:
        raise OnnxError("the node needs an intercept for each score", expected=rows, got=len(intercepts))
    matrix = np.asarray(coefficients, x.dtype).reshape(rows, -1)
    product = jnp.matmul(x, jnp.asarray(matrix.T))
    return product + jnp.asarray(np.asarray(intercepts, x.dtype)) if intercepts else product


@operator("LinearRegressor", DOMAIN)
def linear_regressor(
    x: Value,
    *,
    coefficients: Sequence[float],
    intercepts: Sequence[float] = (),
    post_transform: str = "NONE",
    targets: int = 1,
) -> Array:
    return transformed(as_result(_products(as_rows(x), coefficients, intercepts, targets)), post_transform)


@operator("LinearClassifier", DOMAIN)
def linear_classifier(
    x: Value,
    *,
    classlabels_ints: Sequence[int] | None = None,
    classlabels_strings: Sequence[str] | None = None,
    coefficients: Sequence[float],
    intercepts: Sequence[float] = (),
    multi_class: int = 0,
    post_transform: str = "NONE",
) -> tuple[Array, Array]:
    """Labels [N] and scores [N, classes]; of two classes with one row of coefficients, that is of the second."""
    # `multi_class` says how the model was trained, and has no part in the result.
    rows = as_rows(x)
    count = len(intercepts) or len(coefficients) // max(rows.shape[1], 1)
    labels = class_labels(classlabels_ints, classlabels_strings, max(count, 2), _LABEL_NAMES)
    scores = as_result(_products(rows, coefficients, intercepts, count))
    if count == 1:
        chosen = (scores[:, 0] > 0).astype(jnp.int32)
        return labels_of(labels, chosen), two_classes(scores, post_transform, is_probability=True)
    chosen = jnp.argmax(scores, axis=1)
    return labels_of(labels, chosen), transformed(scores, post_transform)


KERNELS = ("LINEAR", "POLY", "RBF", "SIGMOID")
_ITERATIONS = 100  # of LIBSVM, for any number of classes below 100
_LEAST = 1e-7  # LIBSVM: min_prob


def _matrix(name: str, values: Sequence[float], rows: int, columns: int, dtype: np.dtype) -> np.ndarray:
    if len(values) != rows * columns:
        raise OnnxError(f"{name} has another number of values", expected=f"{rows} · {columns}", got=len(values))
    return np.asarray(values, dtype).reshape(rows, columns)


def _kernel(x: Array, vectors: np.ndarray, kind: str, parameters: Sequence[float]) -> Array:
    """Return the kernel of rows [N, features] and vectors [S, features], [N, S]."""
    checked_name("kernel_type", kind, KERNELS)
    if len(parameters) not in (0, 3):
        raise OnnxError("kernel_params needs gamma, offset and degree", expected="3 numbers", got=list(parameters))
    gamma, offset, degree = parameters or (0.0, 0.0, 3.0)
    other = jnp.asarray(vectors)
    if kind == "RBF":
        # Squares of differences: the difference of squares would lose digits of near vectors.
        distance = jnp.sum(jnp.square(x[:, None, :] - other[None]), axis=-1)
        return jnp.exp(-gamma * distance)
    product = jnp.matmul(x, other.T)
    if kind == "POLY":
        return (gamma * product + offset) ** (int(degree) if float(degree).is_integer() else degree)
    return jnp.tanh(gamma * product + offset) if kind == "SIGMOID" else product


@operator("SVMRegressor", DOMAIN)
def svm_regressor(
    x: Value,
    *,
    coefficients: Sequence[float],
    kernel_params: Sequence[float] = (),
    kernel_type: str = "LINEAR",
    n_supports: int = 0,
    one_class: int = 0,
    post_transform: str = "NONE",
    rho: Sequence[float] = (0.0,),
    support_vectors: Sequence[float] = (),
) -> Array:
    """A weighted sum of kernels, [N, 1]; its sign, of one class."""
    rows = as_rows(x)
    refuse_outside(np.asarray(n_supports), 0, MAX_SIZE, "n_supports")
    if n_supports:
        vectors = _matrix("support_vectors", support_vectors, n_supports, rows.shape[1], rows.dtype)
        features = _kernel(rows, vectors, kernel_type, kernel_params)
    else:
        features = rows
    weights = _matrix("coefficients", coefficients, features.shape[1], 1, rows.dtype)
    score = jnp.matmul(features, jnp.asarray(weights)) + np.asarray(rho[0], rows.dtype)
    score = as_result(score)
    return jnp.where(score > 0, 1, -1).astype(score.dtype) if one_class else transformed(score, post_transform)


@operator("SVMClassifier", DOMAIN)
def svm_classifier(
    x: Value,
    *,
    classlabels_ints: Sequence[int] | None = None,
    classlabels_strings: Sequence[str] | None = None,
    coefficients: Sequence[float],
    kernel_params: Sequence[float] = (),
    kernel_type: str = "LINEAR",
    post_transform: str = "NONE",
    prob_a: Sequence[float] = (),
    prob_b: Sequence[float] = (),
    rho: Sequence[float],
    support_vectors: Sequence[float] = (),
    vectors_per_class: Sequence[int] = (),
) -> tuple[Array, Array]:
    """Labels [N], and probabilities or decisions: of each class, or of each pair of them."""
    rows = as_rows(x)
    if not vectors_per_class:
        return _linear(rows, classlabels_ints, classlabels_strings, coefficients, post_transform, rho)
    classes = len(vectors_per_class)
    refuse_outside(np.asarray(vectors_per_class), 0, MAX_SIZE, "vectors_per_class:")
    labels = class_labels(classlabels_ints, classlabels_strings, classes, _LABEL_NAMES)
    vectors = _matrix("support_vectors", support_vectors, sum(vectors_per_class), rows.shape[1], rows.dtype)
    weights = _matrix("coefficients", coefficients, classes - 1, len(vectors), rows.dtype)
    count = classes * (classes - 1) // 2
    for name, values in (("rho", rho), *((("prob_a", prob_a), ("prob_b", prob_b)) if prob_a else ())):
        if len(values) != count:
            raise OnnxError(f"{name} needs a value for each pair of classes", expected=count, got=len(values))
    pairs = list(combinations(range(classes), 2))
    features = _kernel(rows, vectors, kernel_type, kernel_params)
    decisions = jnp.matmul(features, jnp.asarray(_pair_weights(weights, vectors_per_class, pairs)))
    decisions = as_result(decisions + jnp.asarray(np.asarray(rho, rows.dtype)))
    # The votes of pairs decide, also where probabilities of classes say otherwise.
    chosen = labels_of(labels, jnp.argmax(_votes(decisions, classes, pairs), axis=1))
    if prob_a:
        return chosen, transformed(_probabilities(decisions, prob_a, prob_b, classes, pairs), post_transform)
    if classes > 2:
        return chosen, transformed(decisions, post_transform)
    return chosen, two_classes(decisions, post_transform, bool((weights >= 0).all()))


def _pair_weights(weights: np.ndarray, counts: Sequence[int], pairs: Sequence[tuple[int, int]]) -> np.ndarray:
    """Return the weights of vectors in the decision of each pair, [S, pairs]: zero for vectors of other classes."""
    ends = np.cumsum(counts)
    starts = ends - np.asarray(counts)
    table = np.zeros((weights.shape[1], len(pairs)), weights.dtype)
    for n, (a, b) in enumerate(pairs):
        table[starts[a] : ends[a], n] = weights[b - 1, starts[a] : ends[a]]
        table[starts[b] : ends[b], n] = weights[a, starts[b] : ends[b]]
    return table


def _votes(decisions: Array, classes: int, pairs: Sequence[tuple[int, int]]) -> Array:
    first, second = (np.eye(classes, dtype=np.float32)[[pair[n] for pair in pairs]] for n in range(2))
    is_first = decisions > 0
    return jnp.matmul(is_first.astype(jnp.float32), first) + jnp.matmul((~is_first).astype(jnp.float32), second)


def _probabilities(
    decisions: Array, a: Sequence[float], b: Sequence[float], classes: int, pairs: Sequence[tuple[int, int]]
) -> Array:
    """Return probabilities of classes, [N, classes], from the logistic ones of pairs."""
    slope, offset = (np.asarray(values, decisions.dtype) for values in (a, b))
    # Away from 0 and 1, as LIBSVM: the iteration divides by sums of their squares.
    of_pairs = jnp.clip(jax.nn.sigmoid(-(decisions * slope + offset)), _LEAST, 1 - _LEAST)
    first = np.array([pair[0] for pair in pairs])
    second = np.array([pair[1] for pair in pairs])
    r = jnp.zeros((decisions.shape[0], classes, classes), decisions.dtype)
    r = r.at[:, first, second].set(of_pairs).at[:, second, first].set(1 - of_pairs)
    return jax.vmap(lambda matrix: _coupled(matrix, classes))(r)


def _coupled(r: Array, classes: int) -> Array:
    """Return the probabilities that fit those of pairs best: the iteration of Wu, Lin and Weng's second method."""
    squares = jnp.square(r)
    diagonal = jnp.sum(squares, axis=0)
    q = jnp.where(np.eye(classes, dtype=bool), diagonal, -r.T * r)
    tolerance = 0.005 / classes

    def gradient(p: Array) -> tuple[Array, Array]:
        product = jnp.matmul(q, p)
        return product, jnp.dot(p, product)

    def is_running(state: tuple[Array, Array]) -> Array:
        step, p = state
        product, total = gradient(p)
        return (step < _ITERATIONS) & (jnp.max(jnp.abs(product - total)) >= tolerance)

    def iterate(state: tuple[Array, Array]) -> tuple[Array, Array]:
        """Update one probability after another, and with each `q p` and `pᵀ q p`, which then need no product."""
        step, p = state
        product, total = gradient(p)
        for t in range(classes):
            change = (total - product[t]) / q[t, t]
            p = p.at[t].add(change)
            scale = 1 + change
            total = (total + change * (change * q[t, t] + 2 * product[t])) / scale / scale
            product = (product + change * q[t]) / scale
            p = p / scale
        return step + 1, p

    start = jnp.full((classes,), 1 / classes, r.dtype)
    return jax.lax.while_loop(is_running, iterate, (jnp.zeros((), jnp.int32), start))[1]


def _linear(
    rows: Array,
    integers: Sequence[int] | None,
    texts: Sequence[str] | None,
    coefficients: Sequence[float],
    post_transform: str,
    rho: Sequence[float],
) -> tuple[Array, Array]:
    """Return labels and scores of a model without support vectors: a row of coefficients for each class."""
    classes = len(integers or texts or ())
    labels = class_labels(integers, texts, classes, _LABEL_NAMES)
    weights = _matrix("coefficients", coefficients, classes, rows.shape[1], rows.dtype)
    scores = as_result(jnp.matmul(rows, jnp.asarray(weights.T)) + np.asarray(rho[0], rows.dtype))
    return labels_of(labels, jnp.argmax(scores, axis=1)), transformed(scores, post_transform)
