"""Labels of classes, and what models do with scores before they return them.

Text cannot be traced: labels of text are their positions in the node's list.

Source: the specification of ai.onnx.ml. Where it is silent, what onnxruntime returns: a single score is not transformed
but by PROBIT, and of one score for two classes the other is its complement or its negative.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ipujax.onnx.element_types import canonical, check_held
from ipujax.onnx.onnx_errors import OnnxError

DOMAIN = "ai.onnx.ml"
POST_TRANSFORMS = ("NONE", "SOFTMAX", "LOGISTIC", "SOFTMAX_ZERO", "PROBIT")  # in the order of their codes


def checked_name(attribute: str, name: str, allowed: Sequence[str]) -> str:
    """Return the name in an attribute; refuse one without a meaning."""
    if name not in allowed:
        raise OnnxError(f"the attribute {attribute!r} is unknown", expected=f"one of {', '.join(allowed)}", got=name)
    return name


def class_labels(
    integers: Sequence[int] | None, texts: Sequence[str] | None, classes: int, names: tuple[str, str]
) -> np.ndarray:
    """Return the labels of classes, int64: positions for text.

    Args:
        integers: labels that are numbers.
        texts: labels that are text.
        classes: number of them.
        names: of the two attributes, for errors.

    Raises:
        OnnxError: no labels or both kinds, another number of them, a label twice, or one that 32 bits do not hold.
    """
    if bool(integers) == bool(texts):
        kinds = "both kinds" if integers else "neither kind"
        raise OnnxError(f"the node has labels of {kinds}", expected=" or ".join(names), got=kinds)
    labels: Sequence[Any] = integers or texts or ()
    if len(labels) != classes:
        raise OnnxError("the node has another number of labels than classes", expected=classes, got=len(labels))
    if len(set(labels)) < len(labels):
        raise OnnxError("two classes have one label", expected="a label for each class", got=list(labels))
    array = np.arange(classes) if texts else np.asarray(labels, np.int64)
    check_held(array, f"{names[0]}: a label")
    return array


def labels_of(labels: np.ndarray, positions: jax.Array) -> jax.Array:
    """Return the labels at positions; those that count the classes are the positions themselves."""
    dtype = canonical(np.int64)
    if np.array_equal(labels, np.arange(len(labels))):
        return positions.astype(dtype)
    return jnp.take(jnp.asarray(labels.astype(dtype)), positions)


def transformed(scores: jax.Array, post_transform: str) -> jax.Array:
    """Return scores [N, classes] after a transform; a single one changes by PROBIT alone."""
    checked_name("post_transform", post_transform, POST_TRANSFORMS)
    if scores.shape[-1] == 1 and post_transform != "PROBIT":
        return scores
    return _TRANSFORMS[post_transform](scores)


def two_classes(score: jax.Array, post_transform: str, is_probability: bool) -> jax.Array:
    """Return scores [N, 2] of the score [N, 1] of the second of two classes.

    Args:
        score: of the second class.
        post_transform: of the node.
        is_probability: whether the other class has the complement, else the negative.
    """
    checked_name("post_transform", post_transform, POST_TRANSFORMS)
    if post_transform == "LOGISTIC":
        return jnp.concatenate([jax.nn.sigmoid(-score), jax.nn.sigmoid(score)], axis=1)
    if post_transform == "PROBIT":
        score = _probit(score)
    return jnp.concatenate([1 - score if is_probability else -score, score], axis=1)


def _softmax_zero(scores: jax.Array) -> jax.Array:
    """Softmax of the scores that are not zero; those that are stay zero."""
    is_zero = jnp.abs(scores) <= _ZERO
    largest = jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True))
    weights = jnp.where(is_zero, 0, jnp.exp(scores - largest))
    total = jnp.sum(weights, axis=-1, keepdims=True)
    return weights / jnp.where(total == 0, 1, total)


def _probit(scores: jax.Array) -> jax.Array:
    """√2 erf⁻¹(2 x − 1), by onnxruntime's approximation of the inverse error function."""
    x = 2 * scores - 1
    logarithm = jnp.log((1 - x) * (1 + x))
    middle = 2 / (np.pi * _WINITZKI) + logarithm / 2
    inverse = jnp.sign(x) * jnp.sqrt(jnp.sqrt(middle * middle - logarithm / _WINITZKI) - middle)
    return np.float32(np.sqrt(2)) * inverse


def _unchanged(scores: jax.Array) -> jax.Array:
    return scores


_ZERO = 1e-7  # onnxruntime: ComputeSoftmaxZero
_WINITZKI = 0.147  # S. Winitzki, A handy approximation for the error function and its inverse (2008): to 2 · 10⁻³
_TRANSFORMS: Mapping[str, Callable[[jax.Array], jax.Array]] = {
    "NONE": _unchanged,
    "SOFTMAX": lambda scores: jax.nn.softmax(scores, axis=-1),
    "LOGISTIC": jax.nn.sigmoid,
    "SOFTMAX_ZERO": _softmax_zero,
    "PROBIT": _probit,
}
