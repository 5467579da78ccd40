"""The examples of `examples/block_sparse/`, each run as a program at small size."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

from tests.examples.loading import EXAMPLES

Printed = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def beside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES / "block_sparse")


def program(name: str) -> Any:
    return importlib.import_module(f"examples.block_sparse.{name}")


def test_products_equal_dense_ones(capsys: Printed) -> None:
    sizes = ["--size", "32", "--columns", "4", "--block", "8", "--densities", "0.25", "--tiles", "8"]
    assert program("matmul").main([*sizes, "--dtype", "float32"]) < 1e-5
    printed = capsys.readouterr().out
    assert "static  density 0.25" in printed and "dynamic density 0.25" in printed


def test_softmax_equals_the_dense_one(capsys: Printed) -> None:
    assert program("softmax").main(["--size", "16", "--block", "4", "--densities", "0.3", "--tiles", "8"]) < 1e-6
    assert "density 0.3" in capsys.readouterr().out


def test_sparse_classifier_learns(capsys: Printed) -> None:
    accuracy = program("digits_classifier").main(
        ["--hidden", "64", "--density", "0.5", "--epochs", "4", "--tiles", "8"]
    )
    assert min(accuracy.values()) > 0.6
    assert "sparse" in capsys.readouterr().out


def test_attention_equals_the_dense_one(capsys: Printed) -> None:
    sizes = ["--tokens", "32", "--channels", "8", "--block", "8", "--windows", "1", "--tiles", "8"]
    assert program("attention").main(sizes) < 1e-5
    assert "window 1" in capsys.readouterr().out
