"""A value written over what it is an update of: what stays does not move, and nothing is overwritten too early."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import ipujax as ipu
from ipujax.lowering.layout.in_place import changes, must_be_set_aside
from ipujax.runtime.graph import Graph
from ipujax.runtime.tensor import concat
from tests.lowering.helpers import check, small_target

RNG = np.random.default_rng(0)


def test_only_what_differs_moves() -> None:
    graph = Graph(small_target(4))
    old, new = (graph.add_variable((6, 8), np.float32, name) for name in ("old", "new"))
    assert changes(old, old) is None
    assert changes(concat([old[:2], old[2:]], 0), old) is None
    whole = changes(new, old)
    assert whole is not None and whole[0] is new and whole[1] is old
    framed = concat([old[:1], concat([old[1:-1, :3], new[1:-1, 3:5], old[1:-1, 5:]], 1), old[-1:]], 0)
    one = changes(framed, old)
    assert one is not None
    assert (one[0].shape, one[0].node) == ((4, 2), new[1:-1, 3:5].node)
    assert one[1].node == old[1:-1, 3:5].node
    two = changes(concat([new[:1], old[1:-1], new[-1:]], 0), old)
    assert two is not None and two[0].shape == two[1].shape == (16,)
    moved = changes(concat([new[:3], new[3:]], 0), old)
    assert moved is not None and moved[0].size == 48


def test_what_moves_within_what_is_overwritten_is_set_aside() -> None:
    graph = Graph(small_target(4))
    old, new = (graph.add_variable((6, 8), np.float32, name) for name in ("old", "new"))
    overwritten = set(old.variables())
    assert not must_be_set_aside(concat([new[:1], old[1:]], 0), old, overwritten)
    assert must_be_set_aside(concat([old[1:2], old[1:]], 0), old, overwritten)
    assert must_be_set_aside(old.reverse(0), old, overwritten)
    assert not must_be_set_aside(new, old, overwritten)


def border(u: Any, v: Any) -> Any:
    return u.at[0].set(1.0).at[-1].set(v[0]), v * 2


def exchanged(u: Any, v: Any) -> Any:
    return u.at[3:5].set(v[1:3]), v.at[0:2].set(u[3:5])


def turned(u: Any, v: Any) -> Any:
    return jnp.concatenate([u[5:], u[:5]]), v.at[1:].set(v[:-1])


@pytest.mark.parametrize("step", [border, exchanged, turned])
def test_updates_in_loops_and_of_donated_arguments_are_right(step: Callable[..., Any]) -> None:
    args = tuple(RNG.standard_normal((9, 6)).astype(np.float32) for _ in range(2))
    check(lambda u, v: lax.fori_loop(0, 3, lambda _, s: step(*s), (u, v)), *args, tiles=(7,), rtol=1e-6)
    got = ipu.jit(step, device=ipu.IPUModel(tiles_per_ipu=7), donate_argnums=(0, 1))(*map(jnp.array, args))
    for one, other in zip(got, jax.jit(step)(*args), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)


def test_a_row_is_written_without_a_copy_of_the_array() -> None:
    step = ipu.jit(lambda u: u.at[0].set(1.0), device=ipu.IPUModel(), donate_argnums=0)
    profile = step.lower(jax.ShapeDtypeStruct((1024, 1024), np.float32)).compile().profile
    copied_whole = 1024 * 1024 * 4 / 1472 / ipu.IPUModel().target.memcpy_bytes_per_cycle
    assert profile.phase_cycles["compute"] < copied_whole
