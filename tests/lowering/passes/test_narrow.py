"""Pass `narrow`: bytes that gradients save of the forward part, and unchanged numbers."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import ipujax as ipu
from ipujax.lowering.jax_compat import ClosedJaxpr, Var, jaxpr_as_fun, shape_of
from ipujax.lowering.jaxpr import stage_name
from ipujax.lowering.passes import narrow
from ipujax.lowering.passes.cse import cse
from ipujax.lowering.passes.inline import inline
from tests.lowering.helpers import check, quick_jit

RNG = np.random.default_rng(5)
X = RNG.normal(size=(8, 24)).astype(np.float16)
W = RNG.normal(size=(24, 24)).astype(np.float16)


def layer_norm(x: Any) -> Any:
    wide = x.astype(jnp.float32)
    centred = wide - wide.mean(-1, keepdims=True)
    return (centred * jax.lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-5)).astype(x.dtype)


def loss(w: Any, x: Any) -> Any:
    return (layer_norm(x @ w) ** 2 * x).sum().astype(jnp.float32)


def saved_bytes(jaxpr: ClosedJaxpr) -> int:
    """Bytes of the arrays with the shape of X that the forward part defines and the gradient reads."""
    defined = {v for eqn in jaxpr.eqns if not stage_name(eqn).is_backward for v in eqn.outvars}
    read = {v for eqn in jaxpr.eqns if stage_name(eqn).is_backward for v in eqn.invars if isinstance(v, Var)}
    avals: list[Any] = [var.aval for var in defined & read if shape_of(var) == X.shape]
    return sum(aval.size * aval.dtype.itemsize for aval in avals)


def test_saves_the_narrow_form() -> None:
    wide = jax.make_jaxpr(jax.grad(loss))(W, X)
    slim = narrow(wide)
    assert saved_bytes(slim) <= saved_bytes(wide) // 2
    for actual, expected in zip(jaxpr_as_fun(slim)(W, X), jaxpr_as_fun(wide)(W, X), strict=True):
        np.testing.assert_array_equal(actual, expected)
    check(jax.grad(loss), W, X, tiles=(1, 4), rtol=2e-2, atol=2e-2)


def test_saves_no_wider_sources() -> None:
    """Nothing is narrower than a sum of two arrays."""

    def fun(x: Any, y: Any) -> Any:
        return (jnp.sin(x + y) ** 2).sum()

    jaxpr = jax.make_jaxpr(jax.grad(fun))(*(X.astype(np.float32),) * 2)
    assert saved_bytes(narrow(jaxpr)) == saved_bytes(jaxpr)


def test_saves_a_sum_like_a_product() -> None:
    """The gradient recomputes the same values from a sum as from a product."""

    def kinds(start: Any) -> list[str]:
        def fun(w: Any, scale: Any, x: Any) -> Any:
            return ((layer_norm(start(w, x)) * scale + scale) @ w).sum().astype(jnp.float32)

        jaxpr = narrow(jax.make_jaxpr(jax.grad(fun, (0, 1)))(W, W[0], X))
        return [eqn.primitive.name for eqn in jaxpr.eqns if stage_name(eqn).is_backward]

    behind_product = kinds(lambda w, x: x @ w)
    behind_sum = kinds(lambda w, x: jnp.sin(x) + x)
    assert behind_sum[: len(behind_sum) // 2] == behind_product[: len(behind_sum) // 2]


def test_layers_share_constants_of_the_gradient() -> None:
    """Gradients of equal layers are equal runs, the first computes no constants of all among its own equations."""

    def loss(ws: Any, x: Any) -> Any:
        for w in ws:
            x = jnp.sin(x * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1)) @ w  # a variance divides by a constant
        return x.sum()

    jaxpr = narrow(cse(inline(jax.make_jaxpr(jax.grad(loss))([np.float32(W)] * 4, np.float32(X)))))
    kinds = [eqn.primitive.name for eqn in jaxpr.eqns if stage_name(eqn).is_backward]
    products = [number for number, kind in enumerate(kinds) if kind == "dot_general"]
    assert kinds.count("gt") == 1, "the constant is computed again"
    # Two products each, of which the first layer has one.
    last, *others = [kinds[a:b] for a, b in zip(products[:-1:2], products[2::2], strict=True)]
    assert "gt" not in last and all(other == last for other in others)


def test_constants_of_gradients_come_before_their_readers_in_other_phases() -> None:
    """The gradient outside of the phase begins first, and reads a constant that the phase's gradient computes first."""

    def loss(p: Any, x: Any) -> Any:
        two = jax.lax.full(p.shape, 2.0, jnp.float32)
        y = p * jnp.sin(two)
        with ipu.phase(1):
            y = y * jnp.cos(x.astype(jnp.float32) * two)
        return (y**2).sum()

    p, x = np.ones((4, 4), np.float32), np.arange(16, dtype=np.int8).reshape(4, 4)
    jaxpr = narrow(inline(jax.make_jaxpr(jax.grad(loss))(p, x)))
    (gradient,) = jaxpr_as_fun(jaxpr)(p, x)
    np.testing.assert_allclose(gradient, jax.grad(loss)(p, x), rtol=1e-6)


def test_does_not_recompute_across_phases() -> None:
    """A gradient reads a value that crosses phases, and does not repeat the sums of all earlier phases."""

    def loss(in_phases: bool, ws: Any, x: Any) -> Any:
        for number, w in enumerate(ws):
            with ipu.phase(number) if in_phases else nullcontext():
                x = x + jnp.tanh(x @ w)
        return (x**2).mean()

    def sums_in_gradient(in_phases: bool) -> int:
        jaxpr = narrow(jax.make_jaxpr(jax.grad(partial(loss, in_phases)))([W] * 4, X))
        return sum(eqn.primitive.name == "add" and stage_name(eqn).is_backward for eqn in jaxpr.eqns)

    assert sums_in_gradient(in_phases=False) == 3
    assert sums_in_gradient(in_phases=True) == 0


def test_stashes_the_narrow_form() -> None:
    """A stage stashes only the half-precision array of a normalisation."""
    params = {"a": W, "b": W}
    batch = RNG.normal(size=(16, 24)).astype(np.float16)

    def staged(params: Any, x: Any) -> Any:
        with ipu.stage(0):
            h = layer_norm(x @ params["a"])
        with ipu.stage(1):
            return (layer_norm(h @ params["b"]) ** 2).sum().astype(jnp.float32)

    optimizer = optax.sgd(0.1)

    def step(params: Any, state: Any, batch: Any) -> Any:
        value, grads = ipu.pipeline(jax.value_and_grad(staged), micro_batches=2)(params, batch)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    args = params, optimizer.init(params), batch
    compiled = ipu.jit(step, device=ipu.IPUModel(num_ipus=2)).lower(*args).compile()
    stacks = [v for v in compiled.executable.graph.variables if v.name.endswith("/stack") and v.size >= X.size]
    assert stacks and all(v.dtype == np.float16 for v in stacks)
    for actual, expected in zip(jax.tree.leaves(compiled(*args)), jax.tree.leaves(jax.jit(step)(*args)), strict=True):
        np.testing.assert_allclose(np.float32(actual), np.float32(expected), rtol=2e-2, atol=2e-2)


def test_computes_compared_values_once() -> None:
    """A gradient that compared them again would lose the maximum: a second sum of products may be rounded otherwise."""

    def at_the_largest(x: Any) -> Any:
        y = x + x * -0.618034
        return (
            jnp.where(y == jnp.max(y), x, 0).sum()
            + jax.lax.reduce_window(x, -np.inf, jax.lax.max, (1,), (1,), "VALID").sum()
        )

    x = np.array([1, 1.875, -1.875, -1.5, 1.375, 1.875, -1], np.float32)
    options = ipu.Options(exact_splits=True)
    step = ipu.jit(jax.grad(at_the_largest), device=ipu.IPUModel(tiles_per_ipu=7), options=options)
    np.testing.assert_array_equal(quick_jit(step.lower(x).evaluate)(x), 1 + (x == 1.875))
