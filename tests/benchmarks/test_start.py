"""Every benchmark starts, as a file and from any folder."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = sorted((Path(__file__).parents[2] / "benchmarks").glob("*.py"))
QUICK = ("bert_pipeline", "count_code", "step_time")


@pytest.mark.parametrize(
    "benchmark",
    [pytest.param(p, id=p.stem, marks=() if p.stem in QUICK else pytest.mark.slow) for p in BENCHMARKS],
)
def test_help_says_how_to_run_it(benchmark: Path, tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, str(benchmark), "--help"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f"python benchmarks/{benchmark.name}" in benchmark.read_text() and done.stdout.startswith("usage:")
