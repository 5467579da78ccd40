"""`docs/poplar.md`: its first program, run as written from an empty folder; for the others see `test_doc_pages`."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import ipujax

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "poplar.md"


BLOCKS = re.findall(r"```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)


def test_the_first_program_runs_as_written(tmp_path):
    block = BLOCKS[0]
    (tmp_path / "suffix_sums.py").write_text(block, encoding="utf-8")
    # The folder of the package comes after the script's own, as if it were installed.
    actual = f"import sys; sys.path.append({str(Path(ipujax.__file__).parents[1])!r}); "
    run = "import runpy; runpy.run_path('suffix_sums.py', run_name='__main__')"
    command = [sys.executable, "-W", "error", "-c", actual + run]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    promised = re.findall(r"# (v2: \{.*\})", block)
    assert done.stderr.splitlines() == promised == ["v2: {7,6,4.5,2.5}"]
    assert done.stdout.startswith("Target:\n") and re.search(r"^ +Cycles: +[\d,]+$", done.stdout, re.MULTILINE)
    assert "suffix_sums.py" in done.stdout  # costs are attributed to lines of the script
