"""Cumulative results, sorting, the largest elements, rising numbers and padding against plain JAX."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from ipujax.lowering.popops.maps.rows import sort
from ipujax.runtime.graph import Builder, Graph, Sequence
from tests.lowering.helpers import check, lowered, small_target

RNG = np.random.default_rng(4)
X = RNG.normal(size=(5, 6, 7)).astype(np.float32)

CUMULATIVE: dict[str, Callable[..., Any]] = {
    "cumsum": lax.cumsum,
    "cumprod": lax.cumprod,
    "cummax": lax.cummax,
    "cummin": lax.cummin,
    "cumlogsumexp": lax.cumlogsumexp,
}


@pytest.mark.parametrize("name", CUMULATIVE)
def test_cumulative(name: str) -> None:
    # XLA may pick another order of additions for another number of rows.
    check(lambda x: CUMULATIVE[name](x, axis=1, reverse=name == "cumsum"), X, tiles=(7,), rtol=1e-5, atol=1e-6)


def test_cumulative_of_one_row_and_gradient() -> None:
    check(lambda x: lax.cumsum(x), X.ravel(), tiles=(4,), rtol=1e-5)
    check(jax.grad(lambda x: (lax.cumsum(x, 2) ** 2).sum()), X, tiles=(4,), rtol=1e-5, atol=1e-5)


def test_sort() -> None:
    check(lambda x: lax.sort(x, dimension=0), X, tiles=(1, 7))
    keys = RNG.integers(0, 3, X.shape).astype(np.int32)
    check(lambda k, x: lax.sort((k, x), dimension=1, num_keys=1), keys, X, tiles=(7,))
    check(lambda x: jnp.argsort(x, axis=-1), X, tiles=(7,))
    check(jnp.sort, np.array([3.0, np.nan, -0.0, 0.0, -np.inf], np.float32), tiles=(4,))


@pytest.mark.parametrize(
    ("tensors", "num_keys", "is_stable", "start", "pair_cycles"),
    [(1, 1, True, 60, 13), (2, 1, False, 35, 11), (2, 1, True, 81, 25), (2, 2, False, 81, 25), (4, 1, False, 35, 19)],
)
def test_sort_costs_a_bitonic_network(
    tensors: int, num_keys: int, is_stable: bool, start: int, pair_cycles: int
) -> None:
    """64 elements take 21 stages, each of 32 pairs for six workers; two rows have twice as many pairs."""
    for rows in (1, 2):
        graph = Graph(small_target(1))
        target = small_target(1)
        operands = [graph.add_variable((rows, 64), np.float32, f"x{n}") for n in range(tensors)]
        sort(Builder(graph, Sequence(), "sort"), operands, 1, num_keys, is_stable=is_stable)
        ((group,),) = graph.groups.values()
        shapes = [tuple(np.asarray(n) for n in (rows, 64))] * 2 * tensors
        stage = 19 + 6 * (start + -(-32 * rows // 6) * pair_cycles)
        assert group.codelet.cycles(shapes, target) == target.supervisor_overhead_cycles + 21 * stage


def test_top_k() -> None:
    check(lambda x: lax.top_k(x, 3), X, tiles=(1, 7))
    check(lambda x: lax.top_k(x, 7), X, tiles=(7,))
    check(lambda x: lax.top_k(x, 2, axis=0), X, tiles=(7,))


@pytest.mark.parametrize("dtype", ["int32", "float32", "uint8", "bfloat16", "complex64"])
def test_iota(dtype: str) -> None:
    check(lambda x: lax.broadcasted_iota(dtype, (3, 200), 1) + x.astype(dtype), np.float32(0), tiles=(7,))


PADS = {
    "around": ((1, 2, 0), (0, 3, 0), (2, 0, 0)),
    "between": ((1, 0, 2), (0, 0, 1), (0, 0, 0)),
    "crop": ((-1, -2, 0), (0, -3, 0), (-2, 0, 0)),
    "mixed": ((-2, 3, 1), (4, -9, 2), (-1, 1, 0)),
    "far": ((40, 40, 0), (0, 0, 0), (0, 0, 0)),
}


@pytest.mark.parametrize("config", PADS)
def test_pad(config: str) -> None:
    check(lambda x: lax.pad(x, np.float32(1.5), PADS[config]), X, tiles=(1, 7, 16))
    check(lambda x, v: lax.pad(x, v, PADS[config]), X, np.float32(-2), tiles=(7,))


def test_no_elements() -> None:
    check(lambda x: lax.pad(x[:0], np.float32(2), ((1, 1, 0), (0, 0, 0), (0, 0, 0))), X, tiles=(4,))
    check(lambda x: (lax.cumsum(x[:0]), lax.sort(x[:, :0]), lax.top_k(x, 0)), X, tiles=(4,))
    check(lambda x: lax.broadcasted_iota(np.int32, (0, 3), 1) + x.astype(np.int32)[:0, :3, 0], X, tiles=(4,))


def test_crop_is_a_view() -> None:
    assert not lowered(lambda x: lax.pad(x, np.float32(0), PADS["crop"]), (X,), small_target(4)).graph.groups
