"""Matrix multiplication over tiles against `lax.dot_general`: engine, engine with exact splits, tile interpreter."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from ipujax.lowering.poplin import matmul, plan_matmul
from ipujax.lowering.poplin.matmul import _add_steps
from ipujax.runtime.engine.engine import engine_function
from ipujax.runtime.errors import GraphError
from ipujax.runtime.graph import Builder
from ipujax.runtime.graph.graph import Graph
from ipujax.runtime.graph.program import HostStream, Repeat, Sequence, StreamIn, StreamOut
from ipujax.runtime.interpreter.interpreter import interpret
from ipujax.runtime.target.presets import preset
from ipujax.runtime.target.target import Target
from ipujax.runtime.verify import verify
from tests.lowering.helpers import quick_jit

SHAPES = [(1, 5, 7, 3), (1, 33, 50, 18), (3, 9, 17, 20), (1, 1, 40, 1), (2, 64, 1, 5)]
DTYPES = ["float32", "float16", "bfloat16", "int32", "int8", "bool", "complex64"]
TOLERANCE = {"float32": 1e-5, "float16": 4e-3, "bfloat16": 3e-2, "complex64": 1e-5}


def small(tiles: int) -> Target:
    return preset("mk2").replace(tiles_per_ipu=tiles)


def values(shape: tuple[int, ...], dtype: str, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    if dtype == "bool":
        return rng.random(shape) < 0.1
    if dtype.startswith("int"):
        return rng.integers(-9, 9, shape).astype(dtype)
    array = rng.standard_normal(shape) + (1j * rng.standard_normal(shape) if dtype == "complex64" else 0)
    return np.asarray(jnp.asarray(array, dtype))


def build(a: np.ndarray, b: np.ndarray, target: Target, **options: Any) -> tuple[Graph, Sequence, dict, HostStream]:
    """Program that reads both operands, multiplies them, and writes the result."""
    graph = Graph(target)
    prog = Sequence()
    tensors = [graph.add_variable(v.shape, v.dtype, name) for name, v in (("a", a), ("b", b))]
    streams = [HostStream(t.variables()[0].name, t.shape, t.dtype) for t in tensors]
    for stream, tensor in zip(streams, tensors, strict=True):
        prog.add(StreamIn(stream, tensor))
    out = matmul(Builder(graph, prog, "dot"), *tensors, **options)
    result = HostStream("out", out.shape, out.dtype)
    prog.add(StreamOut(out, result))
    verify(graph, prog)
    return graph, prog, dict(zip(streams, (a, b), strict=True)), result


def run_everywhere(a: np.ndarray, b: np.ndarray, target: Target, **options: Any) -> list[Any]:
    """Results of the engine, of the engine with exact splits, and of the tile interpreter."""
    graph, prog, inputs, result = build(a, b, target, **options)

    def engine(exact_splits: bool) -> Any:
        run = engine_function(graph, prog, exact_splits=exact_splits)
        return quick_jit(lambda arrays: run(dict(zip(inputs, arrays, strict=True)))[result])(list(inputs.values()))

    return [engine(False), engine(True), interpret(graph, prog, inputs)[result]]


def reference(a: np.ndarray, b: np.ndarray, out_dtype: Any) -> jax.Array:
    dims = (((2,), (1,)), ((0,), (0,)))
    return lax.dot_general(jnp.asarray(a), jnp.asarray(b), dims, preferred_element_type=out_dtype)


def close(got: Any, expected: jax.Array) -> None:
    assert got.dtype == expected.dtype and got.shape == expected.shape
    tolerance = TOLERANCE.get(str(expected.dtype), 0.0)
    wide = "complex128" if jnp.iscomplexobj(expected) else "float64"
    got, expected = (np.asarray(x).astype(wide) for x in (got, expected))
    np.testing.assert_allclose(
        got, expected, rtol=tolerance, atol=tolerance * max(1.0, np.abs(expected).max(initial=0))
    )


@pytest.mark.parametrize(("shape", "tiles"), [*((shape, 7) for shape in SHAPES), *((SHAPES[1], n) for n in (1, 4, 16))])
def test_all_executors_agree(shape, tiles):
    groups, m, k, n = shape
    a = values((groups, m, k), "float32", 0)
    b = values((groups, k, n), "float32", 1)
    for got in run_everywhere(a, b, small(tiles)):
        close(got, reference(a, b, np.float32))


@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes(dtype):
    a = values((2, 6, 40), dtype, 2)
    b = values((2, 40, 5), dtype, 3)
    for got in run_everywhere(a, b, small(16)):
        close(got, reference(a, b, a.dtype))


@pytest.mark.parametrize(("dtype", "out_dtype"), [("int8", "int32"), ("float16", "float32")])
def test_wider_results(dtype, out_dtype):
    a = values((1, 6, 40), dtype, 2)
    b = values((1, 40, 5), dtype, 3)
    for got in run_everywhere(a, b, small(4), out_dtype=out_dtype):
        close(got, reference(a, b, out_dtype))


def test_half_partials_keep_their_dtype():
    a = values((1, 4, 400), "float16", 2)
    b = values((1, 400, 4), "float16", 3)
    graph, _, _, _ = build(a, b, small(16), partials_dtype="float16")
    partials = [v for v in graph.variables if v.monoid]
    assert partials and all(v.dtype == np.float16 for v in partials)
    graph, _, _, _ = build(a, b, small(16))
    assert all(v.dtype == np.float32 for v in graph.variables if v.monoid)


@pytest.mark.parametrize(
    ("dtype", "partials", "expected"),
    [
        ("float32", "float16", "float32"),
        ("bfloat16", "float16", "float32"),
        ("float16", "bfloat16", "float16 or float32"),
        ("int32", "int8", "int32"),
    ],
)
def test_partials_that_no_codelet_has(dtype, partials, expected):
    a = values((1, 4, 40), dtype, 2)
    b = values((1, 40, 4), dtype, 3)
    with pytest.raises(GraphError, match=rf"dot: no codelet(.|\n)*expected: {expected}\n(.|\n)*got: {partials}"):
        build(a, b, small(4), partials_dtype=jnp.dtype(partials))
    build(a, b, small(4), partials_dtype=expected.split()[-1])


@pytest.mark.parametrize("shape", [(1, 64, 40, 32), (1, 32, 40, 128), (2, 64, 20, 32)], ids=str)
def test_in_steps(shape):
    """Tiles so small that the plan has several steps."""
    groups, m, k, n = shape
    a = values((groups, m, k), "float32", 0)
    b = values((groups, k, n), "float32", 1)
    target = small(4)
    share = 0.35 * plan_matmul(groups, m, k, n, "float32", target).temp_bytes / target.bytes_per_tile
    assert plan_matmul(groups, m, k, n, "float32", target, available_memory_proportion=share).steps > 1
    for got in run_everywhere(a, b, target, available_memory_proportion=share):
        close(got, reference(a, b, np.float32))


@pytest.mark.parametrize("is_loop", [True, False], ids=["loop", "in a row"])
@pytest.mark.parametrize("shape", [(1, 256, 64, 32), (1, 32, 64, 256)], ids=["rows", "columns"])
def test_steps_with_and_without_a_loop(shape, is_loop):
    """Rows and columns in steps."""
    groups, m, k, n = shape
    a = values((groups, m, k), "float32", 0)
    b = values((groups, k, n), "float32", 1)
    target = small(4)
    share = 0.4 * plan_matmul(groups, m, k, n, "float32", target).temp_bytes / target.bytes_per_tile
    plan = replace(plan_matmul(groups, m, k, n, "float32", target, available_memory_proportion=share), is_loop=is_loop)
    assert plan.steps > 1
    graph = Graph(target)
    prog = Sequence()
    product = Sequence()
    operands = [graph.add_variable(v.shape, v.dtype, name) for name, v in (("a", a), ("b", b))]
    out = _add_steps(Builder(graph, product, "dot"), *operands, plan, None)
    streams = [HostStream(t.variables()[0].name, t.shape, t.dtype) for t in (*operands, out)]
    for stream, tensor in zip(streams, operands, strict=False):
        prog.add(StreamIn(stream, tensor))
    prog.add(product)
    prog.add(StreamOut(out, streams[-1]))
    verify(graph, prog)
    close(interpret(graph, prog, dict(zip(streams, (a, b), strict=False)))[streams[-1]], reference(a, b, np.float32))
    assert is_loop == any(isinstance(step, Repeat) for step in product.children())


@pytest.mark.parametrize("shape", [(1, 40, 500, 30), (3, 40, 500, 30)], ids=str)
def test_unsplit_product_is_one_bit_exact_dot(shape):
    groups, m, k, n = shape
    a = values((groups, m, k), "float32", 4)
    b = values((groups, k, n), "float32", 5)
    graph, prog, inputs, result = build(a, b, small(64))
    assert any(v.monoid for v in graph.variables), "k is split, or the test shows nothing"
    run = engine_function(graph, prog)

    def of_arrays(*arrays: Any) -> Any:
        return run(dict(zip(inputs, arrays, strict=True)))[result]

    names = [eqn.primitive.name for eqn in jax.make_jaxpr(of_arrays)(a, b).jaxpr.eqns]
    assert names.count("dot_general") == 1
    assert set(names) <= {"dot_general", "reshape", "squeeze", "slice", "broadcast_in_dim", "reduce_sum"}
    assert (
        np.asarray(jax.jit(of_arrays)(a, b)) == np.asarray(jax.jit(reference, static_argnums=2)(a, b, "float32"))
    ).all()


def test_views_as_operands():
    target = small(16)
    a = values((20, 9, 2), "float32", 6)
    b = values((12, 40), "float32", 7)
    graph = Graph(target)
    prog = Sequence()
    tensors = [graph.add_variable(v.shape, v.dtype, name) for name, v in (("a", a), ("b", b))]
    streams = [HostStream(t.variables()[0].name, t.shape, t.dtype) for t in tensors]
    for stream, tensor in zip(streams, tensors, strict=True):
        prog.add(StreamIn(stream, tensor))
    lhs = tensors[0].transpose((2, 1, 0))
    rhs = tensors[1].slice((0, 3), (12, 23)).transpose((1, 0)).broadcast_in_dim((2, 20, 12), (1, 2))
    out = matmul(Builder(graph, prog, "dot"), lhs, rhs)
    result = HostStream("out", out.shape, out.dtype)
    prog.add(StreamOut(out, result))
    verify(graph, prog)
    expected = np.einsum("kmg,nk->gmn", a.astype(np.float64), b[:, 3:23].astype(np.float64))
    inputs = dict(zip(streams, (a, b), strict=True))
    for got in (engine_function(graph, prog)(inputs)[result], interpret(graph, prog, inputs)[result]):
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [(0, 2, 3, 4), (1, 0, 3, 4), (1, 2, 0, 4), (1, 2, 3, 0)], ids=str)
def test_empty(shape):
    groups, m, k, n = shape
    graph = Graph(small(4))
    prog = Sequence()
    a, b = (graph.add_variable(s, np.dtype("float32")) for s in ((groups, m, k), (groups, k, n)))
    out = matmul(Builder(graph, prog, "dot"), a, b)
    result = HostStream("out", out.shape, out.dtype)
    prog.add(StreamOut(out, result))
    got = engine_function(graph, prog)({})[result]
    assert got.shape == (groups, m, n) and not np.any(got)


def test_maps_operands_evenly():
    graph, _, _, _ = build(values((1, 64, 256), "float32", 0), values((1, 256, 64), "float32", 1), small(16))
    for variable in graph.variables[:2]:
        counts = graph.mappings[variable].elements_per_tile(16)
        assert counts.min() > 0 and counts.max() <= 2 * counts.min()


def test_refuses_shapes_that_do_not_match():
    graph = Graph(small(4))
    a, b = (graph.add_variable(s, np.dtype("float32")) for s in ((1, 2, 3), (1, 4, 5)))
    with pytest.raises(GraphError, match="dot: shapes do not match"):
        matmul(Builder(graph, Sequence(), "dot"), a, b)
