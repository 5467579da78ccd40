"""Layers written by a Python loop, in training steps: each becomes a call, in time that grows with their number.

The cost of code is high here, so that layers are worth being functions.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import ipujax as ipu
from ipujax.lowering.jax_compat import JaxprEqn
from ipujax.lowering.jaxpr import stage_name
from ipujax.lowering.outlining.outline import outline
from ipujax.lowering.outlining.repeats import Dataflow
from ipujax.lowering.passes import run_passes
from ipujax.lowering.source_info import name_stack
from ipujax.runtime.graph.program import Call
from ipujax.runtime.graph.walks import distinct
from tests.lowering.helpers import set_byte_cost
from tests.lowering.outlining.outline_helpers import LENGTH, WIDTH, calls, normal, outlined


@pytest.fixture(autouse=True)
def costly_code(monkeypatch: pytest.MonkeyPatch) -> None:
    set_byte_cost(monkeypatch, 8)


def dense(p: Any, x: jax.Array) -> jax.Array:
    """Layer of a perceptron, with a residual."""
    h = jnp.tanh(x @ p["w"] + p["b"])
    return x + jax.nn.gelu(h @ p["v"]) * h


def attention(p: Any, x: jax.Array) -> jax.Array:
    """Layer of a transformer of one head, without biases."""
    y = (x - x.mean(-1, keepdims=True)) * lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)
    q, k, v = jnp.split(y @ p["qkv"], 3, -1)
    scores = jnp.where(jnp.tril(jnp.ones((LENGTH, LENGTH), bool)), q @ k.T, -1e9)
    x = x + jax.nn.softmax(scores) @ v @ p["out"]
    return x + jax.nn.relu(x @ p["up"]) @ p["down"]


def dense_parameters() -> Any:
    return {"w": normal(WIDTH, WIDTH), "b": normal(WIDTH), "v": normal(WIDTH, WIDTH)}


def attention_parameters() -> Any:
    shapes = {"qkv": (WIDTH, 3 * WIDTH), "out": (WIDTH, WIDTH), "up": (WIDTH, 2 * WIDTH), "down": (2 * WIDTH, WIDTH)}
    return {name: normal(*shape) for name, shape in shapes.items()}


LAYERS = {"dense": (dense, dense_parameters), "attention": (attention, attention_parameters)}


def training(kind: str, layers: int, wrap: Callable[..., Any] = lambda fun: fun) -> tuple[Callable[..., Any], Any]:
    """Training step of layers in a loop, and its arguments."""
    layer, make = LAYERS[kind]
    params = {"first": normal(WIDTH, WIDTH), "layers": [make() for _ in range(layers)]}
    optimizer = optax.adam(1e-2)

    def loss(params: Any, x: jax.Array) -> jax.Array:
        x = x @ params["first"]
        for number, p in enumerate(params["layers"]):
            with jax.named_scope(f"layer{number}"):
                x = wrap(layer)(p, x)
        return (x**2).mean()

    def step(params: Any, state: Any, x: jax.Array) -> Any:
        value, gradients = jax.value_and_grad(loss)(params, x)
        updates, state = optimizer.update(gradients, state)
        return optax.apply_updates(params, updates), state, value

    return step, (params, optimizer.init(params), normal(LENGTH, WIDTH))


def is_of_loss(eqn: JaxprEqn) -> bool:
    """True for an equation that is not of the optimiser."""
    return "jvp(" in name_stack(eqn)


WRAPS: dict[str, Callable[..., Any]] = {"plain": lambda fun: fun, "jit": jax.jit, "checkpoint": jax.checkpoint}
CASES = [*product(WRAPS, LAYERS)]


@pytest.mark.parametrize(("wrap", "kind"), CASES)
def test_calls_each_layer_once_forward_and_once_backward(wrap: str, kind: str) -> None:
    step, args = training(kind, 4, WRAPS[wrap])
    jaxpr = outlined(step, *args)
    layer_calls = [(stage_name(eqn).is_backward, id(eqn.params["jaxpr"])) for eqn in calls(jaxpr) if is_of_loss(eqn)]
    forward = [body for is_backward, body in layer_calls if not is_backward]
    backward = [body for is_backward, body in layer_calls if is_backward]
    assert (len(forward), len(set(forward))) == (len(backward), len(set(backward))) == (4, 1)


def test_shrinks_twelve_layers() -> None:
    """Runs that are calls come once a layer."""
    step, args = training("attention", 12)
    jaxprs = run_passes(jax.jit(step).trace(*args).jaxpr)
    bodies = Counter(id(eqn.params["jaxpr"]) for eqn in calls(jaxprs["outline"]) if is_of_loss(eqn))
    assert set(bodies.values()) == {12}
    assert len(jaxprs["outline"].eqns) < 0.7 * len(jaxprs["dce"].eqns)


def test_training_step_with_functions_matches_jax() -> None:
    step, args = training("dense", 3)
    device = ipu.IPUModel(tiles_per_ipu=16)
    lowered = ipu.jit(step, device=device).lower(*args)
    assert list(calls(lowered.jaxpr))
    actual = ipu.jit(step, device=device)(*args)
    expected = jax.jit(step)(*args)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_outlines_layers_in_stages_of_a_pipeline() -> None:
    """Each part of a stage calls its own function, with the numbers and gradients of plain JAX."""
    params = [dense_parameters() for _ in range(6)]

    def loss(params: Any, x: jax.Array) -> jax.Array:
        for number, p in enumerate(params):
            with ipu.stage(number // 3):
                x = dense(p, x)
        return (x**2).mean()

    device = ipu.IPUModel(num_ipus=2, tiles_per_ipu=16)
    step = ipu.pipeline(jax.value_and_grad(loss), micro_batches=2)
    lowered = ipu.jit(step, device=device).lower(params, normal(LENGTH, WIDTH))
    functions = {node.function for node in distinct(lowered.program) if isinstance(node, Call)}
    # Going back through stage 0 a layer is two functions: layer 0 has no gradient of what it reads.
    assert sum(function.name == "dense" for function in functions) == 5
    x = normal(LENGTH, WIDTH)
    actual = ipu.jit(step, device=device)(params, x)
    expected = jax.jit(jax.value_and_grad(loss))(params, x)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_time_is_linear_in_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four times the layers take about four times the work, counted in elements of arrays."""
    counts: list[int] = []
    windows = Dataflow.windows

    def counted(flow: Dataflow, length: int) -> Any:
        counts.append(flow.count)
        return windows(flow, length)

    monkeypatch.setattr(Dataflow, "windows", counted)
    work = []
    for layers in (12, 48):
        step, args = training("dense", layers)
        jaxpr = run_passes(jax.jit(step).trace(*args).jaxpr)["dce"]
        counts.clear()
        outline(jaxpr)
        work.append(sum(counts))
    assert work[1] <= 6 * work[0]


_PROGRAM = """
from tests.lowering.outlining.test_outline_layers import run_passes, training
import jax
step, args = training("attention", 3)
print(run_passes(jax.jit(step).trace(*args).jaxpr)["outline"])
"""


def test_does_not_depend_on_the_order_of_hashes() -> None:
    texts = [
        subprocess.run(
            [sys.executable, "-c", _PROGRAM],
            env={**os.environ, "PYTHONHASHSEED": seed, "JAX_PLATFORMS": "cpu"},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert "function_call" in texts[0] and texts[0] == texts[1]
