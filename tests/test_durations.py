"""The record of slow tests names tests that exist, and is written as it is read."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import durations

ROOT = Path(__file__).resolve().parents[1]


def test_recorded_functions_exist():
    recorded = {test.partition("[")[0] for test in durations.read_durations()}
    paths = {function.partition("::")[0] for function in recorded if (ROOT / function.partition("::")[0]).exists()}
    defined = {
        f"{path}::{name}"
        for path in paths
        for name in re.findall(r"^def (test_\w+)", (ROOT / path).read_text(), re.MULTILINE)
    }
    assert not recorded - defined, "their records can go"


def test_the_record_has_slow_tests_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    text = durations.RECORD.read_text(encoding="utf-8")
    slow = durations.read_durations()
    monkeypatch.setattr(durations, "RECORD", tmp_path / "durations.json")
    durations.write_durations(slow | {"a.py::test_quick": durations.TEST_SECONDS - 0.1, "a.py::test_cases[quick]": 0.2})
    assert (tmp_path / "durations.json").read_text(encoding="utf-8") == text


CONFTEST = """
from pathlib import Path
import pytest
from tests import durations

durations.RECORD = Path("durations.json")
durations.TEST_SECONDS = 0.1

def pytest_configure(config):
    config.addinivalue_line("markers", "slow: of the record")
    if config.getoption("-m") == "":
        config.pluginmanager.register(durations.DurationRecorder())

@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    durations.mark_slow(items)
"""
SUBJECT = """
from time import process_time

def test_long():
    end = process_time() + 0.2
    while process_time() < end:
        pass

def test_short():
    pass
"""


def test_a_run_measures_its_tests_and_leaves_out_the_slow_ones_of_the_record(tmp_path: Path):
    (tmp_path / "durations.json").write_text("{}")
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_subject.py").write_text(SUBJECT)

    def summary(expression: str) -> str:
        command = [sys.executable, "-m", "pytest", "-q", "-c", os.devnull, "--rootdir", ".", "-m", expression, "."]
        environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
        return run.stdout.splitlines()[-1]

    assert summary("").startswith("2 passed")
    assert summary("not slow").startswith("1 passed, 1 deselected")
    assert summary("slow").startswith("1 passed, 1 deselected")
