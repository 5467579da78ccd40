"""Operators of ai.graphcore against NumPy, and their gradients against finite differences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from ipujax import popart
from ipujax.onnx.registry import OPERATORS
from ipujax.popart.building import DOMAIN, GRAPHCORE_OPERATIONS

RNG = np.random.default_rng(5)
X = RNG.normal(size=(3, 4)).astype(np.float32)
Y = RNG.normal(size=(3, 4)).astype(np.float32)
INTS = RNG.integers(0, 100, size=(3, 4)).astype(np.int32)
OTHERS = RNG.integers(0, 100, size=(3, 4)).astype(np.int32)
OFFSET = np.array([1, 2], np.uint32)
BOTH = {"axes": [0, 1], "sizes": [2, 1]}


def operator(name: str) -> Callable[..., Any]:
    """Return the function of an operator of ai.graphcore."""
    return OPERATORS[DOMAIN, name].function


def test_every_operation_of_the_builder_has_an_operator() -> None:
    registered = {op_type for domain, op_type in OPERATORS if domain == DOMAIN}
    without = {"CtcBeamSearchDecoder", "ReplicatedReduceScatter"}
    of_rewritten_nodes = {"ScanSlice", "ScanJoin", "Resize"}
    assert {
        operation.op_type for operation in GRAPHCORE_OPERATIONS.values()
    } - without | of_rewritten_nodes == registered


def updated(change: Callable[[np.ndarray], Any]) -> np.ndarray:
    """Return X with a part changed."""
    result = X.copy()
    part = result[1:3, 2:3]
    part[...] = change(part)
    return result


PART = np.full((2, 1), 7.0, np.float32)
CASES: list[tuple[str, tuple[Any, ...], dict[str, Any], Any]] = [
    ("Scale", (X,), {"scale": 3.0}, 3 * X),
    ("ScaledAdd", (X, Y), {"scale0": 0.5, "scale1": 2.0}, 0.5 * X + 2 * Y),
    ("ScaledAdd", (X, Y, np.float32([3]), np.float32([4])), {}, 3 * X + 4 * Y),
    ("Square", (X,), {}, X**2),
    ("Swish", (X,), {}, X / (1 + np.exp(-X))),
    ("Expm1", (X,), {}, np.expm1(X)),
    ("Log1p", (abs(X),), {}, np.log1p(abs(X))),
    ("Atan2", (X, Y), {}, np.arctan2(X, Y)),
    ("Fmod", (X, Y), {}, np.fmod(X, Y)),
    ("Remainder", (X, Y), {}, np.remainder(X, Y)),
    ("IncrementMod", (INTS,), {"increment": 3.0, "modulus": 7.0}, (INTS + 3) % 7),
    ("Round", (4 * X,), {}, np.round(4 * X)),
    ("BitwiseAnd", (INTS, OTHERS), {}, INTS & OTHERS),
    ("BitwiseOr", (INTS, OTHERS), {}, INTS | OTHERS),
    ("BitwiseXor", (INTS, OTHERS), {}, INTS ^ OTHERS),
    ("BitwiseXnor", (INTS, OTHERS), {}, ~(INTS ^ OTHERS)),
    ("BitwiseNot", (INTS,), {}, ~INTS),
    ("Reshape", (X,), {"shape": [0, 2, -1]}, X.reshape(3, 2, 2)),
    ("Slice", (X,), {"ends": [3, 2], "starts": [1, 0]}, X[1:3, 0:2]),
    ("Slice", (X,), {"ends": [3], "starts": [1], "axes": [1]}, X[:, 1:3]),
    ("Subsample", (X,), {"strides": [2, 3]}, X[::2, ::3]),
    ("Reverse", (X,), {"dimensions": [1]}, X[:, ::-1]),
    ("Init", (), {"shape": [2], "data_type": 1, "init_type": 1}, np.zeros(2, np.float32)),
    ("DynamicSlice", (X, OFFSET), BOTH, X[1:3, 2:3]),
    ("DynamicUpdate", (X, OFFSET, PART), BOTH, updated(lambda part: 7)),
    ("DynamicAdd", (X, OFFSET, PART), BOTH, updated(lambda part: part + 7)),
    ("DynamicZero", (X, OFFSET), BOTH, updated(lambda part: 0)),
    ("Bucketize", (X, np.float32([-1, 0, 1])), {}, np.searchsorted([-1, 0, 1], X).astype(np.int32)),
    ("GroupedGather", (np.stack([X, Y]), np.int32([[2, 0], [1, 1]])), {"axis": 1, "group_size": 2},
     np.stack([X[[2, 0]], Y[[1, 1]]])),
    ("L1", (X,), {"lambda": 0.5, "reduction": 0}, 0.5 * abs(X).sum()),
    ("IdentityLoss", (X,), {"reduction": "Mean"}, X.mean()),
    ("ConvFlipWeights", (X.reshape(3, 2, 2),), {}, X.reshape(3, 2, 2).transpose(1, 0, 2)[:, :, ::-1]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "operands", "attributes", "expected"), CASES, ids=[row[0] for row in CASES])
def test_results(name: str, operands: tuple[Any, ...], attributes: dict[str, Any], expected: Any) -> None:
    result = operator(name)(*map(jnp.asarray, operands), **attributes)
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("reduction", popart.ReductionType)
def test_losses_of_labels(reduction: popart.ReductionType) -> None:
    probabilities = np.asarray(jax.nn.softmax(jnp.asarray(X)))
    labels = np.array([1, 3, 0], np.int32)
    chosen = -np.log(probabilities[[0, 1, 2], labels])
    for ignored, counted in ((None, [0, 1, 2]), (3, [0, 2])):
        losses = np.where(np.isin(range(3), counted), chosen, 0)
        expected = {"Sum": losses.sum(), "Mean": losses.sum() / len(counted), "NoReduction": losses}[reduction.name]
        got = operator("Nll")(jnp.asarray(probabilities), jnp.asarray(labels), reduction=reduction, ignoreIndex=ignored)
        np.testing.assert_allclose(got, expected, rtol=1e-5)


@pytest.mark.parametrize("reduction", [r for r in popart.ScatterReduction if r.name != "NoReduction"])
def test_scatters(reduction: popart.ScatterReduction) -> None:
    indices = np.array([1, 1, 3])
    combine = {"Sum": np.sum, "Max": np.max, "Min": np.min, "Mul": np.prod}[reduction.name]
    expected = np.full((5, 4), 1.0 if reduction.name == "Mul" else 0.0, np.float32)
    expected[1] = combine(X[:2], axis=0)
    expected[3] = X[2]
    got = operator("ScatterReduce")(jnp.asarray(X), jnp.asarray(indices), axis_size=5, axis=0, reduction=int(reduction))
    np.testing.assert_allclose(got, expected, rtol=1e-6)


def test_the_largest_of_infinite_elements_is_infinite() -> None:
    source = jnp.array([-jnp.inf, -jnp.inf])
    indices = jnp.array([1, 1])
    for reduction, sign in ((popart.ScatterReduction.Max, 1), (popart.ScatterReduction.Min, -1)):
        got = operator("ScatterReduce")(sign * source, indices, axis_size=3, reduction=int(reduction))
        np.testing.assert_array_equal(got, sign * np.float32([0, -np.inf, 0]))


@pytest.mark.parametrize("groups", [1, 2])
def test_scatters_without_a_broadcast_leave_out_elements_without_an_index(groups: int) -> None:
    indices = np.array([[1, 0]])
    expected = np.zeros((1, 4), np.float32)
    expected[0, [1, 0]] = X[0, :2]
    settings = {"axis_size": 4, "enable_index_broadcast": 0}
    if groups == 1:
        got = operator("ScatterReduce")(jnp.asarray(X), jnp.asarray(indices), axis=1, **settings)
    else:
        operands = jnp.stack([X] * 2), jnp.stack([indices] * 2)
        both = operator("GroupedScatterReduce")(*operands, axis=2, group_size=2, **settings)
        np.testing.assert_array_equal(both[0], both[1])
        got = both[0]
    np.testing.assert_array_equal(got, expected)


def test_medians_and_sorts() -> None:
    value, index = operator("ReduceMedian")(jnp.asarray(X[:, :3]), axes=[1], keepdims=0)
    np.testing.assert_array_equal(value, np.median(X[:, :3], axis=1).astype(np.float32))
    np.testing.assert_array_equal(np.take_along_axis(X, np.asarray(index)[:, None], 1)[:, 0], value)
    ordered, places = operator("Sort")(jnp.asarray(X), axis=1, descending=1)
    np.testing.assert_array_equal(ordered, -np.sort(-X, axis=1))
    np.testing.assert_array_equal(np.take_along_axis(X, np.asarray(places), 1), ordered)


def test_group_norms() -> None:
    x = RNG.normal(size=(2, 4, 3)).astype(np.float32)
    scale, bias = RNG.normal(size=(2, 4)).astype(np.float32)
    normal, mean, inverse = operator("GroupNormalization")(x, scale, bias, num_groups=2)
    grouped = x.reshape(2, 2, -1)
    means = grouped.mean(-1)
    deviations = np.sqrt(grouped.var(-1) + 1e-5)
    np.testing.assert_allclose(mean, means.ravel(), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(inverse, 1 / deviations.ravel(), rtol=1e-4)
    standard = ((grouped - means[..., None]) / deviations[..., None]).reshape(x.shape)
    np.testing.assert_allclose(normal, standard * scale[:, None] + bias[:, None], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("output_count", [1, 5])
def test_norms_have_the_element_type_of_the_data(output_count: int) -> None:
    x = X.astype(np.float16)
    of_channels = [np.ones(4, np.float32)] * 4
    results = operator("BatchNormalization")(x, *of_channels, output_count=output_count)
    assert (results if output_count == 1 else results[0]).dtype == np.float16
    assert operator("GroupNormalization")(x, *of_channels[:2], num_groups=2)[0].dtype == np.float16


def test_batch_norms_in_training() -> None:
    x = RNG.normal(size=(5, 3)).astype(np.float32)
    ones = np.ones(3, np.float32)
    zeros = np.zeros(3, np.float32)
    results = operator("BatchNormalization")(x, ones, zeros, zeros, ones, momentum=0.9, output_count=5)
    np.testing.assert_allclose(results[1], 0.1 * x.mean(0), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(results[2], 0.9 + 0.1 * x.var(0, ddof=1), rtol=1e-4)
    np.testing.assert_allclose(results[0], (x - x.mean(0)) / np.sqrt(x.var(0) + 1e-5), rtol=1e-4, atol=1e-5)


def test_multi_convolutions_are_convolutions() -> None:
    data = RNG.normal(size=(1, 2, 5)).astype(np.float32)
    kernel = RNG.normal(size=(3, 2, 2)).astype(np.float32)
    bias = RNG.normal(size=3).astype(np.float32)
    first, second = operator("MultiConv")(
        data, kernel, data, kernel, bias, inputsPerConv=[2, 3], pads=[0, 0, 1, 1], strides=[1, 2], output_count=2
    )
    window = np.stack([data[..., i : i + 2] for i in range(4)], 2)
    np.testing.assert_allclose(first, np.einsum("ncwk,ock->now", window, kernel), rtol=1e-4, atol=1e-5)
    assert second.shape == (1, 3, 3)


def test_lstms() -> None:
    x = RNG.normal(size=(2, 3, 4)).astype(np.float32)
    weights = RNG.normal(size=(4, 9, 5)).astype(np.float32)
    biases = RNG.normal(size=(4, 5)).astype(np.float32)
    outputs, cell = operator("LSTM")(jnp.asarray(x), jnp.asarray(weights), jnp.asarray(biases))
    h = c = np.zeros((3, 5))
    sigmoid = lambda v: 1 / (1 + np.exp(-v))  # noqa: E731
    for row in x:
        gates = [np.concatenate([row, h], 1) @ weights[i] + biases[i] for i in range(4)]
        c = sigmoid(gates[0]) * c + sigmoid(gates[1]) * np.tanh(gates[2])
        h = sigmoid(gates[3]) * np.tanh(c)
    np.testing.assert_allclose(outputs[-1], h, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(cell, c, rtol=1e-4, atol=1e-5)


def test_ctc_losses_count_all_alignments() -> None:
    steps = 4
    classes = 3
    labels = (1, 2)
    logs = np.log(np.asarray(jax.nn.softmax(jnp.asarray(RNG.normal(size=(steps, classes))))))
    total = 0.0
    for path in np.ndindex(*[classes] * steps):
        merged = [c for i, c in enumerate(path) if c != 0 and (i == 0 or path[i - 1] != c)]
        total += np.exp(sum(logs[t, c] for t, c in enumerate(path))) if tuple(merged) == labels else 0.0
    got = operator("Ctc")(
        jnp.asarray(logs[:, None], jnp.float32), jnp.asarray([labels]), jnp.asarray([4]), jnp.asarray([2]), reduction=0
    )
    np.testing.assert_allclose(got, -np.log(total), rtol=1e-5)


def test_ctc_losses_of_no_labels_are_of_blanks_alone() -> None:
    logs = np.log(np.float32([[[0.5, 0.5]], [[0.25, 0.75]]]))
    labels = jnp.zeros((1, 0), jnp.int32)
    loss = operator("Ctc")(jnp.asarray(logs), labels, jnp.asarray([2]), jnp.asarray([0]))
    np.testing.assert_allclose(loss, -np.log(0.5 * 0.25), rtol=1e-5)


@pytest.mark.parametrize(("is_zero", "expected"), [(0, np.inf), (1, 0)])
def test_ctc_losses_of_labels_that_do_not_fit(is_zero: int, expected: float) -> None:
    logs = np.log(np.full((2, 1, 3), 1 / 3, np.float32))
    operands = np.int32([[1, 1, 1]]), np.int32([2]), np.int32([3])
    function = jax.jit(
        jax.value_and_grad(lambda x: operator("Ctc")(x, *map(jnp.asarray, operands), zeroInfinity=is_zero))
    )
    loss, gradient = function(logs)
    assert loss == expected
    np.testing.assert_array_equal(gradient, 0)


@pytest.mark.parametrize("degree", [1, *(2, 3)])
def test_spline_bases_sum_to_one(degree: int) -> None:
    pseudo = RNG.uniform(size=(6, 2)).astype(np.float32)
    values, index = operator("SplineBasis")(pseudo, jnp.asarray([4, 5]), jnp.asarray([1, 0]), degree=degree)
    np.testing.assert_allclose(values.sum(1), 1, rtol=1e-5)
    assert values.shape == index.shape == (6, (degree + 1) ** 2)


@pytest.mark.parametrize("name", ["Scale", "Swish", "Gelu", "GeluErf", "Expm1", "Square", "Atan2", "DynamicAdd"])
def test_gradients(name: str) -> None:
    if name == "Atan2":
        check_grads(operator(name), (X, Y), order=1, modes=["rev"], rtol=2e-2, atol=2e-2)
    elif name == "DynamicAdd":
        check_grads(lambda x, p: operator(name)(x, OFFSET, p, **BOTH), (X, PART), 1, ["rev"], rtol=2e-2, atol=2e-2)
    else:
        keywords = {"scale": 2.0} if name == "Scale" else {}
        check_grads(lambda x: operator(name)(x, **keywords), (X,), 1, ["rev"], rtol=2e-2, atol=2e-2)


def test_detached_tensors_have_no_gradient() -> None:
    gradient = jax.grad(lambda x: jnp.sum(operator("Detach")(x) * x))(jnp.asarray(X))
    np.testing.assert_array_equal(gradient, X)


def test_the_mean_loss_of_ignored_labels_is_zero() -> None:
    probabilities = jnp.full((2, 4), 0.25)
    labels = jnp.full(2, 3)
    assert operator("Nll")(probabilities, labels, reduction=popart.ReductionType.Mean, ignoreIndex=3) == 0
