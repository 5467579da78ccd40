"""Where a step is cut for recomputation, and where its gradient's equations run."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import ipujax as ipu
from ipujax.lowering.jax_compat import ClosedJaxpr
from ipujax.lowering.passes import run_passes
from ipujax.lowering.recomputation.chain_steps import best_cuts, between_layers
from ipujax.lowering.recomputation.flow import Flow
from ipujax.lowering.recomputation.gradient_parts import split

ROWS, WIDTH, LAYERS = 8, 16, 4
X = np.ones((ROWS, WIDTH), np.float32)


def layer(p: Any, x: jax.Array) -> jax.Array:
    """Two halves that end alike, as attention and the dense layer behind it."""
    x = x + jnp.tanh(x @ p["first"]) @ p["second"]
    return x + jax.nn.sigmoid(x @ p["first"]) @ p["second"]


def layered(params: Any, x: jax.Array) -> jax.Array:
    x = jnp.exp(x @ params["start"])
    for p in params["layers"]:
        x = layer(p, x)
    return (x**2).sum()


def gradient(fun: Any, *args: Any) -> ClosedJaxpr:
    """As the pass `recompute` finds it."""
    return run_passes(jax.make_jaxpr(jax.value_and_grad(fun))(*args))["dce"]


def test_layers_are_cut_as_a_whole() -> None:
    """Between them, before the first, and behind the last: not where their halves meet."""
    p = {"first": np.ones((WIDTH, 4 * WIDTH), np.float32), "second": np.ones((4 * WIDTH, WIDTH), np.float32)}
    params = {"start": np.ones((WIDTH, WIDTH), np.float32), "layers": [p] * LAYERS}
    jaxpr = gradient(layered, params, X)
    parts = split(jaxpr.eqns)
    assert parts is not None
    flow = Flow(parts.forward, parts.backward, set(jaxpr.jaxpr.outvars))
    fine = best_cuts(flow)
    whole = between_layers(flow, fine)
    assert len(fine) >= 2 * LAYERS and set(whole) < set(fine)
    runs = [flow.forward[a:b] for a, b in pairwise(whole)]
    assert [sum(eqn.primitive.name == "dot_general" for eqn in run) for run in runs].count(4) == LAYERS


def test_cuts_of_what_is_not_repeated_stay() -> None:
    def fun(w: jax.Array, x: jax.Array) -> jax.Array:
        return (jnp.tanh(jnp.exp(x @ w) @ w.T) ** 2).sum()

    jaxpr = gradient(fun, np.ones((WIDTH, 2 * WIDTH), np.float32), X)
    parts = split(jaxpr.eqns)
    assert parts is not None
    flow = Flow(parts.forward, parts.backward, set(jaxpr.jaxpr.outvars))
    assert between_layers(flow, best_cuts(flow)) == best_cuts(flow)


def test_a_parameter_and_its_transpose_are_sent_once() -> None:
    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        with ipu.stage(0):
            x = jnp.tanh(x @ w)
        with ipu.stage(1):
            return ((x @ w.T) ** 2).sum()

    def step(w: jax.Array, x: jax.Array) -> Any:
        return ipu.pipeline(jax.value_and_grad(loss), micro_batches=2)(w, x)

    device = ipu.IPUModel(num_ipus=2, tiles_per_ipu=4)
    graph = ipu.jit(step, device=device).lower(np.ones((WIDTH, 3 * WIDTH), np.float32), X).graph
    sent = [v for v in graph.variables if v.name == "to IPU 1" and v.size == 3 * WIDTH**2]
    assert len(sent) == 1
