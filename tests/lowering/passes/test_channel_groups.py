"""Choice of the arguments whose columns are stored in groups."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ipujax as ipu
from ipujax.lowering.passes.channel_groups import grouped_inputs

MATRIX = jax.ShapeDtypeStruct((32, 64), jnp.float32)
SQUARE = jax.ShapeDtypeStruct((64, 64), jnp.float32)


def grouped(fun: Callable[..., Any], *args: Any) -> list[bool]:
    return grouped_inputs(jax.make_jaxpr(fun)(*args).jaxpr)


def test_groups_operands_of_products_and_values_combined_with_them() -> None:
    def step(x: jax.Array, w: jax.Array, momentum: jax.Array, other: jax.Array) -> Any:
        y = x @ w
        return y, 0.9 * momentum + w, jnp.sin(other)

    assert grouped(step, MATRIX, SQUARE, SQUARE, SQUARE) == [True, True, True, False]


def test_groups_a_weight_updated_by_its_gradient() -> None:
    def step(x: jax.Array, state: jax.Array) -> jax.Array:
        return state - x.T @ jnp.tanh(x)

    assert grouped(step, MATRIX, SQUARE) == [True, True]


def test_groups_neither_vectors_nor_programs_without_products() -> None:
    assert grouped(lambda x, y: jnp.exp(x) + y, MATRIX, MATRIX) == [False, False]
    vector = jax.ShapeDtypeStruct((64,), jnp.float32)
    assert grouped(lambda x, b: x @ b, MATRIX, vector) == [True, False]


def test_groups_a_table_whose_rows_are_multiplied() -> None:
    tokens = jax.ShapeDtypeStruct((5,), jnp.int32)
    assert grouped(lambda table, w, tokens: table[tokens] @ w, MATRIX, SQUARE, tokens) == [True, True, False]
    assert grouped(lambda table, w, tokens: table[tokens] + 1, MATRIX, SQUARE, tokens) == [False, False, False]


@pytest.mark.parametrize("wrap", [jax.jit, jax.checkpoint])
def test_groups_through_nested_jaxprs(wrap: Callable[..., Any]) -> None:
    assert grouped(wrap(lambda x, w: jnp.sin(x) @ w), MATRIX, SQUARE) == [True, True]


def test_groups_stacked_layers_of_a_scan_and_its_carry() -> None:
    def layers(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0]

    assert grouped(layers, MATRIX, jax.ShapeDtypeStruct((3, 64, 64), jnp.float32)) == [True, True]


@pytest.mark.parametrize("columns", [32, 20])
def test_groups_values_combined_with_columns_of_a_product(columns: int) -> None:
    """The cell state of an LSTM, which is combined with gates."""
    part = jax.ShapeDtypeStruct((32, columns), jnp.float32)

    def step(x: jax.Array, w: jax.Array, cell: jax.Array, other: jax.Array) -> Any:
        y = x @ w
        first, second = jnp.split(y, [columns], 1)
        return first * cell, jnp.concatenate([second, second], 1), jnp.sin(other)

    assert grouped(step, MATRIX, SQUARE, part, part) == [True, True, True, False]


def test_groups_operands_that_are_joined_along_columns() -> None:
    half = jax.ShapeDtypeStruct((32, 32), jnp.float32)
    assert grouped(lambda x, h, w: jnp.concatenate([x, h], 1) @ w, half, half, SQUARE) == [True, True, True]


def test_training_step_with_groups_matches_jax() -> None:
    """Weight and momentum are stored in groups and updated in place, with the numbers of JAX."""

    def step(w: jax.Array, m: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        m = 0.9 * m + jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)
        return w - 0.1 * m, m

    rng = np.random.default_rng(0)
    w, m, x = (rng.standard_normal(shape).astype(np.float32) for shape in ((64, 64), (64, 64), (32, 64)))
    fast = ipu.jit(step, donate_argnums=(0, 1))
    lowered = fast.lower(w, m, x)
    shapes = {v.name: v.shape for v in lowered.graph.variables if v.name in ("w", "m", "x")}
    assert shapes == {"w": (4, 64, 16), "m": (4, 64, 16), "x": (4, 32, 16)}
    expected = jax.jit(step)(w, m, x)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6), fast(w, m, x), expected)
