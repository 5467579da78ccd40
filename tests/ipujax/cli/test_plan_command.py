"""The command `plan`: a table of plans of a published network, and wrong input."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

import ipujax as ipu
from ipujax import models
from ipujax.cli import main

Capture = pytest.CaptureFixture[str]
TINY = [f"--size={size}" for size in ("layers=2", "width=32", "heads=2", "vocabulary=64", "length=16")]


def test_networks_are_listed(capsys: Capture) -> None:
    assert main(["plan", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(models.PUBLISHED)


@pytest.mark.parametrize("kind", [[], ["--inference"]])
def test_plans_of_a_small_network_are_a_table(capsys: Capture, monkeypatch, tmp_path, kind: list[str]) -> None:
    monkeypatch.setattr(ipu, "IPUModel", partial(ipu.IPUModel, tiles_per_ipu=32))
    path = tmp_path / "plans.csv"
    arguments = ["plan", "gpt2", "--ipus", "2", "--batch", "8", "--seconds", "5", "--csv", str(path), *TINY, *kind]
    assert main(arguments) == 0
    output = capsys.readouterr().out
    assert output.startswith(f"gpt2 {'inference' if kind else 'training'}, ") and "batch 8, 2 × bow" in output
    assert "Plan(" in output and "Plan(" in path.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "arguments, text",
    [
        ([], "ipujax plan --list"),
        (["gpt-6.7"], "try: 'gpt-6.7b'"),
        (["gpt2", "--size", "layers"], "--size NAME=VALUE"),
        (["gpt2", "--size", "layer=2"], "try: 'layers'"),
        (["gpt2", "--size", "layers=0"], "size layers of a network"),
        (["gpt2", "--size", "width=64.0"], "a whole number from 1"),
        (["resnet-50", "--size", "groups=2"], "numbers, as (3, 4, 6, 3)"),
        (["gpt2", "--dtype", "int8"], "floating-point"),
        (["gpt2", "--inference", "--optimizer", "sgd"], "--optimizer is for training"),
    ],
)
def test_wrong_input_is_one_error_text(capsys: Capture, arguments: list[str], text: str) -> None:
    assert main(["plan", *arguments]) == 2
    error = capsys.readouterr().err
    assert text in error and "Traceback" not in error


@pytest.mark.parametrize(
    "arguments, text",
    [
        (["plan", "gpt2", "--batch", "0"], "argument --batch: expected a whole number of at least 1, got '0'"),
        (["plan", "gpt2", "--ipus", "2.5"], "argument --ipus: expected a whole number of at least 1, got '2.5'"),
        (["plan", "gpt2", "--seconds", "-1"], "argument --seconds: expected a finite number of at least 0, got '-1'"),
        (["profile", "--min-cycles", "nan", __file__], "argument --min-cycles: expected a finite number"),
        (["profile", "--replicas", "many", __file__], "argument --replicas: expected a whole number"),
    ],
)
def test_numbers_out_of_range_are_refused_before_anything_runs(capsys: Capture, arguments: list[str], text: str):
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    captured = capsys.readouterr()
    assert text in captured.err and captured.out == ""


@pytest.mark.parametrize("command", ["advise", "run"])
def test_models_are_refused_where_scripts_run(capsys: Capture, tmp_path: Path, command: str):
    path = tmp_path / "model.onnx"
    path.touch()
    assert main([command, str(path)]) == 2
    error = capsys.readouterr().err
    assert "is an ONNX model" in error and f"try: ipujax profile {path}" in error
