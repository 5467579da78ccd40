"""All optimisers and schedules of optax under `ipu.jit`, against `jax.jit`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import ipujax as ipu

STEPS = 3
RATE = 0.05
RATED = (  # made from a rate alone
    "adabelief adadelta adafactor adagrad adam adamax adamaxw adamw adan amsgrad fromage lamb lars lion nadam nadamw"
    " novograd optimistic_gradient_descent radam rmsprop rprop sgd sign_sgd sm3 yogi"
)
OPTIMIZERS: dict[str, Callable[[], Any]] = {
    name: lambda name=name: getattr(optax, name)(RATE) for name in RATED.split()
}
OPTIMIZERS |= {
    "momentum": lambda: optax.sgd(RATE, 0.9, nesterov=True),
    "noise": lambda: optax.noisy_sgd(RATE, key=0),
    "lookahead": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.add_decayed_weights(1e-3), optax.sgd(RATE)),
    "frozen": lambda: optax.multi_transform({"a": optax.adam(RATE), "b": optax.set_to_zero()}, {"w": "a", "b": "b"}),
    "every second": lambda: optax.MultiSteps(optax.adam(RATE), 2).gradient_transformation(),
    "finite": lambda: optax.apply_if_finite(optax.adam(RATE), 2),
    "average": lambda: optax.chain(optax.adam(RATE), optax.ema(0.9)),
    "polyak": lambda: optax.polyak_sgd(1.0),
    "lbfgs": lambda: optax.lbfgs(RATE, linesearch=None),
}
DEVICE = ipu.IPUModel(tiles_per_ipu=4)


def loss(params: Any, x: jax.Array) -> jax.Array:
    return (jnp.tanh(x @ params["w"] + params["b"]) ** 2).mean()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimiser_trains_as_with_jax_jit(name: str) -> None:
    optimizer = optax.with_extra_args_support(OPTIMIZERS[name]())
    rng = np.random.default_rng(0)
    params = {"w": rng.normal(size=(6, 4)).astype(np.float32), "b": np.zeros(4, np.float32)}
    x = rng.normal(size=(8, 6)).astype(np.float32)

    def step(params: Any, state: Any, x: jax.Array) -> Any:
        value, grads = jax.value_and_grad(loss)(params, x)
        inputs = {"value": value, "grad": grads, "value_fn": lambda p: loss(p, x)}
        updates, state = optimizer.update(grads, state, params, **inputs)
        return optax.apply_updates(params, updates), state, value

    results = []
    for jit in (jax.jit, ipu.jit(device=DEVICE)):
        now = params
        state = optimizer.init(params)
        run = jit(step)
        for _ in range(STEPS):
            now, state, value = run(now, state, x)
        results.append((now, value))
    for expected, got in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_allclose(got, expected, rtol=2e-4, atol=1e-5)


SCHEDULES: dict[str, Callable[[], Any]] = {
    "constant": lambda: optax.constant_schedule(0.1),
    "cosine": lambda: optax.cosine_decay_schedule(0.1, 20),
    "exponential": lambda: optax.exponential_decay(0.1, 5, 0.5, staircase=True),
    "linear": lambda: optax.linear_schedule(0.1, 0.0, 20),
    "one cycle": lambda: optax.cosine_onecycle_schedule(20, 0.1),
    "piecewise": lambda: optax.piecewise_constant_schedule(0.1, {5: 0.5, 10: 0.1}),
    "polynomial": lambda: optax.polynomial_schedule(0.1, 0.0, 2, 20),
    "restarts": lambda: optax.sgdr_schedule(
        [{"init_value": 0.0, "peak_value": 0.1, "warmup_steps": 2, "decay_steps": 8, "end_value": 0.0}] * 2
    ),
    "warm-up": lambda: optax.warmup_cosine_decay_schedule(0.0, 0.1, 4, 20),
}


def test_schedules() -> None:
    schedules = {name: make() for name, make in SCHEDULES.items()}

    @ipu.jit(device=DEVICE)
    def rates(count: jax.Array) -> dict[str, jax.Array]:
        return {name: jnp.asarray(schedule(count), jnp.float32) for name, schedule in schedules.items()}

    for count in (0, 3, 7, 12, 30):
        for name, got in rates(np.int32(count)).items():
            np.testing.assert_allclose(got, schedules[name](count), rtol=1e-5, atol=1e-7, err_msg=name)
