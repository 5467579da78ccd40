"""Loops inside `tile_map`: every kind of counter, and gradients, tangents and batches of them, as of plain JAX."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import ipujax as ipu
from ipujax.runtime.errors import ArgumentError

DEVICE = ipu.IPUModel(tiles_per_ipu=8)
X = np.linspace(-1, 1, 12, dtype=np.float32).reshape(4, 3)


def repeated(first: Any, step: Any, limit: Any) -> Callable[..., Any]:
    """A `while_loop` whose counter steps from one number to another, in the dtype of both."""

    def body(state: Any) -> Any:
        return state[0] + step, state[1] * 0.5 + state[0]

    return lambda row: lax.while_loop(lambda state: state[0] != limit, body, (first, row))


def with_ref(row: Any) -> Any:
    ref = jax.new_ref(row)

    def body(i: Any, _: None) -> None:
        ref[i] = ref[i] * 2 + i

    lax.fori_loop(0, 3, body, None)
    return ref[...]


@jax.custom_vjp
def with_own_gradient(row: Any) -> Any:
    return lax.fori_loop(0, 3, lambda i, x: x * 0.5 + i, row)


with_own_gradient.defvjp(
    lambda row: (with_own_gradient(row), row),
    lambda row, g: (lax.fori_loop(0, 2, lambda i, x: x * row + i, g),),
)


def sum_of(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x: sum(jnp.sum(jnp.sin(y)) for y in jax.tree.leaves(function(x)) if y.dtype == jnp.float32)


FORWARD: dict[str, Callable[..., Any]] = {  # loops that JAX differentiates forward only
    "bounds that are data": lambda row: lax.fori_loop(0, jnp.int32(row[0] * 0 + 3), lambda i, x: x * 0.5 + i, row),
    "bounds of an outer counter": lambda row: lax.fori_loop(
        0, 3, lambda i, x: lax.fori_loop(0, i, lambda j, y: y * 0.5 + i * j, x), row
    ),
    "down by 2": repeated(6, -2, 0),
    "float32": repeated(jnp.float32(0), 0.5, 2),
    "uint8": repeated(jnp.uint8(0), jnp.uint8(2), 6),
    "int16": repeated(jnp.int16(0), jnp.int16(1), 3),
    "float16": repeated(jnp.float16(0), jnp.float16(1), 3),
    "tangent of a while": lambda row: jax.jvp(lambda x: repeated(0, 1, 3)(x)[1], (row,), (row,)),
    "batch of whiles": jax.vmap(
        lambda x: lax.while_loop(lambda s: s[1] < 2, lambda s: (s[0] + 1, s[1] + abs(x) + s[0]), (0, 0 * x))
    ),
}
LOOPS: dict[str, Callable[..., Any]] = FORWARD | {
    "fori": lambda row: lax.fori_loop(0, 3, lambda i, x: x * 0.5 + i, row),
    "fori of no iteration": lambda row: lax.fori_loop(2, 2, lambda i, x: x * 0.5 + i, row),
    "unrolled": lambda row: lax.fori_loop(0, 4, lambda i, x: x * 0.5 + i, row, unroll=2),
    "scan of rows": lambda row: lax.scan(lambda x, y: (x + y, x * y), row[0], row),
    "scan in reverse": lambda row: lax.scan(lambda x, y: (x + y, x * y), row[0], row, reverse=True),
    "scan of a length": lambda row: lax.scan(lambda x, _: (x * 0.5, x.sum()), row, length=4),
    "scan with a counter": lambda row: lax.scan(lambda s, _: ((s[0] + 1, s[1] * s[0]), s[0]), (0, row), length=3),
    "position from a counter": lambda row: lax.fori_loop(0, 3, lambda i, x: x.at[i].add(row[2 - i] * i), row),
    "branch on a counter": lambda row: lax.fori_loop(
        0, 3, lambda i, x: lax.cond(i % 2 == 0, lambda y: y + i, lambda y: y * 2, x), row
    ),
    "switch on a counter": lambda row: lax.fori_loop(
        0, 3, lambda i, x: lax.switch(i, [lambda y: y + 1, lambda y: y * 2, lambda y: y], x), row
    ),
    "loop in a branch": lambda row: lax.cond(
        row[0] > 0, lambda x: lax.fori_loop(0, 3, lambda i, y: y * 0.5 + i, x), lambda x: x, row
    ),
    "scan in a scan": lambda row: lax.scan(
        lambda x, y: lax.scan(lambda u, v: (jnp.sin(u) * v + y, u), x, row), row[0], row
    ),
    "gradient of a scan": jax.grad(lambda row: lax.scan(lambda x, y: (jnp.sin(x) * y, x * y), row[0], row)[1].sum()),
    "gradient of a fori": jax.grad(lambda row: lax.fori_loop(0, 3, lambda i, x: jnp.sin(x) * i, row).sum()),
    "gradient of a recomputed scan": jax.grad(
        jax.checkpoint(lambda row: lax.scan(lambda x, y: (jnp.sin(x * y), None), row[0], row)[0])
    ),
    "cotangents of a scan": lambda row: jax.vjp(lambda x: lax.scan(lambda u, v: (u + v, u * v), x[0], x), row)[1](
        (row[0], row)
    ),
    "batch of scans": jax.vmap(lambda x: lax.scan(lambda u, i: (u * x + i, u), 1.0, jnp.arange(3.0))),
    "own gradient": jax.grad(lambda row: with_own_gradient(row).sum()),
    "map": lambda row: lax.map(lambda x: x * 2 + 1, row),
    "a Ref": with_ref,
}
TRANSFORMATIONS: dict[str, Callable[..., Any]] = {
    "gradient": lambda mapped: jax.grad(sum_of(mapped)),
    "tangent": lambda mapped: lambda x: jax.jvp(sum_of(mapped), (x,), (2 * x,)),
    "batch": lambda mapped: lambda x: jax.vmap(mapped)(jnp.stack([x, x + 0.25])),
}


def assert_as_plain(of_mapped: Callable[..., Any], row_function: Callable[..., Any]) -> None:
    expected = jax.jit(of_mapped(jax.vmap(row_function)))(X)
    actual = ipu.jit(of_mapped(lambda x: ipu.tile_map(row_function, x)), device=DEVICE)(X)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), actual, expected)


@pytest.mark.parametrize("name", LOOPS)
def test_tile_map_of_a_loop(name: str) -> None:
    assert_as_plain(lambda mapped: mapped, LOOPS[name])


@pytest.mark.parametrize("transformation", TRANSFORMATIONS)
@pytest.mark.parametrize("name", LOOPS)
def test_transformed_tile_map_of_a_loop(name: str, transformation: str) -> None:
    if transformation == "gradient" and name in FORWARD:
        pytest.skip("JAX has no gradient of this loop")
    assert_as_plain(TRANSFORMATIONS[transformation], LOOPS[name])


def test_a_loop_costs_its_iterations() -> None:
    def cycles(iterations: int) -> int:
        loop = jax.jit(lambda row: lax.fori_loop(0, iterations, lambda i, x: x * 0.5 + i, row))
        profile = ipu.jit(lambda x: ipu.tile_map(loop, x), device=DEVICE).profile(X)
        return profile.phase_cycles["compute"]

    assert cycles(40) - cycles(20) == 2 * (cycles(20) - cycles(10)) > 0


def test_a_ref_of_the_outside_is_refused() -> None:
    ref = jax.new_ref(jnp.zeros(3))

    def add_to_ref(row: Any) -> Any:
        ref[...] += row
        return row

    with pytest.raises(ArgumentError, match="closes over a Ref"):
        ipu.tile_map(add_to_ref, X)


def until(is_running: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A loop of 20 iterations over a counter, a bound and a row."""
    return lambda row: lax.while_loop(is_running, lambda c: (c[0] + 1, c[1], c[2] * 0.5 + c[0]), (0, 20, row))[2]


@pytest.mark.parametrize(
    "is_running", [lambda c: c[0] < 20, lambda c: c[0] <= 19, lambda c: c[0] != 20, lambda c: c[0] < c[1]]
)
def test_a_counted_while_costs_as_a_fori_loop(is_running: Callable[[Any], Any]) -> None:
    def profile(loop: Callable[[Any], Any]) -> ipu.Profile:
        return ipu.jit(lambda x: ipu.tile_map(loop, x), device=DEVICE).profile(X)

    profile_of_while = profile(until(is_running))
    assert profile_of_while.cycles == profile(lambda row: lax.fori_loop(0, 20, lambda i, x: x * 0.5 + i, row)).cycles
    assert not profile_of_while.unpriced


def test_a_loop_of_data_is_unpriced() -> None:
    loop = until(lambda c: (c[0] < 20) & (c[2].sum() < 1e9))
    profile = ipu.jit(lambda x: ipu.tile_map(loop, x), device=DEVICE).profile(X)
    (row,) = profile.unpriced
    assert (row.operation, row.place, row.runs) == ("tile_map", "tiles", 1)
    assert "Unpriced operations" in profile.summary()
