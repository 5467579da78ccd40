"""Counts of n-grams of integers: TfIdfVectorizer."""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from ipujax.onnx.budget import check_table, check_terms
from ipujax.onnx.operators.operand_types import Array, Value
from ipujax.onnx.registry import operator


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
