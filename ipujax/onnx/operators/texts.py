"""Operators on text, which exists while a model is traced alone: of constants, and inputs in `load(static=)`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

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
