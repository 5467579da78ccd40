"""`examples/digits.py`, on small settings in the fast tests and as users run it in the slow ones."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from tests.examples.loading import example

EPOCH = re.compile(r"epoch +(\d+)/(\d+)  loss (\d+\.\d+)  test accuracy (\d+\.\d+)%")


digits = example("digits")


def epochs(text: str) -> list[tuple[float, float]]:
    """(loss, accuracy) of each epoch a run printed."""
    return [(float(actual[3]), float(actual[4]) / 100) for actual in EPOCH.finditer(text)]


def test_data_is_split_once_and_for_all(digits: ModuleType) -> None:
    train_images, test_images, train_labels, test_labels = digits.load()
    assert (train_images.shape, test_images.shape) == ((1437, 8, 8, 1), (360, 8, 8, 1))
    assert (train_labels.shape, test_labels.shape) == ((1437,), (360,))
    assert train_images.min() == 0 and train_images.max() == 1
    assert set(train_labels) == set(test_labels) == set(range(10))
    np.testing.assert_array_equal(test_images, digits.load()[1])


def test_batches_have_one_size_and_no_image_twice(digits: ModuleType) -> None:
    images = np.arange(10)[:, None]
    labels = np.arange(10)
    first, second = (list(digits.batches(images, labels, 4, epoch)) for epoch in (1, 2))
    for epoch in (first, second):
        assert [len(batch) for batch, _ in epoch] == [4, 4]
        assert len({int(n) for _, chosen in epoch for n in chosen}) == 8
        for batch, chosen in epoch:
            np.testing.assert_array_equal(batch[:, 0], chosen)
    assert any(not np.array_equal(a[1], b[1]) for a, b in zip(first, second, strict=True))


def test_mlp_learns_and_prints_its_profile(
    digits: ModuleType, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    accuracy = digits.main(["--model", "mlp", "--epochs", "3", "--html", str(tmp_path / "page.html")])
    assert "digits.py" in (tmp_path / "page.html").read_text(encoding="utf-8")
    text = capsys.readouterr().out
    losses, accuracies = zip(*epochs(text), strict=True)
    assert len(losses) == 3 and losses[2] < losses[1] < losses[0]
    assert accuracy == pytest.approx(accuracies[-1], abs=1e-4) and accuracy > 0.9
    for words in ("Cycles:", "Estimated time:", "Compute:", "Exchange:", "Sync:", "Tile balance:", "Fullest tile:"):
        assert words in text
    assert re.search(r"digits\.py:\d+", text), "no cost is attributed to a line of the example"


def test_device_cpu_gives_the_same_training_without_a_profile(
    digits: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    digits.main(["--model", "mlp", "--epochs", "1", "--device", "mk2"])
    on_ipu = epochs(capsys.readouterr().out)
    digits.main(["--model", "mlp", "--epochs", "1", "--device", "cpu"])
    text = capsys.readouterr().out
    assert len(on_ipu) == 1 and epochs(text) == on_ipu
    assert "Cycles" not in text


@pytest.mark.parametrize("flags", [("--epochs", "0"), ("--batch", "0"), ("--batch", "1438"), ("--device", "mk9")])
def test_flags_out_of_range_are_refused(
    digits: ModuleType, flags: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        digits.main(list(flags))
    assert flags[0] in capsys.readouterr().err


@pytest.mark.parametrize("device", ["mk1", "bow"])
def test_other_machines(digits: ModuleType, device: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert digits.main(["--model", "cnn", "--epochs", "2", "--device", device, "--batch", "100"]) > 0.85
    assert "Cycles:" in capsys.readouterr().out


def test_cnn_reaches_97_percent(digits: ModuleType) -> None:
    assert digits.main(["--model", "cnn"]) >= 0.97
