"""The record of slow tests: CPU seconds of each test above its limit, in `tests/durations.json`.

`pytest --update-durations` measures the tests that it runs, `pytest -m '' --update-durations` slow ones too. A test
without a record, as a new one is, runs each time. A record equal to its limit is a lower bound: slow, not measured.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

RECORD = Path(__file__).with_name("durations.json")
TEST_SECONDS = 1.0
CASE_SECONDS = 0.3  # of a function that has many


def is_slow(test: str, seconds: float) -> bool:
    """Whether a test, named as pytest does, reaches its limit."""
    return seconds >= (CASE_SECONDS if test.endswith("]") else TEST_SECONDS)


def read_durations() -> dict[str, float]:
    """Seconds of each slow test; the file has one list for each module, so that names are short."""
    modules = json.loads(RECORD.read_text(encoding="utf-8"))
    return {f"{path}::{name}": seconds for path, tests in modules.items() for name, seconds in tests.items()}


def write_durations(durations: dict[str, float]) -> None:
    """Writes the slow ones, sorted, one a line."""
    modules: dict[str, dict[str, float]] = {}
    for test, seconds in sorted(durations.items()):
        path, _, name = test.partition("::")
        if is_slow(test, seconds):
            modules.setdefault(path, {})[name] = seconds
    RECORD.write_text(json.dumps(modules, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def mark_slow(items: list[pytest.Item]) -> None:
    """Marks the tests of the record `slow`."""
    slow = read_durations()
    for item in items:
        if item.nodeid in slow:
            item.add_marker(pytest.mark.slow)


class DurationRecorder:
    """Measures tests where they run, and writes the record in the process that hears of all of them.

    CPU time, of child processes too: how busy the machine is does not count. Fixtures do not either, as which test
    pays for a shared one depends on which tests run.
    """

    def __init__(self) -> None:
        self.durations: dict[str, float] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        start = sum(os.times()[:4])
        yield
        item.user_properties.append(("cpu_seconds", round(sum(os.times()[:4]) - start, 2)))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.passed:
            self.durations[report.nodeid] = dict(report.user_properties)["cpu_seconds"]

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if not hasattr(session.config, "workerinput"):
            write_durations(read_durations() | self.durations)
