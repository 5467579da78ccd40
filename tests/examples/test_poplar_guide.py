"""`docs/poplar.md`: its programs, run as written from an empty folder."""

from __future__ import annotations

import os
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
    found = f"import sys; sys.path.append({str(Path(ipujax.__file__).parents[1])!r}); "
    run = "import runpy; runpy.run_path('suffix_sums.py', run_name='__main__')"
    command = [sys.executable, "-W", "error", "-c", found + run]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    promised = re.findall(r"# (v2: \{.*\})", block)
    assert done.stderr.splitlines() == promised == ["v2: {7,6,4.5,2.5}"]
    assert done.stdout.startswith("Target:\n") and re.search(r"^ +Cycles: +[\d,]+$", done.stdout, re.MULTILINE)
    assert "suffix_sums.py" in done.stdout  # costs are attributed to lines of the script


def test_the_other_programs_run_as_written(tmp_path):
    page = GUIDE.read_text(encoding="utf-8")
    (tmp_path / "page.py").write_text("\n".join(BLOCKS[1:]), encoding="utf-8")
    command = [sys.executable, "-W", "error", "page.py"]
    path = {"PYTHONPATH": str(Path(ipujax.__file__).parents[1])}
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, check=False, env={**os.environ, **path}
    )
    assert done.returncode == 0, done.stderr
    outputs = re.findall(r"```\n\n```text\n(.*?)```", page, re.DOTALL)[1:]
    assert done.stdout == "".join(outputs)
