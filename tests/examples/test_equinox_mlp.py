"""`examples/equinox_mlp.py` on small settings: it learns as without the machine, and prints its cost."""

from __future__ import annotations

import re
from types import ModuleType

import numpy as np
import pytest

from tests.examples.loading import example

SMALL = ["--epochs", "3", "--batch", "50", "--width", "32", "--depth", "1"]


mlp = example("equinox_mlp")


def test_learns_as_without_the_machine(mlp: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    losses, accuracy = mlp.main([*SMALL, "--tiles", "16"])
    on_ipu = capsys.readouterr().out
    assert len(losses) == 3 and losses[2] < losses[1] < losses[0] and accuracy > 0.6
    costs = re.search(r"^a step: [\d,]+ cycles, [\d,]+ µs on a mk2\nfullest tile: [\d,]+ bytes\n", on_ipu, re.MULTILINE)
    assert costs is not None

    on_cpu, same_accuracy = mlp.main([*SMALL, "--device", "cpu"])
    np.testing.assert_allclose(losses, on_cpu, rtol=1e-4)
    assert accuracy == pytest.approx(same_accuracy, abs=0.005)
    assert re.findall(r"loss ([\d.]+)", capsys.readouterr().out) == [f"{loss:.4f}" for loss in on_cpu]


@pytest.mark.parametrize(
    "flags", [("--epochs", "0"), ("--batch", "1501"), ("--device", "mk9"), ("--tiles", "8", "--device", "cpu")]
)
def test_flags_out_of_range_are_refused(
    mlp: ModuleType, flags: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        mlp.main(list(flags))
    assert flags[0] in capsys.readouterr().err


def test_default_settings(mlp: ModuleType) -> None:
    losses, accuracy = mlp.main([])
    assert len(losses) == 10 and losses[-1] < 0.06 and accuracy > 0.9
