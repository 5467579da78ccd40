"""Loss scaling: losses of half precision without it, how the automatic scale moves, and refusals."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import ipujax as ipu
from tests.lowering.helpers import assert_rounded_alike

RNG = np.random.default_rng(11)
DEVICE = ipu.IPUModel(tiles_per_ipu=8)
PARAMS = {"w": jnp.asarray(RNG.normal(size=(4, 3)), jnp.float16)}
X = jnp.asarray(RNG.normal(size=(8, 4)), jnp.float16)


def small_loss(params: Any, x: jax.Array) -> jax.Array:
    """A loss whose gradients are below the smallest number of half precision, as deep networks have them."""
    return jnp.mean((x @ params["w"]).astype(jnp.float32) ** 2) * 1e-8


def step_of(optimizer: Any, loss: Any, micro_batches: int = 2) -> Any:
    """A training step with gradient accumulation."""

    def step(params: Any, state: Any, x: jax.Array) -> Any:
        scale = ipu.optim.loss_scale(state)
        grad = ipu.pipeline(
            jax.grad(lambda p, x: loss(p, x) * scale), micro_batches=micro_batches, accumulate_dtype=jnp.float32
        )
        updates, state = optimizer.update(grad(params, x), state, params)
        return optax.apply_updates(params, updates), state

    return step


# --- numbers ----------------------------------------------------------------------------------------------------------


def test_gradients_too_small_for_half_precision_survive() -> None:
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), (PARAMS, X))
    expected = jax.grad(small_loss)(*wide)["w"]
    assert not np.any(jax.grad(small_loss)(PARAMS, X)["w"])
    for optimizer in (
        ipu.optim.static_loss_scale(optax.sgd(1.0), 2.0**15),
        ipu.optim.automatic_loss_scale(optax.sgd(1.0)),
    ):
        state = optimizer.init(PARAMS)
        grads = jax.grad(lambda p: small_loss(p, X) * ipu.optim.loss_scale(state))(PARAMS)  # noqa: B023
        updates, _ = optimizer.update(grads, state, PARAMS)
        assert updates["w"].dtype == jnp.float32
        np.testing.assert_allclose(-updates["w"], expected, rtol=0.02, atol=1e-10)


@pytest.mark.parametrize("optimizer", [optax.adam(1e-2), optax.adamw(1e-2), optax.sgd(0.1, momentum=0.9)])
def test_a_power_of_two_changes_no_update(optimizer: Any) -> None:
    params = {"w": PARAMS["w"].astype(jnp.float32)}
    grads = {"w": jnp.asarray(RNG.normal(size=(4, 3)), jnp.float32)}
    expected, _ = optimizer.update(grads, optimizer.init(params), params)
    scaled = jax.tree.map(lambda g: g * 2.0**15, grads)
    for wrapped in (ipu.optim.static_loss_scale(optimizer, 2.0**15), ipu.optim.automatic_loss_scale(optimizer)):
        got, _ = wrapped.update(scaled, wrapped.init(params), params)
        assert_rounded_alike(got, expected)


def moves(good: list[bool], initial: float, interval: int, low: float, high: float) -> list[float]:
    """The scale after each step, by the rule as it is written."""
    scale = initial
    since = 0
    scales = []
    for is_good in good:
        since = since + 1 if is_good else 0
        if not is_good:
            scale = max(low, scale / 2)
        elif since == interval:
            scale = min(high, scale * 2)
            since = 0
        scales.append(scale)
    return scales


@pytest.mark.parametrize("seed", range(3))
def test_the_automatic_scale_moves_by_its_rule(seed: int) -> None:
    good = list(np.random.default_rng(seed).random(60) < 0.8)
    optimizer = ipu.optim.automatic_loss_scale(
        optax.adam(0.1), initial_scale=8.0, growth_interval=3, min_scale=2.0, max_scale=64.0
    )
    params = {"a": jnp.ones(3), "b": jnp.zeros(2)}
    state = optimizer.init(params)

    def body(carry: Any, is_good: jax.Array) -> Any:
        params, state = carry
        grads = {"a": jnp.ones(3), "b": jnp.where(is_good, jnp.ones(2), jnp.array([1, jnp.inf]))}
        updates, new = optimizer.update(grads, state, params)
        return (optax.apply_updates(params, updates), new), (new.scale, params["a"][0], new.inner[0].count)

    (_, last), (scales, values, counts) = jax.lax.scan(body, (params, state), jnp.asarray(good))
    np.testing.assert_array_equal(scales, moves(good, 8.0, 3, 2.0, 64.0))
    assert last.skipped_steps == good.count(False)
    np.testing.assert_array_equal(counts, np.cumsum(good))  # a step left out is none for the optimiser either
    changed = np.diff(np.append(values, 0.0))[:-1] != 0
    np.testing.assert_array_equal(changed, good[:-1])


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_a_step_with_a_gradient_that_is_not_finite_is_left_out(bad: float) -> None:
    optimizer = ipu.optim.automatic_loss_scale(optax.adam(0.1))
    state = optimizer.init(PARAMS)
    grads = {"w": jnp.ones((4, 3), jnp.float16).at[1, 2].set(bad)}
    updates, new = ipu.jit(optimizer.update, device=DEVICE)(grads, state, PARAMS)
    assert not np.any(updates["w"]) and new.scale == 2.0**14
    for a, b in zip(jax.tree.leaves(new.inner), jax.tree.leaves(state.inner), strict=True):
        np.testing.assert_array_equal(a, b)


def test_training_on_the_machine_with_accumulation() -> None:
    """Half-precision parameters follow those of float32 once their loss is scaled."""
    target = jnp.asarray(RNG.normal(size=(8, 3)), jnp.float32)

    def loss(params: Any, x: jax.Array) -> jax.Array:
        return jnp.mean(((x @ params["w"]).astype(jnp.float32) - target[: len(x)]) ** 2) * 1e-6

    optimizer = ipu.optim.automatic_loss_scale(optax.sgd(1e5), initial_scale=2.0**20)
    step = ipu.jit(step_of(optimizer, loss), device=DEVICE)
    params = PARAMS
    state = optimizer.init(PARAMS)
    wide = {"w": PARAMS["w"].astype(jnp.float32)}
    grad = ipu.pipeline(jax.grad(loss), micro_batches=2)
    for _ in range(5):
        params, state = step(params, state, X)
        wide = jax.tree.map(lambda p, g: p - 1e5 * g, wide, grad(wide, X.astype(jnp.float32)))
    assert params["w"].dtype == jnp.float16
    np.testing.assert_allclose(params["w"], wide["w"], rtol=0.01, atol=0.01)


def test_the_step_keeps_its_dtypes() -> None:
    for optimizer in (
        ipu.optim.static_loss_scale(optax.adam(1e-3), 1024),
        ipu.optim.automatic_loss_scale(optax.adam(1e-3)),
        ipu.optim.static_loss_scale(optax.adam(1e-3), 1024, dtype=jnp.float16),
    ):
        state = optimizer.init(PARAMS)
        after = jax.eval_shape(step_of(optimizer, small_loss), PARAMS, state, X)
        described = jax.tree.map(lambda x: (x.shape, x.dtype), ((PARAMS, state), after))
        assert described[0] == described[1]


@pytest.mark.parametrize("scale", [2.0**15, 2.0**17])
def test_scales_and_gradients_may_overflow_the_dtype_of_the_update(scale: float) -> None:
    optimizer = ipu.optim.static_loss_scale(optax.sgd(1.0), scale, dtype=jnp.float16)
    params = {"w": jnp.ones(2), "b": 0.5}
    grads = {"w": scale * jnp.array([1.0, 3.0]), "b": 2.0 * scale}
    updates, _ = optimizer.update(grads, optimizer.init(params), params)
    assert updates["w"].dtype == jnp.float16
    np.testing.assert_array_equal(updates["w"], [-1.0, -3.0])
    assert updates["b"] == -2.0


def test_replicas_leave_out_a_step_together() -> None:
    optimizer = ipu.optim.automatic_loss_scale(optax.sgd(1.0), axis="replica")
    state = optimizer.init(jnp.ones(2))
    grads = jnp.array([[1, 2], [jnp.nan, 1], [3, 4]])
    updates, new = jax.vmap(lambda g: optimizer.update(g, state), axis_name="replica")(grads)
    assert not np.any(updates) and np.all(new.scale == 2.0**14)


def test_the_state_can_be_donated_from_the_first_step_on() -> None:
    optimizer = ipu.optim.automatic_loss_scale(optax.sgd(1.0))
    update = ipu.jit(optimizer.update, device=DEVICE, donate_argnums=1)
    _, state = update(PARAMS, optimizer.init(PARAMS))
    assert state.good_steps == 1 and state.skipped_steps == 0


# --- its place among optimisers ---------------------------------------------------------------------------------------


def test_the_scale_is_found_inside_a_chain() -> None:
    optimizer = optax.chain(ipu.optim.static_loss_scale(optax.clip(1.0), 16.0), optax.sgd(0.1))
    assert ipu.optim.loss_scale(optimizer.init(PARAMS)) == 16


def test_further_arguments_reach_the_optimiser() -> None:
    recorded = []

    def update(grads: Any, state: Any, params: Any = None, *, value: Any) -> Any:
        recorded.append(value)
        return grads, state

    inner = optax.GradientTransformationExtraArgs(lambda params: (), update)
    for optimizer in (ipu.optim.static_loss_scale(inner, 4.0), ipu.optim.automatic_loss_scale(inner)):
        assert isinstance(optimizer, optax.GradientTransformationExtraArgs)
        optimizer.update(jnp.ones(2), optimizer.init(jnp.ones(2)), jnp.ones(2), value=3)
    assert recorded == [3, 3]


# --- bad input --------------------------------------------------------------------------------------------------------

BAD: dict[str, tuple[Any, str]] = {
    "no optimiser": (lambda: ipu.optim.static_loss_scale(optax.adam, 2.0), "needs an optimiser"),
    "no optimiser, automatic": (lambda: ipu.optim.automatic_loss_scale(None), "needs an optimiser"),
    "no scale": (lambda: ipu.optim.static_loss_scale(optax.sgd(1.0), 0.0), "scale of ipu.optim.*\n.*\n.*positive"),
    "no steps": (lambda: ipu.optim.automatic_loss_scale(optax.sgd(1.0), growth_interval=0), "growth_interval"),
    "no growth": (lambda: ipu.optim.automatic_loss_scale(optax.sgd(1.0), factor=1.0), "above 1"),
    "no number": (lambda: ipu.optim.static_loss_scale(optax.sgd(1.0), "2"), "scale of ipu.optim.static_loss_scale"),
    "no float32": (lambda: ipu.optim.static_loss_scale(optax.sgd(1.0), 1e39), "a positive number that float32 holds"),
    "zero in float32": (lambda: ipu.optim.static_loss_scale(optax.sgd(1.0), 1e-50), "a positive number that float32"),
    "half a step": (lambda: ipu.optim.automatic_loss_scale(optax.sgd(1.0), growth_interval=2.5), "growth_interval"),
    "bounds": (lambda: ipu.optim.automatic_loss_scale(optax.sgd(1.0), max_scale=2.0), "out of order"),
    "beyond float": (lambda: ipu.optim.automatic_loss_scale(optax.sgd(1.0), initial_scale=10**400), "that float32"),
    "below float": (lambda: ipu.optim.static_loss_scale(optax.sgd(1.0), Fraction(-(10**400))), "that float32 holds"),
    "infinite bound": (lambda: ipu.optim.automatic_loss_scale(optax.sgd(1.0), max_scale=math.inf), "max_scale of"),
    "bound of text": (lambda: ipu.optim.automatic_loss_scale(optax.sgd(1.0), max_scale="2"), "max_scale of"),
    "beyond int32": (lambda: ipu.optim.automatic_loss_scale(optax.sgd(1.0), growth_interval=2**31), "at most 2,147,"),
    "integers": (lambda: ipu.optim.static_loss_scale(optax.sgd(1.0), 2.0, dtype=jnp.int32), "floating-point"),
    "no state": (lambda: ipu.optim.loss_scale(optax.sgd(1.0).init(PARAMS)), "got: 0 of them"),
    "two states": (
        lambda: ipu.optim.loss_scale([ipu.optim.static_loss_scale(optax.sgd(1.0), 2.0).init(PARAMS)] * 2),
        "got: 2 of them",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_refuses_invalid_settings(name: str) -> None:
    call, match = BAD[name]
    with pytest.raises(ipu.ArgumentError, match=match):
        call()


@pytest.mark.parametrize(
    "settings",
    [{"initial_scale": np.float16(8.0)}, {"max_scale": 2**40}, {"factor": 2**40}, {"min_scale": np.float16(0.5)}],
    ids=str,
)
def test_bounds_are_numbers_of_any_type_that_float32_holds(settings: dict[str, Any]) -> None:
    """Without a warning, and also in the update: JAX takes whole numbers as int32."""
    gradients = {"w": jnp.ones(2)}
    optimizer = ipu.optim.automatic_loss_scale(
        optax.sgd(0.1), **{"growth_interval": 1, "initial_scale": 8.0} | settings
    )
    _, state = optimizer.update(gradients, optimizer.init(gradients))
    expected = min(8 * settings.get("factor", 2), settings.get("max_scale", 2**24))
    assert ipu.optim.loss_scale(state) == expected
