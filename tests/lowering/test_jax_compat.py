"""Access to JAX's less stable surface: the names have the properties that the rest of the package relies on."""

from __future__ import annotations

import importlib.util
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from ipujax.lowering import jax_compat, source_info
from ipujax.lowering.jax_compat import (
    argument_names,
    closed,
    eliminate_dead_code,
    is_float0,
    jaxpr_as_fun,
    jaxprs_in_params,
    trace,
    with_weak_type,
    without_float0,
)

X = jnp.ones(3)


def test_trace_accepts_arrays_shapes_and_static_arguments() -> None:
    traced = trace(lambda a, n, *, b: {"s": a * n + b}, (jax.ShapeDtypeStruct((3,), jnp.float32), 2), {"b": X}, (1,))
    assert [aval.shape for aval in traced.jaxpr.in_avals] == [(3,), (3,)]
    assert traced.in_tree == jax.tree.structure(((0,), {"b": 0})) and traced.out_tree == jax.tree.structure({"s": 0})
    np.testing.assert_array_equal(jaxpr_as_fun(traced.jaxpr)(X, X)[0], 3 * X)


def test_an_import_that_is_traced_knows_when_nothing_is() -> None:
    """The first program of a process may be compiled, and this module imported, while `jax.jit` traces."""
    spec = importlib.util.find_spec(jax_compat.__name__)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)

    def importing(x: Any) -> Any:
        spec.loader.exec_module(module)
        assert not module.is_evaluating()
        return x

    jax.jit(importing)(X)
    assert module.is_evaluating()


def test_one_signature_is_traced_once() -> None:
    """`ipu.jit` keys lowered programs by the jaxpr itself."""
    jitted = jax.jit(lambda x: x * 2)
    reference = jitted.trace(1.0).jaxpr
    assert jitted.trace(2.0).jaxpr is reference
    assert jitted.trace(jnp.float32(1)).jaxpr is not reference  # weak no more
    inner_traces: list[Any] = []
    jax.jit(lambda x: (inner_traces.append(jitted.trace(x).jaxpr), x)[1])(3.0)
    assert inner_traces[0] is reference
    with jax.enable_x64(True):
        assert jitted.trace(jnp.float32(1)).jaxpr is not jitted.trace(1.0).jaxpr


def test_tracers_that_a_function_closes_over_are_further_inputs() -> None:
    """`ipu.jit` cannot lower such a function, and detects it by its inputs."""
    counts = []

    def outer(w: jax.Array) -> jax.Array:
        traced = jax.jit(lambda x: x * w + X).trace(2.0)
        counts.append((len(traced.jaxpr.in_avals), len(jax.tree.leaves(traced.args_info))))
        return w

    for transform in (jax.grad, jax.jit):
        transform(outer)(1.0)
    jax.vmap(outer)(X)
    assert all(inputs > arguments == 1 for inputs, arguments in counts) and len(counts) == 3
    traced = jax.jit(lambda x: x * X).trace(2.0)
    assert len(traced.jaxpr.in_avals) == 1 and len(traced.jaxpr.consts) == 1  # arrays are constants


def test_argument_names() -> None:
    def fun(p: Any, *rest: Any, q: Any = 1, **settings: Any) -> Any:
        return p, rest, q, settings

    jaxpr = jax.jit(fun).trace({"w": X, "b": [X, None]}, X, q=2, z=(X,)).jaxpr
    assert argument_names(jaxpr) == ["p['b'][0]", "p['w']", "rest[0]", "q", "settings['z'][0]"]
    assert argument_names(jax.jit(lambda a, n, b: (a, b), static_argnums=1).trace(X, 2, X).jaxpr) == ["a", "b"]
    loop = jax.make_jaxpr(lambda x: lax.fori_loop(0, 3, lambda i, c: c * 2, x))(X)
    body = next(jaxpr for eqn in loop.eqns for jaxpr in jaxprs_in_params(eqn.params))
    names = argument_names(closed(getattr(body, "jaxpr", body)))
    assert len(names) == len(closed(getattr(body, "jaxpr", body)).in_avals) and all(names)


@pytest.mark.parametrize("weak", [False, True])
def test_with_weak_type(weak: bool) -> None:
    for x in (X, jnp.asarray(2.0), jnp.asarray(3)):
        out = jax.jit(lambda x: with_weak_type(x, weak))(x)
        assert out.weak_type is weak and out.dtype == x.dtype
        np.testing.assert_array_equal(out, x)
    assert (with_weak_type(jnp.asarray(2.0), True) * jnp.float16(1)).dtype == jnp.float16
    assert with_weak_type(X, False) is X
    key = jax.random.key(0)
    assert with_weak_type(key, False) is key


def test_dead_code() -> None:
    def fun(x: jax.Array, unused: jax.Array) -> jax.Array:
        jnp.exp(unused)
        jax.debug.print("kept")
        return jnp.sin(x)

    live = eliminate_dead_code(jax.make_jaxpr(fun)(X, X).jaxpr)
    assert [eqn.primitive.name for eqn in live.eqns] == ["debug_print", "sin"] and len(live.invars) == 2


def test_closed() -> None:
    jaxpr = jax.make_jaxpr(jnp.sin)(X)
    assert closed(jaxpr) is jaxpr
    np.testing.assert_array_equal(jaxpr_as_fun(closed(jaxpr.jaxpr))(X)[0], jnp.sin(X))


def test_without_float0() -> None:
    zeros = np.zeros((3,), jax.dtypes.float0)
    gradient = jax.grad(lambda n, x: (x * n).sum(), (0, 1), allow_int=True)
    jaxpr, remaining = without_float0(jax.jit(lambda z, n, x: (z, gradient(n, x))).trace(zeros, 3, X).jaxpr)
    assert remaining == [1, 2] and [aval.dtype for aval in jaxpr.out_avals] == [np.float32]
    np.testing.assert_array_equal(jaxpr_as_fun(jaxpr)(jnp.asarray(3), X)[0], 3 * X)
    same = jax.jit(lambda x: x + 1).trace(X).jaxpr
    assert without_float0(same) == (same, [0]) and not is_float0(same.in_avals[0])


def test_jaxprs_in_params() -> None:
    [eqn] = jax.make_jaxpr(lambda x: lax.cond(x[0] > 0, jnp.sin, jnp.cos, x))(X).eqns[-1:]
    assert len(list(jaxprs_in_params(eqn.params))) == 2


@pytest.mark.parametrize("module", [jax_compat, source_info])
def test_every_name_is_documented(module: Any) -> None:
    functions = [f for f in vars(module).values() if inspect.isfunction(f) and f.__module__ == module.__name__]
    assert functions and all(f.__doc__ for f in functions if not f.__name__.startswith("_"))
