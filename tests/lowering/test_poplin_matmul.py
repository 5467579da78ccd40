"""Matrix multiplication over tiles against `lax.dot_general`: engine, engine with exact splits, tile interpreter."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from ipujax.lowering.poplin import matmul
from ipujax.runtime.engine import engine_function
from ipujax.runtime.errors import GraphError
from ipujax.runtime.graph import Graph
from ipujax.runtime.interpreter import interpret
from ipujax.runtime.presets import preset
from ipujax.runtime.program import HostStream, Sequence, StreamIn, StreamOut
from ipujax.runtime.target import Target
from ipujax.runtime.verifier import verify

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
    """A program that reads both operands, multiplies them, and writes the result."""
    graph, prog = Graph(target), Sequence()
    tensors = [graph.add_variable(v.shape, v.dtype, name) for name, v in (("a", a), ("b", b))]
    streams = [HostStream(t.variables()[0].name, t.shape, t.dtype) for t in tensors]
    for stream, tensor in zip(streams, tensors, strict=True):
        prog.add(StreamIn(stream, tensor))
    out = matmul(graph, *tensors, prog, "dot", **options)
    result = HostStream("out", out.shape, out.dtype)
    prog.add(StreamOut(out, result))
    verify(graph, prog)
    return graph, prog, dict(zip(streams, (a, b), strict=True)), result


def run_everywhere(a: np.ndarray, b: np.ndarray, target: Target, **options: Any) -> list[Any]:
    """Results of the engine, of the engine with exact splits, and of the tile interpreter."""
    graph, prog, inputs, result = build(a, b, target, **options)

    def engine(exact_splits: bool) -> Any:
        run = engine_function(graph, prog, exact_splits=exact_splits)
        return jax.jit(lambda arrays: run(dict(zip(inputs, arrays, strict=True)))[result])(list(inputs.values()))

    return [engine(False), engine(True), interpret(graph, prog, inputs)[result]]


def reference(a: np.ndarray, b: np.ndarray, out_dtype: Any) -> jax.Array:
    dims = (((2,), (1,)), ((0,), (0,)))
    return lax.dot_general(jnp.asarray(a), jnp.asarray(b), dims, preferred_element_type=out_dtype)


def close(got: Any, want: jax.Array) -> None:
    assert got.dtype == want.dtype and got.shape == want.shape
    tolerance = TOLERANCE.get(str(want.dtype), 0.0)
    wide = "complex128" if jnp.iscomplexobj(want) else "float64"
    got, want = np.asarray(got).astype(wide), np.asarray(want).astype(wide)
    np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance * max(1.0, np.abs(want).max(initial=0)))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("tiles", [1, 4, 7, 16])
def test_all_executors_agree(shape, tiles):
    groups, m, k, n = shape
    a, b = values((groups, m, k), "float32", 0), values((groups, k, n), "float32", 1)
    for got in run_everywhere(a, b, small(tiles)):
        close(got, reference(a, b, np.float32))


@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes(dtype):
    a, b = values((2, 6, 40), dtype, 2), values((2, 40, 5), dtype, 3)
    for got in run_everywhere(a, b, small(16)):
        close(got, reference(a, b, a.dtype))
