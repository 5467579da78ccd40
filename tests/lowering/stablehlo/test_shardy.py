"""Functions exported for several devices: the numbers of plain JAX, and the prices of the function itself."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parent / "sharded_exports.py"
SPLIT = ("result", "both", "constraint", "open dimension", "loop")
LINE = r"at: sharded_exports.py:\d+(.|\n)*"
ERRORS = {
    "small device": r"GraphError: shardings are over (.|\n)*larger than the device",
    "shard_map": rf"GraphError: (.|\n)*exported for 4 devices(.|\n)*{LINE}manual_computation",
    "GSPMD": rf"GraphError: (.|\n)*exported for 4 devices(.|\n)*{LINE}GSPMD",
}


@pytest.fixture(scope="module")
def printed() -> dict[str, Any]:
    done = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


@pytest.mark.parametrize("name", SPLIT)
def test_exported_is_partitioned_and_priced_as_plain(printed: dict[str, Any], name: str) -> None:
    outcome = printed["outcomes"][name]
    exported_cycles, plain_cycles = outcome["cycles"]
    assert exported_cycles == pytest.approx(plain_cycles, rel=0.02)
    assert outcome["unpriced"] == 0
    assert outcome["difference"] < 1e-4


@pytest.mark.parametrize("name", ["explicit axes", "gradient"])
def test_numbers_are_those_of_jax(printed: dict[str, Any], name: str) -> None:
    assert printed["differences"][name] < 1e-3


@pytest.mark.parametrize("name", ERRORS)
def test_refused_when_compiled(printed: dict[str, Any], name: str) -> None:
    assert re.match(ERRORS[name], printed["errors"][name])
