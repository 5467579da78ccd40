"""The examples of `examples/popart/`, each run as a program; small settings where the defaults take long."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from examples.popart import (
    alexnet,
    callbacks,
    custom_operators,
    distributed_training,
    kernel_benchmarks,
    mnist,
    phased_execution,
    pipelining,
    recomputing,
    sharding,
    simple_addition,
)
from tests.ipujax.distributed.distributed_helpers import ROOT, Runner, run

__all__ = ["run"]  # a fixture
Printed = pytest.CaptureFixture[str]
PROFILE = "What limits this program"


def test_adds(capsys: Printed) -> None:
    assert simple_addition.main().shape == (1,)
    printed = capsys.readouterr().out
    assert "] = [" in printed and PROFILE in printed


@pytest.mark.parametrize(("model", "accuracy"), [("linear", 0.7), ("conv", 0.7)])
def test_digits_are_learned(
    model: str, accuracy: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Printed
) -> None:
    monkeypatch.chdir(tmp_path)
    accuracies = mnist.main(["--model", model, "--epochs", "2"])
    assert accuracies[-1] > accuracy
    printed = capsys.readouterr().out
    assert "epoch 1: loss" in printed and PROFILE in printed


def test_alexnet_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Printed) -> None:
    monkeypatch.chdir(tmp_path)
    losses = alexnet.main(["--batch-size", "2", "--batches", "2", "--width", "0.03"])
    assert len(losses) == 2 and np.isfinite(losses).all()
    printed = capsys.readouterr().out
    assert "inference: probabilities (2, 2, 1000)" in printed and PROFILE in printed


FLAGS = "--num-ipus 2 --pipeline --simulation --syn-data-type zeros --test-mode inference --log-graph-trace"


def test_processes_train_together(run: Runner) -> None:
    source = (ROOT / "examples" / "popart" / "distributed_training.py").read_text(encoding="utf-8")
    assert run(source, "--timeout", "300", arguments=["--epochs", "2", "--batch-size", "8"]) == 0, run.err
    (line,) = (line for line in run.out if "epoch 1" in line)
    # Both processes together see the batches of one, in another order.
    one = distributed_training.main(["--epochs", "2"])[-1]
    assert one > 0.7 and abs(float(line.split("accuracy ")[1].strip("%")) - 100 * one) < 3
    assert sum(PROFILE in line for line in run.out) == 1


def test_flags_of_distributed_training(capsys: Printed) -> None:
    settings = "--epochs 1 --batches-per-step 2 --batch-size 4"
    assert len(distributed_training.main(f"{settings} {FLAGS}".split())) == 1
    assert PROFILE in capsys.readouterr().out


@pytest.mark.parametrize("kernel", ["lstm", "conv"])
@pytest.mark.parametrize("training", [[], ["--train"]])
def test_kernels_are_timed(kernel: str, training: list[str], capsys: Printed) -> None:
    settings = ["--size", "16", "--steps", "8", "--batch-size", "4", "--batches", "2"]
    assert kernel_benchmarks.main(["--kernel", kernel, *training, *settings]) > 0
    printed = capsys.readouterr().out
    assert "GFLOP/s" in printed and PROFILE in printed


def test_shards_train(capsys: Printed) -> None:
    losses = sharding.main([])
    np.testing.assert_allclose(losses, sharding.main(["--ipus", "1"]), rtol=1e-4)
    assert losses[-1] < losses[0]
    assert PROFILE in capsys.readouterr().out


def test_pipelines_are_faster_than_shards(capsys: Printed) -> None:
    cycles = pipelining.main([])
    assert cycles["pipelined"] < cycles["sharded"]
    assert PROFILE in capsys.readouterr().out


@pytest.mark.parametrize("io_tiles", [0, 4])
def test_phases_need_less_memory(io_tiles: int, capsys: Printed) -> None:
    used = phased_execution.main(["--num-layers", "6", "--io-tiles", str(io_tiles)])
    assert used["phased"] < used["resident"]
    assert PROFILE in capsys.readouterr().out


def test_operators_of_the_user(capsys: Printed) -> None:
    assert len(custom_operators.main(["--alpha", "0.5", "0.1", "-0.1"])) == 3
    printed = capsys.readouterr().out
    assert "leaky ReLU: [" in printed and PROFILE in printed


def test_callbacks(capsys: Printed) -> None:
    assert all(seconds > 0 for seconds in callbacks.main(["--data-size", "64", "4096"]).values())
    printed = capsys.readouterr().out
    assert "4,096 elements" in printed and PROFILE in printed


def test_recomputation_needs_less_memory(capsys: Printed) -> None:
    used = recomputing.main([])
    assert used["auto"] < used["none"] and used["manual"] < used["none"]
    assert PROFILE in capsys.readouterr().out
