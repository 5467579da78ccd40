"""The update after a pipeline: equal runs are functions, and gradients have the layout of parameters."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import PartitionSpec as P

import ipujax as ipu
from ipujax.lowering.jaxpr import primitive_names
from ipujax.lowering.pipelining.staged import is_staged, micro_batch_of
from ipujax.lowering.replicas import unwrapped

WIDTH = 8
REPLICAS = 2
PARAMS = [{"w": jnp.full((WIDTH, WIDTH), 0.1), "b": jnp.zeros(WIDTH)} for _ in range(4)]
X = jnp.linspace(-1.0, 1.0, 8 * WIDTH).reshape(8, WIDTH)
OPTIMIZER = ipu.optim.shard(optax.lamb(1e-2, weight_decay=0.1), replicas=REPLICAS, min_elements=16)


def loss(params: Any, x: jax.Array) -> jax.Array:
    for number, p in enumerate(params):
        with ipu.stage(number // 2):
            x = jnp.tanh(x @ p["w"] + p["b"])
    return (x**2).mean()


def step(params: Any, state: Any, x: jax.Array) -> Any:
    value, grads = ipu.pipeline(jax.value_and_grad(loss), micro_batches=2)(params, x)
    updates, state = OPTIMIZER.update(grads, state, params)
    return optax.apply_updates(params, updates), state, lax.pmean(value, "replica")


def lowered(device: Any = None, **options: Any) -> Any:
    state = OPTIMIZER.init(PARAMS)
    specs = P(), ipu.optim.shard_specs(state)
    fun = ipu.jit(
        step,
        device=device or ipu.IPUModel(2 * REPLICAS, tiles_per_ipu=4),
        replicas=REPLICAS,
        in_specs=(*specs, P("replica")),
        out_specs=(*specs, P()),
        offload_argnums=1,
        options=ipu.Options(**options),
    )
    return fun, (PARAMS, state, X)


def test_does_not_transpose_gradients() -> None:
    fun, args = lowered()
    jaxpr = unwrapped(fun.lower(*args).jaxpr).jaxpr
    (pipeline,) = (eqn for eqn in jaxpr.jaxpr.eqns if is_staged(eqn))
    assert "transpose" not in primitive_names(micro_batch_of(pipeline).jaxpr)


def test_shares_a_function_for_equal_updates_of_an_ipu() -> None:
    def functions(cost: float) -> int:
        fun, args = lowered(byte_cost=cost)
        return sum(line.strip().startswith("call") for line in fun.lower(*args).as_text().splitlines())

    assert functions(1e6) > functions(0)


def test_equals_the_plain_update() -> None:
    fun, args = lowered(byte_cost=1e6)
    plain, _ = lowered(ipu.CPU())
    for got, expected in zip(jax.tree.leaves(fun(*args)), jax.tree.leaves(plain(*args)), strict=True):
        np.testing.assert_allclose(got, expected, rtol=2e-4, atol=1e-6)
