"""Whole training steps under `ipu.jit` against `jax.jit` of the same function: numbers, and promises of profiles."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ipujax as ipu
from tests.ipujax.models import MODELS, PLAIN, TrainingStep, training_step

STEPS = 20
STEP_RTOL = 1e-5  # of the loss of one step from the same state
FREE_RTOL = 1e-4  # of the loss after STEPS steps on their own
STATE_RTOL = 1e-4  # of the distance of two new states, to the size of what the step changed in each array

FEW = 16
MK2 = 1472


NUMBERS = [(name, tiles) for name in MODELS for tiles in (FEW, MK2)]
PROFILES = MODELS


def model_device(tiles: int) -> ipu.IPUModel:
    return ipu.IPUModel(num_ipus=1, arch="mk2", tiles_per_ipu=tiles)


@cache
def compiled(name: str, tiles: int) -> ipu.Compiled:
    """The training step of a model, compiled from shapes alone."""
    model = training_step(name)
    shapes = jax.eval_shape(lambda *arrays: arrays, model.state, *model.batch(0))
    return ipu.jit(model.step, device=model_device(tiles)).lower(*shapes).compile()


def as_numbers(leaf: Any) -> np.ndarray:
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return np.asarray(leaf)


def assert_same_state(got: Any, expected: Any, before: Any, label: str) -> None:
    """Whole numbers equal; of other arrays the difference is small beside their change in the step."""
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for a, b, start in zip(*map(jax.tree.leaves, (got, expected, before)), strict=True):
        a = as_numbers(a)
        b = as_numbers(b)
        start = as_numbers(start)
        assert (a.dtype, a.shape) == (b.dtype, b.shape), label
        if a.dtype.kind == "f":
            change = np.linalg.norm(b - start)
            rounding = np.finfo(a.dtype).eps * np.linalg.norm(b)
            assert np.linalg.norm(a - b) <= STATE_RTOL * change + 4 * rounding, label
        else:
            np.testing.assert_array_equal(a, b, err_msg=label)


def assert_same_training(ours: Callable[..., Any], reference: Callable[..., Any], model: TrainingStep) -> None:
    """Equal losses and states in each step from the same state, equal losses of steps on their own."""
    state = alone = model.state
    for number in range(STEPS):
        batch = model.batch(number)
        label = f"step {number}"
        expected, loss = reference(state, *batch)
        got, got_loss = ours(state, *batch)
        np.testing.assert_allclose(got_loss, loss, STEP_RTOL, err_msg=label)
        assert_same_state(got, expected, state, label)
        alone, alone_loss = ours(alone, *batch)
        np.testing.assert_allclose(alone_loss, loss, FREE_RTOL, err_msg=f"{label}, on its own")
        state = expected


@pytest.mark.parametrize(("name", "tiles"), NUMBERS)
def test_numbers_are_those_of_jax_jit(name: str, tiles: int) -> None:
    model = training_step(name)
    assert_same_training(ipu.jit(model.step, device=model_device(tiles)), jax.jit(model.step), model)


@pytest.mark.parametrize("name", ["plain-mlp_sgd", "plain-cnn_batch_norm_adam"])
def test_numbers_are_those_of_the_function_itself(name: str) -> None:
    model = training_step(name)
    assert_same_training(ipu.jit(model.step, device=model_device(FEW)), model.step, model)


def test_donated_state_trains_the_same() -> None:
    model = training_step("plain-mlp_sgd")
    reference = jax.jit(model.step)
    ours = ipu.jit(model.step, device=model_device(FEW), donate_argnums=0)
    expected = model.state
    state = jax.tree.map(jnp.copy, model.state)
    for number in range(5):
        expected, loss = reference(expected, *model.batch(number))
        state, got = ours(state, *model.batch(number))
        np.testing.assert_allclose(got, loss, STEP_RTOL)


def test_the_comparison_can_fail() -> None:
    model = training_step("plain-mlp_sgd")

    def wrong(state: Any, *batch: Any) -> Any:
        (params, opt_state), loss = model.step(state, *batch)
        return (params | {"b2": params["b2"] * (1 + 1e-2)}, opt_state), loss

    with pytest.raises(AssertionError, match="step 0"):
        assert_same_training(jax.jit(wrong), jax.jit(model.step), model)


@pytest.mark.parametrize("name", PROFILES)
def test_every_primitive_has_a_tile_parallel_rule(name: str) -> None:
    fallbacks = compiled(name, FEW).profile.fallbacks
    assert not fallbacks, {item.operation for item in fallbacks}


@pytest.mark.parametrize("name", PROFILES)
def test_phases_add_up(name: str) -> None:
    profile = compiled(name, FEW).profile
    assert set(profile.phase_cycles) == {"compute", "exchange", "global_exchange", "host_exchange", "sync", "idle"}
    assert sum(profile.phase_cycles.values()) == profile.cycles > 0
    assert profile.phase_cycles["global_exchange"] == 0  # one IPU
    assert profile.seconds == pytest.approx(profile.cycles / 1.325e9)  # the Mk2's clock
    assert sum(layer.sum() for layer in profile.memory.by_category.values()) == profile.memory.tile_bytes.sum()


@pytest.mark.parametrize("name", [f"plain-{name}" for name in PLAIN])
def test_twice_the_batch_is_more_work_and_no_faster(name: str) -> None:
    # Sizes that vectors divide: an odd batch may cost more than twice as much of it.
    model = training_step(name)

    def costs(size: int) -> tuple[int, int]:
        batch = [jax.ShapeDtypeStruct((size, *x.shape[1:]), x.dtype) for x in model.batch(0)]
        state = jax.eval_shape(lambda: model.state)
        profile = ipu.jit(model.step, device=model_device(MK2)).lower(state, *batch).compile().profile
        return profile.total_worker_cycles, profile.cycles

    (work, cycles) = costs(16)
    (more_work, more_cycles) = costs(32)
    assert more_work > work
    assert more_cycles >= 0.95 * cycles  # where small operands lie may save a few percent


@pytest.mark.parametrize("name", [f"plain-{name}" for name in PLAIN])
def test_more_tiles_are_hardly_ever_slower(name: str) -> None:
    cycles = [compiled(name, tiles).profile.cycles for tiles in (16, 64, 256, 1472)]
    assert all(settings <= 1.05 * fewer for i, fewer in enumerate(cycles) for settings in cycles[i + 1 :]), cycles
