"""`python -m benchmarks.kernels`: layers at small size, sweeps with their files, and options that make no sense."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from benchmarks import kernels

SMALL = {
    "lstm": ["--inputs", "4", "--hidden", "4", "--steps", "2"],
    "conv2d": ["--side", "4", "--channels", "2", "--filters", "2"],
    "matmul": ["--inner", "8", "--columns", "8"],
    "attention": ["--tokens", "4", "--channels", "8", "--heads", "2"],
}


@pytest.mark.parametrize("name", SMALL)
def test_kernels_print_rates(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    (row,) = kernels.main([name, *SMALL[name], "--batch", "2"])
    assert 0 < row.peak_share < 1 and row.compute > 0 and row.tile_bytes > 0
    assert row.flops_per_second == pytest.approx(
        row.items_per_second * kernels.KERNELS[name][0](kernels.parser().parse_args([name, *SMALL[name]])).flops
    )
    printed = capsys.readouterr().out
    assert "items/s" in printed and "of peak" in printed and "exchange" in printed


@pytest.mark.parametrize("name", SMALL)
def test_training_of_replicas(name: str) -> None:
    (row,) = kernels.main([name, *SMALL[name], "--batch", "2", "--ipus", "2", "--train", "--dtype", "float32"])
    assert row.global_exchange > 0


def test_a_sweep_writes_its_files(tmp_path: Path) -> None:
    files = ["--csv", str(tmp_path / "rows.csv"), "--plot", str(tmp_path / "rows.png")]
    rows = kernels.main(["matmul", *SMALL["matmul"], "--sweep", "columns", "8", "16", *files])
    with (tmp_path / "rows.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert [line["columns"] for line in lines] == ["8", "16"]
    assert [int(line["compute"]) for line in lines] == [row.compute for row in rows]
    assert (tmp_path / "rows.png").stat().st_size > 1000


@pytest.mark.parametrize(
    "wrong",
    [
        ["matmul", "--batch", "0"],
        ["matmul", "--csv", "rows.csv"],
        ["matmul", "--sweep", "hidden", "1"],
        ["matmul", "--sweep", "inner"],
        ["matmul", "--sweep", "inner", "many"],
        ["softmax"],
    ],
)
def test_wrong_options(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        kernels.main(wrong)
    assert "error" in capsys.readouterr().err
