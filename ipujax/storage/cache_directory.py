"""Directory of a cache: sealed files by key and kind, bounded in bytes, the longest unused removed first.

Input: the key of a program. Output: figures and sections of a file, or None. Files appear by an atomic rename, so that
several processes may write one directory. A directory that cannot be used, and files that are damaged, cost one warning
in a process; the program is then compiled as without a cache. A file of another version of ipujax is not there for this
one, and is neither damaged nor removed, but by age. Folders, pipes and links are foreign, whatever their names: they
are neither read, nor followed, nor removed, nor written over.
"""

from __future__ import annotations

import os
import re
import stat
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from ipujax.runtime.errors import ArgumentError
from ipujax.runtime.files import (
    FileError,
    FileKind,
    Sealed,
    UnreadableError,
    VersionError,
    file_problem,
    read_sealed,
    seal,
    write_file,
)
from ipujax.runtime.files.file_access import UNFINISHED
from ipujax.runtime.logs import Log

_LOG = Log("cache")
CACHE_DIR = "IPUJAX_CACHE_DIR"
CACHE_BYTES = "IPUJAX_CACHE_BYTES"
# Kinds of files.
PROGRAM = "program"
PROFILE = "profile"
PLAN = "plan"
MAX_BYTES = 2 << 30  # assumed: some hundred programs with their profiles
MAX_FILES = 10_000  # assumed: some hundred programs with their plans; so many are listed in 0.1 s
_NAME = re.compile(r"[0-9a-f]{64}-[a-z]+\.ipujax")
_UNFINISHED = re.compile(UNFINISHED)
_MAX_WRITE_SECONDS = 3600  # an unfinished file that is older has no writer any more


@dataclass(frozen=True, slots=True)
class CacheFile:
    """A file of a cache: its path, bytes, and the time of its last use in seconds."""

    path: Path
    size: int
    last_use: float

    @property
    def key(self) -> str:
        """Digest of everything that its contents depend on."""
        return self.path.stem.partition("-")[0]

    @property
    def kind(self) -> str:
        """Kind of its contents: `PROGRAM`, `PROFILE` or `PLAN`."""
        return self.path.stem.partition("-")[2]


@dataclass(frozen=True, slots=True)
class NewFile:
    """A file that is to be written.

    Args:
        kind: kind of the file.
        key: digest of all that its contents depend on.
        sections: bytes by name.
        figures: of the fields of the kind.
    """

    kind: FileKind
    key: str
    sections: Mapping[str, bytes]
    figures: Mapping[str, Any] = field(default_factory=dict)


class CacheDirectory:
    """A directory with sealed files.

    Args:
        path: of the directory, created when a file is written.
        max_bytes: bound of all files together.
    """

    def __init__(self, path: str, max_bytes: int = MAX_BYTES) -> None:
        self.path = Path(path)
        self.max_bytes = max_bytes
        self._has_warned = False

    def read(self, key: str, kind: FileKind) -> Sealed | None:
        """Return a file; None if there is none of this version, or a damaged one, which is removed."""
        path = self._path(key, kind)
        try:
            sealed = read_sealed(path, kind, key, follows_links=False)
        except FileNotFoundError:
            return None
        except VersionError as error:
            _LOG.debug("%s is not used: %s", path, error)
            return None
        except UnreadableError as error:
            self.warn(f"{path} cannot be read: {error}")
            return None
        except FileError as error:
            self.discard(key, kind, error)
            return None
        with suppress(OSError):  # of a directory that is read-only
            os.utime(path)  # used now
        return sealed

    def discard(self, key: str, kind: FileKind, problem: object) -> None:
        """Warn of a damaged file, and remove it."""
        path = self._path(key, kind)
        self.warn(f"{path} is damaged, {problem}: it is not used")
        with suppress(OSError):  # it is not used in any case
            path.unlink(missing_ok=True)

    def write(self, *files: NewFile) -> None:
        """Write files, then remove the longest unused files beyond the bound."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            for file in files:
                self._write(file)
            self._shrink()
        except (OSError, ValueError) as error:
            self.warn(f"{self.path} cannot be written: {file_problem(error)}")

    def _write(self, file: NewFile) -> None:
        content = seal(file.kind, file.sections, file.figures, file.key)
        path = self._path(file.key, file.kind)
        if len(content) > self.max_bytes:
            _LOG.info("%s of %s bytes is larger than the whole cache", file.kind.name, f"{len(content):,}")
        elif _is_foreign(path):
            self.warn(f"{path} is no file of the cache: it is left as it is")
        else:
            # Not synced, which would take longer than many a plan: a file that a crash cuts off is found damaged.
            write_file(path, content, is_synced=False)

    def files(self) -> list[CacheFile]:
        """Return the files of the cache, longest unused first; none if there is no such directory.

        Raises:
            OSError: the directory cannot be read.
        """
        return sorted(self._scan(_NAME), key=lambda file: file.last_use)

    def clear(self) -> tuple[list[CacheFile], list[str]]:
        """Remove all files of the cache, other files stay.

        Returns:
            The files that were removed, and for each that could not be removed its path and why.

        Raises:
            OSError: as `files`.
        """
        removed = []
        irregular = [f"{path}: no regular file" for path in self.irregular_entries()]
        for file in (*self.files(), *self._scan(_UNFINISHED)):
            try:
                file.path.unlink(missing_ok=True)
            except OSError as error:
                irregular.append(f"{file.path}: {file_problem(error)}")
            else:
                removed.append(file)
        return removed, irregular

    def irregular_entries(self) -> list[Path]:
        """Return entries that have names of cache files and are no regular files: folders, pipes, links.

        Raises:
            OSError: as `files`.
        """
        return [entry for entry, status in self._entries(_NAME) if not stat.S_ISREG(status.st_mode)]

    def warn(self, problem: str) -> None:
        """Log a problem, the first of this directory as a warning."""
        text = "the cache of programs is not used: %s" if not self._has_warned else "%s"
        log = _LOG.info if self._has_warned else _LOG.warning
        self._has_warned = True
        log(text, problem)

    def _path(self, key: str, kind: FileKind) -> Path:
        return self.path / f"{key}-{kind.name}.ipujax"

    def _scan(self, pattern: re.Pattern[str]) -> list[CacheFile]:
        entries = self._entries(pattern)
        return [CacheFile(path, x.st_size, x.st_mtime) for path, x in entries if stat.S_ISREG(x.st_mode)]

    def _entries(self, pattern: re.Pattern[str]) -> list[tuple[Path, os.stat_result]]:
        """Return the files of the directory whose names match, with their status; other processes may remove some."""
        try:
            directory = os.scandir(self.path)
        except FileNotFoundError:  # nothing is stored yet
            return []
        paths = []
        with directory as entries:
            for entry in entries:
                if pattern.fullmatch(entry.name):
                    with suppress(FileNotFoundError):  # another process has removed it meanwhile
                        paths.append((Path(entry.path), entry.stat(follow_symlinks=False)))
        return paths

    def _shrink(self) -> None:
        """Remove the files of least recent use above the bounds, and those that a lost process left unfinished."""
        files = self.files()
        excess_bytes = sum(file.size for file in files) - self.max_bytes
        for number, file in enumerate(files):
            if excess_bytes <= 0 and len(files) - number <= MAX_FILES:
                break
            with suppress(OSError):  # of one file: the next may be removed
                file.path.unlink(missing_ok=True)
                excess_bytes -= file.size
        for file in self._scan(_UNFINISHED):
            if file.last_use < time.time() - _MAX_WRITE_SECONDS:
                with suppress(OSError):
                    file.path.unlink(missing_ok=True)


def _is_foreign(path: Path) -> bool:
    try:
        return not stat.S_ISREG(path.lstat().st_mode)
    except FileNotFoundError:
        return False


@cache  # one object for each directory, which remembers that it has warned
def cache_directory(path: str, max_bytes: int = MAX_BYTES) -> CacheDirectory:
    """Return the cache in a directory."""
    return CacheDirectory(path, max_bytes)


def requested_directory(cache_dir: str | None) -> CacheDirectory | None:
    """Return the cache of `Options.cache_dir` or, if that is None, of the environment; None without any.

    Raises:
        ArgumentError: the bound in the environment is no number of bytes.
    """
    path = os.environ.get(CACHE_DIR, "") if cache_dir is None else cache_dir
    if not path:
        return None
    bound = os.environ.get(CACHE_BYTES) or str(MAX_BYTES)
    if not bound.isdecimal():
        raise ArgumentError(f"{CACHE_BYTES} must be a number of bytes", expected="digits", got=repr(bound))
    return cache_directory(os.path.abspath(os.path.expanduser(path)), int(bound))
