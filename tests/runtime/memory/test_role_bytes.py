"""Bytes by role add up to those of each tile, and to those of the fullest tile over time, also in saved profiles."""

from __future__ import annotations

from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings, strategies as st

import ipujax as ipu
from ipujax.runtime.compile import compile
from ipujax.runtime.graph.graph import Graph
from ipujax.runtime.graph.program import Sequence
from ipujax.runtime.memory import ROLES, MemoryReport
from ipujax.runtime.options import Options
from ipujax.runtime.report import Profile
from ipujax.runtime.tensor.mapping import on_one_tile
from ipujax.runtime.tensor.roles import OPTIMISER_STATE, UNKNOWN, WEIGHTS
from tests.runtime.profile.profile_helpers import F32, TARGET, inputs, output


def assert_adds_up(memory):
    assert set(memory.by_role) <= set(ROLES)
    np.testing.assert_array_equal(sum(memory.by_role.values()), memory.tile_bytes)
    assert sum(item.num_bytes for item in memory.largest) == memory.max_tile_bytes
    rows = memory.breakdown.rows
    assert sum(row.fullest_bytes for row in rows) == memory.max_tile_bytes
    assert sum(row.mean_bytes for row in rows) * len(memory.tile_bytes) == memory.total_bytes
    for role, values in memory.by_role.items():
        here = sum(item.num_bytes for item in memory.largest if item.role == role)
        assert here == values[memory.worst_tile], role
    gaps = int(memory.gap_bytes[memory.worst_tile])
    if memory.live_bytes.steps:
        assert memory.live_bytes.num_bytes.max() == memory.max_tile_bytes - gaps
        assert memory.live_bytes.num_bytes.min() >= memory.live_bytes.always_bytes


def random_step(seed):
    """A training step of random widths, optimiser, recomputation and loops, and its arguments."""
    rng = np.random.default_rng(seed)
    widths = rng.integers(1, 40, 4).tolist()
    params = [jax.ShapeDtypeStruct((a, b), F32) for a, b in pairwise(widths)]
    layer = jax.checkpoint(lambda w, h: jnp.tanh(h @ w)) if rng.integers(2) else lambda w, h: jnp.sin(h @ w)
    optimiser = [optax.sgd(0.1), optax.adam(0.1), optax.sgd(0.1, 0.9)][rng.integers(3)]

    def loss(params, x):
        for w in params:
            x = layer(w, x)
        return jnp.sum(x**2)

    def step(carry, x):
        params, state = carry
        updates, state = optimiser.update(jax.grad(loss)(params, x), state)
        return (optax.apply_updates(params, updates), state), None

    state = jax.eval_shape(optimiser.init, params)
    batch = int(rng.integers(1, 9))
    if rng.integers(2):
        return lambda carry, xs: jax.lax.scan(step, carry, xs)[0], (params, state), (3, batch, widths[0])
    return lambda carry, x: step(carry, x)[0], (params, state), (batch, widths[0])


@settings(max_examples=8)
@given(st.integers(0, 10**6), st.sampled_from([2, 7, 16]), st.booleans())
def test_roles_add_up_on_random_programs(seed, tiles, donate):
    step, carry, shape = random_step(seed)
    device = ipu.IPUModel(tiles_per_ipu=tiles)
    fun = ipu.jit(step, device=device, donate_argnums=(0,) if donate else ())
    memory = fun.lower(carry, jax.ShapeDtypeStruct(shape, F32)).compile().profile.memory
    assert_adds_up(memory)
    assert memory.by_role[WEIGHTS].sum() > 0
    saved = MemoryReport.from_data(memory.target, memory.figures_as_data())
    assert_adds_up(saved)
    assert saved.by_role.keys() == memory.by_role.keys()


def test_moments_take_the_bytes_of_optimiser_state():
    def loss(w, x):
        return jnp.sum((x @ w) ** 2)

    def step(w, m, x):
        m = 0.9 * m + jax.grad(loss)(w, x)
        return w - m, m

    w = jax.ShapeDtypeStruct((64, 64), F32)
    x = jax.ShapeDtypeStruct((4, 64), F32)
    fun = ipu.jit(step, device=ipu.IPUModel(tiles_per_ipu=16), donate_argnums=(0, 1))
    memory = fun.lower(w, w, x).compile().profile.memory
    assert memory.by_role[WEIGHTS].sum() >= 64 * 64 * 4 <= memory.by_role[OPTIMISER_STATE].sum()
    assert_adds_up(memory)


@pytest.mark.parametrize("tile", [0, 3])
def test_a_table_on_one_tile_of_a_program_built_by_hand_is_named(tile):
    graph = Graph(TARGET)
    table = graph.add_variable((60_000,), F32, "table", on_one_tile(60_000, tile))
    profile = Profile(compile(graph, Sequence(*inputs(table), output(table))))
    memory = profile.memory
    assert memory.worst_tile == tile and memory.by_role[UNKNOWN][tile] == 240_000
    first = memory.largest[0]
    assert (first.name, first.role, first.whole_bytes) == ("Variable(table: float32[60000])", UNKNOWN, 240_000)
    assert_adds_up(memory)
    assert "Largest on it:  240,000 B  Variable(table: float32[60000])" in profile.summary()


def test_functions_and_overflowing_tiles_add_up():
    def layers(params, x):
        for w in params:
            x = jnp.tanh(x @ w)
        return jnp.sum(x)

    w = jax.ShapeDtypeStruct((128, 128), F32)
    x = jax.ShapeDtypeStruct((64, 128), F32)
    device = ipu.IPUModel(tiles_per_ipu=4, bytes_per_tile=32 * 1024)
    fun = ipu.jit(jax.grad(layers), device=device, options=Options(allow_out_of_memory=True))
    memory = fun.lower([w] * 8, x).compile().profile.memory
    assert memory.max_tile_bytes > 32 * 1024
    assert_adds_up(memory)
