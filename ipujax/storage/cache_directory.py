"""Directory of a cache: sealed files by key and kind, bounded in bytes, the longest unused removed first.

Input: the key of a program. Output: the bytes of a file, or None. Files appear by an atomic rename, so that several
processes may write one directory. A directory that cannot be used, and files that are damaged, cost one warning in a
process; the program is then compiled as without a cache.
"""

from __future__ import annotations

import os
import re
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from ipujax.runtime.errors import ArgumentError
from ipujax.runtime.logs import Log
from ipujax.storage.sealed import DamagedError, Head, seal, unseal

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
_UNFINISHED = re.compile(r"\.[0-9a-f]{32}\.ipujax-part")
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

    def read(self, key: str, kind: str) -> tuple[Head, dict[str, bytes]] | None:
        """Return head and sections of a file; None if there is none, or a damaged one, which is removed."""
        path = self._path(key, kind)
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            self.warn(f"{path} cannot be read: {error.strerror or error}")
            return None
        try:
            opened = unseal(content, kind, key)
        except DamagedError as error:
            self.discard(key, kind, str(error))
            return None
        with suppress(OSError):  # of a directory that is read-only
            os.utime(path)  # used now
        return opened

    def discard(self, key: str, kind: str, problem: str) -> None:
        """Warn of a damaged file, and remove it."""
        path = self._path(key, kind)
        self.warn(f"{path} is damaged, {problem}: it is not used")
        with suppress(OSError):  # it is not used in any case
            path.unlink(missing_ok=True)

    def write(self, *files: tuple[Head, Mapping[str, bytes]]) -> None:
        """Write sealed files, each of a head and sections, then remove the longest unused files beyond the bound."""
        try:
            for head, sections in files:
                self._write(head, seal(head, sections))
            self._shrink()
        except OSError as error:
            self.warn(f"{self.path} cannot be written: {error.strerror or error}")

    def _write(self, head: Head, content: bytes) -> None:
        if len(content) > self.max_bytes:
            _LOG.info("%s of %s bytes is larger than the whole cache", head.kind, f"{len(content):,}")
            return
        unfinished = self.path / f".{uuid.uuid4().hex}.ipujax-part"
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            unfinished.write_bytes(content)
            unfinished.replace(self._path(head.key, head.kind))
        except OSError:
            with suppress(OSError):  # as where the path leads through a file
                unfinished.unlink(missing_ok=True)
            raise

    def files(self) -> list[CacheFile]:
        """Return the files of the cache, longest unused first; none if there is no such directory.

        Raises:
            OSError: the directory cannot be read.
        """
        return sorted(self._scan(_NAME), key=lambda file: file.last_use)

    def clear(self) -> list[CacheFile]:
        """Remove all files of the cache, other files stay; return those that were there.

        Raises:
            OSError: as `files`, or a file cannot be removed.
        """
        removed = [*self.files(), *self._scan(_UNFINISHED)]
        for file in removed:
            file.path.unlink(missing_ok=True)
        return removed

    def warn(self, problem: str) -> None:
        """Log a problem, the first of this directory as a warning."""
        text = "the cache of programs is not used: %s" if not self._has_warned else "%s"
        log = _LOG.info if self._has_warned else _LOG.warning
        self._has_warned = True
        log(text, problem)

    def _path(self, key: str, kind: str) -> Path:
        return self.path / f"{key}-{kind}.ipujax"

    def _scan(self, pattern: re.Pattern[str]) -> list[CacheFile]:
        try:
            directory = os.scandir(self.path)
        except FileNotFoundError:  # nothing is stored yet
            return []
        files = []
        with directory as entries:
            for entry in entries:
                if pattern.fullmatch(entry.name):
                    with suppress(FileNotFoundError):  # another process has removed it meanwhile
                        stat = entry.stat()
                        files.append(CacheFile(Path(entry.path), stat.st_size, stat.st_mtime))
        return files

    def _shrink(self) -> None:
        files = self.files()
        excess_bytes = sum(file.size for file in files) - self.max_bytes
        for number, file in enumerate(files):
            if excess_bytes <= 0 and len(files) - number <= MAX_FILES:
                break
            file.path.unlink(missing_ok=True)
            excess_bytes -= file.size
        for file in self._scan(_UNFINISHED):
            if file.last_use < time.time() - _MAX_WRITE_SECONDS:
                file.path.unlink(missing_ok=True)


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
