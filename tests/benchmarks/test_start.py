"""Every benchmark starts, as a file and from any folder."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"
BENCHMARKS = sorted(path for path in FOLDER.glob("*.py") if "__main__" in path.read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    "benchmark",
    [pytest.param(p, id=p.stem) for p in BENCHMARKS],
)
def test_help_says_how_to_run_it(benchmark: Path, tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, str(benchmark), "--help"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    commands = (f"python benchmarks/{benchmark.name}", f"python -m benchmarks.{benchmark.stem}")
    assert any(command in benchmark.read_text() for command in commands) and done.stdout.startswith("usage:")
