"""Prices of exported functions, of kernels of Pallas, and of code that nothing describes."""

from __future__ import annotations

import io
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export, lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import ipujax as ipu
from ipujax.lowering.jax_compat import Primitive, mlir
from ipujax.runtime.profile.operation_warnings import Unpriced

X = np.random.default_rng(0).normal(size=(32, 64)).astype(np.float32)
W = np.random.default_rng(1).normal(size=(64, 64)).astype(np.float32) / 8
SAME = jax.ShapeDtypeStruct(X.shape, X.dtype)
BENCHMARK = Path(__file__).resolve().parents[2] / "benchmarks" / "opaque_calls.py"


def powers(count: int, x: Any) -> Any:
    return lax.fori_loop(0, count, lambda _, c: jnp.tanh(c @ W), x)


def flops(profile: Any) -> int:
    return sum(row.flops or 0 for row in profile.step_costs)


def test_an_exported_function_costs_what_the_function_costs() -> None:
    cycles = []
    for count in (1, 50):
        fun = jax.jit(lambda x, count=count: powers(count, x))
        plain = ipu.jit(fun).profile(X)
        exported = ipu.jit(export.export(fun)(X).call).profile(X)
        assert exported.cycles == pytest.approx(plain.cycles, rel=0.1)
        assert flops(exported) == flops(plain)
        cycles.append(exported.cycles)
    assert cycles[1] > 10 * (cycles[0] - 27_000)  # but for the host exchange


def test_captured_weights_are_constants_on_the_tiles() -> None:
    profile = ipu.jit(export.export(jax.jit(lambda x: x @ W))(X).call).profile(X)
    constants = [x for x in profile.executable.graph.variables if x.is_constant]
    assert W.nbytes <= sum(x.num_bytes for x in constants) < 1.1 * W.nbytes


def test_layers_are_those_of_the_exported_function() -> None:
    def fun(x: Any) -> Any:
        with jax.named_scope("attention"):
            return jax.nn.softmax(x @ W)

    profile = ipu.jit(export.export(jax.jit(fun))(X).call).profile(X)
    assert any("attention" in row.layer for row in profile.layers)


def test_gradients_of_an_export() -> None:
    data = export.export(jax.jit(lambda x: jnp.tanh(x @ W)))(X).serialize(vjp_order=1)
    loaded = export.deserialize(data).call
    gradient = jax.grad(lambda x: (loaded(x) ** 2).sum())
    np.testing.assert_allclose(ipu.jit(gradient)(X), gradient(X), rtol=1e-5, atol=1e-6)
    assert not ipu.jit(gradient).profile(X).fallbacks


def test_a_routine_of_lapack_has_the_price_of_its_primitive() -> None:
    a = X[:, :32] @ X[:, :32].T + 64 * np.eye(32, dtype=np.float32)
    plain = ipu.jit(jnp.linalg.cholesky).profile(a)
    exported = ipu.jit(export.export(jax.jit(jnp.linalg.cholesky))(a).call).profile(a)
    assert not exported.unpriced
    assert exported.cycles == pytest.approx(plain.cycles, rel=0.1)


def test_an_export_without_a_counterpart_holds_what_it_captured() -> None:
    """Numbers of 64 bits, which JAX does not have here."""
    with jax.enable_x64(True):
        wide = W.astype(np.float64)
        call = export.export(jax.jit(lambda x: (x @ wide).astype(np.float32)))(SAME).call
    function = ipu.jit(call)
    profile = function.profile(X)
    (row,) = profile.unpriced
    assert row.operation == "exported <lambda>"
    assert profile.memory.total_bytes > ipu.jit(lambda x: x * 2).profile(X).memory.total_bytes + wide.nbytes
    np.testing.assert_array_equal(function(X), jax.jit(call)(X))


def foreign(x: Any) -> Any:
    return jax.ffi.ffi_call("nothing_known", SAME)(x)


def on_the_host(x: Any) -> Any:
    return lax.fori_loop(0, 5, lambda _, c: jax.pure_callback(np.sin, SAME, c), x)


UNPRICED: dict[str, tuple[Callable[[Any], Any], str, int]] = {
    "nothing_known": (foreign, "tiles", 1),
    "pure_callback": (on_the_host, "host", 5),
}


def test_a_call_that_devices_share_has_its_name_and_line() -> None:
    mesh = ipu.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))
    device = ipu.IPUModel(num_ipus=2, tiles_per_ipu=8)
    in_shardings = NamedSharding(mesh, P("x"))

    def doubled(x: Any) -> Any:
        return jax.shard_map(lambda block: 2 * block, mesh=mesh, in_specs=P("x"), out_specs=P("x"))(on_the_host(x))

    for fun, shardings in ((on_the_host, {"in_shardings": in_shardings}), (doubled, {})):
        (row,) = ipu.jit(fun, device=device, **shardings).profile(X).unpriced
        assert row.operation == "pure_callback"
        assert row.origin.line.startswith(f"test_opaque_calls.py:{on_the_host.__code__.co_firstlineno + 1} (")


@pytest.mark.parametrize("name", UNPRICED)
def test_what_has_no_price_is_named(name: str) -> None:
    fun, place, runs = UNPRICED[name]
    profile = ipu.jit(fun).profile(X)
    line = f"test_opaque_calls.py:{fun.__code__.co_firstlineno + 1} ("
    (row,) = profile.unpriced
    assert (row.operation, row.place, row.runs) == (name, place, runs)
    assert row.origin.line.startswith(line)
    text = profile.summary()
    assert f"{profile.cycles:,}, without 1 unpriced operation" in text
    assert f"{name} on the {place}, {runs} run" in text
    assert "without 1 unpriced operation" in profile.brief
    (data,) = profile.execution()["unpriced"]
    assert {key: data[key] for key in ("operation", "place", "runs")} == dict(operation=name, place=place, runs=runs)
    assert profile.scalars()["unpriced_operations"] == 1


def test_priced_programs_name_none() -> None:
    profile = ipu.jit(lambda x: x @ W).profile(X)
    assert profile.unpriced == () and "unpriced" not in profile.summary()
    assert "unpriced" not in profile.execution()


def test_runs_that_depend_on_data_are_said() -> None:
    def fun(x: Any) -> Any:
        return lax.while_loop(lambda c: c.sum() > 0, foreign, x)

    assert [row.runs for row in ipu.jit(fun).profile(X).unpriced] == [None]


def test_saved_profiles_and_advice_keep_it(tmp_path: Path) -> None:
    profile = ipu.jit(foreign).profile(X)
    profile.save(tmp_path / "profile")
    loaded = ipu.Profile.load(tmp_path / "profile")
    assert isinstance(loaded.unpriced[0], Unpriced) and loaded.unpriced == profile.unpriced
    assert loaded.summary() == profile.summary()
    with redirect_stdout(io.StringIO()) as printed:
        advice = ipu.advise(ipu.jit(foreign), X)
    assert {row.unpriced for row in advice} == {1}
    assert "without 1 unpriced" in printed.getvalue()


def test_the_page_marks_it(tmp_path: Path) -> None:
    ipu.jit(foreign).profile(X).to_html(tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "without 1 unpriced operation" in page and "Unpriced operations" in page


def test_flops_are_within_a_factor_of_two_of_xla() -> None:
    run = subprocess.run([sys.executable, str(BENCHMARK)], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr


def test_effects_of_a_primitive_of_ones_own_happen_in_each_call() -> None:
    """Its implementation runs Python code, and its lowering calls that code at run time."""
    calls: list[Any] = []
    noted_p = Primitive("noted")
    noted_p.multiple_results = True
    effects = jax.make_jaxpr(lambda: jax.debug.callback(print))().effects

    def note(x: Any) -> list[Any]:
        calls.append(x)
        return []

    def lowered(x: Any) -> list[Any]:
        jax.debug.callback(calls.append, x)
        return []

    noted_p.def_impl(note)
    noted_p.def_effectful_abstract_eval(lambda x: ((), effects))
    mlir.register_lowering(noted_p, mlir.lower_fun(lowered, multiple_results=True))

    def step(x: Any) -> Any:
        noted_p.bind(x)
        return x * 2

    fun = ipu.jit(step, device=ipu.IPUModel(tiles_per_ipu=4))
    assert [float(fun(jnp.float32(n))) for n in range(3)] == [0, 2, 4]
    jax.effects_barrier()
    assert list(map(float, calls)) == [0, 1, 2]
