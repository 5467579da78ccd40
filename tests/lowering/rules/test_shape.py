"""Shape primitives are views: they run nothing, and their readers read the right elements."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from ipujax.runtime.graph.program import Copy, Execute
from tests.lowering.helpers import check, lowered, quick_jit, run_engine, run_tiles, small_target

CUBE = np.arange(3 * 5 * 7, dtype=np.float32).reshape(3, 5, 7)

FREE: dict[str, Callable[[Any], Any]] = {
    "reshape": lambda x: x.reshape(7, 15),
    "broadcast": lambda x: jnp.broadcast_to(x, (2, 3, 5, 7)),
    "transpose": lambda x: x.transpose(2, 0, 1),
    "squeeze": lambda x: lax.squeeze(x[:1], (0,)),
    "expand": lambda x: lax.expand_dims(x, (1, 3)),
    "reverse": lambda x: lax.rev(x, (0, 2)),
    "slice": lambda x: lax.slice(x, (1, 0, 2), (3, 5, 7), (1, 2, 3)),
    "concatenate": lambda x: jnp.concatenate([x, x[:, ::-1]], 2),
    "stack": lambda x: jnp.stack([x, x], 1),
    "unstack": lambda x: jnp.unstack(x, axis=1)[2],
    "split": lambda x: jnp.split(x, 3)[1],
    "tile": lambda x: jnp.tile(x, (2, 1, 3)),
    "copy": jnp.copy,
    "stop": lax.stop_gradient,
    "barrier": lambda x: lax.optimization_barrier((x, x))[1],
    "name": lambda x: checkpoint_name(x, "x"),
    "all-at-once": lambda x: jnp.tile(x.transpose(1, 2, 0)[::-1, 1:6].reshape(5, 15), (1, 2))[:, ::4],
    "nothing": lambda x: x[:, 2:2],
}


@pytest.mark.parametrize("name", FREE)
def test_views_run_nothing(name: str) -> None:
    program = lowered(FREE[name], (CUBE,), small_target(7))
    assert not [node for node in program.program.children() if isinstance(node, Execute | Copy)]
    expected = np.asarray(quick_jit(FREE[name])(CUBE))
    np.testing.assert_array_equal(run_engine(program, (CUBE,))[0], expected)
    np.testing.assert_array_equal(run_tiles(program, (CUBE,))[0], expected)


@pytest.mark.parametrize("name", [name for name in FREE if name != "nothing"])
def test_views_of_results_are_read_tile_by_tile(name: str) -> None:
    def fun(x: Any) -> Any:
        y = FREE[name](x * 2)
        return y + 1, y.sum()

    check(fun, CUBE, tiles=(7,), rtol=1e-6)


@pytest.mark.parametrize("dtype", [np.int8, np.bool_, jnp.bfloat16, np.uint32])
def test_views_keep_every_dtype(dtype: Any) -> None:
    x = (CUBE % 3).astype(dtype)
    check(lambda x: (x[::-1].transpose(2, 1, 0), jnp.concatenate([x, x], 1)), x, tiles=(7,))


def test_views_of_keys() -> None:
    keys = jax.random.split(jax.random.key(0), 6).reshape(2, 3)
    check(lambda k: (k.T, k[::-1], k.reshape(-1)[1:4], jnp.concatenate([k, k])), keys, tiles=(1, 7))


def test_returns_arguments_and_constants() -> None:
    check(lambda x: (x, x, x.T, np.float32(3), jnp.zeros((2, 0)), np.arange(5)), CUBE, tiles=(1, 7))


STEPS: dict[str, Callable[[Any, np.random.Generator], Any]] = {
    "transpose": lambda x, rng: x.transpose(tuple(rng.permutation(x.ndim))),
    "reverse": lambda x, rng: lax.rev(x, (int(rng.integers(x.ndim)),)),
    "flatten": lambda x, rng: x.reshape(-1),
    "fold": lambda x, rng: x.reshape(x.shape[0], -1) if x.size else x,
    "column": lambda x, rng: x.reshape(-1, 1),
    "halve": lambda x, rng: x[: (x.shape[0] + 1) // 2],
    "skip": lambda x, rng: x[..., ::2],
    "tail": lambda x, rng: x[..., 1:] if x.shape[-1] > 1 else x,
    "twice": lambda x, rng: jnp.concatenate([x, x[:1]], 0),
    "spread": lambda x, rng: jnp.broadcast_to(x[:1], x.shape),
    "stack": lambda x, rng: jnp.stack([x, x], int(rng.integers(x.ndim + 1))) if x.ndim < 4 else x,
}


@settings(max_examples=12)
@given(st.lists(st.sampled_from(sorted(STEPS)), min_size=2, max_size=6), st.integers(0, 99))
def test_random_chains_of_views(names: list[str], seed: int) -> None:
    def fun(x: Any) -> Any:
        rng = np.random.default_rng(seed)
        for name in names:
            x = STEPS[name](x, rng)
        return x, x * 2

    x = CUBE[:2, :3, :5].copy()
    program = lowered(fun, (x,), small_target(4))
    expected = fun(x)
    for results in (run_engine(program, (x,)), run_tiles(program, (x,))):
        for a, b in zip(results, expected, strict=True):
            np.testing.assert_array_equal(a, b)
