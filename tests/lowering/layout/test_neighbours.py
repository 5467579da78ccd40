"""Stencils: variables read at several offsets are mapped in blocks where that is cheaper, with the results of JAX."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import ipujax as ipu
from ipujax.lowering.layout import neighbour_mappings
from ipujax.runtime.graph import Graph
from ipujax.runtime.tensor import Blocked, Tensor, concat
from tests.lowering.helpers import check, lowered, small_target

STEPS = 4
RNG = np.random.default_rng(0)


def rolled(u: jax.Array) -> jax.Array:
    """Step of the heat equation on a torus, of any rank."""
    around = sum(jnp.roll(u, shift, axis) for axis in range(u.ndim) for shift in (-1, 1))
    return u + 0.1 * (around - 2 * u.ndim * u)


def sliced(u: jax.Array) -> jax.Array:
    """Step of the heat equation inside of a constant border."""
    inner = u[2:, 1:-1] + u[:-2, 1:-1] + u[1:-1, 2:] + u[1:-1, :-2] - 4 * u[1:-1, 1:-1]
    return u.at[1:-1, 1:-1].add(0.1 * inner)


def diagonal(u: jax.Array) -> jax.Array:
    """Blur that reads its corners."""
    return sum(jnp.roll(u, (i, j), (0, 1)) for i in (-1, 0, 1) for j in (-1, 0, 1)) / 9  # type: ignore[return-value]


def wave(s: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Step of the wave equation, which has two states."""
    old, u = s
    return u, u + rolled(u) - old


def repeated(step: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Several steps in a loop."""
    return lambda u: lax.fori_loop(0, STEPS, lambda _, u: step(u), u)


def normal(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("step", [rolled, sliced, diagonal])
@pytest.mark.parametrize("shape", [(24, 40), (17, 23)])
def test_stencils_match_jax(step: Callable[[Any], Any], shape: tuple[int, ...]) -> None:
    check(step, normal(*shape), tiles=(6,), rtol=1e-5, atol=1e-5)
    check(repeated(step), normal(*shape), tiles=(7,), rtol=1e-5, atol=1e-5)


def test_stencils_of_more_states_and_dimensions_match_jax() -> None:
    check(repeated(wave), (normal(24, 40), normal(24, 40)), tiles=(6,), rtol=1e-5, atol=1e-5)
    check(repeated(rolled), normal(8, 12, 10), tiles=(6,), rtol=1e-5, atol=1e-5)
    check(jax.vmap(repeated(rolled)), normal(3, 12, 10), tiles=(6,), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("step", [rolled, sliced])
def test_receives_only_the_border_of_a_block(step: Callable[[Any], Any]) -> None:
    """256 × 256 floats on 64 tiles: blocks of 1,024, whose borders are at most four times 128 elements."""
    device = ipu.IPUModel(tiles_per_ipu=64)
    args = (jax.ShapeDtypeStruct((256, 256), np.float32),)
    stencil = ipu.jit(repeated(step), device=device, donate_argnums=0).lower(*args).compile().profile
    elementwise = ipu.jit(lambda u: u * 2, device=device, donate_argnums=0).lower(*args).compile().profile
    target = device.target
    copied_in_and_out = 2 * (256 * 256 * 4 / 64 / target.exchange_bytes_per_cycle + target.exchange_startup_cycles)
    exchange = stencil.phase_cycles["exchange"] - elementwise.phase_cycles["exchange"] - copied_in_and_out
    border = 4 * 128 * 4 / target.exchange_bytes_per_cycle
    assert exchange / STEPS < border + 2 * target.exchange_startup_cycles


def test_maps_a_carry_for_its_loop() -> None:
    """The linear mapping of a value computed before the loop is no choice that the loop has to follow."""
    program = lowered(lambda u: repeated(rolled)(jnp.exp(u)), (normal(128, 1024),), small_target(256))
    (carry,) = (v for v in program.graph.variables if v.name.endswith("carry0"))
    mapping = program.graph.mappings[carry]
    assert isinstance(mapping, Blocked) and min(mapping.tile.shape) > 1


def proposals(*views: Tensor, graph: Graph, shape: tuple[int, ...]) -> list[dict[Any, Blocked]]:
    return neighbour_mappings(graph, views, shape, lambda elements: 4 * elements)


def test_maps_elements_to_the_tile_of_the_middle_point() -> None:
    graph = Graph(small_target(16))
    u = graph.add_variable((66, 66), np.float32, "u")
    views = [u[1:-1, 1:-1], u[:-2, 1:-1], u[2:, 1:-1], u[1:-1, :-2], u[1:-1, 2:]]
    first, *_ = proposals(*views, graph=graph, shape=(64, 64))
    (mapping,) = first.values()
    assert mapping.shape == (66, 66) and mapping.tile.size == 16
    rows, columns = mapping.cuts
    assert all(cut[0] == 0 and cut[-1] == 66 for cut in (rows, columns))
    assert {int(n) % (64 // (len(cut) - 1)) for cut in (rows, columns) for n in cut[1:-1]} == {1}


def test_counts_a_roll_as_one_step() -> None:
    graph = Graph(small_target(16))
    u = graph.add_variable((64, 64), np.float32, "u")
    views = [u, concat([u[-1:], u[:-1]], 0), concat([u[:, 1:], u[:, :1]], 1)]
    first, *_ = proposals(*views, graph=graph, shape=(64, 64))
    assert next(iter(first.values())).tile.size == 16


def test_proposes_nothing_for_other_views() -> None:
    graph = Graph(small_target(16))
    u, v = (graph.add_variable((64, 64), np.float32, name) for name in "uv")
    shape = (64, 64)
    assert not proposals(u, v, graph=graph, shape=shape)  # each at one offset
    assert not proposals(u, u, graph=graph, shape=shape)
    assert not proposals(u, u.transpose((1, 0)), graph=graph, shape=shape)  # along different dimensions
    assert not proposals(u[:32, ::2], u[32:, ::2], graph=graph, shape=(32, 32))  # in steps of two
    flat = graph.add_variable((4096,), np.float32, "flat")
    assert not proposals(flat[1:], flat[:-1], graph=graph, shape=(4095,))  # neighbours in a line are neighbours anyway
    graph.set_tile_mapping(u.variables()[0], Blocked((np.array([0, 64]),) * 2, np.zeros((1, 1), np.int32)))
    assert not proposals(u[1:], u[:-1], graph=graph, shape=(63, 64))  # mapped already


def test_each_variable_has_a_border_of_its_own() -> None:
    """Sixteen variables are read at two rows and one at two columns: blocks of whole columns exchange that one only."""
    graph = Graph(small_target(16))
    views = []
    for n in range(17):
        u = graph.add_variable((64, 80) if n == 0 else (80, 64), np.float32, f"u{n}")
        views += [u[:, :64], u[:, 16:]] if n == 0 else [u[:64], u[16:]]
    first, *_ = proposals(*views, graph=graph, shape=(64, 64))
    assert {mapping.tile.shape for mapping in first.values()} == {(1, 16)}
