"""Energy against time by power, and metrics of the user against sums of the rows that they are of."""

from __future__ import annotations

import dataclasses
from math import hypot
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ipujax as ipu
from ipujax.runtime.errors import ArgumentError
from ipujax.runtime.options import FIGURES_OF_OPERATIONS
from ipujax.runtime.profile import StepCost
from ipujax.runtime.target import preset
from ipujax.runtime.uncertainty import Interval
from ipujax.runtime.uncertainty.certainty import energy_of_run

HALF = jax.ShapeDtypeStruct((64, 64), jnp.float16)


def step(w: Any, x: Any) -> Any:
    y = jnp.tanh(x @ w)
    with jax.named_scope("head"):
        return (y * 2).sum()


def profile(metrics: Any = None, **machine: Any) -> ipu.Profile:
    device = ipu.IPUModel(tiles_per_ipu=16, **machine)
    return ipu.jit(step, device=device, options=ipu.Options(metrics=metrics or {})).profile(HALF, HALF)


def test_energy_is_time_by_published_power():
    figures = profile()
    power = preset("mk2").ipu_watts
    assert figures.energy.joules == pytest.approx(figures.seconds * power)
    assert profile(ipu_watts=2 * power).energy.joules == pytest.approx(2 * figures.energy.joules)
    assert 4 * power == 1000  # watts of an M2000 that trains BERT-Large
    assert 4 * preset("bow").ipu_watts == 1250 and preset("mk1").ipu_watts == 150


def test_energy_is_of_the_ipus_of_all_replicas():
    fun = ipu.jit(lambda x: x * 2, device=ipu.IPUModel(num_ipus=4, tiles_per_ipu=16), replicas=4)
    one = ipu.jit(lambda x: x * 2, device=ipu.IPUModel(tiles_per_ipu=16))
    x = jax.ShapeDtypeStruct((16,), jnp.float32)
    several, single = fun.profile(x), one.profile(x)
    assert several.energy.joules / several.cycles == pytest.approx(4 * single.energy.joules / single.cycles)


def test_ends_of_energy_are_those_of_independent_errors():
    target = preset("mk2").replace(clock_hz=1e9)  # of the user, so exact
    watts = target.ipu_watts
    energy = energy_of_run(Interval(1000, 800, 1500, ()), target, 2)
    assert energy.joules == pytest.approx(1e-6 * watts * 2)
    assert energy.low == pytest.approx(energy.joules * (1 - hypot(0.2, 1 - 185 / 250)))
    assert energy.high == pytest.approx(energy.joules * (1 + hypot(0.5, 375 / 250 - 1)))
    assert energy_of_run(Interval(1000, 800, None, ()), target, 1).high is None
    assert energy_of_run(Interval(0, 0, 0, ()), target, 1).joules == 0


def test_rows_of_a_sweep_have_joules():
    fun = ipu.jit(step, device=ipu.IPUModel(tiles_per_ipu=16))
    sweep = ipu.sweep(fun, HALF, HALF, grid={"ipu_watts": [100.0, 200.0]}, progress=False)
    assert sweep[0]["joules"] == pytest.approx(100 * sweep[0]["seconds"])
    assert sweep[1]["joules"] == pytest.approx(2 * sweep[0]["joules"])


# --- metrics ----------------------------------------------------------------------------------------------------------


def test_a_metric_adds_up_by_line_and_layer(tmp_path):
    figures = profile({"moved": lambda op: op.moved_bytes, "saved": lambda op: np.float32(-op.flops)})
    rows = figures.step_costs
    moved = figures.metrics["moved"]
    assert moved.total == sum(row.moved_bytes for row in rows) > 0
    for line, total in moved.by_line.items():
        assert total == sum(row.moved_bytes for row in rows if str(row.origin) == line)
    assert moved.by_layer["head"] == sum(row.moved_bytes for row in rows if row.origin.layer == "head") > 0
    assert sum(moved.by_layer.values()) == moved.total
    assert figures.metrics["saved"].total == -sum(row.flops for row in rows) < 0
    assert figures.scalars()["metrics/moved"] == moved.total and "moved:" in figures.summary()
    figures.save(tmp_path / "saved")
    loaded = ipu.Profile.load(tmp_path / "saved")
    assert loaded.metrics == figures.metrics and loaded.energy == figures.energy


@pytest.mark.parametrize(
    ("metric", "match"),
    [
        (lambda op: 1 / op.flops, "raised ZeroDivisionError"),
        (lambda op: op.flop, "raised AttributeError"),
        (lambda op: [op.flops, 1], "no number"),
        (lambda op: float("nan"), "no number"),
        (lambda op: 10**400, "no number"),
        (lambda op: True, "no number"),
    ],
)
def test_refuses_a_metric_that_is_no_number(metric, match, tmp_path):
    figures = profile({"mine": metric})
    with pytest.raises(ArgumentError, match=f"'mine' (.|\n)*{match}"):
        _ = figures.metrics
    with pytest.raises(ArgumentError, match="'mine'"):
        figures.save(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


@pytest.mark.parametrize("metrics", [{"cycles": len}, {"": len}, {"x": 3}, [len], {1: len}, {"two\nlines": len}])
def test_refuses_metrics_before_anything_is_compiled(metrics):
    with pytest.raises(ArgumentError, match=r"Options\.metrics"):
        ipu.Options(metrics=metrics)


def test_taken_names_are_those_of_rows():
    assert {item.name for item in dataclasses.fields(StepCost)} == set(FIGURES_OF_OPERATIONS)
