"""A model of two `Gemm(transB=1)` layers trains as the same layers in plain JAX do."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import onnx
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


def test_a_whole_exponent_is_a_constant_as_powers_of_negative_numbers_have_no_derivative_by_it():
    """Variances of layer normalisation are squares, whose exponent may be an initialiser; learnt ones are fractions."""
    graph = onnx.parser.parse_model("""
        <ir_version: 8, opset_import: ["" : 17]>
        powers (float[3] x) => (float[3] y) <float w = {0.5}, float two = {2}, float p = {3.1}> {
            scaled = Mul (x, w)
            square = Pow (scaled, two)
            y = Pow (square, p)
        }""")
    model = ipujax.onnx.load(graph)
    assert set(model.params) == {"w", "p"}
    gradients = jax.grad(lambda params: model(params, jnp.array([-1.0, 2.0, -3.0])).sum())(model.params)
    assert all(jnp.isfinite(x) for x in gradients.values())


def test_an_exponent_that_is_a_factor_too_has_the_precision_of_the_weights():
    graph = onnx.parser.parse_model("""
        <ir_version: 8, opset_import: ["" : 17]>
        powers (float[3] x) => (float[3] y) <float two = {2}> { square = Pow (x, two) y = Mul (square, two) }""")
    model = ipujax.onnx.load(graph)
    half = jax.tree.map(lambda x: x.astype(jnp.float16), model.params)
    assert model(half, jnp.ones(3, jnp.float16)).dtype == jnp.float16
