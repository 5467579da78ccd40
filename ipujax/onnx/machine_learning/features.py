"""Features before a model: scaled, normalised, imputed, binarised, selected, joined; ZipMap after it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from ipujax.onnx.element_types import index_dtype, is_floating
from ipujax.onnx.machine_learning.class_scores import DOMAIN, checked_name, class_labels
from ipujax.onnx.onnx_errors import OnnxError
from ipujax.onnx.operators.operand_types import Array, Value, refuse_outside
from ipujax.onnx.registry import operator


def as_features(x: Value) -> Array:
    """Return an operand as floats: integers and flags become float32."""
    array = jnp.asarray(x)
    return array if is_floating(array) else array.astype(jnp.float32)


def as_rows(x: Value) -> Array:
    """Return an operand as floats [N, features]; a vector is one row."""
    array = as_features(x)
    return array.reshape(1, -1) if array.ndim < 2 else array.reshape(array.shape[0], -1)


def as_result(y: Array) -> Array:
    """Return scores as the domain declares them: float32, of doubles too."""
    return y.astype(jnp.float32) if y.dtype == np.float64 else y


def _per_feature(name: str, values: Sequence[float], x: Array) -> Array:
    """Return a value for each feature, or one for all; refuse another number of them."""
    features = x.shape[-1] if x.ndim else 1
    if len(values) not in (1, features):
        raise OnnxError(f"{name} has another number of values than features", expected=features, got=len(values))
    return jnp.asarray(np.asarray(values, x.dtype))


@operator("Scaler", DOMAIN)
def scaler(x: Value, *, offset: Sequence[float] = (), scale: Sequence[float] = ()) -> Array:
    """(x − offset) · scale, by feature."""
    array = as_features(x)
    centred = array - _per_feature("offset", offset or [0.0], array)
    return as_result(centred * _per_feature("scale", scale or [1.0], array))


@operator("Normalizer", DOMAIN)
def normalizer(x: Value, *, norm: str = "MAX") -> Array:
    """Rows divided by a norm; rows whose norm is zero stay."""
    checked_name("norm", norm, ("MAX", "L1", "L2"))
    array = as_features(x)
    if norm == "MAX":  # of signed values, as onnxruntime
        size = jnp.max(array, axis=-1, keepdims=True)
    else:
        size = jnp.sum(jnp.abs(array) if norm == "L1" else array * array, axis=-1, keepdims=True)
    # of a zero norm neither root nor quotient is computed: their gradients are infinite
    safe = jnp.where(size == 0, 1, size)
    return as_result(array / (jnp.sqrt(safe) if norm == "L2" else safe))


@operator("Imputer", DOMAIN)
def imputer(
    x: Value,
    *,
    imputed_value_floats: Sequence[float] = (),
    imputed_value_int64s: Sequence[int] = (),
    replaced_value_float: float = 0.0,
    replaced_value_int64: int = 0,
) -> Array:
    """Missing values replaced, by feature: those that are NaN, or equal another marker."""
    array = jnp.asarray(x)
    if imputed_value_floats and imputed_value_int64s:
        raise OnnxError("the node has values of both kinds", expected="one attribute imputed_value_…", got="both")
    values, marker = (
        (imputed_value_floats, replaced_value_float)
        if is_floating(array)
        else (imputed_value_int64s, replaced_value_int64)
    )
    if not values:
        raise OnnxError(f"the node has no value for missing ones of {array.dtype}", expected="imputed_value_…")
    is_missing = jnp.isnan(array) if np.isnan(marker) else array == marker
    return jnp.where(is_missing, _per_feature("imputed_value", values, array), array)


@operator("Binarizer", DOMAIN)
def binarizer(x: Value, *, threshold: float = 0.0) -> Array:
    array = jnp.asarray(x)
    return (array > threshold).astype(array.dtype)


@operator("FeatureVectorizer", DOMAIN)
def feature_vectorizer(*inputs: Value, inputdimensions: Sequence[int]) -> Array:
    """Features of several operands side by side, float32; each cut or padded with zeros to its number of features."""
    if len(inputdimensions) != len(inputs):
        raise OnnxError("inputdimensions needs a number for each input", expected=len(inputs), got=inputdimensions)
    rows = [as_rows(x).astype(jnp.float32)[:, :size] for x, size in zip(inputs, inputdimensions, strict=True)]
    widths = [size - row.shape[1] for row, size in zip(rows, inputdimensions, strict=True)]
    return jnp.concatenate([jnp.pad(x, ((0, 0), (0, width))) for x, width in zip(rows, widths, strict=True)], axis=1)


@operator("ArrayFeatureExtractor", DOMAIN)
def array_feature_extractor(x: Value, positions: Value) -> Any:
    """Columns of an array by their positions; of a vector, of text too, a row of elements."""
    flat = jnp.ravel(jnp.asarray(positions))
    refuse_outside(np.ravel(positions) if isinstance(positions, np.ndarray) else None, 0, x.shape[-1] - 1, "position")
    if x.dtype.kind in "OSU":  # labels of text are positions
        return flat.astype(index_dtype()).reshape(1, -1)
    columns = jnp.take(jnp.asarray(x), flat, axis=-1)
    return columns.reshape(1, -1) if x.ndim == 1 else columns


@operator("ZipMap", DOMAIN)
def zip_map(
    x: Value, *, classlabels_int64s: Sequence[int] | None = None, classlabels_strings: Sequence[str] | None = None
) -> Array:
    """Probabilities [N, classes], a column for each label: maps of labels exist on a host alone."""
    array = jnp.asarray(x)
    names = "classlabels_int64s", "classlabels_strings"
    class_labels(classlabels_int64s, classlabels_strings, array.shape[-1], names)
    return array
