"""The reader of files: regular files alone, without waiting for pipes or devices.

Input: a path. Output: an open file, or an `UnreadableError`.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO

from ipujax.runtime.files.file_errors import UnreadableError
from ipujax.runtime.files.writing import FilePath, file_problem

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
