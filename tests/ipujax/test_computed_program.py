"""XLA gets the same operations from a lowered program as from `jax.jit`."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import ipujax as ipu

DEVICE = ipu.IPUModel(tiles_per_ipu=64)
X = np.linspace(-2, 2, 96, dtype=np.float32).reshape(8, 12)
W = np.linspace(-1, 1, 60, dtype=np.float32).reshape(5, 12)


def loss(w: Any, x: Any) -> jax.Array:
    return jnp.max(jnp.tanh(x @ w.T) - 0.9 * w.sum(1), axis=1).sum()


def trained_in_a_scan(w: Any, x: Any) -> Any:
    def step(w: Any, row: Any) -> Any:
        value, grad = jax.value_and_grad(loss)(w, row[None])
        return w - 0.1 * grad, value

    return lax.scan(step, w, x)


def staged(w: Any, x: Any) -> Any:
    def staged_loss(w: Any, x: Any) -> jax.Array:
        with ipu.stage(0):
            h = jnp.tanh(x @ w.T)
        with ipu.stage(1):
            return (h**2).mean()

    return ipu.pipeline(jax.value_and_grad(staged_loss), micro_batches=4)(w, x)


def opcodes(jitted: Any, *args: Any) -> Counter[str]:
    """The operations of the program that XLA runs, counted."""
    text = jitted.lower(*args).compile().as_text()
    found = Counter(re.findall(r"= \S+ ([a-z][\w-]*)\(", text))
    return found - Counter(bitcast=found["bitcast"])  # which move nothing


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "transposed product": lambda w, x: x @ w.T,
    "sorts": lambda w, x: (jnp.argsort(x, axis=1), jnp.sort(w.ravel()), lax.top_k(x, 3)),
    "long sort": lambda w, x: jnp.argsort(jnp.tile(x.ravel(), 64)),
    "permutation": lambda w, x: jax.random.permutation(jax.random.key(0), x.ravel()),
    "layers": jax.value_and_grad(lambda w, x: (jax.nn.gelu(x @ w.T) @ w).sum()),
    "gradient": jax.value_and_grad(loss),
    "scan": trained_in_a_scan,
    "while": lambda w, x: lax.while_loop(lambda c: c.sum() < 50, lambda c: c + 1, x),
}
# The others compute values once that are tested for equality, and have a counter in each loop.
SAME = ("transposed product", "sorts", "long sort", "permutation", "layers")


@pytest.mark.parametrize("name", FUNCTIONS)
def test_xla_computes_the_program_as_the_function(name: str) -> None:
    fun = FUNCTIONS[name]
    got = jax.tree.leaves(ipu.jit(fun, device=DEVICE)(W, X))
    for result, expected in zip(got, jax.tree.leaves(jax.jit(fun)(W, X)), strict=True):
        np.testing.assert_allclose(result, expected, rtol=1e-5)


@pytest.mark.parametrize("name", SAME)
def test_xla_runs_the_operations_of_jax_jit(name: str) -> None:
    lowered = ipu.jit(FUNCTIONS[name], device=ipu.IPUModel()).lower(W, X)
    assert opcodes(jax.jit(lowered.evaluate), W, X) == opcodes(jax.jit(FUNCTIONS[name]), W, X)


def test_a_pipeline_is_computed_as_the_loop_that_it_means() -> None:
    run = ipu.jit(staged, device=ipu.IPUModel(num_ipus=2, tiles_per_ipu=64))
    for result, expected in zip(jax.tree.leaves(run(W, X)), jax.tree.leaves(jax.jit(staged)(W, X)), strict=True):
        np.testing.assert_allclose(result, expected, rtol=1e-5)


def test_profiled_calls_compute_the_program_whose_decisions_they_record() -> None:
    compiled = ipu.jit(trained_in_a_scan, device=DEVICE).lower(W, X).compile()
    results, _ = compiled.profile_call(W, X)
    for got, expected in zip(jax.tree.leaves(results), jax.tree.leaves(compiled(W, X)), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-5)


@pytest.mark.parametrize("exact_splits", [False, True])
@pytest.mark.parametrize("tiles", [16, 64, 1472])
def test_the_largest_element_of_a_computed_value_is_one_of_its_elements(tiles: int, exact_splits: bool) -> None:
    rng = np.random.default_rng(0)
    b, d = (rng.normal(size=shape).astype(np.float32) for shape in ((6, 16, 1), (1, 1, 20)))
    grad = jax.grad(lambda b, d: jnp.max(b + d * -0.9, axis=1).sum(), (0, 1))
    options = ipu.Options(exact_splits=exact_splits)
    lowered = ipu.jit(grad, device=ipu.IPUModel(tiles_per_ipu=tiles), options=options).lower(b, d)
    of_b, of_d = jax.jit(lowered.evaluate)(b, d)
    np.testing.assert_allclose((of_b.sum(), of_d.sum()), (120, -108), rtol=1e-5)
