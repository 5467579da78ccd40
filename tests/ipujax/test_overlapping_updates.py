"""Slices that are overwritten by values computed from the same array: all are read before any is written.

XLA for CPU of jaxlib 0.10.2 gets many of these wrong under `jax.jit`, so the oracle is NumPy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import ipujax as ipu

DEVICE = ipu.IPUModel(tiles_per_ipu=16)
X = np.arange(64, dtype=np.float32).reshape(4, 16)
# Values of the new columns by an array, in JAX or NumPy.
UPDATES: dict[str, Callable[[Any], Any]] = {
    "head": lambda x: x[:, :8] * 2,
    "sum": lambda x: x[:, :8] + x[:, 8:],
}
Update = Callable[[Any], Any]
ONE_WINDOW = lax.ScatterDimensionNumbers((0, 1), (), (1,))


def column(number: Any) -> Any:
    return (number * 3) % 7


def overwritten(x: np.ndarray, update: Update, start: int) -> np.ndarray:
    """The array with eight columns overwritten."""
    result = x.copy()
    result[:, start : start + 8] = update(x)
    return result


def updated(x: jax.Array, update: Update, i: Any) -> jax.Array:
    return jnp.expand_dims(lax.dynamic_update_slice_in_dim(x, update(x), column(i), 1), 1)


def by_a_known_start(x: jax.Array, update: Update, i: Any) -> jax.Array:
    return lax.dynamic_update_slice(x, update(x), (0, 3))[:, None]


def behind_a_reshape(x: jax.Array, update: Update, i: Any) -> jax.Array:
    return lax.dynamic_update_slice(x.reshape(2, 2, 16), update(x).reshape(2, 2, 8), (0, 0, column(i)))


def by_a_scatter(x: jax.Array, update: Update, i: Any) -> jax.Array:
    return lax.scatter(x, jnp.stack([column(i)]), update(x), ONE_WINDOW, mode="clip")[:, None]


def added_by_a_scatter(x: jax.Array, update: Update, i: Any) -> jax.Array:
    return lax.scatter_add(x, jnp.stack([column(i)]), update(x), ONE_WINDOW, mode="clip")[:, None]


def by_columns(x: jax.Array, update: Update, i: Any) -> jax.Array:
    return x.at[:, column(i) + jnp.arange(8)].set(update(x))[:, None]


def in_a_loop(x: jax.Array, update: Update, i: Any) -> jax.Array:
    def body(n: Any, carry: jax.Array) -> jax.Array:
        rows = carry[:, 0]
        return lax.dynamic_update_slice(rows, update(rows), (0, (column(i) + n) % 8))[:, None]

    return lax.fori_loop(0, 3, body, x[:, None])


def looped(x: np.ndarray, update: Update, i: int) -> np.ndarray:
    for n in range(3):
        x = overwritten(x, update, (column(i) + n) % 8)
    return x


def added(x: np.ndarray, update: Update, i: int) -> np.ndarray:
    return overwritten(x, lambda y: y[:, column(i) : column(i) + 8] + update(y), column(i))


def at_the_column(x: np.ndarray, update: Update, i: int) -> np.ndarray:
    return overwritten(x, update, column(i))


CASES: dict[str, tuple[Callable[..., jax.Array], Callable[..., np.ndarray]]] = {
    "updated": (updated, at_the_column),
    "by a known start": (by_a_known_start, lambda x, update, i: overwritten(x, update, 3)),
    "behind a reshape": (behind_a_reshape, at_the_column),
    "by a scatter": (by_a_scatter, at_the_column),
    "added by a scatter": (added_by_a_scatter, added),
    "by columns": (by_columns, at_the_column),
    "in a loop": (in_a_loop, looped),
}


@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("name", CASES)
def test_all_is_read_before_any_is_written(name: str, update: str) -> None:
    fun, expected = CASES[name]
    run = ipu.jit(lambda x, i: fun(x, UPDATES[update], i), device=DEVICE)
    for i in (1, 2):
        got = np.asarray(run(X, i))
        np.testing.assert_array_equal(got.reshape(X.shape), expected(X, UPDATES[update], i))


def test_of_a_donated_array() -> None:
    run = ipu.jit(lambda x, i: updated(x, UPDATES["head"], i)[:, 0], device=DEVICE, donate_argnums=0)
    np.testing.assert_array_equal(run(jnp.array(X), 2), at_the_column(X, UPDATES["head"], 2))


def test_of_replicas() -> None:
    device = ipu.IPUModel(num_ipus=2, tiles_per_ipu=16)
    specs: dict[str, Any] = {"in_specs": (P("replica"), P()), "out_specs": P("replica")}
    run = ipu.jit(lambda x, i: updated(x, UPDATES["head"], i), device=device, replicas=2, **specs)
    np.testing.assert_array_equal(run(X, 2)[:, 0], at_the_column(X, UPDATES["head"], 2))
