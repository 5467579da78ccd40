"""The names taken from JAX's less stable surface do what the rest of the package counts on."""

from __future__ import annotations

import functools
import inspect
import os
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

from ipujax.lowering import jax_compat
from ipujax.lowering.jax_compat import (
    argument_names,
    closed,
    eliminate_dead_code,
    is_float0,
    jaxpr_as_fun,
    jaxpr_file,
    jaxprs_in_params,
    name_stack,
    source_line,
    trace,
    with_caller,
    with_weak_type,
    without_float0,
)
from ipujax.runtime.errors import is_installed

X = jnp.ones(3)


def line_of(fun: Any, offset: int = 0) -> str:
    return f"test_jax_compat.py:{inspect.getsourcelines(fun)[1] + offset}"


def test_trace_takes_arrays_shapes_and_static_arguments() -> None:
    traced = trace(lambda a, n, *, b: {"s": a * n + b}, (jax.ShapeDtypeStruct((3,), jnp.float32), 2), {"b": X}, (1,))
    assert [aval.shape for aval in traced.jaxpr.in_avals] == [(3,), (3,)]
    assert traced.in_tree == jax.tree.structure(((0,), {"b": 0})) and traced.out_tree == jax.tree.structure({"s": 0})
    np.testing.assert_array_equal(jaxpr_as_fun(traced.jaxpr)(X, X)[0], 3 * X)


def test_one_signature_is_traced_once() -> None:
    """`ipu.jit` keys what it lowered by the jaxpr itself."""
    jitted = jax.jit(lambda x: x * 2)
    first = jitted.trace(1.0).jaxpr
    assert jitted.trace(2.0).jaxpr is first
    assert jitted.trace(jnp.float32(1)).jaxpr is not first  # weak no more
    inside: list[Any] = []
    jax.jit(lambda x: (inside.append(jitted.trace(x).jaxpr), x)[1])(3.0)
    assert inside[0] is first
    with jax.enable_x64(True):
        assert jitted.trace(jnp.float32(1)).jaxpr is not jitted.trace(1.0).jaxpr


def test_tracers_that_a_function_closes_over_are_further_inputs() -> None:
    """`ipu.jit` sees by that that it cannot lower."""
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
    def fun(p: Any, *rest: Any, q: Any = 1, **more: Any) -> Any:
        return p, rest, q, more

    jaxpr = jax.jit(fun).trace({"w": X, "b": [X, None]}, X, q=2, z=(X,)).jaxpr
    assert argument_names(jaxpr) == ["p['b'][0]", "p['w']", "rest[0]", "q", "more['z'][0]"]
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


# --- source lines and name stacks -------------------------------------------------------------------------------------


class Layer:
    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.tanh(x)


def test_source_line_is_the_users() -> None:
    def inner(x: jax.Array) -> jax.Array:
        return jnp.sin(x)

    [eqn] = jax.make_jaxpr(inner)(X).eqns
    assert source_line(eqn) == f"{line_of(inner, 1)} (inner)"
    [eqn] = jax.make_jaxpr(Layer())(X).eqns
    assert source_line(eqn) == f"{line_of(Layer.__call__, 1)} (Layer.__call__)"
    [eqn] = jax.make_jaxpr(functools.partial(lambda s, x: x * s, 2.0))(X).eqns
    assert re.fullmatch(r"test_jax_compat\.py:\d+ \(<lambda>\)", source_line(eqn))


def test_source_line_of_a_library_is_that_of_its_call() -> None:
    def update(grads: jax.Array) -> Any:
        optimizer = optax.adam(1e-3)
        return optimizer.update(grads, optimizer.init(grads))

    lines = {source_line(eqn) for eqn in jax.make_jaxpr(update)(X).eqns}
    assert lines == {f"{line_of(update, 2)} (update)"}


def test_no_line_is_the_users_where_a_library_is_traced() -> None:
    for fun in (jnp.sin, jax.nn.softmax, optax.adam(0.1).init):
        assert {source_line(eqn) for eqn in jax.make_jaxpr(fun)(X).eqns} == {""}


@pytest.mark.parametrize(
    ("file", "installed"),
    [
        (__file__, False),
        (jax.__file__, True),
        (os.__file__, True),
        (jax_compat.__file__, True),
        ("/elsewhere/lib/site-packages/flax/nn.py", True),
        ("<string>", True),
        ("<stdin>", False),
        ("<ipython-input-3-ab>", False),
        ("<python-input-0>", False),
    ],
)
def test_what_is_installed(file: str, installed: bool) -> None:
    assert is_installed(file) == installed


def test_without_float0() -> None:
    zeros = np.zeros((3,), jax.dtypes.float0)
    gradient = jax.grad(lambda n, x: (x * n).sum(), (0, 1), allow_int=True)
    jaxpr, kept = without_float0(jax.jit(lambda z, n, x: (z, gradient(n, x))).trace(zeros, 3, X).jaxpr)
    assert kept == [1, 2] and [aval.dtype for aval in jaxpr.out_avals] == [np.float32]
    np.testing.assert_array_equal(jaxpr_as_fun(jaxpr)(jnp.asarray(3), X)[0], 3 * X)
    same = jax.jit(lambda x: x + 1).trace(X).jaxpr
    assert without_float0(same) == (same, [0]) and not is_float0(same.in_avals[0])


def test_source_line_of_a_backward_equation_is_that_of_the_forward_one() -> None:
    def loss(w: jax.Array) -> jax.Array:
        return jnp.sin(w).sum()

    eqns = jax.make_jaxpr(jax.grad(loss))(X).eqns
    backward = [eqn for eqn in eqns if "transpose(" in name_stack(eqn)]
    assert backward and {source_line(eqn) for eqn in eqns} == {f"{line_of(loss, 1)} (loss)"}


def test_name_stack_and_caller() -> None:
    def inner(x: jax.Array) -> jax.Array:
        with jax.named_scope("inner"):
            return jnp.sin(x)

    def outer(x: jax.Array) -> jax.Array:
        with jax.named_scope("outer"):
            return jax.jit(inner)(x)

    [call] = jax.make_jaxpr(outer)(X).eqns
    [eqn] = call.params["jaxpr"].eqns
    assert name_stack(eqn) == "inner"
    for keep_line, line in ((True, line_of(inner, 2)), (False, line_of(outer, 2))):
        seen = with_caller(eqn, call, keep_line=keep_line)
        assert name_stack(seen) == "outer/inner" and source_line(seen).startswith(f"{line} ")
    assert jaxpr_file(call.params["jaxpr"].jaxpr) == inspect.getsourcefile(inner)


def test_file_of_library_code() -> None:
    [call] = [eqn for eqn in jax.make_jaxpr(lambda x: jnp.where(x > 0, x, 0.0))(X).eqns if "jaxpr" in eqn.params]
    assert Path(jaxpr_file(call.params["jaxpr"].jaxpr)).is_relative_to(Path(jax.__file__).parent)


def test_jaxprs_in_params() -> None:
    [eqn] = jax.make_jaxpr(lambda x: lax.cond(x[0] > 0, jnp.sin, jnp.cos, x))(X).eqns[-1:]
    assert len(list(jaxprs_in_params(eqn.params))) == 2


def test_every_name_is_documented() -> None:
    functions = [f for f in vars(jax_compat).values() if inspect.isfunction(f) and f.__module__ == jax_compat.__name__]
    assert functions and all(f.__doc__ for f in functions)
