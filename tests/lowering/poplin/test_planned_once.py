"""Plans of repeated shapes: a deeper model of equal layers needs no further plan."""

from __future__ import annotations

from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from ipujax.runtime.cache import cached_calls, clear_caches
from tests.lowering.helpers import lowered, small_target

TARGET = small_target(64)
PLANNERS = ("plan_convolution", "trial_plans", "_best_grid")


def dense(weights: Any, x: jax.Array) -> jax.Array:
    for w in weights:
        h = x @ w
        h = (h - h.mean(1, keepdims=True)) * lax.rsqrt(h.var(1, keepdims=True) + 1e-5)
        x = x + jnp.where(h > 0, h, 0.1 * h)
    return (x**2).sum()


def convolved(weights: Any, x: jax.Array) -> jax.Array:
    for w in weights:
        x = jnp.tanh(lax.conv_general_dilated(x, w, (1, 1), "SAME"))
    return (x**2).sum()


MODELS = {
    "dense": (dense, (32, 32), (16, 32)),
    "convolved": (convolved, (8, 8, 3, 3), (2, 8, 10, 10)),
}


def plans_of(name: str, layers: int) -> tuple[Counter[str], int]:
    """Counts the distinct calls of planners of products for a model and its gradient, and its emissions."""
    fun, weight, x = MODELS[name]
    arguments = [np.ones(weight, np.float32)] * layers, np.ones(x, np.float32)
    graph = lowered(jax.value_and_grad(fun), arguments, TARGET).graph
    calls = [getattr(key[0], "__name__", key[0]) for key in cached_calls()]
    return Counter(name for name in calls if name in PLANNERS), len(graph.emissions)


@pytest.mark.parametrize("name", MODELS)
def test_plans_no_more_for_a_deeper_model(name: str) -> None:
    clear_caches()
    calls, emissions = plans_of(name, 8)  # from six on, layers are calls of functions
    assert calls["plan_convolution"] >= 3  # forward, and two gradients
    deep_calls, deep_emissions = plans_of(name, 16)
    assert deep_calls == calls and 0 < deep_emissions < 2 * emissions  # small values start on other tiles
