"""The reader of files: regular files alone, without waiting for pipes or devices.

Each reason to refuse a file has a class; who opens files for users makes an `IpuError` of them.

Input: a path. Output: an open file, or an `UnreadableError`.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO

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
