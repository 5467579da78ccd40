"""popsparse.static_matmul: numbers and gradients of the dense product on the same mask; cycles follow density."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ipujax as ipu
from ipujax import popsparse
from ipujax.popsparse import BlockPattern

SMALL = ipu.IPUModel(tiles_per_ipu=16)


def random_pattern(m, k, block, density, seed=0):
    rows = m // block
    columns = k // block
    count = max(1, round(density * rows * columns))
    chosen = np.random.default_rng(seed).permutation(rows * columns)[:count]
    return BlockPattern((m, k), block, tuple((chosen // columns).tolist()), tuple((chosen % columns).tolist()))


def operands(pattern, n, dtype=np.float32):
    keys = jax.random.split(jax.random.key(0), 3)
    blocks = (pattern.num_blocks, pattern.block, pattern.block)
    shapes = (blocks, (pattern.shape[1], n), (pattern.shape[0], n))
    return [jax.random.normal(key, shape, dtype) for key, shape in zip(keys, shapes, strict=True)]


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("block", [1, 4, 8, 16])
def test_equals_the_dense_product_with_gradients(block, dtype):
    pattern = random_pattern(4 * block, 6 * block, block, 0.4)
    values, x, g = operands(pattern, 6, dtype)

    def sparse(values, x):
        return popsparse.static_matmul(pattern, values, x, buckets=5)

    def dense(values, x):
        return jnp.matmul(pattern.dense(values), x, preferred_element_type=jnp.float32).astype(x.dtype)

    def with_gradients(fun):
        return lambda values, x: (fun(values, x), *jax.vjp(fun, values, x)[1](g))

    tolerance = 1e-5 if dtype == np.float32 else 4e-3
    expected = with_gradients(dense)(values, x)
    for actual in (with_gradients(sparse)(values, x), ipu.jit(with_gradients(sparse), device=SMALL)(values, x)):
        for a, b in zip(actual, expected, strict=True):
            assert a.dtype == dtype
            np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * float(jnp.max(jnp.abs(b))))


def test_columns_are_divided_where_blocks_are_few():
    pattern = random_pattern(64, 64, 16, 0.2)
    values, x, _ = operands(pattern, 32)
    one, many = (
        ipu.jit(lambda v, y, b=b: popsparse.static_matmul(pattern, v, y, buckets=b), device=SMALL) for b in (3, 12)
    )
    np.testing.assert_allclose(one(values, x), pattern.dense(values) @ x, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(many(values, x), pattern.dense(values) @ x, rtol=1e-5, atol=1e-5)
    assert many.profile(values, x).cycles < one.profile(values, x).cycles


def test_cycles_fall_with_density():
    cycles = []
    for density in (0.5, 0.25, 0.125):
        pattern = random_pattern(512, 512, 16, density)
        shapes = [jax.ShapeDtypeStruct(y.shape, y.dtype) for y in operands(pattern, 64, np.float16)[:2]]
        product = ipu.jit(lambda v, y, p=pattern: popsparse.static_matmul(p, v, y, buckets=16), device=SMALL)
        phases = product.lower(*shapes).compile().profile.phase_cycles
        cycles.append(phases["compute"] + phases["exchange"])
    # Less than by density: exchanges start once each, and buckets are filled up to whole vectors of indices.
    assert cycles[0] > 1.35 * cycles[1] > 1.35**2 * cycles[2]


def test_vmap_and_second_gradients():
    pattern = random_pattern(8, 8, 4, 0.5)
    values, x, _ = operands(pattern, 3)

    def loss(fun):
        return lambda v, y: jnp.sum(fun(v, y) ** 3)

    sparse = loss(lambda v, y: popsparse.static_matmul(pattern, v, y))
    dense = loss(lambda v, y: pattern.dense(v) @ y)
    for second in (0, 1):
        actual, expected = (
            jax.grad(lambda v, y, f=f, i=second: jnp.sum(jax.grad(f, i)(v, y) ** 2), (0, 1))(values, x)
            for f in (sparse, dense)
        )
        for a, b in zip(actual, expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * float(jnp.max(jnp.abs(b))))
    several = jnp.stack([x, 2 * x])
    actual = jax.vmap(sparse, (None, 0))(values, several)
    np.testing.assert_allclose(actual, jax.vmap(dense, (None, 0))(values, several), rtol=1e-4)


def test_unused_blocks_are_not_read():
    """Neither those that fill the last bucket, nor rows of `x` without blocks."""
    pattern = BlockPattern((8, 12), 4, (1, 0, 1), (1, 1, 2))
    values, x, _ = operands(pattern, 2)
    x = x.at[:4].set(jnp.inf)
    result = popsparse.static_matmul(pattern, values, x, buckets=2)
    assert np.all(np.isfinite(result))


def test_no_blocks():
    pattern = BlockPattern((8, 4), 4, (), ())
    result = popsparse.static_matmul(pattern, jnp.zeros((0, 4, 4)), jnp.ones((4, 3)))
    assert result.shape == (8, 3) and not result.any()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (((8, 8), 3, (), ()), "one of"),
        (((8, 10), 4, (), ()), "multiples of the block, 4"),
        (((8, 8), 4, (0, 0), (1, 1)), "twice"),
        (((8, 8), 4, (2,), (0,)), "rows of a pattern"),
        (((8, 8), 4, (0,), (-1,)), "columns of a pattern"),
        (((8, 8), 4, (0, 1), (0,)), "equally many"),
        (((8, 8), 4, (0.5,), (0,)), "whole numbers"),
        (((8, 8, 8), 4, (), ()), "rows and columns"),
    ],
)
def test_wrong_patterns(arguments, message):
    with pytest.raises(ipu.ArgumentError, match=message):
        BlockPattern(*arguments)


def test_wrong_operands():
    pattern = BlockPattern((8, 8), 4, (0,), (0,))
    values, x, _ = operands(pattern, 2)
    for wrong, message in (
        (lambda: popsparse.static_matmul(pattern, values[:, :2], x), "shapes"),
        (lambda: popsparse.static_matmul(pattern, values, x[:4]), "shapes"),
        (lambda: popsparse.static_matmul(pattern, values, x.astype(np.float16)), "both float32"),
        (lambda: popsparse.static_matmul(None, values, x), "a BlockPattern"),
        (lambda: popsparse.static_matmul(pattern, values, x, buckets=0), "at least 1"),
        (lambda: popsparse.static_matmul(pattern, values, x, buckets=2.5), "a whole number"),
        (lambda: popsparse.static_matmul(pattern, values.tolist(), x), "arrays, both float32"),
        (lambda: pattern.blocks_of(x), "dense matrix"),
        (lambda: pattern.blocks_of([[1.0]]), "dense matrix"),
        (lambda: BlockPattern((8, 8), 4, (0, 1), (0, 1)).dense(values), "blocks of a pattern"),  # one for both
        (lambda: BlockPattern.of_mask(np.ones((6, 4)), 4), "multiples of a block"),
        (lambda: jax.jit(lambda mask: BlockPattern.of_mask(mask, 4).num_blocks)(jnp.ones((4, 4))), "cannot be traced"),
    ):
        with pytest.raises(ipu.ArgumentError, match=message):
            wrong()


def test_patterns_of_masks():
    mask = np.zeros((8, 12), bool)
    mask[5, 9] = mask[0, 0] = True
    pattern = BlockPattern.of_mask(mask, 4)
    assert (pattern.rows, pattern.columns, pattern.density) == ((0, 1), (0, 2), 2 / 6)
    dense = jnp.arange(96.0).reshape(8, 12)
    kept = pattern.dense(pattern.blocks_of(dense))
    np.testing.assert_array_equal(kept, np.where(np.kron(np.array([[1, 0, 0], [0, 0, 1]]), np.ones((4, 4))), dense, 0))


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_the_start_of_its_vertices_is_a_cause_of_cycles(dtype):
    pattern = random_pattern(32, 48, 8, 0.4)
    values, x, _ = operands(pattern, 6, dtype)

    def trained(values, x):
        return jax.grad(lambda values: (popsparse.static_matmul(pattern, values, x) ** 2).sum())(values)

    profile = ipu.jit(trained, device=SMALL).profile(values, x)
    assert sum(cause.cycles for cause in profile.causes) == profile.cycles
