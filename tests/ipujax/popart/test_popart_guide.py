"""`docs/popart.md`: its program as written, and its lists of options, which `--update-golden` writes."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

import ipujax
from ipujax.popart.building.annotations import WITHOUT_EFFECT as ANNOTATIONS
from ipujax.popart.model_graph.annotated_graph import SETTINGS
from ipujax.popart.options import FIELDS_WITHOUT_EFFECT, MAPPED, REFUSED, WITHOUT_EFFECT

GUIDE = Path(__file__).resolve().parents[3] / "docs" / "popart.md"


def texts(table: Mapping[str, tuple[object, str]]) -> dict[str, str]:
    """Return the texts of a table without the defaults."""
    return {name: meaning for name, (_, meaning) in table.items()}


BEGIN = "<!-- options: written by tests/ipujax/popart/test_popart_guide.py -->\n"
END = "<!-- end of options -->"
UNEQUAL = "where nodes have different values: the compiler has one for all products"
CALLS = {
    f"builder.{call}": UNEQUAL if name in SETTINGS else "an annotation that the compiler does not read"
    for name, call in ANNOTATIONS.items()
}
TABLES = (
    ("Mapped", "meaning here", texts(MAPPED)),
    ("Without effect", "why", {**texts(WITHOUT_EFFECT), **FIELDS_WITHOUT_EFFECT, **CALLS}),
    ("Refused unless it has its default", "in its place", texts(REFUSED)),
)


def lists() -> str:
    """Return the three lists in Markdown."""
    parts = []
    for title, column, table in TABLES:
        rows = [f"| `{name}` | {meaning} |" for name, meaning in sorted(table.items())]
        parts.append("\n".join([f"### {title}", "", f"| option | {column} |", "|---|---|", *rows, ""]))
    return "\n".join(parts) + "\n"


def test_the_lists_are_those_of_the_tables(request: pytest.FixtureRequest) -> None:
    page = GUIDE.read_text(encoding="utf-8")
    before, rest = page.split(BEGIN)
    listed, after = rest.split(END)
    if request.config.getoption("--update-golden"):
        GUIDE.write_text(before + BEGIN + lists() + END + after, encoding="utf-8")
    else:
        assert listed == lists()


def test_the_program_runs_as_written(tmp_path: Path) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)
    (tmp_path / "program.py").write_text(block, encoding="utf-8")
    actual = f"import sys; sys.path.append({str(Path(ipujax.__file__).parents[1])!r}); "
    run = "import runpy; runpy.run_path('program.py', run_name='__main__')"
    command = [sys.executable, "-W", "error", "-c", actual + run]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "What limits this program" in done.stdout and "program.py" in done.stdout
