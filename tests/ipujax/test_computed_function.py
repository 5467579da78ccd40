"""XLA gets the same module from `ipu.jit` as from `jax.jit`, unless the lowered program decides something."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractMesh, PartitionSpec as P

import ipujax as ipu

pytestmark = pytest.mark.as_traced
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
    return Counter(re.findall(r"= \S+ ([a-z][\w-]*)\(", text))


@pytest.mark.parametrize(
    "fun",
    [
        lambda w, x: x @ w.T,
        jax.value_and_grad(loss),
        trained_in_a_scan,
        lambda w, x: (jnp.argsort(x, axis=1), jnp.sort(w.ravel()), lax.top_k(x, 3)),
        lambda w, x: jax.random.permutation(jax.random.key(0), x.ravel()),
        lambda w, x: lax.while_loop(lambda c: c.sum() < 50, lambda c: c + 1, x),
    ],
    ids=["transposed product", "gradient", "scan", "sorts", "permutation", "while"],
)
def test_xla_runs_the_operations_of_jax_jit(fun: Callable[..., Any]) -> None:
    lowered = ipu.jit(fun, device=DEVICE).lower(W, X)
    assert lowered.computes_function
    assert opcodes(jax.jit(lowered.evaluate), W, X) == opcodes(jax.jit(fun), W, X)
    for got, expected in zip(
        jax.tree.leaves(ipu.jit(fun, device=DEVICE)(W, X)), jax.tree.leaves(jax.jit(fun)(W, X)), strict=True
    ):
        np.testing.assert_array_equal(got, expected)


def test_a_pipeline_is_computed_as_the_loop_that_it_means() -> None:
    run = ipu.jit(staged, device=ipu.IPUModel(num_ipus=2, tiles_per_ipu=64))
    lowered = run.lower(W, X)
    assert lowered.computes_function
    assert opcodes(jax.jit(lowered.evaluate), W, X) == opcodes(jax.jit(staged), W, X)


def watched(x: Any) -> Any:
    jax.debug.callback(lambda y: None, x)
    return x + 1


def over_a_mesh(x: Any) -> Any:
    shard = jax.shard_map(lambda x: lax.psum(x, "a"), mesh=AbstractMesh((2,), ("a",)), in_specs=P("a"), out_specs=P())
    return shard(x)


PROGRAMS: dict[str, Callable[[], Any]] = {
    "exact splits": partial(ipu.jit, jnp.sin, device=DEVICE, options=ipu.Options(exact_splits=True)),
    "replicas": partial(
        ipu.jit, jnp.sin, device=ipu.IPUModel(2, tiles_per_ipu=64), replicas=2, in_specs=P("replica"),
        out_specs=P("replica"),
    ),
    "callbacks": partial(ipu.jit, watched, device=DEVICE),
    "shard_map": partial(ipu.jit, over_a_mesh, device=ipu.IPUModel(2, tiles_per_ipu=64)),
}  # fmt: skip


@pytest.mark.parametrize("make", PROGRAMS.values(), ids=PROGRAMS.keys())
def test_the_program_is_computed_where_it_decides(make: Callable[[], Any]) -> None:
    run = make()
    assert not run.lower(X).computes_function
    run(X)


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
    of_b, of_d = jax.jit(partial(lowered.evaluate, of_program=True))(b, d)
    np.testing.assert_allclose((of_b.sum(), of_d.sum()), (120, -108), rtol=1e-5)
