"""Serial parts: the program has the same numbers, and no value as large as before; others are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ipujax as ipu
from ipujax.lowering.jax_compat import ClosedJaxpr, jaxpr_as_fun
from ipujax.lowering.jaxpr import equations
from ipujax.lowering.pipelining.segments import is_backward
from ipujax.plan_search.search_plan import traced_step
from ipujax.plan_search.serial_parts import in_parts, large_value
from ipujax.runtime.target import preset

RNG = np.random.default_rng(0)
TABLE = jax.device_put(RNG.normal(size=(96, 16)).astype(np.float32))
X = jax.device_put(RNG.normal(size=(2, 8, 16)).astype(np.float32))
LABELS = jax.device_put(RNG.integers(0, 96, (2, 8), np.int32))


def head(table: Any, x: Any, labels: Any) -> Any:
    """Loss and gradients of logits that share their table with an embedding."""

    def loss(table: Any, x: Any) -> Any:
        logits = (x + table[labels]) @ table.T
        chosen = jnp.take_along_axis(logits, labels[..., None], -1)[..., 0]
        return jnp.mean(jax.nn.logsumexp(logits, -1) - chosen)

    return jax.value_and_grad(loss, (0, 1))(table, x)


def flat_head(table: Any, x: Any, labels: Any) -> Any:
    """The same of rows without batches."""
    return head(table, x.reshape(-1, 16), labels.reshape(-1))


def masked_head(table: Any, x: Any, labels: Any) -> Any:
    """Logits of some rows, which are whole results too."""
    logits = jnp.where(labels[..., None] > 40, 0.0, x @ table.T)
    return jnp.tanh(logits).sum(-1), logits.max(-1)


def traced(fun: Callable[..., Any], *args: Any) -> ClosedJaxpr:
    return traced_step(fun, args).jaxpr


@pytest.mark.parametrize("parts", [2, 8])
@pytest.mark.parametrize("fun", [head, flat_head, masked_head])
def test_numbers_stay_and_large_values_do_not(fun: Callable[..., Any], parts: int) -> None:
    jaxpr = traced(fun, TABLE, X, LABELS)
    divided = in_parts(jaxpr, (False, True, True), parts)
    for got, want in zip(jaxpr_as_fun(divided)(TABLE, X, LABELS), jax.tree.leaves(fun(TABLE, X, LABELS)), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    logits = X.size // 16 * 96
    sizes = [v.aval.size for eqn in equations(divided.jaxpr) for v in eqn.outvars]
    assert logits in [v.aval.size for eqn in equations(jaxpr.jaxpr) for v in eqn.outvars]
    assert logits // parts in sizes
    assert max(size for size in sizes if size != TABLE.size) < logits


def test_equations_of_the_backward_pass_stay_known() -> None:
    jaxpr = traced(head, TABLE, X, LABELS)
    divided = in_parts(jaxpr, (False, True, True), 4)
    products = [eqn for eqn in equations(divided.jaxpr) if eqn.primitive.name == "dot_general"]
    assert sorted(map(is_backward, products)) == [False, True, True]


def test_a_term_is_added_before_the_next_product() -> None:
    divided = in_parts(traced(head, TABLE, X, LABELS), (False, True, True), 4)
    (loop,) = (eqn for eqn in divided.jaxpr.eqns if eqn.primitive.name == "scan")
    body = loop.params["jaxpr"].jaxpr
    names = [
        eqn.primitive.name
        for eqn in body.eqns
        if eqn.primitive.name == "dot_general" or (eqn.primitive.name == "add" and eqn.outvars[0] in body.outvars)
    ]
    # Logits; the gradient of the table, which is added; that of x.
    assert [name for name in names if name != "add"] == ["dot_general"] * 3
    products = [n for n, name in enumerate(names) if name == "dot_general"]
    assert "add" in names[products[1] : products[2]]


def test_sums_of_halves_are_taken_in_single_precision() -> None:
    halves = TABLE.astype(jnp.bfloat16), X.astype(jnp.bfloat16), LABELS
    jaxpr = traced(head, *halves)
    whole, divided = (jaxpr_as_fun(each)(*halves)[1] for each in (jaxpr, in_parts(jaxpr, (False, True, True), 8)))
    want = jax.grad(lambda table: head(table, X, LABELS)[0])(TABLE)
    errors = [float(jnp.abs(got.astype(jnp.float32) - want).max()) for got in (whole, divided)]
    assert errors[1] <= 1.2 * errors[0]


def test_sums_of_eight_bits_have_their_own_dtype_outside() -> None:
    def step(x: Any) -> Any:
        return jnp.tanh(x[:, None] * jnp.arange(1.0, 65.0)).astype(jnp.float8_e4m3fn).sum(0)

    x = jnp.linspace(-1, 1, 16)
    divided = in_parts(traced(step, x), (True,), 2)
    (total,) = jaxpr_as_fun(divided)(x)
    assert total.dtype == jnp.float8_e4m3fn
    np.testing.assert_allclose(total.astype(jnp.float32), step(x).astype(jnp.float32), atol=0.5)


def test_large_value_is_that_of_the_logits() -> None:
    large = large_value(traced(head, TABLE, X, LABELS), (False, True, True), 2)
    assert large.row_bytes == 8 * 96 * 4
    # Eight tokens, of each row or of all.
    assert large.most_parts == 8
    assert large_value(traced(flat_head, TABLE, X, LABELS), (False, True, True), 2).most_parts == 8
    small = preset("mk2").replace(tiles_per_ipu=4, bytes_per_tile=4096)
    assert [large.parts(rows, 1, small) for rows in (1, 64)] == [4, 8]
    assert large.parts(1, 1, preset("mk2")) == 1


def test_gradients_of_stacked_layers_may_be_larger() -> None:
    """They are results of a loop, which no part of the rows makes smaller."""

    def step(layers: Any, table: Any, x: Any, labels: Any) -> Any:
        def loss(layers: Any, table: Any) -> Any:
            layer = jax.checkpoint(lambda hidden, weights: (jnp.tanh(hidden @ weights), None))
            hidden, _ = jax.lax.scan(layer, x, layers)
            return head(table, hidden, labels)[0]

        return jax.grad(loss, (0, 1))(layers, table)

    layers = jax.device_put(RNG.normal(size=(60, 16, 16)).astype(np.float32) / 4)
    operands = layers, TABLE, X[:1], LABELS[:1]
    divided = in_parts(traced(step, *operands), (False, False, True, True), 4)
    products = [eqn for eqn in equations(divided.jaxpr) if eqn.primitive.name == "dot_general"]
    sizes = {eqn.outvars[0].aval.size for eqn in products}
    assert 8 * 96 // 4 in sizes and 8 * 96 not in sizes


def test_normalised_rows_are_refused() -> None:
    def step(x: Any) -> Any:
        return jax.nn.softmax(x @ TABLE.T, 0)

    with pytest.raises(ipu.ArgumentError, match="can be computed in 3 parts"):
        in_parts(traced(step, X[0]), (False, True), 3)
