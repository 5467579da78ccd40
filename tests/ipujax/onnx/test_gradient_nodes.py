"""Gradient nodes: derivatives inside of a model equal JAX's from outside."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from onnx import helper

import ipujax.onnx
from tests.ipujax.onnx.models import info, model_of

DOMAIN = "ai.onnx.preview.training"


def gradient_node(inputs, outputs, xs, y, zs=None):
    attributes = {"xs": xs, "y": y} | ({"zs": zs} if zs else {})
    return helper.make_node("Gradient", inputs, outputs, f"gradient_of_{y}", domain=DOMAIN, **attributes)


def loaded(nodes, inputs, outputs):
    values = [info(name, shape=(3,)) for name in inputs], [info(name, shape=None) for name in outputs]
    return ipujax.onnx.load(model_of(nodes, *values, domains=[DOMAIN]))


SQUARES = [helper.make_node("Mul", ["a", "a"], ["aa"]), helper.make_node("Mul", ["aa", "b"], ["y"])]


def test_gradients_by_two_inputs():
    model = loaded([*SQUARES, gradient_node(["a", "b"], ["da", "db"], ["a", "b"], "y")], ["a", "b"], ["y", "da", "db"])
    a = jnp.arange(1.0, 4.0)
    b = jnp.arange(4.0, 7.0)
    _, da, db = jax.jit(model)(model.params, a, b)
    np.testing.assert_allclose(da, 2 * a * b)
    np.testing.assert_allclose(db, a * a)


def test_gradient_by_an_intermediate_value_elsewhere():
    node = gradient_node(["other", "b"], ["d"], ["aa"], "y", ["b"])
    model = loaded([*SQUARES, node], ["a", "b", "other"], ["d"])
    b = jnp.arange(4.0, 7.0)
    np.testing.assert_allclose(model(model.params, b, b, 9 * b), b)


def test_gradient_of_a_gradient():
    first = gradient_node(["a", "b"], ["da"], ["a"], "y", ["b"])
    second = gradient_node(["a", "b"], ["dda"], ["a"], "da", ["b"])
    model = loaded([*SQUARES, first, second], ["a", "b"], ["dda"])
    a = jnp.arange(1.0, 4.0)
    b = jnp.arange(4.0, 7.0)
    np.testing.assert_allclose(model(model.params, a, b), 2 * b)
