"""Runs scripts under `ipujax run`, in this process or in one of its own, and finds processes that are left."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

from ipujax.cli import main

ROOT = Path(__file__).resolve().parents[3]
PATIENCE_SECONDS = 60.0  # assumed: what a busy machine may take for what takes no time


class Runner:
    """Writes scripts into a folder and runs them."""

    def __init__(self, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
        self._folder = folder
        self._capfd = capfd
        self.out: list[str] = []
        self.err: list[str] = []

    def script(self, source: str, name: str = "script.py") -> str:
        """Writes a script; its path."""
        path = self._folder / name
        path.write_text(textwrap.dedent(source))
        return str(path)

    def __call__(self, source: str, *options: str, arguments: Iterable[str] = (), instances: int = 2) -> int:
        """Runs a script to its end in this process's launcher; keeps the lines of its output, gives its exit code."""
        command = ["run", "--instances", str(instances), *options, self.script(source), *arguments]
        self._capfd.readouterr()
        code = main(command)
        captured = self._capfd.readouterr()
        self.out = captured.out.splitlines()
        self.err = captured.err.splitlines()
        return code

    def start(
        self, source: str, *options: str, arguments: Iterable[str] = (), instances: int = 2
    ) -> subprocess.Popen[str]:
        """Starts a launcher as a process of its own."""
        command = ["-m", "ipujax", "run", "--instances", str(instances), *options, self.script(source), *arguments]
        return subprocess.Popen(
            [sys.executable, *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=self._folder
        )

    def printed(self, word: str) -> list[int]:
        """The numbers that instances printed after a word."""
        return [int(line.split(word)[1]) for line in self.out if word in line]


@pytest.fixture
def run(tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Runner:
    """Runs scripts that import this very package."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("JAX_ENABLE_COMPILATION_CACHE", "false")  # instances run side by side: see tests/conftest.py
    return Runner(tmp_path, capfd)


def in_sessions(leaders: Iterable[int]) -> list[int]:
    """Processes of some sessions that still run: each is led by an instance, and has the processes that it starts."""
    reference = set(leaders)
    return [pid for pid, (state, _, _, session) in statuses() if int(session) in reference and state != "Z"]


def children_of(parent: int) -> set[int]:
    """Processes that another has started itself, and that still run."""
    return {pid for pid, (state, number, _, _) in statuses() if int(number) == parent and state != "Z"}


def statuses() -> Iterator[tuple[int, list[str]]]:
    """Each process with its state, and the numbers of its parent, group and session."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            yield int(folder.name), (folder / "stat").read_text().rpartition(")")[2].split()[:4]


def soon(holds: Callable[[], bool]) -> bool:
    """True if a condition becomes true in time."""
    end = time.monotonic() + PATIENCE_SECONDS
    while not (held := holds()) and time.monotonic() < end:
        time.sleep(0.01)
    return held


def clear_of(leaders: Iterable[int]) -> bool:
    """True if the sessions of some instances become empty."""
    leaders = list(leaders)
    assert leaders and os.getsid(0) not in leaders
    return soon(lambda: not in_sessions(leaders))
