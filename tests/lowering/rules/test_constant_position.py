"""Gathers and scatters whose look-ups all have one constant position: empty index vectors, constants, slices."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import ipujax as ipu
from tests.lowering.helpers import check, lowered, small_target

RNG = np.random.default_rng(5)
TABLE = RNG.normal(size=(7, 5, 6)).astype(np.float32)
INTEGERS = RNG.integers(-5, 6, (7, 5, 6)).astype(np.int32)
SCATTERS = {
    "set": lax.scatter,
    "add": lax.scatter_add,
    "sub": lax.scatter_sub,
    "mul": lax.scatter_mul,
    "min": lax.scatter_min,
    "max": lax.scatter_max,
}
MODES = ("clip", "fill", "promise_in_bounds")


def tiles_used(fun: Callable[..., Any], *args: Any) -> int:
    """Number of tiles that compute; nothing may fall back."""
    program = lowered(fun, args, small_target(64))
    assert not program.graph.notes.fallbacks
    groups = [group for groups in program.graph.groups.values() for group in groups]
    return max((np.unique(group.tile).size for group in groups), default=0)


def no_components(*batch: int) -> np.ndarray:
    """Index vectors that name no dimension."""
    return np.zeros((*batch, 0), np.int32)


@pytest.mark.parametrize("mode", MODES)
def test_views_a_gather_without_components(mode: str) -> None:
    """Every look-up reads the window at 0, as many of each dimension as the slice has."""
    numbers = lax.GatherDimensionNumbers(offset_dims=(1, 3), collapsed_slice_dims=(1,), start_index_map=())

    def fun(x: Any) -> Any:
        return lax.gather(x, no_components(2, 3), numbers, (4, 1, 6), mode=mode)

    for x in (TABLE, INTEGERS.astype(bool), jax.random.split(jax.random.key(0), TABLE.shape)):
        assert tiles_used(fun, x) == 0
        check(lambda x: jax.random.key_data(fun(x)) if x.dtype not in ("float32", "bool") else fun(x), x, tiles=(1, 7))


def test_a_gather_without_components_in_batches() -> None:
    numbers = lax.GatherDimensionNumbers((1,), (), (), (0, 2), (2, 0))

    def fun(x: Any) -> Any:
        return lax.gather(x, no_components(6, 3, 7), numbers, (1, 4, 1), mode="clip")

    assert tiles_used(fun, TABLE) == 0
    check(fun, TABLE, tiles=(1, 7))
    check(jax.grad(lambda x: (fun(x) ** 2).sum()), TABLE, tiles=(7,), rtol=1e-6)


@pytest.mark.parametrize(("kind", "mode"), [*product(SCATTERS, MODES)])
def test_a_scatter_without_components(kind: str, mode: str) -> None:
    """All updates are in the window at 0; integers, so that any order gives the same bits."""
    numbers = lax.ScatterDimensionNumbers((1, 3), (1,), ())

    def fun(x: Any, u: Any) -> Any:
        return SCATTERS[kind](x, no_components(2, 3), u, numbers, mode=mode)

    for dtype in (np.float32, np.int32):
        updates = RNG.integers(-3, 4, (2, 4, 3, 6)).astype(dtype)
        check(fun, INTEGERS.astype(dtype), updates, tiles=(1, 7))
    used = tiles_used(fun, np.zeros((70, 5, 60), np.float32), np.zeros((2, 40, 3, 60), np.float32))
    assert used > 1 if kind != "set" else used == 0  # the last of them, a view


def test_a_scatter_without_components_in_batches() -> None:
    numbers = lax.ScatterDimensionNumbers((1,), (), (), (0, 2), (2, 0))
    updates = RNG.integers(-3, 4, (6, 4, 3, 7)).astype(np.float32)
    for scatter in SCATTERS.values():
        check(
            lambda x, u, f=scatter: f(x, no_components(6, 3, 7), u, numbers),
            INTEGERS.astype(np.float32),
            updates,
            tiles=(7,),
        )


def test_combines_narrow_sums_and_users_functions_in_order() -> None:
    numbers = lax.ScatterDimensionNumbers((0,), (), ())
    updates = jnp.ones((3, 999), jnp.bfloat16)  # a sum of ones in this dtype ends at 256 when each is added by itself
    check(lambda x, u: lax.scatter_add(x, no_components(999), u, numbers), updates[:, 0] * 0, updates, tiles=(4,))

    def applied(x: Any) -> Any:
        return lax.scatter_apply(x, no_components(3), lambda v: v * 2 + 1, numbers, update_shape=(4, 3))

    check(applied, TABLE[0, :, 0], tiles=(1, 4))
    assert tiles_used(applied, np.zeros(1000, np.float32)) > 1


def test_other_dtypes() -> None:
    numbers = lax.ScatterDimensionNumbers((1, 2), (), ())
    for dtype in ("int8", "uint32", "float16", "bfloat16", "float8_e5m2", "complex64"):
        x = jnp.asarray(INTEGERS[0], dtype)
        check(lambda x: lax.scatter_add(x, no_components(1), x[None, :4], numbers), x, tiles=(4,))
    check(lambda x: lax.scatter(x, no_components(2), jnp.stack([x, ~x])[:, :3], numbers), INTEGERS[0] > 0, tiles=(4,))
    keys = jax.random.split(jax.random.key(1), (5, 6))
    check(lambda k: lax.scatter(k, no_components(2), jnp.stack([k, k[::-1]])[:, :3], numbers), keys, tiles=(4,))


# Common forms: a function of the table, and whether it computes anything. (JAX computes indices from an array of
# several, so that negative ones count from the end.)
FORMS: dict[str, tuple[Callable[[Any], Any], bool]] = {
    "all": (lambda x: x.at[:].set(x[::-1]), False),
    "interior": (lambda x: x.at[1:-1, 1:-1].set(0.0), False),
    "rows": (lambda x: x.at[2:5].add(x[:3]), True),
    "element": (lambda x: x.at[3, -1, 2].set(9.0), False),
    "none": (lambda x: x.at[()].multiply(2.0), True),
    "last": (lambda x: x.at[-1].max(x[0]), True),
    "columns": (lambda x: x.at[:, 1:3, -2:].min(0.0), True),
    "applied": (lambda x: x.at[1:-1].apply(lax.neg), True),
    "one row again and again": (lambda x: x.at[np.array([2, 2, 2])].add(x[:3]), True),
    "one row set again and again": (lambda x: x.at[np.array([2, 2, 2])].set(x[:3]), True),
    "row looked up": (lambda x: x[np.array([4])], False),
    "row looked up again and again": (lambda x: x[np.array([[4, 4, 4]])], True),
    "beyond, dropped": (lambda x: x.at[np.array([7])].set(1.0), False),
    "beyond, clipped": (lambda x: x.at[np.array([9])].add(1.0, mode="clip"), True),
    "beyond, filled": (lambda x: x.at[np.array([9])].get(mode="fill", fill_value=-0.0), False),
    "beyond, filled with NaN": (lambda x: x.at[np.array([-9])].get(mode="fill"), False),
    "beyond, promised": (lambda x: x.at[np.array([9])].get(mode="promise_in_bounds"), False),
}


@pytest.mark.parametrize("name", FORMS)
def test_constant_indices(name: str) -> None:
    fun, computes = FORMS[name]
    assert (tiles_used(fun, TABLE) > 0) == computes
    check(fun, TABLE, tiles=(1, 7))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("start", [(0, 1), (4, 3), (5, 0), (-1, 0), (2**31 - 1, 0)])
def test_clamps_drops_or_fills_whole_windows(mode: str, start: tuple[int, int]) -> None:
    index = np.array(start, np.int32)
    numbers = lax.GatherDimensionNumbers((0, 1, 2), (), (0, 2))
    check(lambda x: lax.gather(x, index, numbers, (3, 5, 3), mode=mode), TABLE, tiles=(5,))
    where = lax.ScatterDimensionNumbers((0, 1, 2), (), (0, 2))
    check(lambda x: lax.scatter_mul(x, index, x[:3, 1:, :3], where, mode=mode), TABLE, tiles=(5,))


def test_fits_a_stencil_on_the_tiles_of_its_grid() -> None:
    """A grid of which one tile could not have a third, updated inside of its border."""

    def step(x: Any) -> Any:
        inner = (x[:-2, 1:-1] + x[2:, 1:-1] + x[1:-1, :-2] + x[1:-1, 2:]) / 4
        return x.at[1:-1, 1:-1].set(inner)

    profile = (
        ipu.jit(step, device=ipu.IPUModel(tiles_per_ipu=64)).lower(np.zeros((700, 800), np.float32)).compile().profile
    )
    assert not profile.fallbacks
    assert profile.memory.max_tile_bytes < 700 * 800 * 4 / 8
    check(step, RNG.normal(size=(19, 23)).astype(np.float32), tiles=(7,), rtol=1e-6)


def test_writes_many_rows_one_by_one() -> None:
    def fun(x: Any) -> Any:
        for i in range(7):
            x = x.at[i].set(x[i - 1] * 0.5)
        return x

    check(fun, TABLE, tiles=(7,))
