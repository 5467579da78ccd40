"""Indices of extreme elements against plain JAX, with ties and NaN, in one stage and in two."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tests.lowering.helpers import check, lowered, small_target

RNG = np.random.default_rng(2)
OPS: dict[str, Callable[..., Any]] = {"argmax": lax.argmax, "argmin": lax.argmin}


ONE_STAGE = [
    pytest.param(shape, axis, op, id=f"shape{n}-{axis}-{op}")
    for n, (shape, axis) in enumerate([((9, 10), 1), ((9, 10), 0), ((3, 4, 50), 1), ((17,), 0)])
    for op in OPS
]


@pytest.mark.parametrize(("shape", "axis", "op"), ONE_STAGE)
def test_one_stage(op: str, shape: tuple[int, ...], axis: int) -> None:
    check(lambda x: OPS[op](x, axis, np.int32), RNG.normal(size=shape).astype(np.float32), tiles=(1, 7))


def ties(shape: tuple[int, ...]) -> np.ndarray:
    return RNG.integers(0, 3, shape).astype(np.float32)


def nans(shape: tuple[int, ...]) -> np.ndarray:
    x = RNG.normal(size=shape).astype(np.float32)
    x[..., [700, 300, 20]] = np.nan
    return x


def infinities(shape: tuple[int, ...]) -> np.ndarray:
    return np.full(shape, -np.inf, np.float32)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("make", [ties, nans, infinities])
def test_two_stages(op: str, make: Callable[[tuple[int, ...]], np.ndarray]) -> None:
    x = make((2, 777))
    program = lowered(lambda x: OPS[op](x, 1, np.int32), (x,), small_target(16))
    assert len(program.graph.groups) == 2
    check(lambda x: OPS[op](x, 1, np.int32), x, tiles=(7, 16))


@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "uint32", "bool"])
def test_dtypes(dtype: str) -> None:
    index_dtype = np.uint8 if dtype == "int8" else np.int32
    # JAX orders equal elements by the indices as the type holds them: of more than 256, by wrapped ones.
    x = jnp.asarray(RNG.integers(0, 2, 256 if index_dtype == np.uint8 else 600), dtype)
    check(lambda x: lax.argmax(x, 0, index_dtype), x, tiles=(16,))


def test_views() -> None:
    x = RNG.normal(size=(6, 7)).astype(np.float32)
    check(lambda x: jnp.argmax(x.T[::-1, 1:]), x, tiles=(7,))
