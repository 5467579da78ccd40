"""Convolution over tiles against `lax.conv_general_dilated`: engine, engine with exact splits, tile interpreter."""

from __future__ import annotations

from collections.abc import Sequence as Items
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import ipujax as ipu
from ipujax.lowering.jaxpr.nested import primitive_names
from ipujax.lowering.poplin import convolution, product_plan
from ipujax.lowering.poplin.spec import Window
from ipujax.runtime.cache import clear_caches
from ipujax.runtime.engine.engine import engine_function
from ipujax.runtime.errors import GraphError
from ipujax.runtime.graph import Builder
from ipujax.runtime.graph.graph import Graph
from ipujax.runtime.graph.program import HostStream, Sequence, StreamIn, StreamOut
from ipujax.runtime.interpreter.interpreter import interpret
from ipujax.runtime.target.presets import preset
from ipujax.runtime.target.target import Target
from ipujax.runtime.verify import verify
from tests.lowering.helpers import quick_jit

NHWC = ("NHWC", "HWIO", "NHWC")
# name: input shape, kernel shape, parameters of conv_general_dilated
CASES: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "1x1": ((2, 5, 4, 9), (1, 1, 9, 20), {"dimension_numbers": NHWC}),
    "same": ((2, 7, 6, 5), (3, 3, 5, 18), {"dimension_numbers": NHWC, "padding": ((1, 1), (1, 1))}),
    "nchw": ((2, 5, 7, 6), (18, 5, 3, 3), {"dimension_numbers": ("NCHW", "OIHW", "NCHW"), "padding": ((1, 1), (0, 2))}),
    "strided": ((1, 9, 8, 3), (3, 2, 3, 4), {"dimension_numbers": NHWC, "window_strides": (2, 3)}),
    "strided 1x1": ((1, 8, 8, 3), (1, 1, 3, 4), {"dimension_numbers": NHWC, "window_strides": (2, 2)}),
    "lhs dilated": (
        (2, 4, 3, 6),
        (3, 3, 6, 2),
        {"dimension_numbers": NHWC, "lhs_dilation": (2, 3), "padding": ((2, 1), (1, 2))},
    ),
    "rhs dilated": ((2, 9, 9, 3), (2, 3, 3, 4), {"dimension_numbers": NHWC, "rhs_dilation": (3, 2)}),
    "one column, dilated rows": (
        (1, 4, 1, 3),
        (2, 2, 3, 2),
        {"dimension_numbers": NHWC, "padding": ((0, 0), (3, 0)), "lhs_dilation": (2, 1), "rhs_dilation": (1, 2)},
    ),
    "negative padding": ((1, 9, 8, 3), (2, 2, 3, 4), {"dimension_numbers": NHWC, "padding": ((-2, 1), (-1, -3))}),
    "dilated negative padding": (
        (1, 5, 5, 2),
        (2, 2, 2, 3),
        {"dimension_numbers": NHWC, "padding": ((-1, 0), (-2, -1)), "lhs_dilation": (2, 3)},
    ),
    "feature groups": (
        (2, 6, 6, 8),
        (3, 3, 2, 12),
        {"dimension_numbers": NHWC, "feature_group_count": 4, "padding": ((1, 1), (1, 1))},
    ),
    "depthwise": ((2, 6, 6, 8), (3, 3, 1, 8), {"dimension_numbers": NHWC, "feature_group_count": 8}),
    "batch groups": ((6, 5, 5, 4), (2, 2, 4, 9), {"dimension_numbers": NHWC, "batch_group_count": 3}),
    "mostly padding": ((1, 2, 2, 2), (1, 1, 2, 3), {"dimension_numbers": NHWC, "padding": ((5, 5), (4, 4))}),
    "1d": ((3, 17, 4), (5, 4, 7), {"dimension_numbers": ("NWC", "WIO", "NWC"), "padding": ((2, 2),)}),
    "3d": ((1, 4, 5, 3, 3), (2, 2, 2, 3, 4), {"dimension_numbers": ("NDHWC", "DHWIO", "NDHWC")}),
    "0d": ((3, 40), (7, 40), {"dimension_numbers": ("NC", "OI", "NC")}),
    "permuted": ((3, 6, 5, 2), (3, 5, 4, 2), {"dimension_numbers": ("CHWN", "IHWO", "HWNC")}),
}


def small(tiles: int) -> Target:
    return preset("mk2").replace(tiles_per_ipu=tiles)


def complete(x: Items[int], w: Items[int], overrides: dict[str, Any]) -> dict[str, Any]:
    """All parameters of a convolution, dimension numbers as positions."""
    rank = len(x) - 2
    plain = {"window_strides": (1,) * rank, "padding": ((0, 0),) * rank}
    params = plain | {"lhs_dilation": (1,) * rank, "rhs_dilation": (1,) * rank} | overrides
    numbers = lax.conv_dimension_numbers(tuple(x), tuple(w), params["dimension_numbers"])
    return params | {"dimension_numbers": numbers}


def random(shape: Items[int], seed: int, dtype: str = "float32") -> np.ndarray:
    rng = np.random.default_rng(seed)
    array = rng.integers(-5, 5, shape) if dtype.startswith("int") else rng.standard_normal(shape)
    return np.asarray(jnp.asarray(array, dtype))


def build(x: np.ndarray, w: np.ndarray, target: Target, **params: Any) -> tuple[Graph, Sequence, dict, HostStream]:
    """Program that reads both operands, convolves them, and writes the result."""
    graph = Graph(target)
    prog = Sequence()
    tensors = [graph.add_variable(v.shape, v.dtype, name) for name, v in (("x", x), ("w", w))]
    streams = [HostStream(t.variables()[0].name, t.shape, t.dtype) for t in tensors]
    for stream, tensor in zip(streams, tensors, strict=True):
        prog.add(StreamIn(stream, tensor))
    out = convolution(Builder(graph, prog, "conv"), *tensors, **params)
    result = HostStream("out", out.shape, out.dtype)
    prog.add(StreamOut(out, result))
    verify(graph, prog)
    return graph, prog, dict(zip(streams, (x, w), strict=True)), result


def run_everywhere(x: np.ndarray, w: np.ndarray, target: Target, **params: Any) -> list[Any]:
    """Results of the engine, of the engine with exact splits, and of the tile interpreter."""
    graph, prog, inputs, result = build(x, w, target, **params)

    def engine(exact_splits: bool) -> Any:
        run = engine_function(graph, prog, exact_splits=exact_splits)
        return quick_jit(lambda arrays: run(dict(zip(inputs, arrays, strict=True)))[result])(list(inputs.values()))

    return [engine(False), engine(True), interpret(graph, prog, inputs)[result]]


def close(got: Any, expected: jax.Array, tolerance: float = 1e-5) -> None:
    assert got.dtype == expected.dtype and got.shape == expected.shape
    got, expected = (np.asarray(x).astype(np.float64) for x in (got, expected))
    np.testing.assert_allclose(
        got, expected, rtol=tolerance, atol=tolerance * max(1.0, np.abs(expected).max(initial=0))
    )


def reference(x: np.ndarray, w: np.ndarray, **params: Any) -> jax.Array:
    """Convolution by XLA of an input padded beforehand: XLA CPU reads out of bounds for negative padding."""
    config = [(0, 0, 0)] * x.ndim
    rows = zip(params["dimension_numbers"].lhs_spec[2:], params["padding"], params["lhs_dilation"], strict=True)
    for position, (low, high), dilation in rows:
        config[position] = (low, high, dilation - 1)
    padded = lax.pad(x, np.zeros((), x.dtype), config)
    plain = {"padding": ((0, 0),) * (x.ndim - 2), "lhs_dilation": (1,) * (x.ndim - 2)}
    return lax.conv_general_dilated(padded, w, **(params | plain))


@pytest.mark.parametrize(
    ("case", "tiles"),
    [*((case, 7) for case in CASES), ("same", 1), ("strided", 4), ("lhs dilated", 4), ("permuted", 16)],
)
def test_all_executors_agree(case, tiles):
    x_shape, w_shape, overrides = CASES[case]
    params = complete(x_shape, w_shape, overrides)
    x = random(x_shape, 0)
    w = random(w_shape, 1)
    expected = reference(x, w, **params)
    for got in run_everywhere(x, w, small(tiles), **params):
        close(got, expected)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float16", 4e-3), ("bfloat16", 3e-2), ("int32", 0.0)])
def test_dtypes(dtype, tolerance):
    params = complete((1, 5, 5, 20), (3, 3, 20, 4), {"dimension_numbers": NHWC})
    x = random((1, 5, 5, 20), 0, dtype)
    w = random((3, 3, 20, 4), 1, dtype)
    expected = lax.conv_general_dilated(x, w, **params)
    for got in run_everywhere(x, w, small(4), **params):
        close(got, expected, tolerance)


@pytest.mark.parametrize(
    "shapes", [((1, 4, 4, 9), (3, 3, 9, 64)), ((8, 9, 9, 8), (3, 3, 8, 8)), ((4, 9, 9, 4), (3, 3, 2, 8))], ids=str
)
def test_in_steps(shapes, monkeypatch):
    """Memory for several steps only; slices and joined results count as nothing."""
    monkeypatch.setattr(product_plan, "_stack_bytes", lambda *_: 0)
    clear_caches()
    x_shape, w_shape = shapes
    params = complete(*shapes, {"dimension_numbers": NHWC, "feature_group_count": x_shape[3] // w_shape[2]})
    x = random(x_shape, 0)
    w = random(w_shape, 1)
    expected = reference(x, w, **params)
    share = 2500 / preset("mk2").bytes_per_tile
    graph, _, _, _ = build(x, w, small(4), available_memory_proportion=share, **params)
    assert len(graph.groups) > 1
    for got in run_everywhere(x, w, small(4), available_memory_proportion=share, **params):
        close(got, expected)
    clear_caches()


def convolutions(fun: Any, *args: Any) -> list[Any]:
    return [e for e in jax.make_jaxpr(fun)(*args).jaxpr.eqns if e.primitive.name == "conv_general_dilated"]


PARAMS = tuple(complete((1, 1, 1), (1, 1, 1), {"dimension_numbers": ("NWC", "WIO", "NWC")}))
PARAMS = (*PARAMS, "feature_group_count", "batch_group_count")


@pytest.mark.parametrize(("stride", "kernel", "groups"), [(1, 3, 1), (2, 3, 1), (2, 1, 1), (2, 2, 3)])
def test_cnn_training_step_unsplit_is_bit_exact(stride, kernel, groups):
    """Forward and both backward convolutions, as `jax.grad` writes them."""

    def loss(x: Any, w: Any) -> Any:
        strides = (stride, stride)
        y = lax.conv_general_dilated(x, w, strides, "SAME", dimension_numbers=NHWC, feature_group_count=groups)
        return (y**2).sum()

    eqns = convolutions(jax.grad(loss, (0, 1)), jnp.ones((4, 8, 8, 6)), jnp.ones((kernel, kernel, 6 // groups, 12)))
    assert len(eqns) == 3
    for eqn in eqns:
        x, w = (random(v.aval.shape, seed) for seed, v in enumerate(eqn.invars))
        params = {name: eqn.params[name] for name in PARAMS}
        graph, prog, inputs, result = build(x, w, small(64), **params)
        run = engine_function(graph, prog)

        def of_arrays(*arrays: Any, run=run, inputs=inputs, result=result) -> Any:
            return run(dict(zip(inputs, arrays, strict=True)))[result]

        names = list(primitive_names(jax.make_jaxpr(of_arrays)(x, w).jaxpr))
        assert names.count("conv_general_dilated") == 1 and "dynamic_slice" not in names and "scan" not in names
        got = quick_jit(of_arrays)(x, w)
        close(got, reference(x, w, **params))
        if all(low >= 0 and high >= 0 for low, high in params["padding"]):
            expected = quick_jit(partial(lax.conv_general_dilated, **params))(x, w)
            assert (np.asarray(got) == np.asarray(expected)).all()


def test_empty():
    params = complete((2, 5, 0), (3, 0, 4), {"dimension_numbers": ("NWC", "WIO", "NWC")})
    graph = Graph(small(4))
    prog = Sequence()
    x, w = (graph.add_variable(s, np.dtype("float32")) for s in ((2, 5, 0), (3, 0, 4)))
    out = convolution(Builder(graph, prog, "conv"), x, w, **params)
    result = HostStream("out", out.shape, out.dtype)
    prog.add(StreamOut(out, result))
    got = engine_function(graph, prog)({})[result]
    assert got.shape == (2, 3, 4) and not np.any(got)


@pytest.mark.parametrize(
    ("counts", "match"),
    [
        ({"feature_group_count": 2, "batch_group_count": 2}, "exclude each other"),
        ({"feature_group_count": 4}, "do not divide"),
        ({"batch_group_count": 4}, "do not divide"),
        ({"feature_group_count": 2}, "input channels"),
    ],
)
def test_refuses_groups(counts, match):
    params = complete((2, 5, 6), (3, 6, 6), {"dimension_numbers": ("NWC", "WIO", "NWC")})
    graph = Graph(small(4))
    x, w = (graph.add_variable(s, np.dtype("float32")) for s in ((2, 5, 6), (3, 6, 6)))
    with pytest.raises(GraphError, match=match):
        convolution(Builder(graph, Sequence(), "conv"), x, w, **params | counts)


@pytest.mark.parametrize("seed", range(40))
def test_without_skipped_keeps_every_product(seed):
    """The window over the used elements meets the elements that the window over all of them meets."""
    rng = np.random.default_rng(seed)
    size = int(rng.integers(1, 12))
    kernel = int(rng.integers(1, 4))
    padding = int(rng.integers(-6, 6)), int(rng.integers(-2, 6))
    window = Window(size, kernel, padding, *(int(n) for n in rng.choice([1, 2, 3, 4], 3)))
    start, step, used_window = window.without_skipped()

    def elements_met(w: Window, elements: np.ndarray) -> list[list[int]]:
        rows = []
        for y in range(window.outputs):
            dilated = [y * w.stride + k * w.rhs_dilation - w.padding[0] for k in range(kernel)]
            index = [i // w.lhs_dilation if i % w.lhs_dilation == 0 else -1 for i in dilated]
            rows.append([int(elements[i]) if 0 <= i < len(elements) else -1 for i in index])
        return rows

    used = np.arange(size)[start::step]
    assert used_window.size == len(used)
    assert elements_met(window, np.arange(size)) == elements_met(used_window, used)


def test_dilated_blocks_shorter_than_the_window() -> None:
    """XLA aborts the process on such convolutions, unless they are padded beforehand."""

    def loss(x: Any, w: Any) -> Any:
        return (lax.conv_general_dilated(x, w, (2, 3), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")) ** 2).mean()

    rng = np.random.default_rng(5)
    args = [rng.normal(size=size).astype(np.float32) for size in ((2, 13, 15, 16), (3, 3, 16, 32))]
    split = ipu.jit(
        jax.grad(loss), device=ipu.IPUModel(tiles_per_ipu=64), options=ipu.Options(exact_splits=True, progress=False)
    )
    np.testing.assert_allclose(split(*args), jax.jit(jax.grad(loss))(*args), rtol=1e-4, atol=1e-4)


def test_spreads_activations_that_arrive_in_many_parts() -> None:
    """Groups of 4 channels are on tiles of their own: they are put together once, not on each tile that needs all."""

    def network(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
        same = partial(lax.conv_general_dilated, window_strides=(1, 1), padding="SAME", dimension_numbers=NHWC)
        return same(same(x, w, feature_group_count=16), v)

    args = random((4, 8, 8, 64), 0), random((3, 3, 4, 64), 1), random((1, 1, 64, 64), 2)
    device = ipu.IPUModel(tiles_per_ipu=16)
    lowered = ipu.jit(network, device=device).lower(*args)
    assert any(variable.name.endswith("/spread") for variable in lowered.graph.variables)
    close(lowered.compile()(*args), network(*args), 1e-4)
    report = ipu.check(ipu.jit(network, device=device), *args)
    assert report.agrees, report
