"""Indices beyond a table: clamped, filled, dropped or wrapped as in JAX, for any index dtype.

The table is between two others on the same tiles, so that reading or writing beyond it would be detected.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tests.lowering.helpers import check

TILES = (5,)
TABLE = np.arange(33, dtype=np.float32).reshape(11, 3)
UPDATES = -np.ones((6, 3), np.float32) * np.arange(1, 7, dtype=np.float32)[:, None]
INDICES = {
    "int32": np.array([0, 10, 11, -1, -11, -12], np.int32),
    "far": np.array([2**31 - 1, -(2**31), 5, 1000, -1000, 10], np.int32),
    "int8": np.array([0, 10, 127, -1, -128, 11], np.int8),
    "uint8": np.array([0, 10, 11, 255, 128, 3], np.uint8),
    "uint16": np.array([0, 10, 11, 65535, 32768, 3], np.uint16),
    "uint32": np.array([0, 10, 11, 2**32 - 1, 2**31, 3], np.uint32),
}


def neighbours(fun: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """The function, and two tables beside its own that must not change."""
    return lambda x, i: (x * 1000, fun(x, i), x * 2000)


@pytest.mark.parametrize("kind", INDICES)
@pytest.mark.parametrize("mode", ["clip", "fill", "wrap"])
def test_reading(mode: str, kind: str) -> None:
    def fun(x: Any, i: Any) -> Any:
        pairs = jnp.stack([i, i], 1).astype(np.int32)
        return (
            jnp.take(x, i, 0, mode=mode),
            jnp.take(x, i, 1, mode=mode),
            x[i, i] if mode != "wrap" else x,
            jax.vmap(lambda p: lax.dynamic_slice(x, (p[0], p[1]), (2, 2)))(pairs),
        )

    check(neighbours(fun), TABLE, INDICES[kind], tiles=TILES)


@pytest.mark.parametrize("kind", INDICES)
@pytest.mark.parametrize("mode", ["clip", "drop", None])
def test_writing(mode: str | None, kind: str) -> None:
    def fun(x: Any, i: Any) -> Any:
        at = x.at[i]
        return (
            at.add(UPDATES, mode=mode),
            at.max(-UPDATES, mode=mode),
            at.multiply(UPDATES, mode=mode),
            x.at[i, i % 3].add(1.0, mode=mode),
            x.at[i[:1]].set(UPDATES[:1], mode=mode),
        )

    check(neighbours(fun), TABLE, INDICES[kind], tiles=TILES)


@pytest.mark.parametrize("kind", INDICES)
def test_clamps_dynamic_slices(kind: str) -> None:
    def fun(x: Any, i: Any) -> Any:
        read = [lax.dynamic_slice(x, (i[n], i[5 - n]), (4, 2)) for n in range(6)]
        written = [lax.dynamic_update_slice(x, x[:4, :2] + 100, (i[n], i[5 - n])) for n in range(6)]
        rows = [lax.dynamic_index_in_dim(x, i[n], 0) for n in range(6)]
        return read, written, rows

    check(neighbours(fun), TABLE, INDICES[kind], tiles=TILES)


def test_clamps_or_fills_whole_windows_of_a_gather() -> None:
    """A window that begins inside and ends outside is clamped back, or filled completely."""
    numbers = lax.GatherDimensionNumbers(offset_dims=(1, 2), collapsed_slice_dims=(), start_index_map=(0, 1))

    def fun(x: Any, i: Any) -> Any:
        starts = jnp.stack([i, i], 1)
        return [lax.gather(x, starts, numbers, (3, 2), mode=mode) for mode in ("clip", "fill")]

    for kind in ("int32", "far"):
        check(neighbours(fun), TABLE, INDICES[kind], tiles=TILES)


def test_clamps_or_drops_whole_windows_of_a_scatter() -> None:
    numbers = lax.ScatterDimensionNumbers(
        update_window_dims=(1, 2), inserted_window_dims=(), scatter_dims_to_operand_dims=(0, 1)
    )

    def fun(x: Any, i: Any) -> Any:
        starts = jnp.stack([i, i], 1)
        updates = jnp.ones((6, 3, 2), np.float32)
        return [lax.scatter_add(x, starts, updates, numbers, mode=mode) for mode in ("clip", "drop")]

    for kind in ("int32", "far"):
        check(neighbours(fun), TABLE, INDICES[kind], tiles=TILES)


def test_indices_from_nan_and_infinities() -> None:
    """NaN and infinities cast to indices equal those of XLA."""
    floats = np.float32([np.nan, np.inf, -np.inf, 2.7, -0.5, 1e20])

    def fun(x: Any, f: Any) -> Any:
        i = f.astype(np.int32)
        return x[i], x.at[i].add(UPDATES), lax.dynamic_slice(x, (i[0], i[1]), (2, 2))

    check(neighbours(fun), TABLE, floats, tiles=TILES)


def test_loops_stay_inside_of_the_table() -> None:
    def fun(x: Any, i: Any) -> Any:
        def iteration(c: Any, n: Any) -> Any:
            row = lax.dynamic_index_in_dim(c, n, 0, keepdims=False)
            return lax.dynamic_update_index_in_dim(c, row + 1, n + 5, 0), row

        return lax.scan(iteration, x, i)

    check(neighbours(fun), TABLE, INDICES["far"], tiles=TILES)


@pytest.mark.parametrize(
    ("dtype", "value"), [("uint8", -1), ("uint8", 300), ("uint32", -1), ("int8", 1000), ("float16", 1e9)]
)
@pytest.mark.filterwarnings("ignore:overflow encountered in cast")  # by JAX, of 1e9
def test_fill_values_beyond_the_range_of_the_dtype_wrap_around(dtype: str, value: float) -> None:
    def fun(x: Any, i: Any) -> Any:
        return x.at[i].get(mode="fill", fill_value=value), x.at[jnp.array([50])].get(mode="fill", fill_value=value)

    check(fun, np.arange(11).astype(dtype), INDICES["int32"], tiles=TILES)
