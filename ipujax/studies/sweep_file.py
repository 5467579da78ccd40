"""File of a sweep or a search: a line that identifies it, then a line for each job that is done.

Input: a path, the digest of a sweep or search. Output: costs of jobs that an earlier run has done, and a file to add
others to. A run that is killed leaves whole lines, and at most one that is cut, which is dropped.
Limits: one run at a time writes to a file, which the system locks until that run ends.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any, Generic, Literal, TypeVar

from ipujax.runtime.errors import ArgumentError
from ipujax.studies.point_costs import PointCost

Job = TypeVar("Job", int, str)  # number of a job of a sweep, text of a plan of a search
Study = Literal["sweep", "search"]


class SweepFile(Generic[Job]):
    """An open file of a sweep or a search.

    Args:
        path: of the file; a new one is made, an existing one must be of the same sweep or search.
        digest: of function, arguments, points and plan.
        study: what writes it.

    Attributes:
        done: costs of the points of each job that is done.

    Raises:
        ArgumentError: the file is of another sweep or search, none at all, in use, or cannot be opened.
    """

    def __init__(self, path: str | os.PathLike[str], digest: str, study: Study = "sweep") -> None:
        self._path = path
        self._study = study
        if os.path.exists(path) and not os.path.isfile(path):
            raise ArgumentError(f"ipu.{study} cannot open {os.fspath(path)!r}", got="no file, but something else")
        try:
            # Open as long as the study runs; without a buffer, so that to close it writes nothing.
            self._file = open(path, "a+b", buffering=0)  # noqa: SIM115
        except OSError as error:
            raise ArgumentError(f"ipu.{study} cannot open {os.fspath(path)!r}", got=error.strerror) from error
        try:
            self._lock()
            self.done: dict[Job, list[PointCost]] = self._read(digest)
        except BaseException:
            self._file.close()
            raise

    @property
    def _kind(self) -> str:
        return f"ipujax {self._study}"

    def add(self, job: Job, costs: Sequence[PointCost]) -> None:
        """Add the costs of a job; they are on disk when this returns.

        Raises:
            ArgumentError: they cannot be written.
        """
        self._write({"job": job, "costs": [asdict(cost) for cost in costs]})
        self.done[job] = list(costs)

    def close(self) -> None:
        """Close the file, and let others write to it."""
        self._file.close()

    def _write(self, fields: dict[str, Any]) -> None:
        line = json.dumps(fields).encode() + b"\n"
        try:
            while line:
                line = line[self._file.write(line) :]
            os.fsync(self._file.fileno())
        except OSError as error:
            name = os.fspath(self._path)
            hint = "what is there is kept: the same call goes on after it"
            raise ArgumentError(f"ipu.{self._study} cannot write {name!r}", got=error.strerror, hint=hint) from error

    def _lock(self) -> None:
        """Lock the file for this run; the system unlocks it when the run ends, killed or not."""
        try:
            if os.name == "nt":
                import msvcrt

                self._file.seek(0)
                msvcrt.locking(self._file.fileno(), msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined]
            else:
                import fcntl

                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            name = os.fspath(self._path)
            hint = "another path, or wait until it ends"
            raise ArgumentError(f"another {self._study} is writing to {name!r}", hint=hint) from error

    def _read(self, digest: str) -> dict[Job, list[PointCost]]:
        """Return the jobs that are done; begin a new file, and drop a line that is cut."""
        self._file.seek(0)
        content = self._file.read()
        end = content.rfind(b"\n") + 1
        if end < len(content):
            if end == 0:
                raise self.foreign("something else")
            os.truncate(self._file.fileno(), end)
        lines = content[:end].splitlines()
        if not lines:
            self._write({"kind": self._kind, "digest": digest})
            return {}
        head = self._fields(lines[0])
        if head.get("kind") != self._kind:
            raise self.foreign("something else")
        if head.get("digest") != digest:
            raise self.foreign(f"another {self._study}: of another function, arguments, points, plan or version")
        try:
            rows = map(self._fields, lines[1:])
            return {row["job"]: [PointCost.of_fields(cost) for cost in row["costs"]] for row in rows}
        except (KeyError, TypeError, ValueError) as error:
            raise self.foreign("something else") from error

    def _fields(self, line: bytes) -> dict[str, Any]:
        fields = None
        with suppress(ValueError):
            fields = json.loads(line)
        if not isinstance(fields, dict):
            raise self.foreign("something else")
        return fields

    def foreign(self, content: str) -> ArgumentError:
        """Return the error of a file that has other content."""
        name = os.fspath(self._path)
        return ArgumentError(f"{name!r} is not a file of this {self._study}", got=content, hint="another path")
