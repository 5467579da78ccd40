"""Dtypes that the machine lacks: their rows in the profile, and their higher cost."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import ipujax as ipu

DEVICE = ipu.IPUModel(tiles_per_ipu=16)
NATIVE = ("float32", "float16", "int32", "uint32", "int16", "uint16", "int8", "uint8", "bool")
ROWS = np.arange(0, 15, 3, dtype=np.int32)
EMULATED = ("bfloat16", "float8_e4m3fn", "float8_e5m2", "int4", "uint4", "complex64")
WIDE = ("float64", "int64", "uint64", "complex128")


def profile(fun: Callable[..., Any], *shapes: Any, device: Any = DEVICE) -> Any:
    return ipu.jit(fun, device=device).lower(*shapes).compile().profile


def of(dtype: str, *shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape or (64, 64), jnp.dtype(dtype))


OPERATIONS: dict[str, Callable[[Any], Any]] = {
    "add": lambda x: x + x,
    "multiply": lambda x: x * x,
    "sum": lambda x: lax.reduce_sum(x, (0,)),
    "product": lambda x: lax.dot_general(x, x, (((1,), (0,)), ((), ()))),
    "running sum": lambda x: lax.cumsum(x, 1),
    "scattered sum": lambda x: x.at[ROWS].add(x[:5]),
}
MOVES: dict[str, Callable[[Any], Any]] = {
    "view": lambda x: x.T.reshape(-1)[::-1],
    "rows": lambda x: x[ROWS],
    "slice": lambda x: lax.dynamic_slice(x, (np.int32(3), np.int32(2)), (4, 5)),
    "padding": lambda x: lax.pad(x, jnp.zeros((), x.dtype), ((1, 1, 1), (0, 2, 0))),
    "choice": lambda x: jnp.where(jnp.arange(64, dtype=np.int32) > 9, x, x.T),
    "rows written": lambda x: x.at[ROWS].set(x[:5]),
}


@functools.cache
def profile_of(name: str, dtype: str) -> Any:
    with jax.enable_x64(dtype in WIDE):
        return profile(OPERATIONS[name], of(dtype))


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(n, d) for n in OPERATIONS for d in (*EMULATED, *WIDE) if n == "add" or "int4" not in d],  # XLA sums no nibbles
)
def test_lists_arithmetic_in_emulated_dtypes(name: str, dtype: str) -> None:
    rows = profile_of(name, dtype).emulated
    assert {row.dtype for row in rows if row.cycles} == {dtype}, rows
    assert all(row.operations and row.origin.line.startswith("test_emulation.py:") for row in rows)


@pytest.mark.parametrize("dtype", NATIVE)
def test_does_not_list_native_dtypes(dtype: str) -> None:
    """In one program, as a list of one of its operations would show."""
    operations = [lambda x: x | x] if dtype == "bool" else [OPERATIONS[n] for n in ("add", "sum", "running sum")]
    assert profile(lambda x: [operation(x) for operation in operations], of(dtype)).emulated == ()


@pytest.mark.parametrize("dtype", [*EMULATED, *WIDE])
def test_does_not_list_moves(dtype: str) -> None:
    with jax.enable_x64(dtype in WIDE):
        assert profile(lambda x: [move(x) for move in MOVES.values()], of(dtype)).emulated == ()


def test_rows_name_line_operations_and_cycles() -> None:
    def fun(x: Any, y: Any) -> Any:
        x = lax.cumsum(jnp.sin(x), 1) * x
        return x, y + 1, y * 2

    rows = profile(fun, of("bfloat16"), of("float32")).emulated
    (row,) = rows
    line = inspect.getsourcelines(fun)[1] + 1
    assert row.dtype == "bfloat16" and row.origin.line.startswith(f"test_emulation.py:{line} ")
    first, *sums, last = row.operations
    assert (first, last) == ("popops::Sin<bfloat16>", "popops::Mul<bfloat16>") and sums
    step = profile(lambda x: jnp.sin(x), of("bfloat16")).emulated
    assert 0 < step[0].cycles < row.cycles


def test_summary_lists_emulated_dtypes() -> None:
    text = profile(lambda x: x + x, of("bfloat16")).summary()
    assert "Arithmetic in dtypes that the machine does not have:" in text
    assert "bfloat16 (popops::Add<bfloat16>), test_emulation.py:" in text
    assert "machine does not have" not in profile(lambda x: x + x, of("float16")).summary()


def test_native_dtypes_are_not_emulated_and_faster() -> None:
    """Changes `native_dtypes`, as in a study of another machine."""
    native = DEVICE.target.native_dtypes
    device = ipu.IPUModel(tiles_per_ipu=16, native_dtypes=native | {"bfloat16"})
    fun = OPERATIONS["add"]
    native_profile = profile(fun, of("bfloat16"), device=device)
    emulated_profile = profile(fun, of("bfloat16"))
    assert native_profile.emulated == () and emulated_profile.emulated
    assert native_profile.phase_cycles["compute"] < emulated_profile.phase_cycles["compute"]
    lacking = ipu.IPUModel(tiles_per_ipu=16, native_dtypes=native - {"float16"})
    assert profile(fun, of("float16"), device=lacking).emulated
    assert (
        profile(fun, of("float16")).phase_cycles["compute"]
        < (profile(fun, of("float16"), device=lacking).phase_cycles["compute"])
    )


@pytest.mark.parametrize("dtype", ["float64", "int64", "bfloat16"])
def test_products_of_native_dtypes_are_not_emulated(dtype: str) -> None:
    def product(x: jax.Array) -> jax.Array:
        return x @ x.T

    args = jax.ShapeDtypeStruct((64, 64), dtype)
    with jax.enable_x64(True):
        emulated_profile = profile(product, args)
        native = DEVICE.target.native_dtypes | {dtype}
        native_profile = profile(product, args, device=ipu.IPUModel(tiles_per_ipu=16, native_dtypes=native))
    assert native_profile.emulated == () and emulated_profile.emulated
    assert native_profile.phase_cycles["compute"] < 0.7 * emulated_profile.phase_cycles["compute"]


COSTLIER = [
    ("bfloat16", "float16"), ("bfloat16", "float32"), ("float8_e4m3fn", "float16"), ("float8_e5m2", "float16"),
    ("float64", "float32"), ("int64", "int32"), ("complex64", "float32"), ("complex128", "complex64"),
    ("complex128", "float64"),
]  # fmt: skip


@pytest.mark.parametrize(("dtype", "cheaper_dtype"), COSTLIER)
@pytest.mark.parametrize("name", ["add", "multiply", "sum", "running sum", "scattered sum"])
def test_emulated_arithmetic_costs_more(name: str, dtype: str, cheaper_dtype: str) -> None:
    cycles, cheaper_cycles = (profile_of(name, d).phase_cycles["compute"] for d in (dtype, cheaper_dtype))
    assert cycles > cheaper_cycles


def test_emulates_doubles_in_software() -> None:
    """An addition of a double costs an order of magnitude more than that of a float."""
    with jax.enable_x64(True):
        double, single = (
            profile(lambda x: x + x, of(d, 256, 256)).phase_cycles["compute"] for d in ("float64", "float32")
        )
    assert 10 < double / single < 20
