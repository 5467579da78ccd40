"""Runs a function through the compiler in all its ways and compares it with plain JAX.

XLA's own optimisations are not compared here, and take nearly half of the time: `quick_jit` leaves them out.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import pytest

from ipujax.checking.jaxpr_values import quick_jit as quick_jit
from ipujax.lowering.jax_compat import ClosedJaxpr, trace
from ipujax.lowering.lower import LoweredProgram, lower
from ipujax.lowering.outlining import gain
from ipujax.lowering.passes import ready
from ipujax.runtime.engine.engine import engine_function
from ipujax.runtime.interpreter.interpreter import interpret
from ipujax.runtime.target.presets import preset
from ipujax.runtime.target.target import Target

TILES = (1, 4, 7, 16)


def small_target(tiles: int, **changes: Any) -> Target:
    """A Mk2 with few tiles and their whole memory."""
    return preset("mk2").replace(tiles_per_ipu=tiles, **changes)


def passed(fun: Callable[..., Any], *args: Any) -> ClosedJaxpr:
    """The jaxpr of `fun` after all passes."""
    return ready(trace(fun, args, {}, ()).jaxpr)


def lowered(fun: Callable[..., Any], args: Sequence[Any], target: Target) -> LoweredProgram:
    """Traces and lowers `fun` for `target`."""
    return lower(passed(fun, *args), target)


def engine(program: LoweredProgram, exact_splits: bool = False) -> Callable[..., list[Any]]:
    """The engine's function of all arguments: its results, in order."""
    run = engine_function(program.graph, program.program, exact_splits=exact_splits)

    def results(*args: Any) -> list[Any]:
        outs = run(dict(zip(program.inputs, jax.tree.leaves(args), strict=True)))
        return [outs[stream] for stream in program.outputs]

    return results


def run_engine(
    program: LoweredProgram, args: Sequence[Any], exact_splits: bool = False, jit: Callable[..., Any] = quick_jit
) -> list[Any]:
    """Results of the engine, in order."""
    return jit(engine(program, exact_splits))(*args)


def run_tiles(program: LoweredProgram, args: Sequence[Any], seed: int = 0) -> list[Any]:
    """Results of the tile interpreter, in order."""
    inputs = dict(zip(program.inputs, jax.tree.leaves(args), strict=True))
    outs = interpret(program.graph, program.program, inputs, seed=seed)
    return [outs[stream] for stream in program.outputs]


def assert_same(got: Sequence[Any], expected: Sequence[Any], rtol: float, atol: float, label: str) -> None:
    """Equal to the bit when both tolerances are 0; NaNs equal; PRNG keys by their data."""
    assert len(got) == len(expected), label
    for a, b in zip(got, expected, strict=True):
        if jax.dtypes.issubdtype(b.dtype, jax.dtypes.prng_key):
            a = jax.random.key_data(a)
            b = jax.random.key_data(b)
        a = np.asarray(a)
        b = np.asarray(b)
        assert a.dtype == b.dtype and a.shape == b.shape, label
        if a.dtype.kind in "fcV" or "float" in a.dtype.name:
            wide = np.complex128 if a.dtype.kind == "c" else np.float64
            np.testing.assert_allclose(a.astype(wide), b.astype(wide), rtol, atol, err_msg=label)
        else:
            np.testing.assert_array_equal(a, b, err_msg=label)


def assert_rounded_alike(got: Any, expected: Any, label: str = "", ulps: int = 8) -> None:
    """Equal, but for a few roundings of floats: XLA rounds two programs alike on some processors, not on others."""
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        tolerance = 0.0
        if jax.dtypes.issubdtype(b.dtype, np.inexact):
            held = np.abs(np.asarray(b).astype(np.complex128))
            tolerance = (
                ulps * float(jax.numpy.finfo(b.dtype).eps) * float(np.max(held, initial=0, where=np.isfinite(held)))
            )
        assert_same([a], [b], 0, tolerance, label)


def check(
    fun: Callable[..., Any],
    *args: Any,
    tiles: Sequence[int] = TILES,
    rtol: float = 0.0,
    atol: float = 0.0,
    split_rtol: float | None = None,
    split_atol: float | None = None,
) -> None:
    """Asserts that engine, literal engine and tile interpreter equal plain JAX.

    Args:
        fun: function of arrays.
        args: its arguments, pytrees of arrays.
        tiles: sizes of the targets to try.
        rtol, atol: tolerance of the engine against `jax.jit`; 0 is equality.
        split_rtol, split_atol: tolerance of split executions, where reductions reassociate; as the engine's by default.
    """
    expected = jax.tree.leaves(quick_jit(fun)(*args))
    split_rtol = rtol if split_rtol is None else split_rtol
    split_atol = atol if split_atol is None else split_atol
    for count in tiles:
        program = lowered(fun, args, small_target(count))
        assert_same(run_engine(program, args), expected, rtol, atol, f"engine, {count} tiles")
        literal = run_engine(program, args, exact_splits=True)
        assert_same(literal, expected, split_rtol, split_atol, f"literal engine, {count} tiles")
        assert_same(run_tiles(program, args, count), expected, split_rtol, split_atol, f"interpreter, {count} tiles")


def set_byte_cost(monkeypatch: pytest.MonkeyPatch, cost: float) -> None:
    """Sets how many cycles a byte of code is worth where functions save some."""
    for name in ("function_call", "repeats"):
        module = importlib.import_module(f"ipujax.lowering.outlining.{name}")
        monkeypatch.setattr(module, "gain", lambda code, copies, calls, byte_cost: gain(code, copies, calls, cost))


def share_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes every run of equations that comes twice a function, however little it does."""
    set_byte_cost(monkeypatch, 1e9)
    changes = {"function_call": {"_COPY_BYTES": 0, "_WORK_PER_ELEMENT": 0}, "repeats": {"_SHORTEST": 1}}
    for name, values in changes.items():
        for constant, value in values.items():
            monkeypatch.setattr(importlib.import_module(f"ipujax.lowering.outlining.{name}"), constant, value)
