"""Linear models: products with coefficients, and labels of the largest score."""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from ipujax.onnx.machine_learning.class_scores import DOMAIN, class_labels, labels_of, transformed, two_classes
from ipujax.onnx.machine_learning.features import as_result, as_rows
from ipujax.onnx.onnx_errors import OnnxError
from ipujax.onnx.operators.operand_types import Array, Value
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
        return labels_of(labels, chosen), two_classes(scores, post_transform, True)
    chosen = jnp.argmax(scores, axis=1)
    return labels_of(labels, chosen), transformed(scores, post_transform)
