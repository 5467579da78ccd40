"""Slices looked up and written index by index, against plain JAX: in engine, literal engine and tile interpreter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from ipujax.lowering.lower import LoweredProgram, lower
from ipujax.lowering.program_inputs import ProgramInputs
from ipujax.lowering.rules.arrays import dynamic_slices
from tests.lowering.helpers import assert_same, check, passed, quick_jit, run_engine, run_tiles, small_target

X = np.arange(6 * 5 * 7, dtype=np.float32).reshape(6, 5, 7)
STARTS = [(0, 0, 0), (2, 1, 3), (-4, 9, 100)]
SIZES = [(1, 5, 7), (6, 2, 7), (2, 3, 4), (1, 1, 1)]


@pytest.fixture(params=["all at once", "first dimension", "in two parts"])
def by_index(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forces a form of slices by index, at any cost."""

    def ways(graph: Any, x: Any, sizes: Any, moving: Any) -> list[Any]:
        dims = tuple(moving)
        if request.param == "all at once" or len(dims) < 2:
            return [[dynamic_slices._Part(dims, by_index=True)]]
        later_by_index = request.param == "in two parts"
        parts = [(dims[:1], True), (dims[1:], later_by_index)]
        return [[dynamic_slices._Part(dims, by_index=by_index) for dims, by_index in parts]]

    monkeypatch.setattr(dynamic_slices, "_plans", ways)


@pytest.mark.usefixtures("by_index")
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("start", STARTS)
def test_read(sizes: tuple[int, ...], start: tuple[int, ...]) -> None:
    check(lambda x, *s: lax.dynamic_slice(x, s, sizes), X, *map(np.int32, start), tiles=(7,))


@pytest.mark.usefixtures("by_index")
@pytest.mark.parametrize("shape", SIZES)
@pytest.mark.parametrize("start", STARTS)
def test_write(shape: tuple[int, ...], start: tuple[int, ...]) -> None:
    update = -np.ones(shape, np.float32)
    check(lambda x, u, *s: lax.dynamic_update_slice(x, u, s), X, update, *map(np.int32, start), tiles=(7,))


@pytest.mark.usefixtures("by_index")
@pytest.mark.parametrize("start", [-9, -1, 3])
def test_negative_starts_are_clamped(start: int) -> None:
    """A rule of the primitive; `lax` resolves negative starts."""
    i = np.int32(start)
    update = -np.ones((1, 2, 3), np.float32)
    check(lambda x, i: lax.dynamic_slice_p.bind(x, i, i, i, slice_sizes=(1, 2, 3)), X, i, tiles=(7,))
    check(lambda x, u, i: lax.dynamic_update_slice_p.bind(x, u, i, i, i), X, update, i, tiles=(7,))


@pytest.mark.usefixtures("by_index")
def test_other_dtypes_and_views() -> None:
    for x in (X.astype(np.int8), X > 3, X.astype(jnp.bfloat16), X.astype(np.float16)):
        check(lambda x, i: lax.dynamic_slice(x, (i, i, i), (2, 2, 2)), x, np.uint8(3), tiles=(4,))
        check(lambda x, i: x.at[i, 1, i].set(x[i - 1, 0, 0]), x, np.int32(3), tiles=(4,))
    check(lambda x, i: lax.dynamic_slice_in_dim(x.T[::-1], i, 2, 1), X, np.int32(2), tiles=(7,))
    check(lambda x, u, i: lax.dynamic_update_slice(x.T.reshape(-1), u, (i,)), X, X[0, 0, :3], np.int32(2), tiles=(7,))
    minus_zero = np.full(40, -0.0, np.float32)
    check(lambda x, i: jnp.copysign(1.0, lax.dynamic_slice(x, (i,), (3,))), minus_zero, np.int32(30), tiles=(16,))


@pytest.mark.usefixtures("by_index")
def test_static_start_of_one_dimension() -> None:
    check(lambda x, u, i: lax.dynamic_update_slice(x, u, (i, 2, i)), X, X[:2, :2, :2], np.int32(1), tiles=(7,))


# Body of a loop that writes an array in place.
Body = Callable[[Any, Any], Any]


def previous(i: jax.Array, b: jax.Array) -> jax.Array:
    return b.at[i].set((b[i - 1] * 2 + 1).astype(b.dtype))


def swap(i: jax.Array, b: jax.Array) -> jax.Array:
    j = (i * 5 + 3) % b.shape[0]
    b_i = b[i]
    b_j = b[j]
    return b.at[i].set(b_j).at[j].set(b_i)


def read_after_write(i: jax.Array, b: jax.Array) -> jax.Array:
    """The unchanged array is read after the first write, so that the write cannot be in place."""
    written = b.at[i].set(b[i + 1])
    return written.at[i + 1].add(b[i])


def windows(i: jax.Array, b: jax.Array) -> jax.Array:
    return lax.dynamic_update_slice(b, lax.dynamic_slice(b, (i,), (3,)) + 1, (i + 1,))


def count(i: jax.Array, b: jax.Array) -> jax.Array:
    return b.at[b[i].astype(int) % 7].add(1)


def own_indices(i: jax.Array, b: jax.Array) -> jax.Array:
    """Indices and updates are views of the array that is written."""
    return b.at[b.astype(int) % b.shape[0]].max(b)


def write_to_copy(i: jax.Array, b: jax.Array) -> jax.Array:
    return (b + 1).at[i].set(b[i - 1])


BODIES = [previous, swap, read_after_write, windows, count, own_indices, write_to_copy]


def lowered_donated(fun: Callable[..., Any], args: tuple[Any, ...], tiles: int) -> LoweredProgram:
    return lower(passed(fun, *args), small_target(tiles), ProgramInputs(donated=[True] + [False] * (len(args) - 1)))


def check_donated(fun: Callable[..., Any], *args: Any) -> None:
    """Checks engine, literal engine and interpreter with the first argument donated."""
    expected = jax.tree.leaves(quick_jit(fun)(*args))
    for tiles in (1, 7):
        program = lowered_donated(fun, args, tiles)
        assert_same(run_engine(program, args), expected, 0, 0, f"engine, {tiles} tiles")
        assert_same(run_engine(program, args, exact_splits=True), expected, 0, 0, f"literal engine, {tiles} tiles")
        assert_same(run_tiles(program, args, tiles), expected, 0, 0, f"interpreter, {tiles} tiles")


@pytest.mark.usefixtures("by_index")
@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("dtype", ["int32", "float16"])
def test_in_a_loop(body: Body, dtype: str) -> None:
    b = np.arange(40, dtype=dtype) % 11
    check_donated(lambda b: lax.fori_loop(0, 5, body, b), b)
    check(lambda b: lax.while_loop(lambda c: c[0] < 5, lambda c: (c[0] + 1, body(*c)), (0, b))[1], b, tiles=(7,))


@pytest.mark.parametrize("body", BODIES)
def test_in_a_scan_with_the_cheapest_plan(body: Body) -> None:
    def fun(b: jax.Array) -> tuple[jax.Array, jax.Array]:
        return lax.scan(lambda b, i: (body(i, b), b[i]), b, jnp.arange(5))

    check_donated(fun, (np.arange(600) % 11).astype(np.float32))


def test_tabular_q_learning() -> None:
    def body(i: jax.Array, q: jax.Array) -> jax.Array:
        s = i % 9
        a = (i * 2) % 4
        following = (i * 7 + 1) % 9
        return q.at[s, a].add(0.5 * (1.0 + jnp.max(q[following]) - q[s, a]))

    q = np.arange(36, dtype=np.float32).reshape(9, 4)
    check_donated(lambda q: lax.fori_loop(0, 6, body, q), q)


def test_writes_a_scatter_in_several_steps_in_place() -> None:
    def fun(table: jax.Array, rows: jax.Array, updates: jax.Array) -> jax.Array:
        return lax.fori_loop(0, 2, lambda i, t: t.at[(rows + i) % 50].set(updates), table)

    rows = np.arange(64, dtype=np.int32) * 3
    args = np.zeros((50, 3), np.float32), rows, np.arange(192, dtype=np.float32).reshape(64, 3)
    check_donated(fun, *args)
