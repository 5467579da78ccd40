"""Text, sequences, which are tuples, and optionals, whose empty one is None: values that no program has.

They exist only while a model is traced: text of constants and of inputs in `load(static=)`; what a program decides of
sequences and optionals is in `bounded_values`. And TfIdfVectorizer, which counts n-grams of integers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from ipujax.onnx.bounded_values import BoundedSequence, TracedOptional
from ipujax.onnx.budget import Budget, check_table, check_terms
from ipujax.onnx.onnx_errors import TracedOperandError
from ipujax.onnx.operators.operand_types import Array, Static, Value, ceil_div, integers, refuse_outside, static_integer
from ipujax.onnx.operators.shapes import stops_of
from ipujax.onnx.registry import as_texts, is_static, operator

_CASES: Mapping[str, Callable[[str], str]] = {"NONE": str, "LOWER": str.lower, "UPPER": str.upper}


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
    by_place = np.ones(size, np.float32)
    if weights:
        by_place[list(ngram_indexes)] = weights
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
    weighted = clipped if mode == "TF" else clipped * by_place
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


Values = tuple[Any, ...]


def _position(position: Any, length: int, default: int) -> int:
    index = default if position is None else static_integer(position, "position")
    # The default of an insertion, the place behind the last element, is the only one that is no element's.
    refuse_outside(np.asarray(index), -length, max(length - 1, default), f"a sequence of {length} has no position")
    return index + length if index < 0 else index


@operator("SequenceConstruct")
def sequence_construct(*inputs: Any) -> tuple[Values]:
    """Return a sequence of the inputs."""
    return (inputs,)


@operator("SequenceEmpty")
def sequence_empty(*, dtype: int = 1) -> tuple[Values]:
    """Return an empty sequence; its dtype does not matter while tracing."""
    return ((),)


def _as_buffer(sequence: Values, room: int) -> BoundedSequence:
    """Return a sequence as a buffer, for a traced position; one whose tensors differ needs a static position."""
    forms = {(tuple(x.shape), np.dtype(x.dtype)) for x in sequence}
    if len(forms) != 1:
        message = "a position in a sequence of tensors that are not alike must be static"
        hint = "name the graph input that it depends on in load(static=…)"
        raise TracedOperandError(message, expected="a static position", got="a traced position", hint=hint)
    elements = tuple(map(jnp.asarray, sequence))
    return BoundedSequence.of(elements, len(elements) + room, elements[0], "read at a traced position")


@operator("SequenceAt")
def sequence_at(sequence: Values | BoundedSequence, position: Any) -> Any:
    """Return the element at a position; a traced one needs elements of one shape."""
    if isinstance(sequence, BoundedSequence):
        return (sequence.at(position),)
    if not is_static(position):
        return (_as_buffer(sequence, 0).at(position),)
    return (sequence[_position(position, len(sequence), 0)],)


@operator("SequenceInsert")
def sequence_insert(
    sequence: Values | BoundedSequence, tensor: Any, position: Any = None
) -> tuple[Values | BoundedSequence]:
    """Return a sequence with a tensor before a position, else at its end."""
    if isinstance(sequence, BoundedSequence):
        return (sequence.inserted(tensor, position),)
    if not is_static(position):
        return (_as_buffer(sequence, 1).inserted(tensor, position),)
    index = _position(position, len(sequence), len(sequence))
    return ((*sequence[:index], tensor, *sequence[index:]),)


@operator("SequenceErase")
def sequence_erase(sequence: Values | BoundedSequence, position: Any = None) -> tuple[Values | BoundedSequence]:
    """Return a sequence without the element at a position, else without its last."""
    if isinstance(sequence, BoundedSequence):
        return (sequence.erased(position),)
    if not is_static(position):
        return (_as_buffer(sequence, 0).erased(position),)
    index = _position(position, len(sequence), len(sequence) - 1)
    return ((*sequence[:index], *sequence[index + 1 :]),)


@operator("SequenceLength")
def sequence_length(sequence: Values | BoundedSequence) -> Any:
    """Return the number of elements, int64; static but of a bounded sequence."""
    if isinstance(sequence, BoundedSequence):
        return sequence.length
    return np.asarray(len(sequence), np.int64)


@operator("SplitToSequence")
def split_to_sequence(
    x: Any, split: Static | None = None, *, axis: int = 0, keepdims: int = 1, budget: Budget
) -> tuple[Values]:
    """Return parts of a tensor: of sizes `split`, of one size if it is a scalar, else of size 1."""
    extent = x.shape[axis]
    sizes = np.asarray(1) if split is None else split
    is_one_size = sizes.ndim == 0
    if is_one_size:
        refuse_outside(sizes, 1, math.inf, "split")
    budget.check_unrolled(ceil_div(extent, int(sizes)) if is_one_size else len(sizes), "parts of a sequence")
    cuts = list(range(int(sizes), extent, int(sizes))) if is_one_size else stops_of(integers(sizes), extent, axis)
    parts = (np if is_static(x) else jnp).split(x, cuts, axis)
    is_squeezed = split is None and not keepdims
    return (tuple(part.squeeze(axis) if is_squeezed else part for part in parts),)


@operator("ConcatFromSequence")
def concat_from_sequence(sequence: Values | BoundedSequence, *, axis: int, new_axis: int = 0) -> Any:
    """Return the elements joined along an axis, or stacked along a new one."""
    if isinstance(sequence, BoundedSequence):
        return sequence.concatenated(axis, bool(new_axis))
    xp = np if is_static(sequence) else jnp
    return xp.stack(sequence, axis) if new_axis else xp.concatenate(sequence, axis)


@operator("Optional")
def optional(value: Any = None, *, type: Any = None) -> tuple[Any]:
    """Return an optional with a value, or an empty one."""
    return (value,)


@operator("OptionalHasElement")
def optional_has_element(value: Any = None) -> Any:
    """Return whether an optional has a value, bool; static but where a program decides it."""
    if isinstance(value, TracedOptional):
        return value.is_present
    return np.asarray(value is not None)


@operator("OptionalGetElement")
def optional_get_element(value: Any) -> tuple[Any]:
    """Return the value of an optional; a ValueError if it is empty, zeros where a program finds it empty."""
    if isinstance(value, TracedOptional):
        return (value.value,)
    if value is None:
        raise ValueError("the optional is empty")
    return (value,)
