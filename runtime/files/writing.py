"""The writer of files: whole content under a name, or the older file as it was.

Input: a path and bytes. Output: a file, that is written beside its place, synced, and renamed. A link is followed; a
device or a pipe, such as `/dev/stdout`, is written to directly.
"""

from __future__ import annotations

import errno
import os
import stat
import uuid
from contextlib import suppress

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
    _replace(place, content, None if existing is None else stat.S_IMODE(existing.st_mode), is_synced)


def _stat(path: FilePath) -> os.stat_result | None:
    try:
        return os.stat(path)
    except FileNotFoundError:
        return None


def _replace(place: str, content: bytes, mode: int | None, is_synced: bool) -> None:
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
    except BaseException:  # an interrupt too leaves nothing behind
        with suppress(OSError):
            os.unlink(unfinished)
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
