"""Cuts of a step for recomputation, and the step of each equation of its gradient."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import ipujax as ipu
from ipujax.lowering.jax_compat import JaxprEqn
from ipujax.lowering.passes import run_passes
from ipujax.lowering.recomputation.chain_steps import ChainSteps, best_cuts, between_layers
from ipujax.lowering.recomputation.flow import DataFlow
from ipujax.lowering.recomputation.recompute import split

ROWS = 8
WIDTH = 16
LAYERS = 4
X = np.ones((ROWS, WIDTH), np.float32)


def layer(p: Any, x: jax.Array) -> jax.Array:
    """Two halves with equal ends, as attention and the dense layer after it."""
    x = x + jnp.tanh(x @ p["first"]) @ p["second"]
    return x + jax.nn.sigmoid(x @ p["first"]) @ p["second"]


def layered(params: Any, x: jax.Array) -> jax.Array:
    x = jnp.exp(x @ params["start"])
    for p in params["layers"]:
        x = layer(p, x)
    return (x**2).sum()


def flow_of(fun: Any, *args: Any) -> DataFlow:
    """The flow of a function and its gradient, as in the pass `recompute`."""
    jaxpr = run_passes(jax.make_jaxpr(jax.value_and_grad(fun))(*args))["dce"]
    parts = split(jaxpr.eqns)
    assert parts is not None
    return DataFlow(parts.forward, parts.backward, set(jaxpr.jaxpr.outvars))


def kinds(eqns: Sequence[JaxprEqn]) -> Counter[str]:
    return Counter(eqn.primitive.name for eqn in eqns)


def test_cuts_between_layers_only() -> None:
    """Cuts are between layers, before the first, and after the last: not between their halves."""
    p = {"first": np.ones((WIDTH, 4 * WIDTH), np.float32), "second": np.ones((4 * WIDTH, WIDTH), np.float32)}
    params = {"start": np.ones((WIDTH, WIDTH), np.float32), "layers": [p] * LAYERS}
    flow = flow_of(layered, params, X)
    all_cuts = best_cuts(flow)
    layer_cuts = between_layers(flow, all_cuts)
    assert len(all_cuts) >= 2 * LAYERS and set(layer_cuts) < set(all_cuts)
    runs = [flow.forward[a:b] for a, b in pairwise(layer_cuts)]
    assert [kinds(run)["dot_general"] for run in runs].count(4) == LAYERS


def test_gradients_of_entire_layers_are_equal() -> None:
    """The first product of a layer's gradient, whose result is four times its operands, waits for its layer."""
    p = {"first": np.ones((WIDTH, 4 * WIDTH), np.float32), "second": np.ones((4 * WIDTH, WIDTH), np.float32)}
    flow = flow_of(layered, {"start": np.ones((WIDTH, WIDTH), np.float32), "layers": [p] * LAYERS}, X)
    cuts = between_layers(flow, best_cuts(flow))

    def products(*, whole_layers: bool) -> list[int]:
        return [kinds(eqns)["dot_general"] for eqns in ChainSteps(flow, cuts, whole_layers=whole_layers).backward]

    products_of_layers = [8] * (LAYERS - 1)
    assert products(whole_layers=True) == [0, 8 + 1, *products_of_layers, 0, 0]  # with that of the start
    assert products(whole_layers=False) == [0, 8, *products_of_layers, 1, 0]


def test_gradient_waits_before_it_grows() -> None:
    """The gradient of a sum of rows is a number per row, and a row of numbers after the mask."""

    def fun(w: jax.Array, mask: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.exp(jnp.exp((jnp.tanh(x @ w) ** 3 * mask).sum(1))).sum()

    flow = flow_of(fun, np.ones((WIDTH, WIDTH), np.float32), np.ones((ROWS, WIDTH), np.float32), X)
    cut_after_sums = [eqn.primitive.name for eqn in flow.forward].index("reduce_sum") + 1
    of_rows, of_sums = ChainSteps(flow, [cut_after_sums]).backward
    shapes = [[eqn.outvars[0].aval.shape for eqn in eqns if eqn.primitive.name == "mul"] for eqns in (of_sums, of_rows)]
    assert shapes[0] == [(ROWS,)] * 2 and len(shapes[1]) > 2 and set(shapes[1]) == {(ROWS, WIDTH)}


def test_keeps_cuts_of_equations_that_do_not_repeat() -> None:
    def fun(w: jax.Array, x: jax.Array) -> jax.Array:
        return (jnp.tanh(jnp.exp(x @ w) @ w.T) ** 2).sum()

    flow = flow_of(fun, np.ones((WIDTH, 2 * WIDTH), np.float32), X)
    assert between_layers(flow, best_cuts(flow)) == best_cuts(flow)


def test_sends_a_parameter_and_its_transpose_once() -> None:
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
