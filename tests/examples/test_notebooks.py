"""The notebooks of `examples/notebooks/` run from top to bottom, and have the output that they print."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import pytest

from tests.examples.doc_pages import ROOT, assert_figures
from tests.examples.loading import EXAMPLES

NOTEBOOKS = sorted((EXAMPLES / "notebooks").glob("*.ipynb"))


def run(cells: list[dict[str, Any]]) -> list[str]:
    """What each cell prints, run as a notebook does; its file name is that of a cell of IPython."""
    names: dict[str, Any] = {"__name__": "__main__"}
    printed = []
    for number, cell in enumerate(cells, 1):
        code = compile("".join(cell["source"]), f"<ipython-input-{number}-cell>", "exec", dont_inherit=True)
        with contextlib.redirect_stdout(io.StringIO()) as stream:
            exec(code, names)
        printed.append(stream.getvalue())
    return printed


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_prints_its_output(
    path: Path, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    notebook = json.loads(path.read_text(encoding="utf-8"))
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for number, (cell, printed) in enumerate(zip(cells, run(cells), strict=True), 1):
        if request.config.getoption("--update-golden"):
            stream = {"name": "stdout", "output_type": "stream", "text": printed.splitlines(keepends=True)}
            cell.update(execution_count=number, outputs=[stream] if printed else [])
        stored = "".join("".join(output["text"]) for output in cell["outputs"])
        assert_figures(stored, printed, f"pytest --update-golden {__file__} writes:\n{printed}")
    if request.config.getoption("--update-golden"):
        path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    assert not list(tmp_path.iterdir())


def test_the_gallery_links_every_notebook() -> None:
    page = (ROOT / "docs" / "gallery.md").read_text(encoding="utf-8")
    assert NOTEBOOKS and all(f"](../examples/notebooks/{path.name})" in page for path in NOTEBOOKS)
