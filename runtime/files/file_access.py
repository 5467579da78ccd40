"""The reader and the writer of files, and JSON with bounds.

Only regular files are read, without waiting for pipes or devices. Each reason to refuse a file has a class; who opens
files for users makes an `IpuError` of them.

Input: a path. Output: an open file, or an `UnreadableError`.

Of JSON the memory that a text takes when it is parsed is estimated before it is. Input: data, or the bytes of a text.
Output: the bytes, or the data. A text with a name twice in an object, a number that is not finite, or lists deeper than
Python reads is refused.
Source: sizes of objects: `sys.getsizeof` of CPython 3.12 and 3.13, 64 bits.

A file that is written has its whole content under a name, or the older file stays as it was. Input: a path and bytes.
Output: a file, that is written beside its place, synced, and renamed. A link is followed; a device or a pipe, such as
`/dev/stdout`, is written to directly.
"""

from __future__ import annotations

import errno
import json
import math
import os
import stat
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, BinaryIO

FilePath = str | os.PathLike[str]
UNFINISHED = r"\.[0-9a-f]{32}\.ipujax-part"  # pattern of the names of files that are being written
_DESCRIPTORS = ("/dev/fd/", "/dev/std", "/proc/")  # names of open files, which renaming would not reach


def write_file(path: FilePath, content: bytes, *, is_synced: bool = True) -> None:
    """Write a file; one that exists is replaced when all of the content is on the disk, and keeps its mode.

    Args:
        path: of the file.
        content: all of its bytes.
        is_synced: whether to wait for the disk, so that a crash of the machine leaves the older file or the new one.

    Raises:
        OSError: the system refuses it; the older file is as it was.
        ValueError: a path that no system has.
    """
    existing = _stat(path)
    name = os.fsdecode(path)
    if existing is None and not os.path.basename(name):  # which names a folder, or nothing
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)
    is_open_file = name.startswith(_DESCRIPTORS)
    if is_open_file or not (existing is None or stat.S_ISREG(existing.st_mode) or stat.S_ISDIR(existing.st_mode)):
        _write_directly(path, content)
        return
    place = os.path.realpath(name)
    if existing is not None and stat.S_ISDIR(existing.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), place)
    if existing is None and os.path.islink(place):  # a circle of links
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), place)
    if existing is not None and not os.access(place, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), place)
    _replace_file(place, content, None if existing is None else stat.S_IMODE(existing.st_mode), is_synced)


def _stat(path: FilePath) -> os.stat_result | None:
    try:
        return os.stat(path)
    except FileNotFoundError:
        return None


def _replace_file(place: str, content: bytes, mode: int | None, is_synced: bool) -> None:
    """Write a file beside the place and move it there: readers see the old content or all of the new one.

    Args:
        place: path without links.
        content: of the file.
        mode: permissions; None for those of a new file.
        is_synced: whether the content is on the disk when this returns.
    """
    folder = os.path.dirname(place)
    unfinished = os.path.join(folder, f".{uuid.uuid4().hex}.ipujax-part")
    try:
        with open(unfinished, "xb") as file:
            if mode is not None:
                os.chmod(unfinished, mode)
            file.write(content)
            file.flush()
            if is_synced:
                os.fsync(file.fileno())
        os.replace(unfinished, place)
    except BaseException as error:  # an interrupt too leaves nothing behind
        with suppress(OSError):
            os.unlink(unfinished)
        if isinstance(error, OSError):
            error.filename = place  # which the caller knows: not the unfinished file, or none at all
        raise
    if is_synced:
        _sync_folder(folder)


def _sync_folder(folder: str) -> None:
    # Windows opens no folders, and some file systems do not sync them: the file itself is on the disk even so.
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _write_directly(path: FilePath, content: bytes) -> None:
    # Without blocking: a pipe that nobody reads is an error, not a wait without end.
    descriptor = os.open(path, os.O_WRONLY | os.O_TRUNC | getattr(os, "O_NONBLOCK", 0))
    os.set_blocking(descriptor, True)
    with open(descriptor, "wb") as file:
        file.write(content)


def file_problem(error: OSError | ValueError) -> str:
    """Return the reason of an error of the system, or of a path, in short."""
    return getattr(error, "strerror", None) or str(error)


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
        kind = _TYPES.get(stat.S_IFMT(status.st_mode), "something else")
        raise UnreadableError("no regular file", "a file", kind)
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
