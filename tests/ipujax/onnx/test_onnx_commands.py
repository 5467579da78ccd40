"""`ipujax profile` and `ipujax report` on an ONNX file."""

from __future__ import annotations

from pathlib import Path

import pytest

from ipujax.cli import main
from ipujax.runtime.report import Profile
from tests.ipujax.onnx.models import mlp

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def path(tmp_path: Path) -> str:
    """A model of two layers, with an open batch size."""
    file = tmp_path / "net.onnx"
    file.write_bytes(mlp().SerializeToString())
    return str(file)


def test_profile_lists_a_model(path: str, tmp_path: Path, capsys: Capture):
    assert main(["profile", "--save", str(tmp_path / "saved"), path]) == 0
    said = capsys.readouterr().err
    assert "open sizes are 1" in said and "x: (1, 8)" in said and "net" in said
    profile = Profile.load(tmp_path / "saved" / "net.profile")
    assert profile.cycles > 0


def test_shapes_come_from_the_command_line(path: str, capsys: Capture):
    assert main(["report", "--shape", "x=16,8", path]) == 0
    output = capsys.readouterr()
    assert "open sizes" not in output.err
    assert "layer1" in output.out and "Gemm" in output.out


@pytest.mark.parametrize("command", ["report", "profile"])
def test_a_page_of_a_model_is_written(command: str, path: str, tmp_path: Path):
    pytest.importorskip("bokeh")
    assert main([command, "--html", str(tmp_path / "net.html"), path]) == 0
    assert "layer1" in (tmp_path / "net.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--shape", "x"], "--shape must name an input and numbers"),
        (["--shape", "x=a"], "--shape must name an input and numbers"),
        (["--shape", "z=1"], "input_shapes names 'z'"),
        (["--static", "z=1"], "static names 'z'"),
    ],
)
def test_refuses_other_options(arguments: list[str], text: str, path: str, capsys: Capture):
    assert main(["profile", *arguments, path]) == 2
    assert text in capsys.readouterr().err


def test_options_of_models_are_refused_for_scripts(tmp_path: Path, capsys: Capture):
    script = tmp_path / "train.py"
    script.write_text("")
    assert main(["profile", "--shape", "x=1", str(script)]) == 2
    assert "--shape is for ONNX models" in capsys.readouterr().err


def test_refuses_a_file_that_is_not_a_model(tmp_path: Path, capsys: Capture):
    (tmp_path / "net.onnx").write_bytes(b"")
    assert main(["report", str(tmp_path / "net.onnx")]) == 2
    assert "is empty" in capsys.readouterr().err
