"""Features before a model: scaled, normalised, imputed, selected, joined; categories as numbers; ZipMap after it.

Text exists where it is known while tracing; a table from numbers to text gives positions in its list of values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from ipujax.onnx.element_types import canonical, check_held, index_dtype, is_floating, is_text
from ipujax.onnx.machine_learning.class_scores import DOMAIN, checked_name, class_labels
from ipujax.onnx.onnx_errors import OnnxError
from ipujax.onnx.operators.operand_types import Array, Value, refuse_outside
from ipujax.onnx.registry import as_texts, is_static, operator


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
    if is_text(x):  # labels of text are positions; where these are known, evaluation has the texts instead
        if x.ndim > 1 and len(x) > 1:
            raise OnnxError("columns of text depend on traced positions", expected="a vector of labels", got=x.shape)
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


def _column(name: str, *candidates: Any) -> np.ndarray:
    """Return keys or values of a table: the one attribute of its kind that the node has."""
    present = [np.ravel(np.asarray(each)) for each in candidates if each is not None and np.size(each)]
    if len(present) != 1:
        raise OnnxError(f"a table needs {name} of one kind", expected=f"one attribute of {name}", got=len(present))
    return present[0]


@operator("LabelEncoder", DOMAIN)
def label_encoder(
    x: Value,
    *,
    classes_strings: Sequence[str] | None = None,
    default_float: float = -0.0,
    default_int64: int = -1,
    default_string: str = "_Unused",
    default_tensor: np.ndarray | None = None,
    keys_floats: Sequence[float] | None = None,
    keys_int64s: Sequence[int] | None = None,
    keys_strings: Sequence[str] | None = None,
    keys_tensor: np.ndarray | None = None,
    values_floats: Sequence[float] | None = None,
    values_int64s: Sequence[int] | None = None,
    values_strings: Sequence[str] | None = None,
    values_tensor: np.ndarray | None = None,
) -> Any:
    """Values of a table for keys; the default for others. NaN is a key as others."""
    if classes_strings:  # opset 1: text to its position, or the other way
        positions = list(range(len(classes_strings)))
        keys, values = (
            (np.asarray(classes_strings, object), np.asarray(positions))
            if is_text(x)
            else (np.asarray(positions), np.asarray(classes_strings, object))
        )
    else:
        floats = None if keys_floats is None else np.asarray(keys_floats, np.float32)
        keys = _column("keys", floats, keys_int64s, _texts(keys_strings), keys_tensor)
        numbers = None if values_floats is None else np.asarray(values_floats, np.float32)
        values = _column("values", numbers, values_int64s, _texts(values_strings), values_tensor)
    if len(keys) != len(values):
        raise OnnxError("a table has another number of keys than values", expected=len(keys), got=len(values))
    if is_text(keys) != is_text(x):
        raise OnnxError("keys of a table and the operand are of different kinds", expected=keys.dtype, got=x.dtype)
    if is_text(values):  # a value that no key has is the position behind the last
        values, default = np.arange(len(values)), np.asarray(len(values))
    elif default_tensor is not None and default_tensor.size:
        default = np.ravel(default_tensor)[0]
    else:
        default = np.asarray(default_float if values.dtype.kind == "f" else default_int64)
    default = np.asarray(default).astype(values.dtype)
    if is_text(x):
        table = dict(zip(as_texts(keys, "keys"), values, strict=True))
        encoded = [table.get(text, default) for text in as_texts(x, "text").ravel()]
        return np.asarray(encoded, values.dtype).reshape(x.shape)
    return _looked_up(x, keys, values, default)


def _texts(texts: Sequence[str] | None) -> np.ndarray | None:
    return None if texts is None else np.asarray(texts, object)


def _looked_up(x: Value, keys: np.ndarray, values: np.ndarray, default: np.ndarray) -> Array:
    """Return the values at equal keys: the position of each element among the sorted keys, and one comparison."""
    check_held(keys, "a key")
    check_held(values, "a value")
    array = jnp.asarray(x)
    # Of a key that is given twice the first counts; NaN sorts last and is found as itself.
    unique, first = np.unique(keys.astype(array.dtype), return_index=True)
    ordered = jnp.asarray(unique)
    rows = values[first].astype(canonical(values.dtype))
    # Behind the last key there is none to compare with.
    place = jnp.minimum(jnp.searchsorted(ordered, array), len(unique) - 1)
    key = ordered[place]
    is_found = (key == array) | ((key != key) & (array != array))
    return jnp.where(is_found, jnp.asarray(rows)[place], jnp.asarray(default.astype(rows.dtype)))


@operator("OneHotEncoder", DOMAIN)
def one_hot_encoder(
    x: Value, *, cats_int64s: Sequence[int] | None = None, cats_strings: Sequence[str] | None = None, zeros: int = 1
) -> Any:
    """A last axis with 1 at the category of each element; without one of it, all zeros if `zeros` allows it."""
    categories = _column("categories", cats_int64s, _texts(cats_strings))
    if is_text(categories):
        is_known_category = as_texts(x, "text")[..., None] == as_texts(categories, "categories")
        _check_known(is_known_category, zeros)
        return is_known_category.astype(np.float32)
    check_held(categories, "a category")
    array = jnp.asarray(x)
    # Numbers of other types are cast to integers first, as onnxruntime does.
    is_category = array.astype(index_dtype())[..., None] == jnp.asarray(categories.astype(index_dtype()))
    if is_static(x):
        _check_known(np.asarray(x).astype(np.int64)[..., None] == categories, zeros)
    return is_category.astype(jnp.float32)


def _check_known(is_category: np.ndarray, zeros: int) -> None:
    if not zeros and not is_category.any(-1).all():
        raise OnnxError("an element has no category", expected="one of the node's categories, or zeros=1")


@operator("CategoryMapper", DOMAIN)
def category_mapper(
    x: Value,
    *,
    cats_int64s: Sequence[int],
    cats_strings: Sequence[str],
    default_int64: int = -1,
    default_string: str = "_Unused",
) -> Any:
    """Text as numbers, or numbers as positions of their text."""
    if is_text(x):
        return label_encoder(x, keys_strings=cats_strings, values_int64s=cats_int64s, default_int64=default_int64)
    return label_encoder(x, keys_int64s=cats_int64s, values_strings=cats_strings, default_string=default_string)
