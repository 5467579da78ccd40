"""A model of two `Gemm(transB=1)` layers trains as the same layers in plain JAX do."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import ipujax as ipu
import ipujax.onnx
from tests.ipujax.onnx.models import mlp

STEPS = 20
RATE = 0.1


def batches():
    """Yield images and labels of each step."""
    draw = np.random.default_rng(0)
    for _ in range(STEPS):
        x = draw.standard_normal((32, 8)).astype(np.float32)
        yield x, np.argmax(x[:, :4], axis=1)


def losses(network, params, jit):
    """Return the losses of all steps of SGD."""
    optimizer = optax.sgd(RATE)

    def loss(params, x, labels):
        return optax.softmax_cross_entropy_with_integer_labels(network(params, x), labels).mean()

    @jit
    def step(params, state, x, labels):
        value, gradients = jax.value_and_grad(loss)(params, x, labels)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    values = []
    state = optimizer.init(params)
    for x, labels in batches():
        params, state, value = step(params, state, x, labels)
        values.append(float(value))
    return values


def plain(params, x):
    """The model of `mlp` in plain JAX."""
    hidden = jnp.maximum(x @ params["w1"].T + params["b1"], 0)
    return hidden @ params["w2"].T + params["b2"]


@pytest.mark.parametrize("jit", [jax.jit, ipu.jit], ids=["jax", "ipu"])
def test_losses_are_those_of_plain_jax(jit):
    model = ipujax.onnx.load(mlp())
    expected = losses(plain, model.params, jax.jit)
    np.testing.assert_allclose(losses(model, model.params, jit), expected, rtol=1e-6)
    assert expected[-1] < 0.8 * expected[0]
