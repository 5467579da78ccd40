"""Primitives of other libraries: lowered as their implementation, where JAX can trace it."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import equinox.internal as eqxi
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ipujax as ipu
from ipujax.lowering.jax_compat import Primitive, make_primitive
from tests.lowering.helpers import check, lowered, small_target

X = np.random.default_rng(0).normal(size=(6, 5)).astype(np.float32)


def primitive(name: str, fun: Callable[..., Any], impl: Callable[..., Any] | None = None) -> Primitive:
    """Primitive that XLA computes as `fun`, which is its implementation too unless there is another."""

    def abstract(*avals: Any, **params: Any) -> Any:
        return jax.eval_shape(lambda *x: fun(*x, **params), *avals)

    new = make_primitive(name, fun, abstract)
    new.def_impl(impl or fun)
    return new


def fallbacks(fun: Callable[..., Any], *arguments: Any) -> set[str]:
    check(fun, *arguments, tiles=(4,), rtol=1e-5, atol=1e-6)
    return set(lowered(fun, arguments, small_target(4)).graph.notes.fallbacks.values())


def test_lowers_an_implementation_in_jax() -> None:
    wrapped = primitive("shifted", lambda x, *, by: [jnp.tanh(x) + by])
    assert not fallbacks(lambda x: wrapped.bind(x * 2, by=3.0), X)


def test_lowers_several_results_and_returned_operands() -> None:
    several = primitive("parts", lambda x, y: [x, jnp.dot(x, y), y[0]])
    assert not fallbacks(lambda x: several.bind(x, x.T), X)


def test_lowers_nested_primitives_and_loops() -> None:
    inner = primitive("inner", lambda x: [jax.jit(jnp.sin)(x)])
    outer = primitive("outer", lambda x: [inner.bind(x)[0] * 2])
    assert not fallbacks(lambda x: jax.lax.fori_loop(0, 3, lambda _, y: outer.bind(y)[0], x), X)


def test_lowers_what_xla_gets_in_place_of_an_implementation_for_arrays_only() -> None:
    opaque = primitive("opaque", lambda x: [jnp.sort(x, 0)], lambda x: [np.sort(np.asarray(x), 0)])
    assert not fallbacks(lambda x: opaque.bind(x)[0] + 1, X)


def test_lowers_what_xla_gets_in_place_of_a_recursive_implementation() -> None:
    recursive = primitive("recursive", lambda x: [x * 2], lambda x: jax.jit(recursive.bind)(x))
    assert not fallbacks(lambda x: recursive.bind(x), X)


def test_lowers_what_xla_gets_in_place_of_an_implementation_of_another_shape() -> None:
    other = primitive("other", lambda x: [x * 2], lambda x: [x[0]])
    assert not fallbacks(lambda x: other.bind(x), X)


def test_runs_what_neither_jax_nor_xla_describes_as_one_vertex() -> None:
    def on_the_host(x: Any) -> Any:
        return [jax.pure_callback(np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), x)]

    foreign = primitive("foreign", on_the_host, lambda x: [np.sin(np.asarray(x))])
    assert fallbacks(lambda x: foreign.bind(x), X) == {"foreign"}
    (row,) = ipu.jit(lambda x: foreign.bind(x)[0]).profile(X).unpriced
    assert (row.operation, row.place, row.runs) == ("foreign", "tiles", 1)


def test_gives_library_code_the_users_line() -> None:
    line = test_gives_library_code_the_users_line.__code__.co_firstlineno + 2
    profile = ipu.jit(lambda x: eqxi.unvmap_max(x) + 1).lower(X).compile().profile
    assert {op.origin.line for op in profile.operations() if op.origin.line} == {
        f"test_unknown_primitives.py:{line} (<lambda>)"
    }


def _newton(x: jax.Array, kind: str) -> jax.Array:
    """Loop of equinox, with its primitives `maybe_set`, `select_if_vmap`, `nonbatchable` and `unvmap_any`."""

    def cond(state: tuple[jax.Array, jax.Array]) -> jax.Array:
        return jnp.abs(state[0] ** 2 - x) > 1e-3

    def body(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        y, steps = state
        return (y + x / y) / 2, steps.at[0].set(y)

    return eqxi.while_loop(cond, body, (x, jnp.zeros(3)), max_steps=16, kind=kind, buffers=lambda s: s[1])[0]


LOOPS = ("lax", "bounded", "checkpointed")


@pytest.mark.parametrize(("many", "kind"), [*product((False, True), LOOPS)])
def test_loops_of_equinox_have_no_fallback(kind: str, many: bool) -> None:
    fun = (lambda x: _newton(x, kind)) if kind == "lax" else jax.grad(lambda x: _newton(x, kind))
    x = np.array([2.0, 3.0, 5.0], np.float32)
    program = jax.vmap(fun) if many else fun
    argument = x if many else x[0]
    compiled = ipu.jit(program, device=ipu.IPUModel(tiles_per_ipu=4))
    np.testing.assert_allclose(compiled(argument), jax.jit(program)(argument), rtol=1e-5)
    assert not compiled.lower(argument).graph.notes.fallbacks
