"""Scatters of many updates: cut over tiles, in steps, or by the last update of each row."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax

import ipujax as ipu
from ipujax.lowering.lower import LoweredProgram
from ipujax.lowering.popops.indexing import scatter
from tests.lowering.helpers import assert_same, check, lowered, quick_jit, run_engine, run_tiles, small_target

Struct = jax.ShapeDtypeStruct
RNG = np.random.default_rng(7)
F32 = np.float32
I32 = np.int32


def set_rows(t: Any, i: Any, u: Any) -> Any:
    return t.at[i].set(u)


def add_rows(t: Any, i: Any, u: Any) -> Any:
    return t.at[i].add(u)


def embedding(rows: int, width: int, count: int, dtype: Any = F32) -> tuple[Any, ...]:
    return Struct((rows, width), dtype), Struct((count,), I32), Struct((count, width), dtype)


LARGE: dict[str, tuple[Callable[..., Any], tuple[Any, ...], float]] = {
    "segment sum": (
        partial(jax.ops.segment_sum, num_segments=1000),
        (Struct((1_000_000,), F32), Struct((1_000_000,), I32)),
        1e6,
    ),
    "segment maximum": (
        partial(jax.ops.segment_max, num_segments=1000),
        (Struct((1_000_000,), F32), Struct((1_000_000,), I32)),
        1e6,
    ),
    "segment sum of rows": (
        partial(jax.ops.segment_sum, num_segments=10_000),
        (Struct((100_000, 64), F32), Struct((100_000,), I32)),
        4e6,
    ),
    "segment sum of halves": (
        partial(jax.ops.segment_sum, num_segments=1000),
        (Struct((1_000_000,), np.float16), Struct((1_000_000,), I32)),
        3.5e7,  # uncut: every worker goes through all indices, 5 cycles each (poplibs `getMultiUpdateOpCycleEstimate`)
    ),
    "histogram": (lambda v: jnp.histogram(v, 100, (0.0, 1.0))[0], (Struct((300_000,), F32),), 1e6),
    "bincount": (partial(jnp.bincount, length=256), (Struct((300_000,), I32),), 1e6),
    "embedding": (add_rows, embedding(50_257, 768, 65_536), 5e7),
    "embedding of halves": (add_rows, embedding(50_257, 768, 65_536, np.float16), 3e7),
    "gradient of an embedding": (
        jax.grad(lambda t, i, u: (t[i] * u).sum()),
        embedding(50_257, 256, 65_536),
        5e7,
    ),
    "as many rows as updates": (
        add_rows,
        (Struct((1_000_000,), F32), Struct((1_000_000,), I32), Struct((1_000_000,), F32)),
        5e6,
    ),
    "set": (set_rows, (Struct((1_000_000,), F32), Struct((1_000_000,), I32), Struct((1_000_000,), F32)), 5e6),
    "set of few": (set_rows, (Struct((1000,), F32), Struct((300_000,), I32), Struct((300_000,), F32)), 1e6),
}


@pytest.mark.parametrize("name", LARGE)
def test_many_updates_fit_an_ipu(name: str) -> None:
    """From shapes alone: no tile runs out of memory, and the cycles are below a bound."""
    fun, args, max_cycles = LARGE[name]
    profile = ipu.jit(fun, device=ipu.IPUModel(num_ipus=1, arch="mk2")).lower(*args).compile().profile
    assert not profile.fallbacks
    assert profile.cycles < max_cycles


def blocks_of_updates(program: LoweredProgram) -> int:
    """Number of blocks into which updates are cut."""
    groups = [g for groups in program.graph.groups.values() for g in groups if "Scatter" in g.codelet.name]
    return max(axis.blocks if axis.name == "lookups" else 1 for g in groups for axis in g.axes)


def updates_of(count: int, *row: int, low: int = -2, high: int = 12) -> tuple[np.ndarray, np.ndarray]:
    """Indices, some of them outside of 0…9, and integer updates."""
    return RNG.integers(low, high, count).astype(I32), RNG.integers(-9, 9, (count, *row)).astype(I32)


KINDS = [
    *((kind, dtype, True) for kind in ("subtract", "multiply") for dtype in (np.int32, np.float32)),
    *(("add", dtype, True) for dtype in (np.int32, np.complex64)),
    *(("min", dtype, True) for dtype in (np.int32, np.float16)),
    *(("max", dtype, True) for dtype in (np.float32, ml_dtypes.bfloat16)),
    *(("add", dtype, False) for dtype in (np.float16, ml_dtypes.bfloat16)),
]


@pytest.mark.parametrize(
    ("kind", "dtype", "is_cut"),
    KINDS,
)
def test_cut_updates_give_exact_results(kind: str, dtype: Any, is_cut: bool) -> None:
    """Small integers are exact in any order of sums; updates of narrow floats stay in order."""
    indices, updates = updates_of(3000)
    table = RNG.integers(-9, 9, 10).astype(dtype)
    if kind == "multiply":
        updates = np.where(np.arange(3000) % 300 < 299, 1, -2)
    updates = updates.astype(dtype)

    def fun(t: Any, i: Any, u: Any) -> Any:
        return getattr(t.at[i], kind)(u)

    assert (blocks_of_updates(lowered(fun, (table, indices, updates), small_target(16))) > 1) == is_cut
    check(fun, table, indices, updates, tiles=(16,))


@pytest.mark.parametrize("mode", ["clip", "drop", "promise_in_bounds"])
def test_cut_updates_of_rows(mode: str) -> None:
    indices, updates = updates_of(2000, 3) if mode != "promise_in_bounds" else updates_of(2000, 3, low=0, high=10)
    table = RNG.normal(size=(10, 3)).astype(F32)
    normal = RNG.normal(size=updates.shape).astype(F32)

    def fun(t: Any, i: Any, u: Any) -> Any:
        return t.at[i].add(u, mode=mode)

    assert blocks_of_updates(lowered(fun, (table, indices, normal), small_target(16))) > 1
    check(fun, table, indices, normal, tiles=(16,), rtol=1e-5, atol=2e-5)
    check(fun, table.astype(I32), indices, updates, tiles=(7,))


@pytest.mark.parametrize("dtype", [F32, np.complex64])
def test_cut_updates_keep_signs_of_zeros(dtype: Any) -> None:
    indices = RNG.integers(0, 6, 3000).astype(I32)
    updates = np.zeros(3000, dtype)
    updates[indices == 5] = -updates[indices == 5]
    table = np.array([0, 1] * 5, dtype) * dtype(-0.0)
    cases: list[tuple[Any, Any]] = [
        (add_rows, (table, indices, updates)),
        (lambda i, u: jnp.zeros(10, dtype).at[i].add(u), (indices, updates)),
    ]
    if dtype == F32:  # XLA reads a complex constant with a zero of either sign as 0
        cases.append((lambda i, u: jnp.full(10, table[1]).at[i].add(u), (indices, updates)))
    for fun, args in cases:
        program = lowered(fun, args, small_target(16))
        assert blocks_of_updates(program) > 1
        (expected,) = jax.tree.leaves(quick_jit(fun)(*args))
        for run in (run_engine(program, args), run_engine(program, args, exact_splits=True), run_tiles(program, args)):
            assert np.asarray(run[0]).tobytes() == np.asarray(expected).tobytes()


def test_cut_updates_of_constant_tables() -> None:
    """A neutral constant and another one."""
    indices, updates = updates_of(3000)
    for start in (0, 7):
        fun = partial(lambda i, u, start: jnp.full(10, start).at[i].add(u), start=start)
        assert blocks_of_updates(lowered(fun, (indices, updates), small_target(16))) > 1
        check(fun, indices, updates, tiles=(16,))


def test_cut_updates_of_windows_batches_and_index_vectors() -> None:
    """The longer dimension of look-ups is cut, within each batch, and windows overlap blocks of rows."""
    table = RNG.integers(-9, 9, (2, 6, 5)).astype(I32)
    indices = RNG.integers(-2, 7, (2, 3, 1500, 2)).astype(I32)
    updates = RNG.integers(-9, 9, (2, 3, 1500, 2)).astype(I32)
    numbers = lax.ScatterDimensionNumbers((3,), (1,), (2, 1), (0,), (0,))
    fun = partial(lax.scatter_add, dimension_numbers=numbers, mode="drop")
    assert blocks_of_updates(lowered(fun, (table, indices, updates), small_target(16))) > 1
    check(fun, table, indices, updates, tiles=(16,))


def test_cut_updates_of_a_table_on_other_tiles() -> None:
    """The table stays on its tiles, in two scatters one after the other."""
    indices, updates = updates_of(3000)
    table = RNG.integers(-9, 9, 10).astype(I32)
    check(lambda t, i, u: jnp.flip(t * 2).at[i].add(u).at[i].max(u), table, indices, updates, tiles=(7,))


def lowered_with_little_memory(fun: Callable[..., Any], args: Any, tiles: int = 4) -> LoweredProgram:
    """Lowers for tiles of which planners may use next to no memory."""
    return lowered(fun, args, small_target(tiles, available_memory_proportion=0.002))


def check_bits(fun: Callable[..., Any], args: Any, program: LoweredProgram) -> None:
    """Compares engine, literal engine and interpreter with JAX to the bit."""
    expected = jax.tree.leaves(quick_jit(fun)(*args))
    assert_same(run_engine(program, args), expected, 0, 0, "engine")
    assert_same(run_engine(program, args, exact_splits=True), expected, 0, 0, "literal engine")
    assert_same(run_tiles(program, args), expected, 0, 0, "interpreter")


def scatters_of(program: LoweredProgram) -> list[str]:
    return [g.codelet.name for groups in program.graph.groups.values() for g in groups if "Scatter" in g.codelet.name]


def test_steps_round_narrow_floats_in_order() -> None:
    indices, _ = updates_of(500)
    table = RNG.normal(size=10).astype(np.float16)
    updates = RNG.normal(size=500).astype(np.float16)
    for fun, args in (
        (add_rows, (table, indices, updates)),
        (lambda i, u: jnp.zeros(10, np.float16).at[i].add(u), (indices, updates)),
    ):
        program = lowered_with_little_memory(fun, args)
        assert len(scatters_of(program)) > 2
        check_bits(fun, args, program)


def test_steps_of_functions_and_of_replacing_windows() -> None:
    """The last of several updates of an element wins; look-ups of two dimensions keep their order."""
    starts = RNG.integers(-1, 18, (3, 60, 1)).astype(I32)
    windows = RNG.normal(size=(3, 60, 4)).astype(F32)
    table = RNG.normal(size=20).astype(F32)
    numbers = lax.ScatterDimensionNumbers((2,), (), (0,))

    def replace(t: Any, i: Any, u: Any) -> Any:
        return lax.scatter(t, i, u, numbers)

    program = lowered_with_little_memory(replace, (table, starts, windows))
    assert len(scatters_of(program)) == 3
    check_bits(replace, (table, starts, windows), program)

    def halved(t: Any, i: Any) -> Any:
        return t.at[i].apply(lambda x: x * 0.5 + 1)

    args = (table, RNG.integers(0, 20, 400).astype(I32))
    program = lowered_with_little_memory(halved, args)
    assert len(scatters_of(program)) > 1
    check_bits(halved, args, program)


@pytest.mark.parametrize("mode", ["clip", "drop"])
def test_looks_up_the_last_update_of_a_row(mode: str) -> None:
    rows, columns = (RNG.integers(-2, n + 2, (40, 10)).astype(I32) for n in (6, 5))
    table = RNG.normal(size=(6, 3, 5)).astype(F32)
    updates = RNG.normal(size=(40, 10, 3)).astype(F32)
    updates[::7, :, 0] = np.nan
    table[2, 1] = -0.0

    def fun(t: Any, i: Any, j: Any, u: Any) -> Any:
        return t.at[i, :, j].set(u, mode=mode)

    args = (table, rows, columns, updates)
    program = lowered_with_little_memory(fun, args, 7)
    assert any("ScatterMax" in name for name in scatters_of(program))
    check_bits(fun, args, program)


def test_steps_need_less_memory() -> None:
    """A sum that must be in order runs in steps on tiles of little memory; one step does not fit."""
    device = ipu.IPUModel(tiles_per_ipu=16, bytes_per_tile=64 * 1024)
    args = (Struct((100,), np.float16), Struct((20_000,), I32), Struct((20_000,), np.float16))
    profile = ipu.jit(add_rows, device=device).lower(*args).compile().profile
    assert profile.memory.max_tile_bytes < 64 * 1024


def test_bounds_the_number_of_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of any memory give equal numbers in a bounded number of steps."""
    indices, updates = updates_of(600)
    args = RNG.integers(-9, 9, 10).astype(np.float16), indices, updates.astype(np.float16)
    assert num_scatter_groups(lowered_with_little_memory(add_rows, args)) > 2
    monkeypatch.setattr(scatter, "_MAX_STEPS", 2)
    program = lowered_with_little_memory(add_rows, args)
    assert num_scatter_groups(program) == 2
    check_bits(add_rows, args, program)


def num_scatter_groups(program: LoweredProgram) -> int:
    """Number of vertex groups that scatter."""
    return sum("Scatter" in g.codelet.name for groups in program.graph.groups.values() for g in groups)


def test_a_scatter_counts_one_operation_an_update() -> None:
    """Each vertex looks at all updates, and computes those of its rows."""
    args = embedding(304, 8, 64)
    profile = ipu.jit(add_rows, device=ipu.IPUModel(tiles_per_ipu=16)).profile(*args)
    assert sum(step.flops for step in profile.step_costs) == 64 * 8
