"""poplin: passes of convolutions against `jax.vjp`, grouped multiplication in place, triangles; against numpy."""

from __future__ import annotations

from itertools import pairwise

import jax
import numpy as np
import pytest
from jax import lax

import ipujax as ipu
from ipujax import poplar, poplin
from ipujax.poplar.program import Sequence
from ipujax.runtime.errors import GraphError
from tests.ipujax.poplar.engine_helpers import both, constant, new_graph, variable
from tests.ipujax.popnn.recurrent_helpers import numbers

# batch, field, kernel, channels in and out of a group, groups, stride, padding, dilation of input and kernel
CONVOLUTIONS = {
    "plain": poplin.ConvParams(poplar.FLOAT, 2, (5, 6), (3, 2), 2, 3),
    "strided groups": poplin.ConvParams(poplar.FLOAT, 2, (6, 7), (3, 2), 2, 3, 2, (2, 3), (1, 0), (0, 2)),
    "dilated": poplin.ConvParams(poplar.FLOAT, 1, (5,), (3,), 2, 2, 1, (2,), (3,), (1,), (2,), (2,)),
    "cut off": poplin.ConvParams(poplar.FLOAT, 1, (7,), (2,), 1, 2, 1, (2,), (-1,), (-2,)),
}


def plain(params, x, w):
    """The convolution by `lax`, of weights [groups, out, in, kernel…]."""
    rank = len(params.kernel_shape)
    ones = (1,) * rank
    pads = list(zip(params.padding_lower or (0,) * rank, params.padding_upper or (0,) * rank, strict=True))
    kernels = w.reshape(-1, *w.shape[2:])
    return lax.conv_general_dilated(
        x, kernels, params.stride or ones, pads, params.input_dilation or ones, params.kernel_dilation or ones,
        feature_group_count=params.num_conv_groups,
    )  # fmt: skip


@pytest.mark.parametrize("case", CONVOLUTIONS)
def test_passes_of_a_convolution(case):
    params = CONVOLUTIONS[case]
    a = numbers(params.input_shape, 1)
    b = numbers(params.weights_shape, 2)
    expected, vjp = jax.vjp(lambda x, w: plain(params, x, w), a, b)
    deltas = numbers(expected.shape, 3)
    d_x, d_w = vjp(deltas)
    graph = new_graph()
    prog = Sequence()
    x = poplin.create_input(graph, params)
    w = poplin.create_weights(graph, params)
    graph.set_initial_value(x, a)
    graph.set_initial_value(w, b)
    z = constant(graph, deltas)
    biases = variable(graph, [expected.shape[1]], value=np.ones(expected.shape[1]))
    assert params.output_shape == expected.shape
    back = poplin.get_gradient_params(params)
    out = poplin.convolution(graph, x, w, params, prog)
    through = poplin.convolution(graph, z, w, back, prog, transpose_and_flip_weights=True)
    turned = variable(graph, [w.shape[0], w.shape[2], w.shape[1], *w.shape[3:]])
    poplin.weights_transpose_chans_flip_xy(graph, w, turned, prog)
    also = poplin.convolution(graph, z, turned, back, prog, "also")
    d_weights = poplin.calculate_weight_deltas(graph, z, x, params, prog)
    poplin.convolution_weight_update(graph, z, w, x, params, constant(graph, [-0.5]), prog)
    poplin.convolution_bias_update(graph, z, biases, -0.5, prog)
    poplin.add_bias(graph, out, biases, prog)
    actual = both(graph, prog, {
        "out": out, "through": through, "also": also, "d_weights": d_weights, "w": w, "biases": biases
    })  # fmt: skip
    over = (0, *range(2, deltas.ndim))
    new_biases = 1 - deltas.sum(over) / 2
    per_channel = new_biases.reshape(-1, *([1] * (deltas.ndim - 2)))
    for name, value in {
        "out": expected + per_channel, "through": d_x, "also": d_x, "d_weights": d_w, "w": b - d_w / 2,
        "biases": new_biases,
    }.items():  # fmt: skip
        np.testing.assert_allclose(actual[name], value, rtol=1e-4, atol=2e-5, err_msg=name)
    assert not graph.notes.fallbacks


def test_biases_are_mapped_to_tiles():
    graph = new_graph()
    prog = Sequence()
    out = variable(graph, [2, 3, 4], value=np.zeros((2, 3, 4)))
    biases = poplin.create_biases(graph, out)
    graph.set_initial_value(biases, [1, 2, 3])
    poplin.add_bias(graph, out, biases, prog)
    expected = np.broadcast_to(np.array([1, 2, 3])[:, None], (2, 3, 4))
    np.testing.assert_array_equal(both(graph, prog, {"out": out})["out"], expected)


def test_grouped_multiplication_in_place():
    a = numbers((2, 3, 5), 1)
    b = numbers((2, 5, 4), 2)
    c = numbers((2, 3, 4), 3)
    graph = new_graph()
    prog = Sequence()
    x = poplin.create_mat_mul_grouped_input_lhs(graph, poplar.FLOAT, [2, 3, 5], [2, 5, 4])
    y = poplin.create_mat_mul_grouped_input_rhs(graph, poplar.FLOAT, [2, 3, 5], [2, 5, 4])
    graph.set_initial_value(x, a)
    graph.set_initial_value(y, b)
    acc = variable(graph, [2, 3, 4], value=c)
    single = variable(graph, [5, 5], value=np.eye(5))
    poplin.mat_mul_grouped_acc(graph, acc, constant(graph, [3.0]), x, y, prog, options={"partialsType": "float"})
    poplin.mat_mul_acc(graph, single, -1, poplin.transpose_grouped_matrix(x)[0], x[0], prog)
    actual = both(graph, prog, {"acc": acc, "single": single})
    np.testing.assert_allclose(actual["acc"], c + 3 * (a @ b), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(actual["single"], np.eye(5) - a[0].T @ a[0], rtol=1e-5, atol=1e-5)


def test_triangles():
    m = numbers((2, 4, 4), 4)
    spd = m @ m.transpose(0, 2, 1) + 4 * np.eye(4, dtype=np.float32)
    right = numbers((2, 3, 4), 5)
    graph = new_graph()
    prog = Sequence()
    x = constant(graph, m)
    b = constant(graph, right)
    lower, upper = (poplin.cholesky(graph, constant(graph, spd), prog, lower=low) for low in (True, False))
    half = poplin.cholesky(graph, constant(graph, spd, poplar.HALF), prog)
    ones = poplin.triangular_mask(graph, x, prog, lower=False, unit_diagonal=True)
    strict = poplin.triangular_mask(graph, x, prog)
    solved = poplin.triangular_solve(graph, x, b, prog, left_side=False, lower=False, unit_diagonal=True)
    results = {"lower": lower, "upper": upper, "half": half, "ones": ones, "strict": strict, "solved": solved}
    actual = both(graph, prog, results)
    assert actual["half"].dtype == np.float16
    np.testing.assert_allclose(actual["half"], actual["lower"], rtol=2e-2, atol=2e-2)
    np.testing.assert_allclose(actual["lower"], np.linalg.cholesky(spd), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(actual["upper"], np.linalg.cholesky(spd).transpose(0, 2, 1), rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(actual["ones"], np.triu(m, 1) + np.eye(4))
    np.testing.assert_array_equal(actual["strict"], np.tril(m))
    np.testing.assert_allclose(actual["solved"] @ actual["ones"], right, rtol=1e-4, atol=1e-4)


def test_wrong_operands():
    graph = new_graph()
    prog = Sequence()
    params = CONVOLUTIONS["plain"]
    x = variable(graph, list(params.input_shape))
    flat = variable(graph, [3, 4])
    cases = [
        (lambda: poplin.calculate_weight_deltas(graph, x, x, params, prog), r"\[2, 3, 3, 5\](.|\n)*\[2, 2, 5, 6\]"),
        (lambda: poplin.add_bias(graph, x, flat[0], prog), "one bias a channel"),
        (lambda: poplin.triangular_mask(graph, flat, prog), "a square matrix"),
        (lambda: poplin.cholesky(graph, flat, prog), "a square matrix"),
        (lambda: poplin.transpose_grouped_matrix(flat), "must be groups of matrices"),
        (lambda: poplin.mat_mul_grouped_acc(graph, x, 1, flat, flat, prog), "tensors of 3 dimensions"),
        (lambda: poplin.weights_transpose_chans_flip_xy(graph, flat, flat, prog), "must have weights"),
    ]
    for call, message in cases:
        with pytest.raises(GraphError, match=message) as error:
            call()
        assert "test_poplin_passes.py" in str(error.value)


def test_created_operands_have_channels_in_rows():
    params = poplin.ConvParams(poplar.FLOAT, 1, (30, 49), (3, 3), 4, 4, padding_lower=(1, 1), padding_upper=(1, 1))
    graph = poplar.Graph(ipu.IPUModel(tiles_per_ipu=16).target)
    prog = Sequence()
    x = poplin.create_input(graph, params)
    weights = poplin.create_weights(graph, params)
    assert (x.shape, weights.shape) == (params.input_shape, params.weights_shape)
    prog.add(poplar.program.Copy(poplin.convolution(graph, x, weights, params, prog), x))
    assert not poplar.Engine(graph, prog).profile.slow_paths  # rows of 49 or of 3 elements would be copied by words


@pytest.mark.parametrize(("kernel", "padding", "stride"), [(3, 1, 1), (5, 2, 1), (3, 1, 2)])
def test_what_two_blocks_read_is_on_tiles_of_the_earlier(kernel, padding, stride):
    params = poplin.ConvParams(
        poplar.FLOAT, 1, (40 * stride, 64), (kernel,) * 2, 4, 4, 1, (stride,) * 2, (padding,) * 2, (padding,) * 2
    )
    graph = poplar.Graph(ipu.IPUModel(tiles_per_ipu=16).target)
    x = poplin.create_input(graph, params)
    out = poplin.convolution(graph, x, poplin.create_weights(graph, params), params, Sequence())
    of_input, of_output = (graph.mappings[tensor.variables()[0]].cuts[1:3] for tensor in (x, out))
    for dim, (bounds, cuts) in enumerate(zip(of_input, of_output, strict=True)):
        assert len(cuts) > 2
        read = [
            {y * stride + k - padding for y in range(begin, end) for k in range(kernel)}
            for begin, end in pairwise(cuts)
        ]
        for bound, earlier, later in zip(bounds[1:-1], read, read[1:], strict=False):
            shared = len(earlier & later)
            assert bound == min(later) + (shared if dim == 1 else shared // 2)  # rows are shared by halves
