"""Random programs on replicas and in pipelines, against `jax.vmap` over a named axis and plain `jax.jit`.

Replicas have arguments of their own and meet in collectives behind the program; the steps of a pipeline's program are
divided among its stages. `-m slow` runs 300 and 150 of them, half split as the machine splits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, seed, settings, strategies as st
from jax import lax
from jax.sharding import PartitionSpec as P

import ipujax as ipu
from tests.lowering.helpers import assert_same, quick_jit
from tests.lowering.random_programs import Pool, Program, Step, Value, programs
from tests.lowering.test_random_programs import EVERY, TOLERANCE, by_jax, with_bytes

REPLICAS = 4
STAGES = 3
MICRO_BATCHES = 4
HOST_OPERATIONS = frozenset({"on_host", "offloaded_residuals"})
COLLECTIVES: tuple[Callable[[jax.Array], jax.Array], ...] = (
    lambda y: y,
    lambda y: lax.pmean(y.astype(np.float32), "replica"),
    lambda y: lax.psum(y.astype(np.float32), "replica"),
    lambda y: lax.pmax(y.astype(np.float32), "replica"),
    lambda y: lax.all_gather(y, "replica"),
    lambda y: lax.ppermute(y, "replica", [(r, (r + 1) % REPLICAS) for r in range(REPLICAS)]),
)


def arguments_of_each(program: Program, number: int) -> list[tuple[np.ndarray, ...]]:
    """By argument its values for each of `number` copies; scalars are the same for all."""
    drawn = [Program(program.shapes, program.steps, program.differentiable, program.seed + n) for n in range(number)]
    columns = zip(*(one.arguments() for one in drawn), strict=True)
    return [tuple(column) if column[0].ndim else (column[0],) * number for column in columns]


def compare_replicas(program: Program, *, exact_splits: bool = False, jit: Any = quick_jit) -> None:
    """Asserts that results of replicas are those of `jax.vmap`."""
    columns = arguments_of_each(program, REPLICAS)
    is_split = [column[0].ndim > 0 for column in columns]

    def one(*args: Any) -> list[jax.Array]:
        results = [COLLECTIVES[n % len(COLLECTIVES)](y) for n, y in enumerate(program(*args), program.seed)]
        if program.differentiable:
            results += lax.pmean(with_bytes(program.gradient(*args)), "replica")
        return [y[None] for y in results]

    mapped = jax.vmap(one, [0 if split else None for split in is_split], axis_name="replica", axis_size=REPLICAS)
    stacked = [np.stack(column) if split else column[0] for column, split in zip(columns, is_split, strict=True)]
    expected = [y[:, 0] for y in by_jax(jit(mapped), stacked)]
    run = ipu.jit(
        one,
        device=ipu.IPUModel(REPLICAS, tiles_per_ipu=64),
        replicas=REPLICAS,
        in_specs=tuple(P("replica") if split else P() for split in is_split),
        out_specs=P("replica"),
        options=ipu.Options(exact_splits=exact_splits),
    )
    full = [np.concatenate(column) if split else column[0] for column, split in zip(columns, is_split, strict=True)]
    got = jit(run.lower(*full).evaluate)(*full)
    assert_same(got, expected, TOLERANCE, TOLERANCE, f"{REPLICAS} replicas")


def staged(program: Program, *args: Any) -> jax.Array:
    """The weighted sum of the results of a program whose steps are divided among stages."""
    pool = Pool([Value(jnp.asarray(x), True) for x in args], program.differentiable)
    handed_on = jnp.float32(len(args))  # by which every stage does something, whatever its steps leave to do
    for number, step in enumerate(program.steps):
        with ipu.stage(number * STAGES // len(program.steps)):
            pool.run(step)
            handed_on = jnp.cos(handed_on + jnp.sum(jnp.asarray(args[-1], jnp.float32)))
    with ipu.stage(STAGES - 1):
        results = [v.array for v in pool.unread() if v.array.dtype == jnp.float32 and v.array.size]
        return sum((jnp.sum(y * jnp.cos(jnp.arange(y.size).reshape(y.shape))) for y in results), handed_on)


def stays_on_device(steps: Sequence[Step]) -> bool:
    """True if no step uses the memory of the host, which is refused inside of stages."""
    return all(s.op not in HOST_OPERATIONS and all(map(stays_on_device, s.bodies)) for s in steps)


def compare_pipelines(program: Program, *, exact_splits: bool = False, jit: Any = quick_jit) -> None:
    """Asserts that results of a pipeline are those of plain JAX."""
    assume(stays_on_device(program.steps))
    columns = arguments_of_each(program, MICRO_BATCHES)
    weights = columns[0][0]
    batch = [np.stack(column) for column in columns[1:]]

    def loss(weights: Any, batch: Any) -> jax.Array:
        return staged(program, weights, *(x[0] for x in batch))

    fun = jax.value_and_grad(loss) if program.differentiable else loss
    run = ipu.pipeline(fun, micro_batches=MICRO_BATCHES)
    expected = jax.tree.leaves(by_jax(jit(run), (weights, batch)))
    options = ipu.Options(exact_splits=exact_splits)
    ready = ipu.jit(run, device=ipu.IPUModel(4, tiles_per_ipu=64), options=options).lower(weights, batch)
    ready.compile()
    got = jax.tree.leaves(jit(ready.evaluate)(weights, *batch))
    assert_same(got, expected, TOLERANCE, TOLERANCE, f"{STAGES} stages")


@seed(1)
@settings(EVERY, max_examples=2)
@given(programs(4, 8))
def test_replicas(program: Program) -> None:
    compare_replicas(program)


@seed(2)
@settings(EVERY, max_examples=2)
@given(programs(6, 9))
def test_pipelines(program: Program) -> None:
    compare_pipelines(program)


@pytest.mark.parametrize("exact_splits", [False, True])
@pytest.mark.parametrize("part", range(3))
def test_replicas_of_many(part: int, exact_splits: bool) -> None:
    run_part(part, programs(4, 9), 50, partial(compare_replicas, exact_splits=exact_splits, jit=jax.jit))


@pytest.mark.parametrize("exact_splits", [False, True])
@pytest.mark.parametrize("part", range(3))
def test_pipelines_of_many(part: int, exact_splits: bool) -> None:
    run_part(part, programs(6, 10), 25, partial(compare_pipelines, exact_splits=exact_splits, jit=jax.jit))


def run_part(part: int, strategy: st.SearchStrategy[Program], number: int, compare: Callable[[Program], None]) -> None:
    """Compares `number` programs of a seed of their own."""

    @seed(200 + part)
    @settings(EVERY, max_examples=number)
    @given(strategy)
    def run(program: Program) -> None:
        compare(program)

    run()
    jax.clear_caches()
