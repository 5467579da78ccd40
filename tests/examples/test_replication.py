"""`examples/replication.py` on small settings: its tables, its losses, its plot, and refusals."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

import jax
import numpy as np
import optax
import pytest

from tests.examples.loading import example

ROW = re.compile(r"^ +(\d+) +(\d+) +([\d,]+) +([\d,]+) +([\d.]+)× +([\d.]+)% +([\d.]+)% +([\d.]+)%$", re.MULTILINE)


replication = example("replication", beside="digits")


def test_tables_and_losses(replication: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    tables = replication.main(["--model", "mlp", "--replicas", "2", "1", "--batch", "16", "--steps", "2"])
    text = capsys.readouterr().out
    assert [title.split(" of ")[0] for title in tables] == ["fixed global batch", "fixed micro-batch"]
    printed = [tuple(float(field.replace(",", "")) for field in actual) for actual in ROW.findall(text)]
    rows = [row for table in tables.values() for row in table]
    assert [row[:3] for row in printed] == [(row.replicas, row.batch // row.replicas, row.cycles) for row in rows]
    assert [row[:2] for row in printed] == [(1, 16), (2, 8), (1, 8), (2, 8)]
    for one, two in tables.values():
        assert one.all_reduce_cycles == one.link_cycles == 0
        assert 0 < two.link_cycles < two.all_reduce_cycles < two.cycles
        clock_hz = one.cycles * one.images_per_second / one.batch
        assert clock_hz == pytest.approx(1.325e9)
        assert two.images_per_second == pytest.approx(two.batch * clock_hz / two.cycles)
    # As much for each replica takes each as long, but for the all-reduce, and for updates of biases: those of one
    # replica run beside its backward pass, those of two wait for all gradients.
    one, two = tables["fixed micro-batch of 8 images"]
    assert 1 < (two.cycles - one.cycles) / two.all_reduce_cycles < 1.5
    assert printed[3][5] == pytest.approx(100 * two.images_per_second / one.images_per_second / 2, abs=0.06)

    actual = {
        int(line.split()[0]): [float(x) for x in line.split()[2:]]
        for line in text.splitlines()
        if "replicas  " in line and "." in line
    }
    images, _, labels, _ = replication.load()
    params = replication.init(replication.MODELS["mlp"][1])
    expected = []
    model = replication.MODELS["mlp"][0]
    state = replication.optimizer.init(params)
    for x, y in list(replication.batches(images, labels, 16, 1))[:2]:

        def loss(params: object, x: np.ndarray = x, y: np.ndarray = y) -> jax.Array:
            return optax.softmax_cross_entropy_with_integer_labels(model(params, x), y).mean()

        value, grads = jax.value_and_grad(loss)(params)
        updates, state = replication.optimizer.update(grads, state)
        params = optax.apply_updates(params, updates)
        expected.append(float(value))
    assert actual.keys() == {1, 2}
    for values in actual.values():
        np.testing.assert_allclose(values, expected, rtol=1e-6)
    difference = re.search(r"differ by (\S+) of themselves", text)
    assert difference is not None and float(difference[1]) <= 1e-6


def test_the_plot_is_drawn(replication: ModuleType, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    tables = {
        title: [replication.Row(n, 8 * n, 1000 + n, 1e6 * n * speed, 10 * n, 5 * n) for n in (1, 2, 4)]
        for title, speed in (("one", 1.0), ("other", 0.5))
    }
    replication.plot(str(tmp_path / "drawn.png"), tables)
    assert (tmp_path / "drawn.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_it_says_so_before_it_works(
    replication: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(replication, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        replication.main(["--plot", "drawn.png"])
    captured = capsys.readouterr()
    assert "pip install 'ipujax[examples]'" in captured.err and not captured.out


@pytest.mark.parametrize(
    "flags",
    [
        ("--batch", "100"),
        ("--batch", "0"),
        ("--batch", "1440"),
        ("--replicas", "0"),
        ("--steps", "-1"),
        ("--device", "cpu"),
    ],
)
def test_flags_out_of_range_are_refused(
    replication: ModuleType, flags: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        replication.main(list(flags))
    assert flags[0] in capsys.readouterr().err


def test_default_settings(replication: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    """More replicas are faster, each of them less efficient, and the more of them the more they wait for each other."""
    tables = replication.main([])
    for rows in tables.values():
        assert [row.replicas for row in rows] == [1, 2, 4, 8]
        speeds = np.array([row.images_per_second for row in rows])
        assert (np.diff(speeds) > 0).all() and (np.diff(speeds / [1, 2, 4, 8]) < 0).all()
        assert (np.diff([row.all_reduce_cycles for row in rows]) > 0).all()
    difference = re.search(r"differ by (\S+) of themselves", capsys.readouterr().out)
    assert difference is not None and float(difference[1]) <= 1e-6
