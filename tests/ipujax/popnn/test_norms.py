"""Normalisation layers of popnn: statistics, results and gradients, against numpy and `jax.grad` of the whole layer."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ipujax import poplar, popnn
from ipujax.poplar.program import Sequence
from ipujax.runtime.errors import GraphError
from tests.ipujax.poplar.engine_helpers import both, constant, new_graph, variable
from tests.ipujax.popnn.recurrent_helpers import assert_all_close, numbers

X = numbers((3, 4, 2, 2), 1) * 2 + 0.2
D_OUT = numbers(X.shape, 2)
GAMMA = numbers((4,), 3)
BETA = numbers((4,), 4)
EPSILON = 1e-3
# How the elements are arranged, what statistics are taken over, and their shape.
KINDS = {
    "batch": ((3, 4, 1, 4), (0, 2, 3), (4,)),
    "group": ((3, 2, 2, 4), (2, 3), (3, 2)),
    "instance": ((3, 4, 1, 4), (2, 3), (3, 4)),
    "layer": ((3, 1, 4, 4), (2, 3), (3, 1)),
}


def normalised(kind, x, gamma, beta, unbiased=False):
    """The result, the whitened activations and the statistics, by the formula."""
    shape, over, kept = KINDS[kind]
    parts = x.reshape(shape)
    mean = parts.mean(over, keepdims=True)
    inverse = 1 / jnp.sqrt(parts.var(over, keepdims=True, ddof=int(unbiased)) + EPSILON)
    white = ((parts - mean) * inverse).reshape(x.shape)
    out = white * gamma.reshape(1, -1, 1, 1) + beta.reshape(1, -1, 1, 1)
    return out, white, mean.reshape(kept), inverse.reshape(kept)


def statistics(kind, *arguments, **settings):
    groups = {"num_groups": 2} if kind == "group" else {}
    return getattr(popnn, f"{kind}_norm_statistics")(*arguments, **groups, **settings)


@pytest.mark.parametrize("kind", KINDS)
def test_layer_and_its_gradients(kind):
    graph = new_graph()
    prog = Sequence()
    x = variable(graph, list(X.shape), value=X)
    d_out = constant(graph, D_OUT)
    gamma, beta = popnn.create_norm_params(graph, x)
    graph.set_initial_value(gamma, GAMMA)
    graph.set_initial_value(beta, BETA)
    normalise = popnn.batch_normalise if kind == "batch" else getattr(popnn, f"{kind}_normalise")
    whiten, param_gradients, gradients = (
        getattr(popnn, f"{kind}_norm_{part}") for part in ("whiten", "param_gradients", "gradients")
    )
    mean, inverse = statistics(kind, graph, x, EPSILON, prog, stable_algo=True)
    _, plain = statistics(kind, graph, x, EPSILON, prog)
    _, unbiased = statistics(kind, graph, x, EPSILON, prog, unbiased_var_estimate=True)
    y, white = normalise(graph, x, gamma, beta, mean, inverse, prog)
    repeated = whiten(graph, x, mean, inverse, prog)
    d_gamma, d_beta = param_gradients(graph, white, d_out, prog)
    d_x = gradients(graph, white, d_out, inverse, gamma, prog)
    popnn.norm_param_update(graph, d_gamma, d_beta, -0.5, gamma, beta, prog)
    actual = both(graph, prog, {
        "y": y, "white": white, "again": repeated, "mean": mean, "inverse": inverse, "plain": plain,
        "unbiased": unbiased, "x": d_x, "d_gamma": d_gamma, "d_beta": d_beta, "gamma": gamma, "beta": beta,
    })  # fmt: skip
    out, whitened, expected_mean, expected_inverse = normalised(kind, X, GAMMA, BETA)
    slopes = jax.grad(lambda *a: jnp.sum(normalised(kind, *a)[0] * D_OUT), (0, 1, 2))(X, GAMMA, BETA)
    expected = {
        "y": out, "white": whitened, "again": whitened, "mean": expected_mean, "inverse": expected_inverse,
        "plain": expected_inverse, "unbiased": normalised(kind, X, GAMMA, BETA, unbiased=True)[3], "x": slopes[0],
        "d_gamma": slopes[1], "d_beta": slopes[2], "gamma": GAMMA - slopes[1] / 2, "beta": BETA - slopes[2] / 2,
    }  # fmt: skip
    assert_all_close(actual, expected, rtol=1e-4, atol=1e-5)
    assert not graph.notes.fallbacks


def test_the_stable_algorithm_is_needed_far_from_zero():
    far = X + 3000
    graph = new_graph()
    prog = Sequence()
    x = variable(graph, list(X.shape), value=far)
    _, plain = popnn.batch_norm_statistics(graph, x, EPSILON, prog)
    _, stable = popnn.batch_norm_statistics(graph, x, EPSILON, prog, stable_algo=True)
    actual = both(graph, prog, {"stable": stable})["stable"]
    exact = 1 / np.sqrt(far.astype(np.float64).var((0, 2, 3)) + EPSILON)
    np.testing.assert_allclose(actual, exact, rtol=1e-3)
    graph.create_host_read("plain", plain)
    engine = poplar.Engine(graph, prog)
    engine.load_and_run(poplar.IPUModel(tiles_per_ipu=8).create_device())
    assert np.abs(engine.read_tensor("plain") / exact - 1).max() > 0.01


def test_half_is_computed_in_float():
    graph = new_graph()
    prog = Sequence()
    x = variable(graph, [64, 4], poplar.HALF, value=numbers((64, 4), 5) * 30)  # sums of squares beyond half's range
    mean, inverse = popnn.batch_norm_statistics(graph, x, EPSILON, prog)
    actual = both(graph, prog, {"mean": mean, "inverse": inverse})
    values = (numbers((64, 4), 5) * 30).astype(np.float16).astype(np.float64)
    np.testing.assert_allclose(actual["mean"], values.mean(0), rtol=2e-3)
    np.testing.assert_allclose(actual["inverse"], 1 / np.sqrt(values.var(0) + EPSILON), rtol=2e-3)


def test_wrong_operands():
    graph = new_graph()
    prog = Sequence()
    x = variable(graph, [3, 4, 2])
    gamma = variable(graph, [4])
    full = variable(graph, [3, 4], poplar.INT)
    cases = [
        (lambda: popnn.group_norm_statistics(graph, x, 1e-5, prog, 3), "4 channels, 3 groups"),
        (lambda: popnn.batch_norm_statistics(graph, full, 1e-5, prog), "must have activations"),
        (lambda: popnn.batch_normalise(graph, x, gamma, gamma[:3], gamma, gamma, prog), "must have activations"),
        (lambda: popnn.batch_norm_whiten(graph, x, gamma, gamma[:3], prog), "statistics must fit"),
        (lambda: popnn.group_norm_whiten(graph, x, gamma, gamma, prog), "statistics must fit"),
        (lambda: popnn.layer_norm_param_gradients(graph, x, x[:, :, :1], prog), "the wrong shape"),
        (lambda: popnn.instance_norm_statistics(graph, x[:, :, :1], 1e-5, prog, True), "too few elements"),
    ]
    for call, message in cases:
        with pytest.raises(GraphError, match=message) as error:
            call()
        assert "test_norms.py" in str(error.value)
