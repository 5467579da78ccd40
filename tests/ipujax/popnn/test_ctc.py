"""popnn.ctc_loss against Optax and its gradient, and against all paths written out."""

from __future__ import annotations

from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from ipujax import poplar
from ipujax.poplar.program import Sequence
from ipujax.popnn import ctc_loss
from ipujax.popnn.ctc_loss import loss_and_gradient
from ipujax.recurrent import running_mask
from ipujax.runtime.errors import GraphError
from ipujax.runtime.graph.program import Repeat
from ipujax.runtime.graph.walks import distinct
from tests.ipujax.poplar.engine_helpers import both, constant, new_graph, variable
from tests.ipujax.popnn.recurrent_helpers import numbers

TIME = 5
BATCH = 4
CLASSES = 5
LENGTH = 3
LOGITS = numbers((TIME, BATCH, CLASSES), 1)
LABELS = np.array([[1, 2, 3], [2, 2, 0], [4, 9, 9], [0, 0, 0]])  # the blank of these is 0; 9 does not count
LABEL_LENGTHS = np.array([3, 2, 1, 0])
DATA_LENGTHS = np.array([5, 4, 3, 4])


def by_optax(logits, labels=LABELS, blank=0):
    late = (np.arange(TIME)[None] >= DATA_LENGTHS[:, None]).astype(np.float32)
    unused = (np.arange(LENGTH)[None] >= LABEL_LENGTHS[:, None]).astype(np.float32)
    labels = np.where(unused > 0, 0, labels)
    return optax.ctc_loss(logits.transpose(1, 0, 2), late, labels, unused, blank_id=blank)


def tensors(graph, data, labels=LABELS, data_lengths=DATA_LENGTHS, label_lengths=LABEL_LENGTHS, dtype=poplar.FLOAT):
    """The operands, data and labels created by the library."""
    time, batch, classes = data.shape
    x = ctc_loss.create_data_input(graph, dtype, batch, time, classes)
    y = ctc_loss.create_labels_input(graph, poplar.UNSIGNED_INT, batch, labels.shape[1])
    graph.set_initial_value(x, data)
    graph.set_initial_value(y, labels)
    return x, y, constant(graph, data_lengths, poplar.UNSIGNED_INT), constant(graph, label_lengths, poplar.INT)


def test_loss_and_gradient_against_optax_with_another_blank():
    blank = 2
    swap = np.array([2, 1, 0, 3, 4, 5, 6, 7, 8, 9])  # no label may be the blank
    labels = swap[LABELS]
    graph = new_graph()
    prog = Sequence()
    inputs = tensors(graph, LOGITS, labels)
    loss, gradient = ctc_loss.calc_loss_and_gradient_logits(graph, poplar.FLOAT, *inputs, prog, blank)
    alone = ctc_loss.calc_ctc_loss_logits(graph, poplar.FLOAT, *inputs, prog, blank)
    actual = both(graph, prog, {"loss": loss, "gradient": gradient, "alone": alone})
    expected = by_optax(LOGITS, labels, blank)
    np.testing.assert_allclose(actual["loss"], expected, rtol=1e-5)
    np.testing.assert_allclose(actual["alone"], expected, rtol=1e-5)
    slope = jax.grad(lambda x: by_optax(x, labels, blank).sum())(LOGITS)
    np.testing.assert_allclose(actual["gradient"], slope, rtol=1e-4, atol=1e-5)
    assert not graph.notes.fallbacks
    assert [node.count for node in distinct(prog) if isinstance(node, Repeat)] == [TIME] * 3


def test_gradient_of_log_probabilities_and_of_their_softmax():
    logs = np.asarray(jax.nn.log_softmax(LOGITS))
    graph = new_graph()
    prog = Sequence()
    inputs = tensors(graph, logs)
    loss, through = ctc_loss.calc_loss_and_gradient_log_probabilities(graph, poplar.FLOAT, *inputs, prog, 0)
    _, direct = ctc_loss.calc_loss_and_gradient_log_probabilities(
        graph, poplar.FLOAT, *inputs, prog, 0, include_softmax_gradient=False
    )
    alone = ctc_loss.calc_ctc_loss(graph, poplar.FLOAT, *inputs, prog, 0)
    actual = both(graph, prog, {"loss": loss, "through": through, "direct": direct, "alone": alone})
    np.testing.assert_allclose(actual["loss"], by_optax(LOGITS), rtol=1e-5)
    np.testing.assert_allclose(actual["alone"], by_optax(LOGITS), rtol=1e-5)
    slope = jax.grad(lambda x: by_optax(x).sum())(LOGITS)
    np.testing.assert_allclose(actual["through"], slope, rtol=1e-4, atol=1e-5)
    _, vjp = jax.vjp(jax.nn.log_softmax, LOGITS)
    np.testing.assert_allclose(vjp(jnp.asarray(actual["direct"]))[0], slope, rtol=1e-4, atol=1e-5)


def test_all_paths_written_out():
    logs = np.asarray(jax.nn.log_softmax(numbers((4, 3, 3), 2)))
    labels = np.array([[1, 2], [1, 1], [2, 0]])
    lengths = np.array([2, 2, 1])

    def spelled(path):
        return [c for n, c in enumerate(path) if c and (n == 0 or path[n - 1] != c)]

    sums = np.zeros(3)
    for path in product(range(3), repeat=4):
        for b in range(3):
            if spelled(path) == labels[b, : lengths[b]].tolist():
                sums[b] += np.exp(sum(logs[t, b, c] for t, c in enumerate(path)))
    graph = new_graph()
    prog = Sequence()
    loss = ctc_loss.calc_ctc_loss(
        graph, poplar.FLOAT, *tensors(graph, logs, labels, np.array([4, 4, 4]), lengths), prog, 0
    )
    np.testing.assert_allclose(both(graph, prog, {"loss": loss})["loss"], -np.log(sums), rtol=1e-5)


def test_labels_that_cannot_be_spelled_and_impossible_classes():
    # Three symbols in two steps; two equal ones in two steps; a class of no probability; nothing in no steps.
    logs = np.asarray(jax.nn.log_softmax(numbers((3, 4, 3), 4))).copy()
    logs[1, 2, 2] = -np.inf
    labels = np.array([[1, 2, 1], [1, 1, 0], [2, 0, 0], [0, 0, 0]])
    graph = new_graph()
    prog = Sequence()
    loss, gradient = ctc_loss.calc_loss_and_gradient_log_probabilities(
        graph,
        poplar.FLOAT,
        *tensors(graph, logs, labels, np.array([2, 2, 3, 0]), np.array([3, 2, 1, 0])),
        prog,
        0,
        include_softmax_gradient=False,
    )
    actual = both(graph, prog, {"loss": loss, "gradient": gradient})
    p = np.exp(logs[:, 2, 2])
    q = np.exp(logs[:, 2, 0])
    only = p[0] * q[1] * q[2] + q[0] * q[1] * p[2]
    np.testing.assert_allclose(actual["loss"], [np.inf, np.inf, -np.log(only), 0], rtol=1e-5)
    np.testing.assert_array_equal(actual["gradient"][:, [0, 1, 3]], 0)
    np.testing.assert_allclose(actual["gradient"][:, 2].sum(1), [-1, -1, -1], rtol=1e-5)  # each step emits something
    assert actual["gradient"][1, 2, 2] == 0


def test_half_data_is_summed_in_float():
    logs = np.asarray(jax.nn.log_softmax(LOGITS)).astype(np.float16)
    graph = new_graph()
    prog = Sequence()
    inputs = tensors(graph, logs, dtype=poplar.HALF)
    wide = ctc_loss.calc_ctc_loss(graph, poplar.FLOAT, *inputs, prog, 0)
    narrow = ctc_loss.calc_ctc_loss(graph, poplar.HALF, *inputs, prog, 0)
    actual = both(graph, prog, {"wide": wide, "narrow": narrow})
    graph = new_graph()
    prog = Sequence()
    exact = ctc_loss.calc_ctc_loss(graph, poplar.FLOAT, *tensors(graph, logs.astype(np.float32)), prog, 0)
    np.testing.assert_allclose(actual["wide"], both(graph, prog, {"exact": exact})["exact"], rtol=1e-6)
    np.testing.assert_array_equal(actual["narrow"], actual["wide"].astype(np.float16))


def test_wrong_operands():
    graph = new_graph()
    prog = Sequence()
    x, labels, lengths, used = tensors(graph, LOGITS)
    short = constant(graph, [1, 2], poplar.INT)
    floats = variable(graph, [4, 3])
    cases = [
        (lambda: ctc_loss.calc_ctc_loss(graph, poplar.FLOAT, x, labels, lengths, used, prog, 5), "must be a class"),
        (lambda: ctc_loss.calc_ctc_loss(graph, poplar.FLOAT, x, labels, short, used, prog, 0), "as many labels"),
        (lambda: ctc_loss.calc_ctc_loss(graph, poplar.FLOAT, x, x, lengths, used, prog, 0), "must be sequences"),
        (
            lambda: ctc_loss.calc_ctc_loss(graph, poplar.FLOAT, x, floats, lengths, used, prog, 0),
            "int",
        ),
    ]
    for call, message in cases:
        with pytest.raises(GraphError, match=message) as error:
            call()
        assert "test_ctc.py" in str(error.value)


def test_narrow_integers_of_labels_and_lengths() -> None:
    time, classes = 300, 260
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(time, 2, classes)), jnp.float32)
    operands = [np.array([[3, 0], [4, 4]]), np.array([5, 6]), np.array([2, 1])]
    wide, narrow = (
        loss_and_gradient(
            logits - 6, *(jnp.asarray(x, dtype) for x in operands), blank=259, include_softmax_gradient=False
        )
        for dtype in (jnp.int32, jnp.uint8)
    )
    for a, b in zip(narrow, wide, strict=True):
        np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(running_mask(time, jnp.array([5, 6], jnp.int8)).sum((0, 2)), [5, 6])
