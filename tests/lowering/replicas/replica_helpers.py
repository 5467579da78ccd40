"""Runs the function of one replica by plain JAX, engine and tile interpreter, and compares the results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

import ipujax as ipu
from ipujax.lowering.lower import LoweredProgram
from ipujax.runtime.engine.engine import engine_function
from ipujax.runtime.interpreter.interpreter import interpret
from tests.lowering.helpers import quick_jit

SPLIT = P("replica")
SAME = P()


def device(replicas: int, tiles: int = 5, **changes: Any) -> ipu.IPUModel:
    """An IPU of a few tiles for each replica."""
    ipus = 1 << (replicas - 1).bit_length()
    return ipu.IPUModel(num_ipus=ipus, tiles_per_ipu=tiles, **changes)


def lowered(
    fun: Callable[..., Any],
    replicas: int,
    in_specs: Any,
    out_specs: Any,
    *args: Any,
    on: ipu.IPUModel | None = None,
) -> Any:
    """Lowers a function of one replica for several, on an IPU of a few tiles for each unless told otherwise."""
    on = on or device(replicas)
    return ipu.jit(fun, device=on, replicas=replicas, in_specs=in_specs, out_specs=out_specs).lower(*args)


def ways(
    fun: Callable[..., Any],
    replicas: int,
    in_specs: Any,
    out_specs: Any,
    *args: Any,
    on: ipu.IPUModel | None = None,
) -> dict[str, list[Any]]:
    """Results of plain JAX, of the engine, of the engine with exact splits and of the tile interpreter."""
    stage = lowered(fun, replicas, in_specs, out_specs, *args, on=on)
    stage.compile()  # the verifier
    program: LoweredProgram = stage.planned.lowered
    plain = ipu.jit(fun, device=ipu.CPU(), replicas=replicas, in_specs=in_specs, out_specs=out_specs)

    def engine(*leaves: Any, exact: bool) -> list[Any]:
        return program.evaluate(leaves, engine_function(program.graph, program.program, exact_splits=exact))

    def tiles(inputs: Any) -> Any:
        arrays = {stream: np.asarray(value) for stream, value in inputs.items()}
        return interpret(program.graph, program.program, arrays, seed=3)

    leaves = jax.tree.leaves(args)
    return {
        "plain": jax.tree.leaves(plain(*args)),
        "engine": quick_jit(partial(engine, exact=False))(*leaves),
        "literal engine": quick_jit(partial(engine, exact=True))(*leaves),
        "interpreter": program.evaluate(leaves, tiles),
    }


def assert_ways(
    expected: Any,
    fun: Callable[..., Any],
    replicas: int,
    in_specs: Any,
    out_specs: Any,
    *args: Any,
    rtol: float = 0.0,
    on: ipu.IPUModel | None = None,
) -> None:
    """Asserts that all executors return the expected results."""
    for way, results in ways(fun, replicas, in_specs, out_specs, *args, on=on).items():
        leaves: Sequence[Any] = jax.tree.leaves(expected)
        assert len(results) == len(leaves)
        for got, value in zip(results, leaves, strict=True):
            assert got.shape == value.shape and got.dtype == value.dtype, (way, got.shape, value.shape)
            np.testing.assert_allclose(np.asarray(got), np.asarray(value), rtol=rtol, atol=rtol, err_msg=way)
