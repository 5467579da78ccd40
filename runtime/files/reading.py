"""The reader of files: regular files alone, without waiting for pipes or devices.

Each reason to refuse a file has a class; who opens files for users makes an `IpuError` of them.

Input: a path. Output: an open file, or an `UnreadableError`.

JSON with bounds: the memory that a text takes when it is parsed is estimated before it is.

Input: data, or the bytes of a text. Output: the bytes, or the data. A text with a name twice in an object, a number
that is not finite, or lists deeper than Python reads is refused.
Source: sizes of objects: `sys.getsizeof` of CPython 3.12 and 3.13, 64 bits.
"""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO

from ipujax.runtime.files.writing import FilePath, file_problem


class FileError(ValueError):
    """A file that is refused; the text says why.

    Args:
        problem: the reason.
        expected: description of what is valid; empty if there is none.
        got: description of what the file has; empty if there is none.
    """

    def __init__(self, problem: str, expected: str = "", got: str = "") -> None:
        super().__init__(": expected ".join(filter(None, (problem, expected))) + (f", got {got}" if got else ""))
        self.problem = problem
        self.expected = expected
        self.got = got


class UnreadableError(FileError):
    """No regular file, or one that the system does not open."""


class ForeignError(FileError):
    """A file that is not of ipujax, or of another kind."""


class VersionError(FileError):
    """A file of another version of ipujax."""


class DamagedError(FileError):
    """Content that differs from what was written, or that no writer of this version writes."""


_FLAGS = os.O_RDONLY | sum(getattr(os, name, 0) for name in ("O_NONBLOCK", "O_CLOEXEC", "O_NOCTTY", "O_BINARY"))
_TYPES = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFLNK: "a link",
}


@contextmanager
def regular_file(path: FilePath, *, follows_links: bool = True) -> Iterator[tuple[BinaryIO, int]]:
    """Open a regular file for the `with`; it is given with its size in bytes.

    Raises:
        FileNotFoundError: there is no such file.
        UnreadableError: the system does not open it, or it is something else than a regular file.
    """
    try:
        descriptor = os.open(path, _FLAGS | (0 if follows_links else getattr(os, "O_NOFOLLOW", 0)))
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:
        raise UnreadableError(file_problem(error)) from error
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        found = _TYPES.get(stat.S_IFMT(status.st_mode), "something else")
        raise UnreadableError("no regular file", "a file", found)
    with open(descriptor, "rb") as file:
        try:
            yield file, status.st_size
        except OSError as error:
            raise UnreadableError(file_problem(error)) from error


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
