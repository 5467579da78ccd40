"""Programs with channels in groups against JAX, on the engine and tile by tile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from ipujax.lowering.jaxpr import equations
from ipujax.lowering.layout import MemoryOrder
from ipujax.lowering.popops import ScatterSpec
from ipujax.lowering.popops.indexing.gather import GatherSpec
from ipujax.lowering.popops.indexing.table_order import gather_over_variable, scatter_over_variable
from tests.lowering.helpers import check, lowered, small_target

RNG = np.random.default_rng(0)


def normal(*shape: int) -> np.ndarray:
    return (RNG.standard_normal(shape) / 4).astype(np.float32)


def embedded(table: jax.Array, w: jax.Array, tokens: jax.Array) -> Any:
    """Tied embedding: look-up, product, comparison with the table, and its gradient."""

    def loss(table: jax.Array) -> jax.Array:
        x = jnp.tanh(table[tokens] @ w)
        return jnp.mean(jax.nn.log_softmax(x @ table.T)[:, 0])

    return table - 0.1 * jax.grad(loss)(table)


def normed(x: jax.Array, w: jax.Array, v: jax.Array) -> Any:
    """Layer norm between products, and sums over rows and over columns."""
    h = x @ w
    h = (h - h.mean(-1, keepdims=True)) / jnp.sqrt(h.var(-1, keepdims=True) + 1e-5)
    return h @ v, h.sum(0), h.max(1)


def looped(x: jax.Array, layers: jax.Array) -> Any:
    """Scan over stacked layers, with carry and gradients in groups too."""

    def loss(layers: jax.Array) -> jax.Array:
        return jnp.sum(lax.scan(lambda h, w: (jnp.tanh(h @ w), h), x, layers)[0])

    return jax.value_and_grad(loss)(layers)


def convolved(x: jax.Array, w: jax.Array, narrow: jax.Array) -> Any:
    """Convolution and strided convolution, with their gradients."""

    def conv(x: jax.Array, w: jax.Array, stride: int) -> jax.Array:
        return lax.conv_general_dilated(x, w, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    return jax.grad(lambda w, narrow: jnp.sum(jnp.sin(conv(conv(x, w, 1), narrow, 2))), (0, 1))(w, narrow)


def branched(x: jax.Array, w: jax.Array, n: jax.Array) -> Any:
    h = x @ w
    return lax.cond(n > 0, lambda h: h * 2, lambda h: -h, h) @ w.T, lax.dynamic_slice(h, (n, 16), (2, 16))


CASES: dict[str, tuple[Callable[..., Any], list[Any]]] = {
    "embedded": (embedded, [normal(12, 32), normal(32, 32), RNG.integers(0, 12, 10).astype(np.int32)]),
    "normed": (normed, [normal(12, 32), normal(32, 48), normal(48, 32)]),
    "looped": (looped, [normal(6, 32), normal(3, 32, 32)]),
    "convolved": (convolved, [normal(2, 6, 6, 32), normal(3, 3, 32, 32), normal(1, 1, 32, 32)]),
    "branched": (branched, [normal(6, 32), normal(32, 32), np.int32(2)]),
}


@pytest.mark.parametrize("name", CASES)
def test_matches_jax(name: str) -> None:
    fun, args = CASES[name]
    check(fun, *args, tiles=(16,), rtol=2e-4, atol=2e-5)
    variables = lowered(fun, args, small_target(16)).graph.variables
    assert any(v.shape[-1] == 16 and len(v.shape) > 2 for v in variables), "no variable is in groups"


def gather_of(fun: Callable[..., Any], *args: Any) -> dict[str, Any]:
    """Parameters of the gather in the jaxpr of a JAX function."""
    return next(eqn.params for eqn in equations(jax.make_jaxpr(fun)(*args).jaxpr) if eqn.primitive.name == "gather")


@pytest.mark.parametrize("batched", [False, True])
def test_gathers_over_the_dimensions_of_the_variable(batched: bool) -> None:
    """A gather of the table's variable, in the order of the view, equals that of the table."""
    order = MemoryOrder.with_channels((3, 7, 32) if batched else (7, 32), 2 if batched else 1)
    table = normal(*order.shape)
    indices = RNG.integers(0, 7, (3, 5)).astype(np.int32)
    at = indices if batched else indices[0]
    fun = jax.vmap(lambda t, i: t[i]) if batched else lambda t, i: t[i]
    params = gather_of(fun, table, at)
    out = fun(table, at)
    spec = GatherSpec(
        params["dimension_numbers"],
        tuple(params["slice_sizes"]),
        params["mode"],
        None,
        params["indices_are_sorted"],
        params["unique_indices"],
        order.shape,
        out.ndim,
    )
    reordered = gather_over_variable(spec, order, out.shape)
    assert reordered is not None
    gather, row_order = reordered
    assert row_order.shape == out.shape and gather.uncut == (len(order.order) - 1,)
    stored = table.reshape([n for row in order.sizes for n in row]).transpose(order.order)
    rows = lax.gather(stored, at[..., None], gather.numbers, gather.slice_sizes, mode=gather.mode)
    assert rows.shape == row_order.variable_shape
    in_view_order = rows.transpose(np.argsort(row_order.order)).reshape(row_order.shape)
    np.testing.assert_array_equal(in_view_order, out)


def test_does_not_reorder_a_table_stored_by_rows() -> None:
    numbers = lax.ScatterDimensionNumbers((1,), (0,), (0,))
    mode = lax.GatherScatterMode.CLIP
    spec = ScatterSpec("scatter-add", numbers, mode, False, False, (7, 32), (5, 32), np.dtype(np.float32))
    assert scatter_over_variable(spec, MemoryOrder.own((7, 32))) is None
    order = MemoryOrder.with_channels((7, 32), 1)
    reordered = scatter_over_variable(spec, order)
    assert reordered is not None and reordered[0].update_shape == (2, 5, 16) and reordered[0].table_shape == (2, 7, 16)
    columns = lax.ScatterDimensionNumbers((0,), (1,), (1,))
    by_column = ScatterSpec("scatter-add", columns, mode, False, False, (7, 32), (7, 5), np.dtype(np.float32))
    assert scatter_over_variable(by_column, order) is None, "the indexed dimension is not cut"


def test_stores_gathered_rows_in_the_order_of_the_table() -> None:
    fun, args = CASES["embedded"]
    graph = lowered(fun, args, small_target(16)).graph
    rows = [v for v in graph.variables if "gather" in v.name]
    assert rows and all(v.shape[-1] == 16 for v in rows)
