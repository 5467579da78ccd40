"""Methods of a function of `jax.jit`: `donate_argnames`, `trace`, `eval_shape`, `clear_cache`."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import ipujax as ipu

DEVICE = ipu.IPUModel(2, tiles_per_ipu=8)
X = np.arange(6, dtype=np.float32).reshape(2, 3)
JITS = {"jax": jax.jit, "ipu": lambda f, **settings: ipu.jit(f, device=DEVICE, **settings)}
JITS["cpu"] = lambda f, **settings: ipu.jit(f, device=ipu.CPU(), **settings)


def update(params: Any, x: Any, *, scale: Any = 1.0) -> Any:
    return {"w": params["w"] + x * scale, "n": params["n"] + 1}, (x * 2).sum(), scale * 3


def params() -> Any:
    return {"w": jnp.ones((2, 3)), "n": 3}


@pytest.mark.parametrize(
    ("settings", "donated"),
    [
        ({"donate_argnames": "params"}, [True, False]),
        ({"donate_argnames": ("params", "scale")}, [True, True]),
        ({"donate_argnums": 0, "donate_argnames": "scale"}, [True, True]),
        ({"donate_argnums": 0}, [True, False]),
    ],
    ids=str,
)
@pytest.mark.parametrize("which", JITS)
@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
def test_arguments_are_donated_by_name(which: str, settings: Any, donated: list[bool]) -> None:
    given = params()
    scale = jnp.ones((2, 3))
    JITS[which](update, **settings)(given, X, scale=scale)
    assert [given["w"].is_deleted(), scale.is_deleted()] == donated
    if which == "ipu":
        lowered = JITS[which](update, **settings).lower(params(), X, scale=scale)
        assert [s.resident for s in lowered.planned.lowered.inputs if s.name == "params['w']"] == donated[:1]


@pytest.mark.parametrize("which", ["ipu", "cpu"])
def test_traced_is_that_of_jax(which: str) -> None:
    ours, theirs = (JITS[name](update, donate_argnums=0).trace(params(), X, scale=2.0) for name in (which, "jax"))
    assert str(ours.jaxpr) == str(theirs.jaxpr)
    for name in ("fun_name", "in_tree", "out_tree", "out_info"):
        assert getattr(ours, name) == getattr(theirs, name)
    info = [[(x.shape, x.dtype, x.donated) for x in jax.tree.leaves(traced.args_info)] for traced in (ours, theirs)]
    assert info[0] == info[1] and repr(ours) == f"Traced(update: {len(theirs.jaxpr.eqns)} equations)"


def test_traced_lowers_as_the_function_does() -> None:
    fun = JITS["ipu"](update, static_argnames="scale")
    traced = fun.trace(params(), jax.ShapeDtypeStruct(X.shape, X.dtype), scale=2)
    assert traced.lower() is fun.lower(params(), X, scale=2) and set(traced.timings) == {"trace"}
    with pytest.raises(ipu.ArgumentError, match=r"argument x of update is not an array"):
        fun.trace(params(), "no")
    with pytest.raises(ipu.ArgumentError, match=r"update runs on ipu.CPU\(\)"):
        JITS["cpu"](update).trace(params(), X).lower()


@pytest.mark.parametrize("which", ["ipu", "cpu"])
def test_eval_shape_is_that_of_jax(which: str) -> None:
    assert JITS[which](update).eval_shape(params(), X) == jax.jit(update).eval_shape(params(), X)
    replicated = {"replicas": 2, "in_specs": P(None, "replica"), "out_specs": P("replica")}
    fun = JITS[which](lambda x: x.sum()[None], **replicated)
    x = np.zeros((3, 4), np.float16)
    assert fun.eval_shape(x) == jax.ShapeDtypeStruct(fun(x).shape, x.dtype) == jax.ShapeDtypeStruct((2,), x.dtype)
    inner: list[Any] = []
    outer = JITS[which](lambda x: (inner.append((fun.eval_shape(x).shape, fun(x).shape)), x.sum(0))[1], **replicated)
    outer(x)
    assert inner[-1][0] == inner[-1][1] == ((1,) if which == "ipu" else (2,))  # there it is one replica's


def test_eval_shape_lowers_nothing() -> None:
    fun = ipu.jit(lambda x: x @ x.T, device=ipu.IPUModel(tiles_per_ipu=1))
    assert fun.eval_shape(jax.ShapeDtypeStruct((10**6, 3), np.float32)).shape == (10**6, 10**6)


@pytest.mark.parametrize("which", JITS)
def test_clear_cache_traces_anew(which: str) -> None:
    scale = [1.0]
    traces = []
    fun = JITS[which](lambda x: (traces.append(1), x * scale[0])[1])
    for expected in (1.0, 2.0, 3.0):
        scale[0] = expected
        fun.clear_cache()
        for _ in range(2):
            np.testing.assert_array_equal(fun(X), X * expected)
    assert len(traces) == 3


def test_clear_cache_frees_lowered_programs() -> None:
    fun = JITS["ipu"](lambda x: x * 2)
    fun(X)
    lowered = weakref.ref(fun.lower(X))
    fun.clear_cache()
    gc.collect()
    assert lowered() is None


def test_reprs_show_the_cost() -> None:
    compiled = JITS["ipu"](update).lower(params(), X).compile()
    cycles = compiled.profile.cycles
    fullest = compiled.profile.memory.worst_tile
    assert repr(compiled) == f"Compiled(update: {compiled.profile.brief})"
    assert repr(compiled.profile) == f"Profile({compiled.profile.brief})"
    assert compiled.profile.brief.startswith(f"{cycles:,} cycles, ")
    assert f"fullest tile {fullest} with " in repr(compiled) and " of 624.0 KiB, 2 × mk2" in repr(compiled)


def test_reprs_of_data_dependent_programs() -> None:
    fun = ipu.jit(
        lambda n: jax.lax.while_loop(lambda i: i < n, lambda i: i + 1, 0), device=ipu.IPUModel(tiles_per_ipu=2)
    )
    compiled = fun.lower(3).compile()
    assert "cycles depend on trip counts" in repr(compiled.profile)
    assert f"{compiled.profile_call(3)[1].cycles:,} cycles" in repr(compiled.profile_call(3)[1])


def test_stages_compute_with_the_bits_of_their_trace() -> None:
    def f(x: Any) -> Any:
        return x * 2.5 + jnp.arange(3), jnp.argmax(x)

    function = ipu.jit(f, device=DEVICE)
    with jax.enable_x64(True):
        x = jnp.arange(3, dtype=jnp.float64) + 1e-12
        expected = jax.jit(f)(x)
        traced = function.trace(x)
        compiled = function.lower(x).compile()
        got = [compiled(x)]
    got += [compiled(x), compiled.profile_call(x)[0], traced(x)]
    for results in got:
        assert [y.dtype for y in results] == [y.dtype for y in expected] == [jnp.float64, jnp.int64]
        assert all(map(np.array_equal, results, expected))


def test_a_lowered_program_keeps_the_numbers_of_arrays_that_change_later() -> None:
    table = np.ones(3, np.float32)
    inner = jax.jit(lambda x: x * table)
    function = ipu.jit(lambda x: inner(x) + table, device=DEVICE)
    x = jnp.ones(3)
    lowered = function.lower(x)
    table[:] = 5
    compiled = lowered.compile()
    table[:] = 7
    np.testing.assert_array_equal(compiled(x), 2 * np.ones(3))
    np.testing.assert_array_equal(function(x), 2 * np.ones(3))


def test_a_negative_static_position_names_no_keyword() -> None:
    function = ipu.jit(lambda x, n: x * n, static_argnums=-1, device=DEVICE)
    assert function.trace(X, 2).jaxpr.in_avals == jax.jit(lambda x: x).trace(X).jaxpr.in_avals
    x = 3  # by position the last argument, so that it is static
    lowered = function.lower(x, n=X)
    assert [aval.shape for aval in lowered.jaxpr.in_avals] == [X.shape]
    np.testing.assert_array_equal(function(x, n=X), 3 * X)
