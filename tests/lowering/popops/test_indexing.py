"""Gathers and scatters against plain JAX: look-ups, gradients, modes, index vectors, and cuts of tables."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tests.lowering.helpers import check, engine, lowered, quick_jit, run_engine, run_tiles, small_target

RNG = np.random.default_rng(3)
TABLE = RNG.normal(size=(23, 10)).astype(np.float32)
IDS = RNG.integers(0, 23, (3, 4)).astype(np.int32)
OUT_OF_RANGE_IDS = np.array([0, 22, 23, -1, 100, -100, 5, 5], np.int32)
Mode = lax.GatherScatterMode


def rows_of(mode: Any, fill_value: Any = None) -> Callable[..., jax.Array]:
    numbers = lax.GatherDimensionNumbers((1,), (0,), (0,))

    def fun(table: jax.Array, ids: jax.Array) -> jax.Array:
        return lax.gather(table, ids[..., None], numbers, (1, table.shape[1]), mode=mode, fill_value=fill_value)

    return fun


def has_cut_rows(fun: Callable[..., Any], *args: Any, tiles: int = 16) -> bool:
    groups = [g for groups in lowered(fun, args, small_target(tiles)).graph.groups.values() for g in groups]
    return any(axis.kind == "reduce" and axis.blocks > 1 for group in groups for axis in group.axes)


@pytest.mark.parametrize("tiles", [1, 7, 16])
def test_embedding_and_its_gradient(tiles: int) -> None:
    check(lambda t, i: t[i], TABLE, IDS, tiles=(tiles,))
    check(jax.grad(lambda t, i: (t[i] ** 2).sum()), TABLE, IDS, tiles=(tiles,), rtol=1e-6)


@pytest.mark.parametrize("mode", ["clip", "fill"])
def test_modes_with_rows_cut(mode: str) -> None:
    table = RNG.normal(size=(200_000, 2)).astype(np.float32)  # a column exceeds the memory for one tile
    ids = np.array([0, 199_999, 200_000, -1, 1 << 30, -(1 << 30), 777, 5], np.int32)
    assert has_cut_rows(rows_of(mode), table, ids)
    check(rows_of(mode), table, ids, tiles=(7, 16))
    if mode == "fill":
        check(rows_of(mode, 7.0), table, ids, tiles=(16,))


@pytest.mark.parametrize("dtype", ["int8", "uint32", "bool", "bfloat16"])
def test_dtypes_with_rows_cut(dtype: str) -> None:
    table = jnp.asarray(RNG.integers(0, 100, (400_000, 1)), dtype)
    ids = np.array([0, 399_999, 400_000, 5, 255], np.uint32)
    assert has_cut_rows(rows_of("fill"), table, ids)
    check(rows_of("fill"), table, ids, tiles=(16,))


@pytest.mark.parametrize("mode", ["clip", "fill"])
def test_modes_with_uncut_rows(mode: str) -> None:
    check(rows_of(mode), TABLE, OUT_OF_RANGE_IDS, tiles=(1, 7))


CUT_DTYPES = ("float32", "bfloat16", "float8_e5m2", "float8_e8m0fnu", "complex64", "int4")


@pytest.mark.parametrize("dtype", CUT_DTYPES)
def test_keeps_every_bit_with_rows_cut(dtype: str) -> None:
    """Signs of zeros too: the zero bits of other blocks of rows must not change a look-up."""
    kinds = np.array([-0.0, 0.0, 1.0, 2.0], np.float32)
    table = jnp.asarray(np.tile(kinds, 200_000)[:, None], dtype)
    if dtype == "complex64":
        table = lax.complex(table.real, -table.real)
    ids = np.array([0, 1, 2, 3, 399_996, 799_997, 500_000], np.int32)
    fun = rows_of("clip")
    assert has_cut_rows(fun, table, ids)
    program = lowered(fun, (table, ids), small_target(16))
    runs = run_engine(program, (table, ids)), run_engine(program, (table, ids), True), run_tiles(program, (table, ids))
    expected = np.asarray(quick_jit(fun)(table, ids))
    for (got,) in runs:
        assert np.asarray(got).tobytes() == expected.tobytes()


def test_plans_without_available_memory() -> None:
    """The smallest plan is used."""
    grad = jax.grad(lambda t, i: (t[i] ** 2).sum())
    program = lowered(grad, (TABLE, IDS), small_target(4, available_memory_proportion=0.0))
    np.testing.assert_allclose(run_tiles(program, (TABLE, IDS))[0], quick_jit(grad)(TABLE, IDS), rtol=1e-6)


def test_labels() -> None:
    logits = RNG.normal(size=(9, 10)).astype(np.float32)
    labels = RNG.integers(0, 10, 9).astype(np.int32)

    def label_scores(x: jax.Array, labels: jax.Array) -> jax.Array:
        return jnp.take_along_axis(x, labels[:, None], 1).sum() + x[jnp.arange(9), labels].sum()

    check(label_scores, logits, labels, tiles=(7,), rtol=1e-5)
    check(jax.grad(label_scores), logits, labels, tiles=(7,))


def test_windows_batches_and_index_vectors() -> None:
    x = RNG.normal(size=(4, 6, 5, 3)).astype(np.float32)
    starts = RNG.integers(-2, 7, (4, 2, 2)).astype(np.int32)

    def fun(x: jax.Array, starts: jax.Array) -> jax.Array:
        numbers = lax.GatherDimensionNumbers((1, 3), (1,), (2, 1), (0,), (0,))
        return lax.gather(x, starts, numbers, (1, 1, 2, 3), mode="clip")

    check(fun, x, starts, tiles=(1, 7))
    check(jax.grad(lambda x, s: (fun(x, s) ** 2).sum()), x, starts, tiles=(7,), rtol=1e-6)


def test_slices_shorter_than_unindexed_dimensions() -> None:
    numbers = lax.GatherDimensionNumbers((1,), (0,), (0,))
    check(lambda t, i: lax.gather(t, i[:, None], numbers, (1, 4), mode="fill"), TABLE, OUT_OF_RANGE_IDS, tiles=(1, 7))


SCATTERS = {
    "set": lambda x, i, u: x.at[i].set(u),
    "add": lambda x, i, u: x.at[i].add(u),
    "subtract": lambda x, i, u: x.at[i].subtract(u),
    "multiply": lambda x, i, u: x.at[i].multiply(u),
    "min": lambda x, i, u: x.at[i].min(u),
    "max": lambda x, i, u: x.at[i].max(u),
}


@pytest.mark.parametrize("name", SCATTERS)
def test_scatter(name: str) -> None:
    ids = OUT_OF_RANGE_IDS[[0, 1, 2, 4, 6]] if name == "set" else OUT_OF_RANGE_IDS
    updates = RNG.normal(size=(len(ids), 10)).astype(np.float32)
    check(SCATTERS[name], TABLE, ids, updates, tiles=(7,))


@pytest.mark.parametrize("mode", ["clip", "drop", "promise_in_bounds"])
def test_scatter_modes_with_rows_cut(mode: str) -> None:
    ids = OUT_OF_RANGE_IDS[[0, 1, 6, 7]] if mode == "promise_in_bounds" else OUT_OF_RANGE_IDS
    updates = RNG.normal(size=(len(ids), 1)).astype(np.float32)
    table = RNG.normal(size=(23, 1)).astype(np.float32)
    numbers = lax.ScatterDimensionNumbers((1,), (0,), (0,))

    def fun(t: jax.Array, i: jax.Array, u: jax.Array) -> jax.Array:
        big = jnp.concatenate([t, jnp.ones((600, 1))])
        return lax.scatter_add(big, i[:, None] * 20, u, numbers, mode=mode)

    check(fun, table, ids, updates, tiles=(7, 16))


def test_scatter_of_windows_index_vectors_and_batches() -> None:
    x = RNG.normal(size=(4, 6, 5, 3)).astype(np.float32)
    starts = RNG.integers(-2, 7, (4, 2, 2)).astype(np.int32)
    updates = RNG.normal(size=(4, 2, 2, 2)).astype(np.float32)
    numbers = lax.ScatterDimensionNumbers((2, 3), (1,), (2, 1), (0,), (0,))
    for mode in ("clip", "drop"):
        check(lambda x, s, u, m=mode: lax.scatter_add(x, s, u, numbers, mode=m), x, starts, updates, tiles=(1, 16))


def test_scatter_of_a_function_and_of_no_updates() -> None:
    check(lambda x, i: x.at[i].apply(jnp.sin), TABLE, IDS, tiles=(4,), rtol=1e-6)
    check(lambda x, i: x.at[i].add(1.0), TABLE, IDS[:0], tiles=(4,))


def test_gradient_fills_its_table_of_zeros() -> None:
    program = lowered(jax.grad(lambda t, i: (t[i] ** 2).sum()), (TABLE, IDS), small_target(16))
    (group,) = [g for groups in program.graph.groups.values() for g in groups if "Scatter" in g.codelet.name]
    assert [field.name for field in group.codelet.fields] == ["indices", "updates", "out"]
    assert np.unique(group.tile).size > 4


def test_cuts_an_embedding_along_features_then_rows() -> None:
    shapes = jax.ShapeDtypeStruct((3000, 8), np.float32), jax.ShapeDtypeStruct((112,), np.int32)
    program = lowered(rows_of("fill"), shapes, small_target(32))
    (group,) = [g for groups in program.graph.groups.values() for g in groups if "MultiSlice" in g.codelet.name]
    blocks = {axis.name: axis.blocks for axis in group.axes}
    assert blocks["d1"] == 8 and np.unique(group.tile).size == 32


def test_engine_computes_one_gather() -> None:
    table = RNG.normal(size=(2000, 2)).astype(np.float32)
    ids = OUT_OF_RANGE_IDS
    program = lowered(rows_of("clip"), (table, ids), small_target(16))
    text = str(jax.make_jaxpr(engine(program))(table, ids))
    assert text.count(" gather[") == 1 and "select_n" not in text and "concatenate" not in text


def test_looks_up_neighbouring_rows() -> None:
    """Slices of several indices of an indexed dimension are not cut there."""

    def windows(x: jax.Array, starts: jax.Array) -> jax.Array:
        return jax.vmap(lambda at: lax.dynamic_slice(x, (at, jnp.int32(1)), (3, 2)))(starts)

    x = np.arange(90, dtype=np.float32).reshape(30, 3)
    starts = np.array([0, 27, 5, 29, -2, 11, 11], np.int32)
    check(windows, x, starts)


# Windows: look-ups and updates of several indices of indexed dimensions.
FIELD = RNG.integers(-9, 10, (60, 41, 2)).astype(np.float32)
CORNERS = np.array([[0, 0], [35, 30], [36, 31], [-1, 2], [4, 100], [3, 3], [4, 3]], np.int32)
WINDOW = (25, 11, 2)
GATHER_NUMBERS = lax.GatherDimensionNumbers((0, 1, 3), (), (0, 1))
SCATTER_NUMBERS = lax.ScatterDimensionNumbers((1, 2, 3), (), (0, 1))


def blocks_of(kind: str, fun: Callable[..., Any], *args: Any, tiles: int = 64, **changes: Any) -> dict[str, int]:
    """Number of blocks of each axis of the vertices of a kind."""
    program = lowered(fun, args, small_target(tiles, **changes))
    assert not program.graph.notes.fallbacks
    (group,) = [g for groups in program.graph.groups.values() for g in groups if kind in g.codelet.name]
    return {axis.name: axis.blocks for axis in group.axes}


@pytest.mark.parametrize("mode", ["clip", "fill", "promise_in_bounds"])
def test_cuts_windows(mode: str) -> None:
    numbers = lax.GatherDimensionNumbers((0, 1, 2), (), (0, 1))

    def fun(x: Any, at: Any) -> Any:
        return lax.gather(x, at, numbers, (51, 38, 2), mode=mode)

    assert blocks_of("MultiSlice", fun, FIELD, CORNERS[0])["d0"] > 1
    for at in ([9, 3], [10, 3], [-1, 0]):
        check(fun, FIELD, np.array(at, np.int32), tiles=(64,))
    check(lambda x, at: lax.gather(x, at, GATHER_NUMBERS, WINDOW, mode=mode), FIELD, CORNERS, tiles=(1, 16))


SCATTER_CASES = [
    (scatter, mode)
    for mode in ("clip", "drop", "promise_in_bounds")
    for scatter in (lax.scatter_add, lax.scatter_mul, lax.scatter_max)
]


@pytest.mark.parametrize(("scatter", "mode"), SCATTER_CASES)
def test_applies_windows_in_part(scatter: Callable[..., Any], mode: str) -> None:
    """Blocks of the table take their part of each window, even if it begins outside of the block or the table."""

    def fun(x: Any, at: Any, u: Any) -> Any:
        return scatter(x, at, u, SCATTER_NUMBERS, mode=mode)

    updates = RNG.integers(-2, 3, (len(CORNERS), *WINDOW)).astype(np.float32)
    blocks = blocks_of("Scatter", fun, FIELD, CORNERS, updates)
    assert blocks["d0"] * blocks["d1"] > 4
    check(fun, FIELD, CORNERS, updates, tiles=(64,))


def test_overlapping_windows_and_windows_of_a_function() -> None:
    updates = RNG.normal(size=(len(CORNERS), *WINDOW)).astype(np.float32)
    check(lambda x, at, u: lax.scatter(x, at, u, SCATTER_NUMBERS), FIELD, CORNERS, updates, tiles=(64,))

    def applied(x: Any, at: Any) -> Any:
        return lax.scatter_apply(x, at, lambda v: v * 0.5 + 1, SCATTER_NUMBERS, update_shape=updates.shape)

    check(applied, FIELD, CORNERS, tiles=(64,))


@pytest.mark.parametrize("mode", ["clip", "fill"])
def test_windows_of_a_table_larger_than_a_tile(mode: str) -> None:
    numbers = lax.GatherDimensionNumbers((0, 2), (1,), (2, 0, 1))

    def fun(x: Any, at: Any) -> Any:
        return lax.gather(x, at, numbers, (3, 1, 5), mode=mode, fill_value=7)

    x = RNG.normal(size=(40, 3, 50)).astype(np.float32)
    at = np.array([[0, 0, 0], [45, 37, 2], [46, 37, 2], [3, -1, 1], [9, 9, 9], [1, 2, 0]], np.int32)
    memory = {"bytes_per_tile": 24_000}
    assert blocks_of("MultiSlice", fun, x, at, tiles=16, **memory)["table2"] > 1
    program = lowered(fun, (x, at), small_target(16, **memory))
    (expected,) = [np.asarray(quick_jit(fun)(x, at))]
    for (got,) in (run_engine(program, (x, at)), run_engine(program, (x, at), True), run_tiles(program, (x, at))):
        np.testing.assert_array_equal(got, expected)
