"""Tile-level JAX: numbers as of plain JAX, tiles as asked for, cycles as of one tile, and errors."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import ipujax as ipu
from ipujax.poplar import FLOAT, Input, Output, Vector, Vertex
from ipujax.runtime.errors import ArgumentTypeError, ArgumentValueError

SMALL = ipu.IPUModel(tiles_per_ipu=16)
TILES = (3, 5, 9, 2)
X = np.random.default_rng(0).normal(size=(4, 6, 8)).astype(np.float32)


def row_function(a: Any, b: Any) -> Any:
    return jnp.sin(a) * b + 1, jnp.sum(a @ b.T)


def around(x: Any, y: Any) -> Any:
    x = ipu.tile_put_sharded(x * 2, TILES)
    y = ipu.tile_put_sharded(y, TILES)
    u, v = ipu.tile_map(row_function, x, y)
    return jnp.sum(ipu.tile_gather(u, (1, 2, 3, 0), TILES) * jnp.arange(8)) + jnp.sum(v)


def plain_around(x: Any, y: Any) -> Any:
    u, v = jax.vmap(row_function)(x * 2, y)
    return jnp.sum(u[jnp.array([1, 2, 3, 0])] * jnp.arange(8)) + jnp.sum(v)


class DoubleVertex(Vertex):
    x: Input[Vector[FLOAT]]
    out: Output[Vector[FLOAT]]

    def compute(x):
        return 2 * x

    def cycles(x):
        return 100 + 3 * x.size


def tiles_of(fun: Any, *args: Any) -> list[list[int]]:
    """Tiles of the vertices of each compute set."""
    groups = ipu.jit(fun, device=SMALL).lower(*args).graph.groups.values()
    return [group.tile.reshape(-1).tolist() for (group,) in groups]


def compute_cycles(fun: Any, *args: Any) -> int:
    return ipu.jit(fun, device=SMALL).profile(*args).phase_cycles["compute"]


@pytest.mark.parametrize("exact_splits", [False, True])
def test_tile_map_numbers_and_gradients_are_those_of_vmap(exact_splits: bool) -> None:
    expected = jax.value_and_grad(plain_around, (0, 1))(X, X + 1)
    differentiated = jax.value_and_grad(around, (0, 1))
    compiled = ipu.jit(differentiated, device=SMALL, options=ipu.Options(exact_splits=exact_splits))
    for actual in (differentiated(X, X + 1), compiled(X, X + 1)):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), actual, expected)


def test_tile_map_has_forward_and_second_derivatives() -> None:
    x = X[:, :1]
    for transform in (lambda f: jax.jvp(f, (x, x), (x, x)), lambda f: jax.hessian(f)(x, x)):
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4),
            transform(around),
            transform(plain_around),
        )


def test_tile_map_differentiates_custom_rules_and_leaves_integers_alone() -> None:
    def fun(a: Any, n: Any) -> Any:
        return jax.nn.relu(a) * n, n + 1

    def loss(map_over: Any) -> Any:
        def total(x: Any) -> Any:
            y, n = map_over(x, jnp.arange(4))
            return jnp.sum(y) + jnp.sum(n)

        return total

    actual = jax.grad(loss(lambda x, n: ipu.tile_map(fun, x, n)))(X)
    np.testing.assert_array_equal(actual, jax.grad(loss(jax.vmap(fun)))(X))


def test_tile_map_under_vmap_keeps_its_tiles() -> None:
    batch = np.stack([X, X + 1, X - 1])
    mapped = jax.vmap(lambda x: ipu.tile_map(jnp.cos, x, tiles=TILES))
    np.testing.assert_array_equal(mapped(batch), jnp.cos(batch))
    assert tiles_of(mapped, batch) == [list(TILES)]


def test_tile_map_runs_where_its_rows_are() -> None:
    def fun(x: Any) -> Any:
        return ipu.tile_map(jnp.exp, ipu.tile_put_sharded(x, TILES))

    def rolled(x: Any) -> Any:
        return ipu.tile_map(jnp.exp, jnp.roll(ipu.tile_map(jnp.exp, x, tiles=TILES), 1, axis=0))

    assert tiles_of(fun, X) == [list(TILES)]
    assert tiles_of(rolled, X) == [list(TILES), [2, 3, 5, 9]]
    assert tiles_of(lambda x: ipu.tile_map(jnp.exp, x), X) == [[0, 1, 2, 3]]


def test_tile_gather_moves_only_rows_from_elsewhere() -> None:
    def exchanged(indices: Any) -> int:
        def fun(x: Any) -> Any:
            return ipu.tile_map(jnp.exp, ipu.tile_gather(ipu.tile_map(jnp.exp, x, tiles=TILES), indices, TILES))

        return ipu.jit(fun, device=SMALL).profile(X).phase_cycles["exchange"]

    assert exchanged((0, 1, 2, 3)) == 0
    assert exchanged((0, 2, 1, 3)) > 0


@pytest.mark.parametrize("fun", [jnp.exp, lambda x: jnp.sum(x @ x.T), lambda x: jnp.cumsum(jnp.tanh(x) * x + 1, 0)])
def test_tile_map_costs_the_same_on_one_tile_and_on_many(fun: Any) -> None:
    cycles = {compute_cycles(lambda x: ipu.tile_map(fun, x), np.ones((n, 6, 8), np.float32)) for n in (1, 2, 16)}
    assert len(cycles) == 1


def test_tile_map_of_a_single_operation_costs_as_much_as_its_vertex() -> None:
    x = np.ones((1, 6, 8), np.float32)
    on_one = ipu.IPUModel(tiles_per_ipu=1)
    alone = ipu.jit(lambda x: jnp.exp(x), device=on_one).profile(x).phase_cycles["compute"]
    assert compute_cycles(lambda x: ipu.tile_map(jnp.exp, x), x) == alone


def test_tile_map_of_a_codelet_has_its_estimate_and_gradient() -> None:
    def gradient(arrays: Any, cotangents: Any) -> Any:
        return (2 * cotangents[0],)

    def fun(x: Any) -> Any:
        return ipu.tile_map(DoubleVertex, x, tiles=TILES, gradient=gradient)

    x = X[:, 0]
    target = SMALL.target
    expected = target.supervisor_overhead_cycles + target.worker_contexts * (100 + 3 * 8)
    assert compute_cycles(fun, x) == expected
    assert tiles_of(fun, x) == [list(TILES)]
    np.testing.assert_array_equal(jax.grad(lambda x: jnp.sum(fun(x)))(x), np.full_like(x, 2))


def test_tile_map_takes_primitives_pytrees_keywords_and_no_arrays() -> None:
    np.testing.assert_array_equal(ipu.tile_map(jax.lax.exp_p, X), jnp.exp(X))
    np.testing.assert_allclose(ipu.tile_map(jax.lax.reduce_sum_p, X, axes=(0,)), X.sum(1), rtol=1e-5)
    by_name = ipu.tile_map(lambda pair, scale: {"sum": (pair["a"] + pair["b"]) * scale}, {"a": X, "b": X}, scale=3)
    np.testing.assert_array_equal(by_name["sum"], 6 * X)
    made = ipu.tile_map(lambda: jnp.arange(3), tiles=TILES)
    np.testing.assert_array_equal(made, np.tile(np.arange(3), (4, 1)))


def test_tile_map_takes_keys_and_arrays_closed_over() -> None:
    keys = jax.random.split(jax.random.key(0), 4)
    weight = jnp.asarray(X[0].T)

    def fun(keys: Any, w: Any) -> Any:
        return ipu.tile_map(lambda key: jax.random.normal(key, (6,)) @ w[:6], keys, tiles=TILES)

    expected = jax.vmap(lambda key: jax.random.normal(key, (6,)) @ weight[:6])(keys)
    np.testing.assert_allclose(ipu.jit(fun, device=SMALL)(keys, weight), expected, rtol=1e-5)


def test_cycle_count_differences_equal_the_profile() -> None:
    def fun(x: Any) -> Any:
        x, start = ipu.cycle_count(ipu.tile_put_sharded(x, TILES))
        x = ipu.tile_map(jnp.tanh, x)
        x, middle = ipu.cycle_count(x)
        x = jax.lax.fori_loop(0, 5, lambda _, z: ipu.tile_map(lambda a: a * 2, z), x)
        x = jax.lax.while_loop(lambda z: jnp.sum(z) < 900, lambda z: ipu.tile_map(lambda a: a + 1, z), x)
        x = jax.lax.cond(x[0, 0, 0] > 0, lambda z: ipu.tile_map(jnp.tanh, z), lambda z: z, x)
        x, end = ipu.cycle_count(x)
        return x, start, middle, end

    outs, profile = ipu.jit(fun, device=SMALL).lower(X).compile().profile_call(X)
    start, middle, end = (np.asarray(count)[:, 0] for count in outs[1:])
    assert len(set(start)) == 1 and outs[1].shape == (4, 2) and outs[1].dtype == np.uint32
    readings = [step for step in profile.timeline.steps if getattr(step.program, "label", "") == "cycle_count"]
    between = [b.starts[0] - a.ends[0] for a, b in pairwise(readings)]
    assert between == [middle[0] - start[0], end[0] - middle[0]]
    np.testing.assert_allclose(outs[0], fun(X)[0], rtol=1e-5)
    assert not np.any(fun(X)[1])


@pytest.mark.parametrize("exact_splits", [False, True])
def test_cycle_count_of_each_replica(exact_splits: bool) -> None:
    def fun(x: Any, limit: Any) -> Any:
        x, start = ipu.cycle_count(ipu.tile_put_sharded(x, TILES))
        x = jax.lax.while_loop(lambda z: z[0, 0, 0] < limit[0], lambda z: ipu.tile_map(lambda a: a + 1, z), x)
        x, middle = ipu.cycle_count(x)
        x = jax.lax.fori_loop(0, 3, lambda _, z: ipu.tile_put_sharded(jax.lax.pmean(z, "replica"), TILES), x)
        x, end = ipu.cycle_count(x)
        return start, middle, end

    options = ipu.Options(exact_splits=exact_splits)
    device = ipu.IPUModel(num_ipus=4, tiles_per_ipu=16)
    split = P("replica")
    step = ipu.jit(fun, device=device, replicas=4, in_specs=(split, split), out_specs=split, options=options)
    operands = np.zeros((16, 3, 5), np.float32), np.array([2, 5, 3, 2], np.float32)
    counts, profile = step.lower(*operands).compile().profile_call(*operands)
    start, middle, end = (np.asarray(count).reshape(4, 4, 2)[:, 0, 0].astype(int) for count in counts)
    for count, called in zip(counts, step(*operands), strict=True):
        np.testing.assert_array_equal(count, called)
    # Replicas are alike but for their iterations, and each iteration takes as long.
    iteration = (middle[1] - middle[0]) // 3
    assert iteration > 0 and len(set(start)) == 1
    assert (middle - middle[0]).tolist() == [0, 3 * iteration, iteration, 0]
    assert len(set(end - middle)) == 1
    readings = [step for step in profile.timeline.steps if getattr(step.program, "label", "") == "cycle_count"]
    between = [b.starts[0] - a.ends[0] for a, b in pairwise(readings)]
    assert between == [middle[0] - start[0], end[0] - middle[0]]


def test_refuses_counts_of_replicas_as_the_same_for_all() -> None:
    device = ipu.IPUModel(num_ipus=2, tiles_per_ipu=8)
    step = ipu.jit(lambda x: ipu.cycle_count(x)[1], device=device, replicas=2, in_specs=P(), out_specs=P())
    with pytest.raises(ipu.GraphError, match=r"may differ between replicas[\s\S]*P\(\"replica\"\)"):
        step(X)


def test_tile_barrier_is_a_sync_that_no_step_passes() -> None:
    def fun(x: Any, y: Any) -> Any:
        a = ipu.tile_map(jnp.exp, x, tiles=(0, 1, 2, 3))
        b = ipu.tile_barrier(y)
        return a, ipu.tile_map(jnp.exp, b, tiles=(4, 5, 6, 7))

    def merged(x: Any, y: Any) -> Any:
        return ipu.tile_map(jnp.exp, x, tiles=(0, 1, 2, 3)), ipu.tile_map(jnp.exp, y, tiles=(4, 5, 6, 7))

    assert compute_cycles(fun, X, X) == 2 * compute_cycles(merged, X, X)


def without_message(row: Any) -> Any:
    raise ValueError


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda: ipu.tile_put_sharded(X, (1, 2, 2, 3)), ArgumentValueError, r"each tile once[\s\S]*tile 2 2 times"),
        (lambda: ipu.tile_map(jnp.exp, X, tiles=(0, 0, 1, 2)), ArgumentValueError, "tile_map of exp: tiles"),
        (lambda: ipu.tile_put_sharded(X, (1, 2, -3, 3)), ArgumentValueError, r"numbered from 0[\s\S]*tile -3"),
        (lambda: ipu.tile_put_sharded(X, (1, 2, 3)), ArgumentValueError, r"leading axis[\s\S]*3, the number of tiles"),
        (lambda: ipu.tile_put_sharded(X, (1.5, 2, 3, 4)), ArgumentTypeError, "whole numbers"),
        (lambda: ipu.tile_put_sharded(np.float32(1), (0,)), ArgumentTypeError, "leading axis with a row"),
        (lambda: ipu.tile_put_replicated(X, ()), ArgumentValueError, "at least one tile"),
        (lambda: ipu.tile_put_replicated(object(), (1,)), ArgumentTypeError, r"an array[\s\S]*object"),
        (lambda: ipu.tile_put_replicated(2**40, (1,)), ArgumentTypeError, r"an array[\s\S]*int"),
        (lambda: ipu.tile_put_sharded(np.ma.array(X), (0, 1, 2, 3)), ArgumentTypeError, r"an array[\s\S]*Masked"),
        (lambda: ipu.tile_put_sharded(X, ((0,), (1, 2), 3, 4)), ArgumentTypeError, "whole numbers"),
        (lambda: ipu.tile_gather(X, (0, 4), (0, 1)), ArgumentValueError, r"rows 0 … 3[\s\S]*row 4"),
        (lambda: ipu.tile_gather(X, (0, 1, 2), (0, 1)), ArgumentValueError, r"one for each tile[\s\S]*got: 3"),
        (lambda: ipu.tile_map(jnp.add, X, X[:2]), ArgumentValueError, r"leading axis of array 1[\s\S]*4[\s\S]*got: 2"),
        (lambda: ipu.tile_map(jnp.dot, X, X), ArgumentTypeError, r"does not run on one row[\s\S]*float32\[6, 8\]"),
        (lambda: ipu.tile_map(without_message, X), ArgumentTypeError, r"does not run on one row[\s\S]*got: ValueError"),
        (lambda: ipu.tile_map(3, X), ArgumentTypeError, r"a function, a primitive or a codelet[\s\S]*got: 3"),
        (lambda: ipu.tile_map(lambda: 1), ArgumentTypeError, r"arrays, or tiles="),
        (lambda: ipu.tile_map(jnp.exp, X, gradient=jnp.exp), ArgumentTypeError, r"a codelet[\s\S]*custom_vjp"),
        (lambda: ipu.tile_map(lambda x: ipu.tile_map(jnp.exp, x), X), ArgumentTypeError, "no tile functions inside"),
        (lambda: ipu.tile_map(lambda x: None, X), ArgumentTypeError, "arrays with elements"),
        (lambda: ipu.tile_map(DoubleVertex, X), ArgumentValueError, r"field x[\s\S]*2 dimensions[\s\S]*\[4, 6, 8\]"),
        (lambda: ipu.tile_map(lambda x: jax.debug.print("{}", x), X), ArgumentTypeError, "without side effects"),
        (lambda: ipu.cycle_count(), ArgumentTypeError, "at least one array"),
        (lambda: ipu.jit(lambda x: ipu.tile_map(jnp.exp, x, tiles=(0, 1, 2, 16)), device=SMALL).lower(X),
         ArgumentValueError, r"device lacks[\s\S]*test_tile_map.py[\s\S]*0 … 15[\s\S]*tile 16"),
    ],
)  # fmt: skip
def test_tile_map_refuses_bad_arguments_with_the_users_line(call: Any, error: Any, match: str) -> None:
    with pytest.raises(error, match=match) as caught:
        call()
    assert "test_tile_map.py" in str(caught.value)
