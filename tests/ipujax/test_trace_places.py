"""Slices of traces and steps of the execution profile have line, layer and part of training, also in functions."""

from __future__ import annotations

import json
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ipujax as ipu
from ipujax.runtime.profile.breakdown import NO_LAYER


def block(x, w):
    return jnp.tanh(jnp.sin(x @ w) @ w)


def loss(weights, x):
    for number, w in enumerate(weights):
        with jax.named_scope(f"block_{number}"):
            x = block(x, w)
    return jnp.mean(x**2)


def train_step(weights, x):
    value, grads = jax.value_and_grad(loss)(weights, x)
    return [w - 0.1 * g for w, g in zip(weights, grads, strict=True)], value


@pytest.fixture(scope="module")
def profile():
    weights = [jax.ShapeDtypeStruct((64, 64), "float32")] * 4
    x = jax.ShapeDtypeStruct((48, 64), "float32")
    return ipu.jit(train_step, device=ipu.IPUModel(tiles_per_ipu=64), donate_argnums=0).profile(weights, x)


@pytest.fixture(scope="module")
def slices(profile, tmp_path_factory):
    path = tmp_path_factory.mktemp("trace") / "trace.json"
    profile.to_perfetto(path)
    events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    return [event for event in events if event["ph"] == "X"]


def test_every_row_that_takes_time_is_a_row_of_some_step(profile):
    rows = profile.step_costs
    of_steps = {row for rows in profile.execution_trace.row_sets for row in rows}
    assert of_steps == {number for number, row in enumerate(rows) if row.cycles}


def test_steps_of_one_row_add_up_to_it(profile):
    trace = profile.execution_trace
    rows = profile.step_costs
    cycles = Counter()
    shared = set()
    for step, work in zip(trace.step.tolist(), trace.work.sum(1).tolist(), strict=True):
        first, *others = trace.row_sets[trace.rows[step]]
        cycles[first] += work
        shared |= {first, *others} if others else set()
    alone = cycles.keys() - shared
    assert alone and {row: cycles[row] for row in alone} == {row: rows[row].cycles for row in alone}


def test_slices_of_perfetto_have_layer_part_and_line(profile, slices):
    layers = {(row.layer, row.part) for row in profile.layers if row.cycles}
    busy = [event for event in slices if event["cat"] in ("step", "compute", "exchange", "sync")]
    placed = [event["args"] for event in busy if "layer" in event["args"]]
    assert {(args["layer"], args["part"]) for args in placed} <= layers
    named = {layer for args in placed for layer in (args["layer"], *args.get("layers", ()))}
    assert (
        named == {layer for layer, part in layers if part} - {NO_LAYER} and {"block_1/block", "block_2/block"} <= named
    )
    assert {args["part"] for args in placed} == {"forward", "backward", "update"}
    assert all("line" in event["args"] for event in busy)
    merged = [event["args"]["layers"] for event in busy if "layers" in event["args"]]
    assert all(len(set(layers)) > 1 for layers in merged)


def test_steps_of_the_execution_profile_have_them_too(profile):
    steps = profile.execution()["simulation"]["steps"]
    layers = {(step.get("layer"), step.get("part")) for step in steps if step["type"] == "OnTileExecute"}
    for number in range(4):
        assert any(layer and f"block_{number}" in layer for layer, _ in layers)
    assert {part for _, part in layers} >= {"forward", "backward", "update"}


def test_saved_profiles_have_them(profile, slices, tmp_path):
    profile.save(tmp_path / "saved")
    loaded = ipu.Profile.load(tmp_path / "saved")
    assert loaded.execution_trace.row_sets == profile.execution_trace.row_sets
    np.testing.assert_array_equal(loaded.execution_trace.rows, profile.execution_trace.rows)
    assert loaded.execution() == profile.execution()
    loaded.to_perfetto(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text(encoding="utf-8"))["traceEvents"]
    assert [event for event in events if event["ph"] == "X"] == slices
