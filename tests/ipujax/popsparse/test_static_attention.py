"""Attention to some blocks, by popsparse: the numbers and gradients of dense attention with a mask."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ipujax as ipu
from ipujax import popsparse
from ipujax.popsparse import BlockPattern

# A band of blocks and a first column that all read.
PAIRS = [(row, column) for row in range(4) for column in range(4) if column == 0 or abs(row - column) <= 1]
PATTERN = BlockPattern((32, 32), 8, tuple(row for row, _ in PAIRS), tuple(column for _, column in PAIRS))


def sparse(q, k, v):
    scores = popsparse.static_sampled_matmul(PATTERN, q, k.T, buckets=6) / 4
    return popsparse.static_matmul(PATTERN, popsparse.static_softmax(PATTERN, scores), v, buckets=6)


def dense(q, k, v):
    mask = PATTERN.dense(jnp.ones((PATTERN.num_blocks, 8, 8))) > 0
    return jax.nn.softmax(jnp.where(mask, q @ k.T / 4, -jnp.inf), 1) @ v


def test_attention_with_gradients():
    q, k, v, g = jax.random.normal(jax.random.key(0), (4, 32, 16))

    def with_gradients(fun):
        return lambda *arrays: (fun(*arrays), *jax.vjp(fun, *arrays)[1](g))

    expected = with_gradients(dense)(q, k, v)
    step = ipu.jit(with_gradients(sparse), device=ipu.IPUModel(tiles_per_ipu=8))
    for a, b in zip(step(q, k, v), expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    assert not step.profile(q, k, v).fallbacks


def test_wrong_operands():
    q = jnp.ones((32, 16))
    for wrong, message in (
        (lambda: popsparse.static_sampled_matmul(PATTERN, q, q), "shapes"),
        (lambda: popsparse.static_sampled_matmul(PATTERN, q, q.T.astype(jnp.float16)), "both float32"),
        (lambda: popsparse.static_sampled_matmul(PATTERN, q, q.T, buckets=0), "at least 1"),
        (lambda: popsparse.static_sampled_matmul(PATTERN, q[0], q.T), "shapes"),
    ):
        with pytest.raises(ipu.ArgumentError, match=message):
            wrong()
