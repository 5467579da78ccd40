"""Losses of training do not depend on replicas, meshes and stages."""

from __future__ import annotations

from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import ipujax as ipu

MESH = ipu.make_mesh((2,), ("model",), axis_types=(AxisType.Auto,))
RNG = np.random.default_rng(0)
PARAMS = [RNG.normal(0, 0.3, size).astype(np.float32) for size in ((8, 16), (16, 8), (8, 4))]
X, Y = (RNG.normal(size=(16, width)).astype(np.float32) for width in (8, 4))


def losses(replicas: int, on_mesh: bool, stages: int) -> list[float]:
    """Losses of three steps of gradient descent."""

    def split(x: Any, *dims: Any) -> Any:
        return lax.with_sharding_constraint(x, NamedSharding(MESH, P(*dims))) if on_mesh else x

    def loss(params: Any, x: Any, y: Any) -> Any:
        with ipu.stage(0):
            h = jnp.tanh(x @ split(params[0], None, "model")) @ split(params[1], "model")
        with ipu.stage(stages - 1):
            return ((h @ params[2] - y) ** 2).mean()

    def step(params: Any, x: Any, y: Any) -> Any:
        grad_fn = ipu.pipeline(jax.value_and_grad(loss), micro_batches=2, batch_argnums=(1, 2))
        value, grads = grad_fn(params, x, y)
        if replicas > 1:
            value, grads = lax.pmean((value, grads), "replica")
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    device = ipu.IPUModel(num_ipus=replicas * stages * (2 if on_mesh else 1), tiles_per_ipu=8)
    rows = P("replica")
    specs = {"replicas": replicas, "in_specs": (P(), rows, rows), "out_specs": P()} if replicas > 1 else {}
    train_step = ipu.jit(step, device=device, **specs)
    params = PARAMS
    values = []
    for _ in range(3):
        params, value = train_step(params, X, Y)
        values.append(float(value))
    return values


@pytest.mark.parametrize(("replicas", "on_mesh", "stages"), [*product((1, 2), (False, True), (1, 2))])
def test_losses_are_those_of_one_ipu(replicas: int, on_mesh: bool, stages: int) -> None:
    np.testing.assert_allclose(losses(replicas, on_mesh, stages), losses(1, False, 1), rtol=1e-6)
