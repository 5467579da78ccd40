"""Calls that shardings partition take JAX's dispatch; what JAX does not see there never mixes two programs."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import ipujax as ipu

DEVICE = ipu.IPUModel(4, tiles_per_ipu=16)
MESH = ipu.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
SPLIT = NamedSharding(MESH, P("data"))
WHOLE = NamedSharding(MESH, P())
X = np.arange(32, dtype=np.float32).reshape(8, 4)
W = np.ones((4, 4), np.float32)


def step(w: Any, x: Any, n: int = 1) -> Any:
    return {"w": w - 0.1 * (x @ w).mean() * n, "x": x * 2}


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Receives the arguments of each look-up of a program by tracing."""
    from ipujax.functions.function_compiler import FunctionCompiler

    calls: list[Any] = []
    trace = FunctionCompiler.trace
    monkeypatch.setattr(FunctionCompiler, "trace", lambda self, *args: calls.append(args) or trace(self, *args))
    return calls


def check(got: Any, *args: Any) -> None:
    expected = step(*args)
    for name, value in expected.items():
        np.testing.assert_allclose(got[name], value, rtol=1e-5)


def test_later_calls_trace_nothing(compilations: list[Any]) -> None:
    function = ipu.jit(step, device=DEVICE, in_shardings=(WHOLE, SPLIT))
    for scale in (1, 2, 3):
        check(function(W * scale, X), W * scale, X)
    assert len(compilations) == 1
    check(function(W, X[:4]), W, X[:4])
    check(function(W, X[:4]), W, X[:4])
    assert len(compilations) == 2
    assert "data" in function.lower(W, X).shardings()


def test_settings_of_jax_count(compilations: list[Any]) -> None:
    function = ipu.jit(step, device=DEVICE, in_shardings=(WHOLE, SPLIT))
    for _ in range(2):
        assert function(W, X)["w"].dtype == np.float32
        with jax.enable_x64(True):
            assert function(W.astype(np.float64), X.astype(np.float64))["w"].dtype == np.float64
    assert len(compilations) == 2


def test_static_and_donated_arguments(compilations: list[Any]) -> None:
    settings: Any = {"static_argnums": 2, "donate_argnums": 0}
    function = ipu.jit(step, device=DEVICE, in_shardings=(WHOLE, SPLIT), **settings)
    w = jnp.asarray(W)
    for n in (1, 2, 1, 2):
        before = np.array(w)  # a view would keep the buffer
        donated = w
        result = function(w, X, n)
        check(result, before, X, n)
        w = result["w"]
        assert donated.is_deleted()
    assert len(compilations) == 2
    with pytest.raises(ipu.ArgumentError, match="argument w of step has been deleted"):
        function(donated, X, 1)
    ipu_jit = ipu.jit(lambda a, b: (a + b, b), device=DEVICE, in_shardings=(SPLIT, SPLIT), donate_argnums=0)
    ipu_jit(jnp.asarray(X), jnp.asarray(X))
    x = jnp.asarray(X)
    with pytest.raises(ipu.ArgumentError, match="given one array as"):
        ipu_jit(x, x)


def test_meshes_that_are_set_count() -> None:
    """A bare spec is one over the mesh that is set."""
    function = ipu.jit(step, device=DEVICE, in_shardings=(P(), P("data")))
    results = {}
    for size in (2, 4, 2):
        with jax.sharding.use_abstract_mesh(ipu.make_mesh((size,), ("data",), axis_types=(AxisType.Auto,))):
            check(function(W, X), W, X)
            results[size] = function.lower(W, X).num_used_ipus
    assert results == {2: 2, 4: 4}
    with pytest.raises(ipu.ArgumentError, match="has a PartitionSpec, and no mesh is set"):
        function(W, X)


def test_bad_arguments_after_good_ones() -> None:
    function = ipu.jit(step, device=DEVICE, in_shardings=(WHOLE, SPLIT))
    function(W, X)
    with pytest.raises(ValueError, match="should be divisible by 4, but it is equal to 7"):
        function(W, X[:7])
    with pytest.raises(TypeError, match=r"argument x of step(.|\n)*got: str"):
        function(W, "x")
    with pytest.raises(TypeError, match="missing a required argument: 'x'"):
        function(W)
    check(function(W, X), W, X)


def test_clear_cache(compilations: list[Any]) -> None:
    function = ipu.jit(step, device=DEVICE, in_shardings=(WHOLE, SPLIT))
    function(W, X)
    function.clear_cache()
    function(W, X)
    assert len(compilations) == 2


def test_one_device_asks_for_nothing(compilations: list[Any]) -> None:
    """A mesh of one device, as programs have that run on any number."""
    one = NamedSharding(ipu.make_mesh((1,), ("data",)), P("data"))
    function = ipu.jit(step, device=DEVICE, in_shardings=(None, one), out_shardings={"w": one, "x": None})
    check(function(W, X), W, X)
    assert compilations == [] and function.lower(W, X).num_used_ipus == 1


DEVICES = """
    import os
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax, jax.numpy as jnp, numpy as np, ipujax as ipu
    from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
    from ipujax.functions.function_compiler import FunctionCompiler

    device = ipu.IPUModel(4, tiles_per_ipu=16)
    traces = []
    trace = FunctionCompiler.trace
    FunctionCompiler.trace = lambda self, *args: traces.append(args) or trace(self, *args)

    def step(w, x):
        return {"w": w - 0.1 * (x @ w).mean(), "x": x * 2}

    x = np.arange(32, dtype=np.float32).reshape(8, 4)
    w = np.ones((4, 4), np.float32)
    for kind in (AxisType.Auto, AxisType.Explicit):
        mesh = jax.make_mesh((4,), ("data",), axis_types=(kind,))
        for specs in ((P(), P("data")), (P("data"), P("data")), (P(), P(None, "data"))):
            for settings in ({}, {"donate_argnums": 0}, {"out_shardings": NamedSharding(mesh, P("data"))}):
                function = ipu.jit(step, device=device, **settings)
                plain = jax.jit(step, **settings)
                traces.clear()
                for scale in (1, 2):
                    shardings = [NamedSharding(mesh, spec) for spec in specs]
                    arrays = [[jax.device_put(a * scale, s) for a, s in zip((w, x), shardings)] for _ in "ab"]
                    if kind == AxisType.Explicit and specs[1] == P(None, "data"):
                        continue  # a product over a split dimension is ambiguous
                    got = function(*arrays[0])
                    expected = plain(*arrays[1])
                    for name in expected:
                        np.testing.assert_allclose(got[name], expected[name], rtol=1e-5)
                        assert got[name].sharding.is_equivalent_to(expected[name].sharding, 2), (specs, name)
                    assert [a.is_deleted() for a in arrays[0]] == [a.is_deleted() for a in arrays[1]]
                assert len(traces) <= 1, traces
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    whole = jax.device_put(x, NamedSharding(mesh, P()))
    split = jax.device_put(x, NamedSharding(mesh, P("data")))
    function = ipu.jit(lambda x: x + 1, device=device)
    for argument in (split, x, whole, split, jnp.asarray(x), whole):
        np.testing.assert_array_equal(function(argument), x + 1)
    assert function(split).sharding.spec == P("data") and function(jnp.asarray(x)).sharding.num_devices == 1
    print("done")
"""


def test_arrays_on_devices() -> None:
    script = textwrap.dedent(DEVICES)
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert result.stdout.endswith("done\n"), result.stderr[-3000:]
