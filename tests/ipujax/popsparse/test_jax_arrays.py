"""Products of BCOO and BCSR in ipu.jit: the numbers of JAX, by block-sparse products where indices are constants."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import sparse

import ipujax as ipu
from ipujax import popsparse

SMALL = ipu.IPUModel(tiles_per_ipu=16)
MASK = np.kron(np.random.default_rng(1).random((4, 6)) < 0.3, np.ones((4, 4)))
DENSE = (np.random.default_rng(0).normal(size=MASK.shape) * MASK).astype(np.float32)
X = jax.device_put(np.random.default_rng(2).normal(size=(24, 3)).astype(np.float32))


def bcoo_of(dense: np.ndarray) -> sparse.BCOO:
    """A matrix as `sparse.BCOO.fromdense` makes it, which compiles a dozen programs."""
    indices = np.argwhere(dense)
    data = jax.device_put(dense[tuple(indices.T)])
    return sparse.BCOO((data, jax.device_put(indices)), shape=dense.shape, indices_sorted=True, unique_indices=True)


BCOO = bcoo_of(DENSE)
SCATTERED = DENSE.copy()
SCATTERED[0, 0] = 1  # no blocks


def codelets(function, *args):
    graph = function.lower(*args).compile().profile.executable.graph
    return {group.codelet.name for groups in graph.groups.values() for group in groups}


def test_constant_indices_use_blocks_and_have_gradients():
    def loss(values, x):
        return jnp.sum((sparse.BCOO((values, BCOO.indices), shape=BCOO.shape) @ x) ** 2)

    step = ipu.jit(jax.value_and_grad(loss, (0, 1)), device=SMALL)
    expected = jax.value_and_grad(loss, (0, 1))(BCOO.data, X)
    for actual, right in zip(jax.tree.leaves(step(BCOO.data, X)), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(actual, right, rtol=1e-5, atol=1e-5)
    names = codelets(step, BCOO.data, X)
    assert {"popsparse::StaticBlockProducts<float32>", "popsparse::SampledProducts<float32>"} <= names
    assert not step.profile(BCOO.data, X).fallbacks


@pytest.mark.parametrize("matrix_of", [lambda: sparse.BCSR.from_bcoo(BCOO), lambda: bcoo_of(SCATTERED)])
def test_constant_matrices(matrix_of):
    matrix = matrix_of()
    product = ipu.jit(lambda x: matrix @ x, device=SMALL)
    np.testing.assert_allclose(product(X), matrix.todense() @ X, rtol=1e-5, atol=1e-5)
    assert "popsparse::StaticBlockProducts<float32>" in codelets(product, X)


def test_a_pattern_cannot_change_under_a_static_plan():
    def product(rows, x):
        pattern = popsparse.BlockPattern((16, 24), 4, rows, rows)
        return popsparse.static_matmul(pattern, jnp.ones((2, 4, 4)), x)

    with pytest.raises(ipu.ArgumentError, match="cannot be traced"):
        ipu.jit(product, device=SMALL)(jnp.array([0, 1]), X)


def test_matrices_that_are_arguments_or_have_an_element_twice():
    product = ipu.jit(lambda m, x: m @ x, device=SMALL)
    np.testing.assert_allclose(product(BCOO, X), DENSE @ X, rtol=1e-5, atol=1e-5)
    twice = sparse.BCOO((jnp.ones(2), jnp.zeros((2, 2), int)), shape=(4, 24))
    np.testing.assert_allclose(ipu.jit(lambda x: twice @ x, device=SMALL)(X)[0], 2 * X[0], rtol=1e-6)
