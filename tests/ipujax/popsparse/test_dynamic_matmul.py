"""popsparse.dynamic_matmul: numbers and gradients of the dense product, for any pattern of one plan."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ipujax as ipu
from ipujax import popsparse
from ipujax.popsparse import BlockPattern, DynamicPlan
from ipujax.popsparse.dynamic_plan import poisson_quantile
from tests.ipujax.popsparse.test_static_matmul import operands, random_pattern

SMALL = ipu.IPUModel(tiles_per_ipu=16)


@pytest.mark.parametrize(("block", "dtype"), [*product((1, 4, 8, 16), (np.float32, np.float16))])
def test_equals_the_dense_product_with_gradients(block, dtype):
    plan = DynamicPlan((4 * block, 6 * block), block, 12, columns=6, dtype=dtype, buckets=6, oversize=1.5)
    pattern = random_pattern(*plan.shape, block, 0.4)
    values, x, g = operands(pattern, 6, dtype)
    sparse = plan.encode(pattern, values)
    # Blocks of the dense matrix in the order of the buckets, those that are empty too.
    numbers = plan.encode(pattern, np.broadcast_to(np.arange(1.0, pattern.num_blocks + 1)[:, None, None], values.shape))
    place = np.flatnonzero(np.asarray(numbers.values)[:, 0, 0])
    number = np.asarray(numbers.values)[place, 0, 0].astype(int) - 1

    def dense(values, x):
        return jnp.matmul(pattern.dense(values), x, preferred_element_type=jnp.float32).astype(x.dtype)

    def product(sparse, x, g):
        return (y := jax.vjp(partial(popsparse.dynamic_matmul, plan), sparse, x))[0], *y[1](g)

    expected = dense(values, x), *jax.vjp(dense, values, x)[1](g)
    tolerance = 1e-5 if dtype == np.float32 else 4e-3
    for jit in (jax.jit, partial(ipu.jit, device=SMALL)):
        y, d_sparse, d_x = jit(product)(sparse, x, g)
        d_values = np.zeros(values.shape, dtype)
        d_values[number] = np.asarray(d_sparse.values)[place]
        assert not np.delete(np.asarray(d_sparse.values), place, 0).any()
        for actual, right in zip((y, d_values, d_x), expected, strict=True):
            assert actual.dtype == dtype
            np.testing.assert_allclose(actual, right, rtol=tolerance, atol=tolerance * float(jnp.max(jnp.abs(right))))


def test_one_program_for_all_patterns():
    plan = DynamicPlan((32, 32), 4, 20, columns=8, oversize=2, buckets=4)
    product = ipu.jit(partial(popsparse.dynamic_matmul, plan), device=SMALL)
    cycles = set()
    for seed, density in ((0, 0.3), (1, 0.1), (2, 0.25)):
        pattern = random_pattern(32, 32, 4, density, seed)
        values, x, _ = operands(pattern, 8)
        sparse = plan.encode(pattern, values)
        np.testing.assert_allclose(product(sparse, x), pattern.dense(values) @ x, rtol=1e-4, atol=1e-4)
        cycles.add(product.profile(sparse, x).cycles)
    assert len(cycles) == 1  # the cost is that of the most blocks


def test_overflow_goes_to_other_buckets():
    """All blocks are of one cell; each step of propagation makes room for one more bucket of them."""
    plan = DynamicPlan((16, 16), 4, 4, columns=2, propagation_steps=3, buckets=4, oversize=0)
    pattern = BlockPattern((16, 16), 4, (0, 0, 1, 1), (0, 1, 0, 1))
    values, x, _ = operands(pattern, 2)
    result = popsparse.dynamic_matmul(plan, plan.encode(pattern, values), x)
    np.testing.assert_allclose(result, pattern.dense(values) @ x, rtol=1e-5, atol=1e-5)


def test_refuses_a_pattern_that_needs_more_steps():
    plan = DynamicPlan((256, 256), 4, 1024, columns=1, buckets=16)
    assert plan.grid.cells > 4
    rows, columns = np.divmod(np.arange(1024), 32)
    pattern = BlockPattern(plan.shape, 4, tuple(rows.tolist()), tuple(columns.tolist()))  # a quarter of the matrix
    with pytest.raises(ipu.ArgumentError, match="too uneven"):
        plan.encode(pattern, operands(pattern, 1)[0])


@pytest.mark.parametrize(("blocks", "density", "buckets"), [(32, 0.1, 64), (64, 0.02, 1472), (32, 0.6, 256)])
def test_random_patterns_fit(blocks, density, buckets):
    count = int(blocks**2 * density)
    plan = DynamicPlan((4 * blocks, 4 * blocks), 4, count, columns=16, buckets=buckets)
    assert plan.grid.cells > 1
    rng = np.random.default_rng(0)
    for _ in range(20):
        rows, columns = np.divmod(np.sort(rng.choice(blocks**2, count, replace=False)), blocks)
        pattern = BlockPattern(plan.shape, 4, tuple(rows.tolist()), tuple(columns.tolist()))
        plan.encode(pattern, np.zeros((count, 4, 4), np.float32))


def test_poisson_quantile():
    assert [poisson_quantile(mean, 0.05) for mean in (0.05, 1.0, 10.0)] == [0, 3, 15]  # of tables
    draws = np.random.default_rng(0).poisson(300, 100_000)
    assert abs(np.mean(draws > poisson_quantile(300, 0.01)) - 0.01) < 0.002


def test_wrong_arguments():
    plan = DynamicPlan((8, 8), 4, 2, columns=2)
    pattern = BlockPattern((8, 8), 4, (0,), (0,))
    values, x, _ = operands(pattern, 2)
    sparse = plan.encode(pattern, values)
    for wrong, message in (
        (lambda: DynamicPlan((8, 8), 3, 2, columns=2), "one of"),
        (lambda: DynamicPlan((8, 8), 4, 5, columns=2), "max_blocks"),
        (lambda: DynamicPlan((8, 8), 4, 2, columns=0), "columns"),
        (lambda: DynamicPlan((8, 8), 4, 2, columns=2, dtype=int), "float32 or float16"),
        (lambda: DynamicPlan((8, 8), 4, 2, columns=2, dtype="half a float"), "float32 or float16"),
        (lambda: DynamicPlan((8, 8), 4, 1.5, columns=2), "max_blocks"),
        (lambda: DynamicPlan((8, 8), 4, 2, columns=2, oversize=float("nan")), "oversize"),
        (lambda: popsparse.dynamic_matmul(plan, sparse, x.tolist()), "arrays, both float32"),
        (lambda: plan.encode(None, values), "a BlockPattern"),
        (lambda: jax.jit(lambda v: plan.encode(pattern, v).values)(values), "values that are not traced"),
        (lambda: plan.encode(pattern, values[0]), "values"),
        (lambda: plan.encode(BlockPattern((8, 8), 4, (0, 0, 1), (0, 1, 1)), np.ones((3, 4, 4))), "at most 2"),
        (lambda: plan.encode(BlockPattern((8, 8), 8, (0,), (0,)), np.ones((1, 8, 8))), "pattern"),
        (lambda: popsparse.dynamic_matmul(plan, values, x), "a DynamicPlan"),
        (lambda: popsparse.dynamic_matmul(plan, sparse, x[:4]), "x"),
        (lambda: popsparse.dynamic_matmul(plan, sparse, x.astype(np.float16)), "both float32"),
        (lambda: popsparse.dynamic_matmul(DynamicPlan((16, 8), 4, 8, columns=2), sparse, x), "another plan"),
        # One whose arrays have equal shapes.
        (lambda: popsparse.dynamic_matmul(replace(plan, oversize=0.31), sparse, x), "another plan"),
    ):
        with pytest.raises(ipu.ArgumentError, match=message):
            wrong()
