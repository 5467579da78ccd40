"""The sessions of docs/command_line.md that need a process of their own: a script without ipujax, and log lines."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.examples.doc_pages import ROOT, assert_figures, excerpt

PAGE = ROOT / "docs" / "command_line.md"
PROMPT = "$ ipujax profile --device bow plain.py\n"
VARIABLE = "IPUJAX_LOG_CONFIG"
CLOCK = re.compile(r"^\[[^]]*\]|took [\d.]+ ms", re.MULTILINE)  # of the day, and of this machine


def output(tmp_path: Path, *arguments: str, **variables: str) -> str:
    """What a script of the page prints, or a command about it, in a process of its own."""
    for name, code in re.findall(r"`(\w+\.py)`:\n\n```\w+\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL):
        (tmp_path / name).write_text(code, encoding="utf-8")
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | variables
    done = subprocess.run(
        [sys.executable, *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout + done.stderr


def compare(pasted: str, printed: str, updates: bool) -> None:
    """Compares a part of the page with an output, or replaces it."""
    kept = excerpt(pasted, printed)
    if updates:
        page = PAGE.read_text(encoding="utf-8")
        PAGE.write_text(page.replace(pasted, kept), encoding="utf-8")
    else:
        assert_figures(CLOCK.sub("", pasted), CLOCK.sub("", kept), f"pytest --update-golden {__file__} writes:\n{kept}")


def test_a_script_without_ipujax_is_profiled(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    (pasted,) = re.findall(re.escape(PROMPT) + r"(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    arguments = PROMPT.split()[2:]
    compare(pasted, output(tmp_path, "-m", "ipujax", *arguments), request.config.getoption("--update-golden"))


def test_a_script_logs_as_its_variable_says(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    pattern = rf"`{VARIABLE}='([^']*)' python train\.py`[^\n]*\n\n```console\n(.*?)```"
    ((levels, pasted),) = re.findall(pattern, PAGE.read_text(encoding="utf-8"), re.DOTALL)
    printed = output(tmp_path, "train.py", **{VARIABLE: levels})
    compare(pasted, printed, request.config.getoption("--update-golden"))
