"""Weights and inputs of different floating-point dtypes: gradients, alone and in pipelines, as plain JAX has them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ipujax as ipu
from ipujax.lowering.schedules import SCHEDULES
from tests.lowering.helpers import check

PAIRS = [("bfloat16", "float32"), ("float16", "float32"), ("bfloat16", "float16"), ("float32", "bfloat16")]
TOLERANCE = 2e-2
RNG = np.random.default_rng(5)


def array(dtype: str, *shape: int) -> np.ndarray:
    return (RNG.normal(size=shape) / 2).astype(jnp.dtype(dtype))


def loss(weights: list[Any], x: Any) -> Any:
    """A dense layer in each of as many stages as there are weights."""
    for number, w in enumerate(weights):
        with ipu.stage(number):
            x = jnp.tanh(x @ w)
    return jnp.mean(x.astype(np.float32) ** 2)


ROWS = (1, 6, 40)


@pytest.mark.parametrize(("rows", "weights", "inputs"), [(rows, *pair) for rows in ROWS for pair in PAIRS])
def test_gradients(weights: str, inputs: str, rows: int) -> None:
    fun = jax.grad(lambda w, x: jnp.mean((x @ w) ** 2))
    check(fun, array(weights, 3, 3), array(inputs, rows, 3), tiles=(1, 4), rtol=TOLERANCE, atol=TOLERANCE)


WAYS = (None, *SCHEDULES)


@pytest.mark.parametrize(("schedule", "weights", "inputs"), [(way, *pair) for way in WAYS for pair in PAIRS])
def test_pipelines(weights: str, inputs: str, schedule: str | None) -> None:
    """Accumulated on one IPU without a schedule, else in two stages."""
    params = [array(weights, 4, 4) for _ in range(2)]
    x = array(inputs, 8, 4)
    given = {} if schedule is None else {"schedule": schedule}
    fun = jax.grad(loss) if schedule else jax.grad(lambda params, x: jnp.mean((x @ params[0] @ params[1]) ** 2))
    stepped = ipu.pipeline(fun, micro_batches=4, **given)
    device = ipu.IPUModel(num_ipus=2 if schedule else 1, tiles_per_ipu=3)
    ours = ipu.jit(stepped, device=device)(params, x)
    plain = jax.jit(stepped)(params, x)
    for one, other in zip(ours, plain, strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_allclose(
            one.astype(np.float32), other.astype(np.float32), rtol=TOLERANCE, atol=TOLERANCE * float(abs(other).max())
        )
