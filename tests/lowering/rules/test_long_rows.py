"""Rows that no tile can hold: sorted, summed and searched in parts, with the results of `lax`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import ipujax as ipu
from ipujax.lowering.popops.maps.rows import sort
from ipujax.runtime.graph import Builder
from ipujax.runtime.graph.graph import Graph
from ipujax.runtime.graph.program import Sequence
from tests.lowering.helpers import assert_same, lowered, quick_jit, run_engine, run_tiles, small_target

RNG = np.random.default_rng(11)
TIED = RNG.integers(-20, 20, (2, 131)).astype(np.int32)
NAMES = np.arange(262, dtype=np.int32).reshape(2, 131)
FLOATS = np.where(TIED == 3, np.nan, np.where(TIED == 0, -0.0, TIED / 8)).astype(np.float32)
FLOATS[0, :5] = np.inf, -np.inf, 0.0, -0.0, -np.nan


def compare(fun: Callable[..., Any], *args: Any, rtol: float = 0.0, bytes_per_tile: int = 1500) -> None:
    """Compares all executions with plain JAX, on tiles that cannot hold a row, several of which must compute."""
    expected = jax.tree.leaves(quick_jit(fun)(*args))
    program = lowered(fun, args, small_target(7, bytes_per_tile=bytes_per_tile))
    assert not program.graph.notes.fallbacks
    groups = [group for groups in program.graph.groups.values() for group in groups]
    assert max(np.unique(group.tile).size for group in groups) > 2
    runs = run_engine(program, args), run_engine(program, args, exact_splits=True), run_tiles(program, args)
    for execution, results in zip(("engine", "literal", "tiles"), runs, strict=True):
        assert_same(results, expected, rtol, rtol, execution)


@pytest.mark.parametrize("reverse", [False, True])
def test_running_results(reverse: bool) -> None:
    kinds = (lax.cumsum, lax.cummax, lax.cummin, lax.cumprod)
    compare(lambda x: [f(x, 1, reverse=reverse) for f in kinds], TIED)
    compare(lambda x: [f(x, 0, reverse=reverse) for f in kinds[:2]], TIED.T.copy() % 3)
    positive = np.abs(TIED[0] / 64).astype(np.float32)
    compare(lambda x: [f(x, 0, reverse=reverse) for f in (lax.cumsum, lax.cumlogsumexp)], positive, rtol=1e-5)


def test_sorting() -> None:
    compare(lambda x, y: lax.sort((x.T, y.T), dimension=0, num_keys=1), FLOATS, NAMES)


def test_sorting_by_several_keys() -> None:
    compare(lambda x, y: lax.sort((x % 3, y % 5, y), dimension=1, num_keys=2), TIED, NAMES)


def test_library_functions() -> None:
    compare(lambda x: (jnp.argsort(x), jnp.median(x[5:]), jnp.unique(x, size=9)), TIED[0])
    compare(
        lambda x: jax.grad(lambda x: (jnp.sort(x) * jnp.arange(131.0)).sum())(x),
        RNG.permutation(131).astype(np.float32),
    )


@pytest.mark.parametrize("k", [1, 16])
def test_largest_elements(k: int) -> None:
    compare(lambda x: lax.top_k(x, k), TIED)
    compare(lambda x: lax.top_k(x.T, k, axis=0), FLOATS)


def test_fits_a_million_elements() -> None:
    functions = (jnp.sort, jnp.cumsum, lambda x: lax.top_k(x, 10))
    for fun in functions:
        profile = ipu.jit(fun).lower(jax.ShapeDtypeStruct((1_000_000,), np.float32)).compile().profile
        assert not profile.fallbacks


def test_costs_a_merge_as_the_last_level_of_a_sort() -> None:
    """A row of 2ᵏ elements is merged in k stages and sorted in k (k + 1) / 2; the steps of a network are merges."""
    costs: dict[bool, list[int]] = {}
    for merges in (False, True):
        costs[merges] = []
        for length in (1024, 2048, 4096):
            graph = Graph(small_target(1))
            prog = Sequence()
            x = graph.add_variable((1, length), np.float32, "x")
            sort(Builder(graph, prog, "sort"), [x], 1, 1, is_stable=False, has_sorted_halves=merges)
            ((group,),) = graph.groups.values()
            shapes = [tuple(np.asarray(n) for n in (1, length))] * 2
            costs[merges].append(int(group.codelet.cycles(shapes, graph.target)))
    overhead = small_target(1).supervisor_overhead_cycles
    for levels, merged, sorting in zip((10, 11, 12), costs[True], costs[False], strict=True):
        assert (sorting - overhead) * 2 == (merged - overhead) * (levels + 1)
    program = lowered(jnp.sort, (TIED[0],), small_target(7, bytes_per_tile=1500))
    names = [g.codelet.name for groups in program.graph.groups.values() for g in groups]
    assert sum("Sort" in name for name in names) == 1
    steps = sum("Merge" in name for name in names)
    levels = int((2 * steps) ** 0.5)
    assert steps == levels * (levels + 1) // 2 > 1


@pytest.mark.parametrize("fun", [jnp.cumsum, jnp.sort, lambda x: jax.lax.top_k(x, 8)], ids=["cumsum", "sort", "top_k"])
def test_spreads_a_long_row(fun):
    """A row of a few thousand elements would fit a tile, and take it ten times as long."""
    cycles = []
    for length in (500, 4000, 40_000, 100_000):
        profile = ipu.jit(fun).lower(jax.ShapeDtypeStruct((length,), "float32")).compile().profile
        cycles.append(profile.cycles - profile.phase_cycles["host_exchange"])
    assert cycles[1] < 8 * cycles[0] and cycles[1:] == sorted(cycles[1:])
