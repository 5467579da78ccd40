"""The list of slow tests names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_listed_functions_exist():
    lines = (ROOT / "tests/slow_cases.txt").read_text().splitlines()
    listed = {line.partition("[")[0] for line in lines if not line.startswith("#")}
    paths = {function.partition("::")[0] for function in listed}
    defined = {
        f"{path}::{name}"
        for path in paths
        for name in re.findall(r"^def (test_\w+)", (ROOT / path).read_text(), re.MULTILINE)
    }
    assert listed <= defined
