"""Operators on text, which exists while a model is traced alone: of constants, and inputs in `load(static=)`.

And TfIdfVectorizer, which counts n-grams of integers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from ipujax.onnx.budget import check_table, check_terms
from ipujax.onnx.operators.operand_types import Array, Value
from ipujax.onnx.registry import operator, static

_CASES: Mapping[str, Callable[[str], str]] = {"NONE": str, "LOWER": str.lower, "UPPER": str.upper}


def as_texts(x: Any, name: str) -> np.ndarray:
    """Return known text as an array of `str`; ONNX's is bytes in UTF-8."""
    flat = [
        each.decode("utf-8", errors="surrogateescape") if isinstance(each, bytes) else str(each)
        for each in np.ravel(static(x, name))
    ]
    texts = np.empty(len(flat), object)
    texts[:] = flat
    return texts.reshape(np.shape(x))


@operator("StringConcat")
def string_concat(x: Any, y: Any) -> np.ndarray:
    return np.asarray(as_texts(x, "x") + as_texts(y, "y"), object)


@operator("StringNormalizer")
def string_normalizer(
    x: Any,
    *,
    case_change_action: str = "NONE",
    is_case_sensitive: int = 0,
    locale: str = "",
    stopwords: Sequence[str] = (),
) -> np.ndarray:
    """Words without stop words, in another case; one empty word where none is left. Cases are those of Unicode."""
    texts = as_texts(x, "x")
    compared = str if is_case_sensitive else str.lower
    stops = set(map(compared, stopwords))
    change = _CASES[case_change_action]
    words = [change(word) for word in texts.ravel() if compared(word) not in stops]
    result = np.asarray(words or [""], object)
    return result.reshape(1, -1) if texts.ndim == 2 else result


@operator("StringSplit")
def string_split(x: Any, *, delimiter: str = "", maxsplit: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Parts of each text on a last axis, padded with empty ones, and their number; without delimiter at white space."""
    texts = as_texts(x, "x")
    parts = [text.split(delimiter or None, -1 if maxsplit is None else maxsplit) for text in texts.ravel()]
    counts = np.asarray(list(map(len, parts)), np.int64).reshape(texts.shape)
    width = int(counts.max(initial=0))
    table = np.empty((len(parts), width), object)
    for row, each in enumerate(parts):
        table[row] = [*each, *[""] * (width - len(each))]
    return table.reshape(*texts.shape, width), counts


@operator("TfIdfVectorizer")
def count_ngrams(
    x: Value,
    *,
    max_gram_length: int,
    max_skip_count: int,
    min_gram_length: int,
    mode: str,
    ngram_counts: Sequence[int],
    ngram_indexes: Sequence[int],
    pool_int64s: Sequence[int],
    weights: Sequence[float] | None = None,
) -> Array:
    """Counts of a pool's n-grams in sequences of integers [C] or [N, C], each at its own position of the result."""
    # `pool_int64s` has n-grams one after another; those of length n begin at `ngram_counts[n - 1]`. Elements of an
    # n-gram are up to `max_skip_count` apart, all equally far. "IDF" has weights of n-grams that occur, "TFIDF" weights
    # times counts.
    sequences = jnp.atleast_2d(x)
    size = max(ngram_indexes) + 1
    counts = jnp.zeros((len(sequences), size), jnp.float32)
    first = 0
    stops = [*ngram_counts[1:], len(pool_int64s)]
    for length, (begin, end) in enumerate(zip(ngram_counts, stops, strict=True), start=1):
        grams = np.array(pool_int64s[begin:end]).reshape(-1, length)
        places = np.array(ngram_indexes[first : first + len(grams)], int)
        first += len(grams)
        if len(grams) and min_gram_length <= length <= max_gram_length:
            counts = counts.at[:, places].add(_occurrences(sequences, grams, max_skip_count))
    clipped = jnp.minimum(counts, 1) if mode == "IDF" else counts
    weighted = clipped if mode == "TF" or not weights else clipped * jnp.asarray(weights, jnp.float32)
    return weighted if np.ndim(x) == 2 else weighted[0]


def _occurrences(sequences: Array, grams: np.ndarray, max_skip_count: int) -> Array:
    """Counts of each n-gram in each sequence, over all distances between its elements."""
    length = grams.shape[1]
    total = jnp.zeros((len(sequences), len(grams)), jnp.float32)
    distances = 1 if length == 1 else min(max_skip_count + 1, sequences.shape[1])
    check_terms(distances, "TfIdfVectorizer")
    # single elements are at no distance
    for distance in range(1, 1 + distances):
        starts = sequences.shape[1] - distance * (length - 1)
        if starts <= 0:
            break
        check_table(starts * length, "positions of n-grams")
        index = np.arange(starts)[:, None] + distance * np.arange(length)
        is_equal = jnp.all(sequences[:, index][:, :, None] == grams, axis=-1)
        total = total + jnp.sum(is_equal, axis=1)
    return total
