"""Losses of popnn against JAX and its gradients; extremes of rows; the logarithm of the softmax."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ipujax import poplar, popnn, popops
from ipujax.poplar.program import Sequence
from ipujax.runtime.errors import GraphError
from tests.ipujax.poplar.engine_helpers import both, constant, new_graph, variable
from tests.ipujax.popnn.recurrent_helpers import numbers

LOGITS = numbers((5, 4), 1)


def softmax(x):
    return np.exp(x) / np.exp(x).sum(1, keepdims=True)


PROBABILITIES = softmax(LOGITS)
TARGETS = softmax(numbers((5, 4), 2))
LABELS = np.array([0, 3, -1, 1, 2], np.int32)  # -1 is masked
ONE_HOT = (LABELS[:, None] == np.arange(4)).astype(np.float32)


def cross_entropy(x, t):
    return -jnp.sum(t * jax.nn.log_softmax(x), 1)


# Outputs given, the loss of what `deltas` are the gradient of, and that.
CASES = {
    "sum_squared": (LOGITS, lambda x, t: jnp.sum((x - t) ** 2, 1) / 2, LOGITS),
    "mean_squared": (LOGITS, lambda x, t: jnp.mean((x - t) ** 2, 1), LOGITS),
    "cross_entropy": (PROBABILITIES, cross_entropy, LOGITS),
    "softmax_cross_entropy": (PROBABILITIES, cross_entropy, LOGITS),
    "cross_entropy_of_logits": (LOGITS, cross_entropy, LOGITS),
    "cross_entropy_of_probabilities": (PROBABILITIES, lambda p, t: -jnp.sum(t * jnp.log(p), 1), PROBABILITIES),
}


@pytest.mark.parametrize("kind", CASES)
def test_loss_and_its_gradient(kind):
    outputs, function, variables = CASES[kind]
    graph = new_graph()
    prog = Sequence()
    x = constant(graph, outputs)
    dense = constant(graph, TARGETS)
    labels = constant(graph, LABELS, poplar.INT)
    actual = {}
    for name, expected in {"dense": dense, "labels": labels}.items():
        actual[f"{name} loss"] = variable(graph, [5])
        actual[f"{name} deltas"] = variable(graph, [5, 4])
        popnn.calc_loss(graph, x, expected, actual[f"{name} loss"], actual[f"{name} deltas"], kind, prog)
    actual = both(graph, prog, actual)
    for name, targets in {"dense": TARGETS, "labels": ONE_HOT}.items():
        slope = jax.grad(lambda v, t=targets: function(v, t).sum())(variables)
        np.testing.assert_allclose(actual[f"{name} loss"], function(variables, targets), rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(actual[f"{name} deltas"], slope, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("kind", "delta", "expected"), [("sum_squared", 200, 40_000), ("mean_squared", 254, 64_516)])
def test_squared_losses_of_halves_are_finite_where_the_loss_is(kind, delta, expected):
    graph = new_graph()
    prog = Sequence()
    outputs = constant(graph, np.full((1, 2), delta), poplar.HALF)
    targets = constant(graph, np.zeros((1, 2)), poplar.HALF)
    loss, deltas = (variable(graph, shape, poplar.HALF) for shape in ([1], [1, 2]))
    popnn.calc_loss(graph, outputs, targets, loss, deltas, kind, prog)
    np.testing.assert_array_equal(both(graph, prog, {"loss": loss})["loss"], np.float16(expected))


def test_average_pools_of_halves_are_finite():
    images = np.full((1, 8, 3, 3), 40_000)
    graph = new_graph()
    prog = Sequence()
    params = popnn.PoolParams("avg", (2, 2), (1, 1), (1, 1), (0, 0))
    pooled = popnn.pool(graph, params, constant(graph, images, poplar.HALF), prog)
    np.testing.assert_array_equal(both(graph, prog, {"pooled": pooled})["pooled"], images.astype(np.float16))


def test_scalings_and_accuracy():
    graph = new_graph()
    prog = Sequence()
    x = constant(graph, 8 * PROBABILITIES)
    labels = constant(graph, LABELS, poplar.INT)
    loss = variable(graph, [5])
    deltas = variable(graph, [5, 4])
    right = variable(graph, [], poplar.UNSIGNED_INT)
    popnn.calc_loss(
        graph, x, labels, loss, deltas, "cross_entropy", prog, num_correct=right,
        deltas_scale=constant(graph, [16.0]), model_output_scaling=constant(graph, 8.0),
    )  # fmt: skip
    actual = both(graph, prog, {"loss": loss, "deltas": deltas, "right": right})
    np.testing.assert_allclose(actual["loss"], cross_entropy(LOGITS, ONE_HOT), rtol=1e-5, atol=1e-6)
    slope = jax.grad(lambda z: cross_entropy(z, ONE_HOT).sum())(LOGITS)
    np.testing.assert_allclose(actual["deltas"], 16 * slope, rtol=1e-4, atol=1e-5)
    assert actual["right"] == (LOGITS.argmax(1) == LABELS).sum()


def test_extremes_of_rows():
    values = np.round(numbers((6, 7), 3) * 2)  # with equal elements
    graph = new_graph()
    prog = Sequence()
    x = variable(graph, [6, 7], value=values)
    outs = {"most": popnn.arg_max(graph, x, prog), "least": popnn.arg_min(graph, x, prog)}
    outs["max"], outs["max at"] = popnn.max_and_arg_max(graph, x, prog)
    outs["min"], outs["min at"] = popnn.min_and_arg_min(graph, x, prog)
    outs["logs"] = popnn.log_softmax(graph, x, prog)
    actual = both(graph, prog, outs)
    for name in ("most", "max at"):
        np.testing.assert_array_equal(actual[name], values.argmax(1))
        assert actual[name].dtype == np.uint32
    for name in ("least", "min at"):
        np.testing.assert_array_equal(actual[name], values.argmin(1))
    np.testing.assert_array_equal(actual["max"], values.max(1))
    np.testing.assert_array_equal(actual["min"], values.min(1))
    shifted = values - values.max(1, keepdims=True)
    np.testing.assert_allclose(actual["logs"], shifted - np.log(np.exp(shifted).sum(1, keepdims=True)), rtol=1e-5)


def test_masked_labels_have_the_code_of_popops():
    assert np.uint32(popops.MASKED_LABEL_CODE) == np.int32(-1).view(np.uint32)
    graph = new_graph()
    prog = Sequence()
    labels = constant(graph, np.array([1, popops.MASKED_LABEL_CODE], np.uint32), poplar.UNSIGNED_INT)
    loss = variable(graph, [2])
    deltas = variable(graph, [2, 4])
    popnn.calc_loss(graph, constant(graph, PROBABILITIES[:2]), labels, loss, deltas, "cross_entropy", prog)
    actual = both(graph, prog, {"loss": loss, "deltas": deltas})
    assert actual["loss"][0] > 0 and actual["loss"][1] == 0
    assert np.all(actual["deltas"][1] == 0)


def test_labels_of_a_type_with_fewer_numbers_than_classes():
    outputs = numbers((2, 300), 4)
    outputs[:, 257] = 9  # 257 is 1 in 8 bits
    graph = new_graph()
    prog = Sequence()
    labels = constant(graph, [1, 200], poplar.UNSIGNED_CHAR)
    loss, deltas, right = variable(graph, [2]), variable(graph, [2, 300]), variable(graph, [], poplar.UNSIGNED_INT)
    popnn.calc_loss(
        graph, constant(graph, outputs), labels, loss, deltas, "cross_entropy_of_logits", prog, num_correct=right
    )
    actual = both(graph, prog, {"loss": loss, "right": right})
    np.testing.assert_allclose(actual["loss"], cross_entropy(outputs, np.eye(300)[[1, 200]]), rtol=1e-5)
    assert actual["right"] == 0


def test_wrong_operands():
    graph = new_graph()
    prog = Sequence()
    x = variable(graph, [5, 4])
    labels = constant(graph, LABELS, poplar.INT)
    loss = variable(graph, [5])
    deltas = variable(graph, [5, 4])
    cases = [
        (lambda: popnn.calc_loss(graph, x, labels, loss, deltas, "cross_entrpy", prog), "try: 'cross_entropy'"),
        (lambda: popnn.calc_loss(graph, x, labels[:3], loss, deltas, "cross_entropy", prog), "must match"),
        (lambda: popnn.calc_loss(graph, x, loss, loss, deltas, "cross_entropy", prog), r"float32\[5\]"),
        (lambda: popnn.calc_loss(graph, x, labels, x, deltas, "cross_entropy", prog), r"float32\[5\](.|\n)*\[5, 4\]"),
        (lambda: popnn.calc_accuracy(graph, x, x, loss, prog), "must match"),
        (lambda: popnn.arg_max(graph, labels, prog), "rows of elements"),
    ]
    for call, message in cases:
        with pytest.raises(GraphError, match=message) as error:
            call()
        assert "test_losses.py" in str(error.value)
