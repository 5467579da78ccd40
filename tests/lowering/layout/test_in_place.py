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
from ipujax.runtime.graph import Copy, Graph, distinct
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


def row_of(v: Any) -> Any:
    return (jnp.abs(v[0, 0]) * 5).astype(jnp.int32) % 9


def at_a_place(u: Any, v: Any) -> Any:
    return lax.dynamic_update_slice(u, v[:1], (row_of(v), 0)), v * 2


def at_a_place_of_both(u: Any, v: Any) -> Any:
    return lax.dynamic_update_slice(u, v[:2, :3], (row_of(v), row_of(u))), v * 2


def within_known_columns(u: Any, v: Any) -> Any:
    return lax.dynamic_update_slice(u, v[:2, :3], (row_of(v), 2)), v * 2


def while_the_old_is_read(u: Any, v: Any) -> Any:
    return lax.dynamic_update_slice(u, v[:1], (row_of(v), 0)), u + v


def with_what_is_overwritten(u: Any, v: Any) -> Any:
    return lax.dynamic_update_slice(u, u[1:3], (row_of(v), 0)), v * 2


def with_what_was_read_of_it(u: Any, v: Any) -> Any:
    return lax.dynamic_update_slice(u, u[1:3] * 2, (row_of(v), 0)), v.at[1].set(u.sum(0))


def and_in_the_place_of_the_other(u: Any, v: Any) -> Any:
    return v + 1, lax.dynamic_update_slice(u, v[:1], (row_of(v), 0))


STEPS = [
    border,
    exchanged,
    turned,
    at_a_place,
    at_a_place_of_both,
    within_known_columns,
    while_the_old_is_read,
    with_what_is_overwritten,
    with_what_was_read_of_it,
    and_in_the_place_of_the_other,
]


@pytest.mark.parametrize("step", STEPS)
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


def at_its_first(u: Any) -> Any:
    return lax.dynamic_update_slice(u, jnp.ones((1, 1024), u.dtype), (u[0, 0].astype(jnp.int32), 0))


def in_a_loop(body: Callable[..., Any]) -> Callable[..., Any]:
    return lambda u: lax.fori_loop(0, 3, lambda _, u: body(u), u)


@pytest.mark.parametrize("step", [in_a_loop(at_its_first), in_a_loop(lambda u: u * 2)])
def test_of_a_donated_array_nothing_is_copied(step: Callable[..., Any]) -> None:
    """Loops copy their counters."""
    given = jax.ShapeDtypeStruct((1024, 1024), np.float32)
    for donated, expected in (((0,), {1}), ((), {1, 1024 * 1024})):
        program = ipu.jit(step, device=ipu.IPUModel(), donate_argnums=donated).lower(given).program
        copied = {node.destination.size for node in distinct(program) if isinstance(node, Copy)}
        assert copied <= expected and (donated or max(copied) > 1)


def test_an_update_of_a_donated_array_costs_at_most_that_of_whole_rows() -> None:
    """One update may be made in another array that is copied back, where that takes fewer cycles."""
    given = jax.ShapeDtypeStruct((1024, 1024), np.float32)
    profile = ipu.jit(at_its_first, device=ipu.IPUModel(), donate_argnums=(0,)).lower(given).compile().profile
    whole_rows_cycles = 6822  # each of 1,024 tiles receives a row, and writes it if it is the one
    assert profile.cycles <= whole_rows_cycles
