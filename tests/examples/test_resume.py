"""`examples/resume.py` on small settings: a run that is killed goes on as one that was not."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from tests.examples.loading import EXAMPLES, example

EXAMPLE = EXAMPLES / "resume.py"
SMALL = ["--batch", "128", "--width", "16", "--epochs", "4"]
ON_IPU = [*SMALL, "--tiles", "8"]


resume = example("resume")


@pytest.fixture(scope="module")
def whole(resume: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[float], str]:
    """The losses and the metrics of a run that is not killed."""
    folder = tmp_path_factory.mktemp("whole")
    return resume.main([*ON_IPU, "--folder", str(folder)]), (folder / "metrics.jsonl").read_text()


def test_learns_as_without_the_machine(
    resume: ModuleType, whole: tuple[list[float], str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    losses, metrics = whole
    assert losses == sorted(losses, reverse=True) and len(losses) == 4
    settings, *epochs = map(json.loads, metrics.splitlines())
    assert settings == {"width": 16, "batch": 128}
    assert epochs == [{"epoch": epoch, "loss": loss} for epoch, loss in enumerate(losses, 1)]
    on_cpu = resume.main([*SMALL, "--folder", str(tmp_path), "--device", "cpu"])
    np.testing.assert_allclose(losses, on_cpu, rtol=1e-4)
    assert capsys.readouterr().out == "".join(f"epoch {n}/4  loss {loss:.6f}\n" for n, loss in enumerate(on_cpu, 1))


def test_a_killed_run_goes_on_with_the_same_losses(
    resume: ModuleType, whole: tuple[list[float], str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    losses, metrics = whole
    command = [sys.executable, "-W", "error", str(EXAMPLE), *ON_IPU, "--folder", str(tmp_path), "--stop-after", "2"]
    killed = subprocess.run(command, capture_output=True, text=True)
    assert (killed.returncode, killed.stderr) == (1, "")
    printed = [f"epoch {n}/4  loss {loss:.6f}\n" for n, loss in enumerate(losses, 1)]
    assert killed.stdout == "".join(printed[:2])
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"epoch": 3, "lo')  # a kill at a worse moment: metrics are begun, and their checkpoint is missing

    assert resume.main([*ON_IPU, "--folder", str(tmp_path)]) == losses
    assert capsys.readouterr().out == "goes on after epoch 2\n" + "".join(printed[2:])
    assert (tmp_path / "metrics.jsonl").read_text() == metrics

    assert resume.main([*ON_IPU, "--folder", str(tmp_path)]) == losses
    assert "has 4 epochs already; --epochs for more" in capsys.readouterr().out
    with pytest.raises(SystemExit, match=r'was begun with \{"width": 16, "batch": 128\}'):
        resume.main([*ON_IPU, "--width", "8", "--folder", str(tmp_path)])
    with pytest.raises(SystemExit, match=r"--stop-after 2: .* has 4 epochs already"):
        resume.main([*ON_IPU, "--stop-after", "2", "--folder", str(tmp_path)])


@pytest.mark.parametrize("flags", [("--epochs", "0"), ("--batch", "100"), ("--stop-after", "11"), ("--device", "mk9")])
def test_flags_out_of_range_are_refused(
    resume: ModuleType, flags: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        resume.main(["--folder", str(tmp_path), *flags])
    assert flags[0] in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_without_orbax_it_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("orbax", "orbax.checkpoint"):
        monkeypatch.setitem(sys.modules, name, None)
    spec = importlib.util.spec_from_file_location("resume_without_orbax", EXAMPLE)
    assert spec is not None and spec.loader is not None
    with pytest.raises(SystemExit, match="pip install orbax-checkpoint"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
