"""poplin and popnn by hand: every function against numpy or JAX, on engine and tile interpreter."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from ipujax import poplar, poplin, popnn
from ipujax.poplar.program import Sequence
from tests.ipujax.poplar.engine_helpers import both, constant, new_graph, variable


def numbers(shape, seed):
    """Normally distributed numbers, the same whichever tests run."""
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


# --- poplin ---


def test_mat_mul_and_its_inputs():
    graph = new_graph()
    prog = Sequence()
    a = poplin.create_mat_mul_input_lhs(graph, poplar.FLOAT, [6, 10], [10, 4], "a")
    b = poplin.create_mat_mul_input_rhs(graph, poplar.FLOAT, [6, 10], [10, 4], "b")
    x = numbers((6, 10), 1)
    y = numbers((10, 4), 2)
    graph.set_initial_value(a, x)
    graph.set_initial_value(b, y)
    out = poplin.mat_mul(graph, a, b, prog, options={"availableMemoryProportion": "0.5"})
    acc = variable(graph, [6, 4], value=np.ones((6, 4)))
    poplin.mat_mul_acc(graph, acc, 2.0, a, b, prog)
    groups = poplin.mat_mul_grouped(
        graph, a.reshape((2, 3, 10)), b.expand_dims(0).broadcast_in_dim((2, 10, 4), (0, 1, 2)), prog
    )
    actual = both(graph, prog, {"out": out, "acc": acc, "groups": groups})
    np.testing.assert_allclose(actual["out"], x @ y, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(actual["acc"], 1 + 2 * (x @ y), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(actual["groups"], (x @ y).reshape(2, 3, 4), rtol=1e-5, atol=1e-5)


def test_convolution_and_its_inputs():
    params = poplin.ConvParams(poplar.FLOAT, 2, (5, 6), (3, 2), 2, 3, 2, (2, 1), (1, 0), (1, 1))
    graph = new_graph()
    prog = Sequence()
    x = poplin.create_input(graph, params)
    w = poplin.create_weights(graph, params)
    a, b = (numbers(t.shape, 3) for t in (x, w))
    graph.set_initial_value(x, a)
    graph.set_initial_value(w, b)
    out = poplin.convolution(graph, x, w, params, prog)
    kernels = b.reshape(6, 2, 3, 2)
    expected = lax.conv_general_dilated(a, kernels, (2, 1), [(1, 1), (0, 1)], feature_group_count=2)
    np.testing.assert_allclose(both(graph, prog, {"out": out})["out"], expected, rtol=1e-4, atol=1e-5)


def test_triangular_solve_and_cholesky():
    graph = new_graph()
    prog = Sequence()
    m = numbers((4, 4), 4)
    spd = m @ m.T + 4 * np.eye(4, dtype=np.float32)
    factor = poplin.cholesky(graph, variable(graph, [4, 4], value=spd), prog)
    x = poplin.triangular_solve(graph, factor, variable(graph, [4, 1], value=[1, 2, 3, 4]), prog)
    actual = both(graph, prog, {"factor": factor, "x": x})
    np.testing.assert_allclose(actual["factor"], np.linalg.cholesky(spd), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(np.tril(actual["factor"]) @ actual["x"], [[1], [2], [3], [4]], rtol=1e-4, atol=1e-4)


# --- popnn ---


@pytest.mark.parametrize("kind", sorted(popnn.NON_LINEARITIES))
def test_non_linearities_and_gradients(kind):
    value = numbers((3, 4), 5) * 2
    gradient = numbers((3, 4), 6)
    graph = new_graph()
    prog = Sequence()
    x = variable(graph, [3, 4], value=value)
    g = variable(graph, [3, 4], value=gradient)
    out = popnn.non_linearity(graph, kind, x, prog)
    back = popnn.non_linearity_input_gradient(graph, kind, x if kind in ("gelu", "swish") else out, g, prog)
    popnn.non_linearity_in_place(graph, kind, x, prog)
    actual = both(graph, prog, {"out": out, "back": back, "x": x})
    expected, vjp = jax.vjp(popnn.NON_LINEARITIES[kind], value)
    np.testing.assert_allclose(actual["out"], expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(actual["x"], expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(actual["back"], vjp(gradient)[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["max", "avg", "sum"])
def test_pooling_and_its_gradient(kind):
    value = numbers((2, 3, 6, 5), 7)
    params = popnn.PoolParams(kind, (2, 2), (2, 1), (0, 1), (0, 0))
    graph = new_graph()
    prog = Sequence()
    x = variable(graph, [2, 3, 6, 5], value=value)
    out = popnn.pool(graph, params, x, prog)
    back = popnn.pool_input_gradient(graph, params, x, out, prog)

    actual = both(graph, prog, {"out": out, "back": back})
    expected = np.zeros((2, 3, 3, 5), np.float32)
    slope = np.zeros_like(value)
    for i, j in np.ndindex(3, 5):
        window = np.s_[:, :, 2 * i : 2 * i + 2, max(0, j - 1) : j + 1]
        part = value[window]
        picked = part == part.max((2, 3), keepdims=True) if kind == "max" else np.ones(part.shape, bool)
        weight = picked / (part.shape[2] * part.shape[3] if kind == "avg" else 1)
        expected[:, :, i, j] = (part * weight).sum((2, 3))
        slope[window] += weight * actual["out"][:, :, i, j, None, None]
    np.testing.assert_allclose(actual["out"], expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(actual["back"], slope, rtol=1e-4, atol=1e-5)


def test_losses_and_accuracy():
    logits = numbers((5, 3), 8)
    labels = np.array([0, 2, 1, 1, 0], np.int32)
    graph = new_graph()
    prog = Sequence()
    x = variable(graph, [5, 3], value=logits)
    y = constant(graph, labels, poplar.INT)
    probabilities = popnn.softmax(graph, x, prog)
    loss = variable(graph, [5])
    deltas = variable(graph, [5, 3])
    correct = variable(graph, [], poplar.UNSIGNED_INT)
    popnn.calc_loss(graph, probabilities, y, loss, deltas, "softmax_cross_entropy", prog)
    popnn.calc_accuracy(graph, probabilities, y, correct, prog)
    squared = variable(graph, [5])
    slope = variable(graph, [5, 3])
    popnn.calc_loss(graph, x, probabilities, squared, slope, "sum_squared", prog)
    actual = both(graph, prog, {"l": loss, "d": deltas, "c": correct, "s": squared, "g": slope})

    def cross_entropy(z):
        return -jnp.take_along_axis(jax.nn.log_softmax(z), labels[:, None], 1)[:, 0]

    np.testing.assert_allclose(actual["l"], cross_entropy(logits), rtol=1e-5)
    np.testing.assert_allclose(actual["d"], jax.grad(lambda z: cross_entropy(z).sum())(logits), rtol=1e-4, atol=1e-6)
    assert actual["c"] == (logits.argmax(1) == labels).sum()
    difference = logits - np.asarray(jax.nn.softmax(logits))
    np.testing.assert_allclose(actual["g"], difference, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(actual["s"], 0.5 * (difference**2).sum(1), rtol=1e-4)


def test_norms():
    value = numbers((3, 4, 2, 2), 9)
    graph = new_graph()
    prog = Sequence()
    x = variable(graph, [3, 4, 2, 2], value=value)
    gamma = constant(graph, [1.0, 2, 3, 4])
    beta = constant(graph, [0.0, 1, 2, 3])
    outs = {
        "batch": popnn.batch_norm(graph, x, gamma, beta, 1e-5, prog),
        "group": popnn.group_norm(graph, x, gamma, beta, 1e-5, 2, prog),
        "instance": popnn.instance_norm(graph, x, gamma, beta, 1e-5, prog),
        "layer": popnn.layer_norm(graph, x, gamma, beta, 1e-5, prog),
    }
    actual = both(graph, prog, {name: out for name, (out, _, _) in outs.items()})
    scale, shift = (np.arange(4.0).reshape(1, 4, 1, 1) + n for n in (1, 0))
    grouped = value.reshape(3, 2, 2, 2, 2)
    over = {
        "batch": (value, (0, 2, 3)),
        "group": (grouped, (2, 3, 4)),
        "instance": (value, (2, 3)),
        "layer": (value, (1, 2, 3)),
    }
    for name, (a, axes) in over.items():
        whitened = (a - a.mean(axes, keepdims=True)) / np.sqrt(a.var(axes, keepdims=True) + 1e-5)
        np.testing.assert_allclose(actual[name], whitened.reshape(value.shape) * scale + shift, rtol=1e-4, atol=1e-4)
