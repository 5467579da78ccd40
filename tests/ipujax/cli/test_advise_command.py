"""`ipujax advise`: the script runs as it would, and changes of each of its functions are compiled."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from ipujax.cli import main

SCRIPT = """
import sys
import jax, jax.numpy as jnp
import ipujax as ipu

@ipu.jit(device=ipu.IPUModel(tiles_per_ipu=4))
def step(w, x):
    return w * 0.9 + x.sum(), x.max()

if __name__ == "__main__":
    print("arguments", sys.argv[1:])
    w = jnp.ones(64)
    for _ in range(2):
        w, most = step(w, jnp.ones(8))
    sys.exit(3)
"""


def script(folder: Path, text: str) -> str:
    path = folder / "train.py"
    path.write_text(textwrap.dedent(text))
    return str(path)


def test_the_script_runs_and_changes_are_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = ["--csv", str(tmp_path / "table.csv"), "--html", str(tmp_path / "page.html")]
    assert main(["advise", *files, "--batch-argnum", "1", script(tmp_path, SCRIPT), "--epochs", "2"]) == 3
    output = capsys.readouterr()
    assert output.out == "arguments ['--epochs', '2']\n"
    assert output.err.count("step:\n") == 1 and "as it is" in output.err
    for change in ("donate_argnums=(0,)", "float16 arguments", "half of the batch, twice"):
        assert change in output.err
    assert "donate_argnums=(0,)" in (tmp_path / "table.csv").read_text(encoding="utf-8")
    assert "Tried by ipu.advise" in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_functions_that_are_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["advise", "--only", "other", script(tmp_path, SCRIPT)]) == 3
    assert "no function of ipu.jit named other was called" in capsys.readouterr().err
    assert main(["advise", "--csv", str(tmp_path / "t.csv"), script(tmp_path, "print(1)")]) == 0
    error = capsys.readouterr().err
    assert "no function of ipu.jit was called" in error and "t.csv is not written" in error
    assert not (tmp_path / "t.csv").exists()


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["missing.py"], "there is no file missing.py"),
        (["--csv", "no_such_folder/table.csv", __file__], "cannot be written"),
        ([], "no script is given"),
    ],
)
def test_invalid_arguments(words: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["advise", *words]) == 2
    assert text in capsys.readouterr().err
