"""Random edits of programs in the cache: none returns the result of the earlier text, and unedited ones are found."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "edited_programs.py"


def test_no_edit_is_missed():
    command = [sys.executable, str(SCRIPT), "--count", "30", "--seed", "1"]
    run = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    assert "30 edits, of which 30 change results or cycles: 0 stale results; 0 unedited" in run.stdout
    assert run.returncode == 0
