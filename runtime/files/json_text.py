"""JSON with bounds: the memory that a text takes when it is parsed is estimated before it is.

Input: data, or the bytes of a text. Output: the bytes, or the data. A text with a name twice in an object, a number
that is not finite, or lists deeper than Python reads is refused.
Source: sizes of objects: `sys.getsizeof` of CPython 3.12 and 3.13, 64 bits.
"""

from __future__ import annotations

import json
import math
from typing import Any

from ipujax.runtime.files.reading import DamagedError

# Bytes of what a character can begin: an element and its place, a list, an object, half of a text, a field.
_BYTES = {b",": 40, b"[": 88, b"{": 240, b'"': 30, b":": 60}
_ASCII_BYTES = 2  # of a character, in the text and in the strings that are made of it
_UNICODE_BYTES = 8  # of a text with characters outside of ASCII: four bytes for each


def json_text(data: Any) -> bytes:
    """Return data as JSON without spaces, in ASCII.

    Raises:
        ValueError: a number that is not finite.
    """
    return json.dumps(data, separators=(",", ":"), allow_nan=False).encode()


def json_memory_bytes(text: bytes) -> int:
    """Return an upper estimate of the memory, in bytes, that a text takes when it is parsed."""
    size = len(text) * (_ASCII_BYTES if text.isascii() else _UNICODE_BYTES)
    return size + sum(text.count(character) * cost for character, cost in _BYTES.items())


def parse_json(text: bytes, max_bytes: int) -> Any:
    """Return the data of a text.

    Args:
        text: JSON in UTF-8.
        max_bytes: upper bound of `json_memory_bytes`.

    Raises:
        DamagedError: a text that is not valid JSON, has a name twice in an object, or takes more memory.
    """
    if (size := json_memory_bytes(text)) > max_bytes:
        problem = "it would take more memory than such a file can have"
        raise DamagedError(problem, f"at most {max_bytes:,} bytes", f"{size:,}")
    try:
        return json.loads(text.decode(), object_pairs_hook=_object, parse_constant=_not_finite, parse_float=_finite)
    except RecursionError as error:
        raise DamagedError("it is JSON that is nested too deeply") from error
    except ValueError as error:  # not JSON, not UTF-8, a name twice, or a number of thousands of digits
        raise DamagedError(f"it is not valid JSON: {str(error)[:200]}") from error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise ValueError("an object has a name twice")
    return fields


def _not_finite(text: str) -> float:
    raise ValueError(f"{text} is not a finite number")


def _finite(text: str) -> float:
    number = float(text)
    return number if math.isfinite(number) else _not_finite(text[:20])
