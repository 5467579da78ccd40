"""popsparse.static_softmax: the numbers and gradients of the dense softmax on the same mask."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ipujax as ipu
from ipujax import popsparse
from ipujax.popsparse import BlockPattern

PATTERN = BlockPattern((16, 24), 4, (3, 0, 0, 3, 0, 1), (1, 5, 0, 4, 2, 3))  # a row of blocks has none


def dense_softmax(values):
    mask = PATTERN.dense(jnp.ones_like(values)) > 0
    rows = jnp.where(mask, PATTERN.dense(values).astype(jnp.float32), -jnp.inf)
    rows = jnp.where(mask.any(1, keepdims=True), rows, 0)  # nothing is read of rows without values
    return PATTERN.blocks_of(jax.nn.softmax(rows, 1)).astype(values.dtype)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_equals_the_dense_softmax_with_gradients(dtype):
    values, g = jax.random.normal(jax.random.key(0), (2, PATTERN.num_blocks, 4, 4), dtype)

    def with_gradient(fun):
        return lambda v: (fun(v), *jax.vjp(fun, v)[1](g))

    def sparse(v):
        return popsparse.static_softmax(PATTERN, v)

    tolerance = 1e-5 if dtype == np.float32 else 2e-3
    expected = with_gradient(dense_softmax)(values)
    step = ipu.jit(with_gradient(sparse), device=ipu.IPUModel(tiles_per_ipu=8))
    for actual in (with_gradient(sparse)(values), step(values)):
        for a, b in zip(actual, expected, strict=True):
            assert a.dtype == dtype
            np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)
    assert not step.profile(values).fallbacks


def test_second_gradients_and_batches():
    values = jax.random.normal(jax.random.key(0), (2, PATTERN.num_blocks, 4, 4))

    def second(fun):
        return jax.vmap(jax.grad(lambda v: jnp.sum(jax.grad(lambda w: jnp.sum(fun(w) ** 3))(v) ** 2)))

    actual = second(lambda v: popsparse.static_softmax(PATTERN, v))(values)
    np.testing.assert_allclose(actual, second(dense_softmax)(values), rtol=1e-4, atol=1e-6)


def test_wrong_operands():
    values = jnp.ones((PATTERN.num_blocks, 4, 4))
    for wrong, message in (
        (lambda: popsparse.static_softmax(PATTERN, values[1:]), "static_softmax: values"),
        (lambda: popsparse.static_softmax(PATTERN, values.astype(int)), "float32 or float16"),
        (lambda: popsparse.static_softmax("mask", values), "a BlockPattern"),
    ):
        with pytest.raises(ipu.ArgumentError, match=message):
            wrong()
    empty = BlockPattern((4, 4), 4, (), ())
    assert popsparse.static_softmax(empty, values[:0]).shape == (0, 4, 4)
