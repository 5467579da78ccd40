"""Updates of parameters whose state lies in streaming memory: on replicas, and of any equation."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

import ipujax as ipu

STATE = [jnp.arange(12.0).reshape(4, 3), jnp.ones((4, 3)), jnp.full((4, 3), 2.0)]


def test_an_equation_may_read_nothing() -> None:
    step = ipu.jit(lambda m: m + jnp.arange(12.0).reshape(4, 3), donate_argnums=0, offload_argnums=0)
    np.testing.assert_array_equal(step(jnp.ones((4, 3))), 1 + np.arange(12.0).reshape(4, 3))


def test_updates_on_replicas_go_one_after_the_other() -> None:
    """Sums over replicas have no effect that orders: the state of the next parameter is loaded behind the first's."""

    def step(state: Any, grads: Any) -> Any:
        scaled = [0.5 * g[0] for g in grads]
        return [0.9 * m + lax.pmax(2 * jnp.sin(m) + g, "replica") for m, g in zip(state, scaled, strict=True)]

    grads = [jnp.stack([x, 2 * x]) for x in STATE]
    specs = {"replicas": 2, "in_specs": (P(), P("replica")), "out_specs": P()}
    fun = ipu.jit(step, device=ipu.IPUModel(2, tiles_per_ipu=4), donate_argnums=0, offload_argnums=0, **specs)
    text = fun.lower(STATE, grads).as_text(after="offload")
    moves = [line.split("= ")[1].split("[")[0].split()[0] for line in text.splitlines() if "= remote_" in line]
    assert sorted(moves) == ["remote_load"] * 3 + ["remote_store"] * 3
    plain = ipu.jit(step, device=ipu.CPU(), **specs)(STATE, grads)
    for got, expected in zip(jax.tree.leaves(fun([*map(jnp.copy, STATE)], grads)), plain, strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-6)
