"""Values written over the tensors they update: unchanged elements do not move, no element is overwritten too early."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import ipujax as ipu
from ipujax.lowering.layout.in_place import differing_elements, must_be_set_aside
from ipujax.runtime.graph import Copy, Graph, distinct
from ipujax.runtime.tensor import concat
from tests.lowering.helpers import check, small_target

RNG = np.random.default_rng(0)


def test_moves_only_different_elements() -> None:
    graph = Graph(small_target(4))
    old, new = (graph.add_variable((6, 8), np.float32, name) for name in ("old", "new"))
    assert differing_elements(old, old) is None
    assert differing_elements(concat([old[:2], old[2:]], 0), old) is None
    all_elements = differing_elements(new, old)
    assert all_elements is not None and all_elements[0] is new and all_elements[1] is old
    framed = concat([old[:1], concat([old[1:-1, :3], new[1:-1, 3:5], old[1:-1, 5:]], 1), old[-1:]], 0)
    rectangle = differing_elements(framed, old)
    assert rectangle is not None
    assert (rectangle[0].shape, rectangle[0].node) == ((4, 2), new[1:-1, 3:5].node)
    assert rectangle[1].node == old[1:-1, 3:5].node
    rows = differing_elements(concat([new[:1], old[1:-1], new[-1:]], 0), old)
    assert rows is not None and rows[0].shape == rows[1].shape == (16,)
    joined_rows = differing_elements(concat([new[:3], new[3:]], 0), old)
    assert joined_rows is not None and joined_rows[0].size == 48


def test_sets_aside_elements_that_move_within_an_overwritten_variable() -> None:
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


def rotated(u: Any, v: Any) -> Any:
    return jnp.concatenate([u[5:], u[:5]]), v.at[1:].set(v[:-1])


def row_of(v: Any) -> Any:
    return (jnp.abs(v[0, 0]) * 5).astype(jnp.int32) % 9


def at_a_row(u: Any, v: Any) -> Any:
    return lax.dynamic_update_slice(u, v[:1], (row_of(v), 0)), v * 2


def at_a_row_and_column(u: Any, v: Any) -> Any:
    return lax.dynamic_update_slice(u, v[:2, :3], (row_of(v), row_of(u))), v * 2


def at_fixed_columns(u: Any, v: Any) -> Any:
    return lax.dynamic_update_slice(u, v[:2, :3], (row_of(v), 2)), v * 2


def with_a_later_read(u: Any, v: Any) -> Any:
    return lax.dynamic_update_slice(u, v[:1], (row_of(v), 0)), u + v


def with_rows_of_the_operand(u: Any, v: Any) -> Any:
    return lax.dynamic_update_slice(u, u[1:3], (row_of(v), 0)), v * 2


def with_values_computed_from_the_operand(u: Any, v: Any) -> Any:
    return lax.dynamic_update_slice(u, u[1:3] * 2, (row_of(v), 0)), v.at[1].set(u.sum(0))


def with_swapped_results(u: Any, v: Any) -> Any:
    return v + 1, lax.dynamic_update_slice(u, v[:1], (row_of(v), 0))


STEPS = [
    border,
    exchanged,
    rotated,
    at_a_row,
    at_a_row_and_column,
    at_fixed_columns,
    with_a_later_read,
    with_rows_of_the_operand,
    with_values_computed_from_the_operand,
    with_swapped_results,
]


@pytest.mark.parametrize("step", STEPS)
def test_updates_in_loops_and_of_donated_arguments_match_jax(step: Callable[..., Any]) -> None:
    args = tuple(RNG.standard_normal((9, 6)).astype(np.float32) for _ in range(2))
    check(lambda u, v: lax.fori_loop(0, 3, lambda _, s: step(*s), (u, v)), *args, tiles=(7,), rtol=1e-6)
    results = ipu.jit(step, device=ipu.IPUModel(tiles_per_ipu=7), donate_argnums=(0, 1))(*map(jnp.array, args))
    for result, expected in zip(results, jax.jit(step)(*args), strict=True):
        np.testing.assert_allclose(result, expected, rtol=1e-6)


def test_writes_a_row_without_a_copy_of_the_array() -> None:
    step = ipu.jit(lambda u: u.at[0].set(1.0), device=ipu.IPUModel(), donate_argnums=0)
    profile = step.lower(jax.ShapeDtypeStruct((1024, 1024), np.float32)).compile().profile
    whole_copy_cycles = 1024 * 1024 * 4 / 1472 / ipu.IPUModel().target.memcpy_bytes_per_cycle
    assert profile.phase_cycles["compute"] < whole_copy_cycles


def at_row_of_first_element(u: Any) -> Any:
    return lax.dynamic_update_slice(u, jnp.ones((1, 1024), u.dtype), (u[0, 0].astype(jnp.int32), 0))


def in_a_loop(body: Callable[..., Any]) -> Callable[..., Any]:
    return lambda u: lax.fori_loop(0, 3, lambda _, u: body(u), u)


@pytest.mark.parametrize("step", [in_a_loop(lambda u: u + 1), in_a_loop(lambda u: u * 2)])
def test_copies_no_donated_array(step: Callable[..., Any]) -> None:
    """Loops copy only their counters."""
    argument = jax.ShapeDtypeStruct((1024, 1024), np.float32)
    for donated, expected in (((0,), {1}), ((), {1, 1024 * 1024})):
        program = ipu.jit(step, device=ipu.IPUModel(), donate_argnums=donated).lower(argument).program
        copied = {node.destination.size for node in distinct(program) if isinstance(node, Copy)}
        assert copied <= expected and (donated or max(copied) > 1)


# Cycles where each of 1,024 tiles receives a row, and writes it if it is the one; of three iterations.
WHOLE_ROWS = [(at_row_of_first_element, 6822), (in_a_loop(at_row_of_first_element), 9216)]


@pytest.mark.parametrize(("step", "whole_rows_cycles"), WHOLE_ROWS)
def test_updates_a_donated_array_within_the_cost_of_whole_rows(
    step: Callable[..., Any], whole_rows_cycles: int
) -> None:
    """An update in another array that is copied back is allowed where it takes fewer cycles."""
    argument = jax.ShapeDtypeStruct((1024, 1024), np.float32)
    profile = ipu.jit(step, device=ipu.IPUModel(), donate_argnums=(0,)).lower(argument).compile().profile
    assert profile.cycles <= whole_rows_cycles
