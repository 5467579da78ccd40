"""Keywords of `jax.jit`: each has its meaning in `ipu.jit`, or is refused by name; `jax.jit = ipu.jit` literally."""

from __future__ import annotations

import functools
import inspect
import subprocess
import sys
import textwrap
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

import ipujax as ipu

DEVICE = ipu.IPUModel(tiles_per_ipu=4)
ipu_jit = functools.partial(ipu.jit, device=DEVICE)
X = np.arange(6, dtype=np.float32).reshape(2, 3)
PARAMETERS = inspect.signature(jax.jit).parameters
UNSPECIFIED = PARAMETERS["in_shardings"].default


def add(x: Any, y: Any, n: int = 1) -> Any:
    return {"sum": x + n, "none": None}


@pytest.mark.parametrize("name", [name for name in PARAMETERS if name != "fun"])
def test_defaults_of_jax_are_accepted(name: str) -> None:
    default = {name: PARAMETERS[name].default}
    np.testing.assert_array_equal(ipu.jit(add, **default)(X, X)["sum"], X + 1)  # type: ignore[call-overload]


def test_all_defaults_together_as_a_decorator_and_a_partial() -> None:
    defaults = {name: parameter.default for name, parameter in PARAMETERS.items() if name != "fun"}
    for function in (ipu.jit(**defaults)(add), functools.partial(ipu.jit, **defaults)(add)):
        np.testing.assert_array_equal(function(X, X)["sum"], X + 1)


REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "backend": ({"backend": "cpu"}, ValueError, "backend= of ipu.jit must be None: it chooses a platform of XLA"),
    "device": ({"device": jax.devices()[0]}, ipu.ArgumentError, "(?s)device of ipu.jit must be a device.*deprecated"),
    "keep_unused": ({"keep_unused": "yes"}, TypeError, "keep_unused of ipu.jit must be a flag"),
    "inline": ({"inline": None}, TypeError, "inline of ipu.jit must be a flag"),
    "options": ({"compiler_options": 3}, TypeError, "compiler_options of ipu.jit must be options of XLA by name"),
    "option": ({"compiler_options": {3: True}}, TypeError, "compiler_options of ipu.jit must be options of XLA"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(name: str) -> None:
    settings, kind, text = REFUSED[name]
    with pytest.raises(kind, match=text) as caught:
        ipu.jit(add, **settings)
    assert isinstance(caught.value, ipu.IpuError)


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
@pytest.mark.parametrize("keep_unused", [False, True, np.bool_(True)])
@pytest.mark.parametrize("jit", [jax.jit, ipu_jit])
def test_unused_arguments_are_donated_if_kept(jit: Callable[..., Any], keep_unused: Any) -> None:
    function = jit(lambda x, y: (x + 1, jnp.ones_like(x)), donate_argnums=(0, 1), keep_unused=keep_unused)
    for call in (function, function.lower(X, X).compile()):
        arguments = jnp.asarray(X), jnp.asarray(X)
        call(*arguments)
        assert [x.is_deleted() for x in arguments] == [True, bool(keep_unused)]


def test_kept_arguments_cost_what_others_do() -> None:
    """On the machine all arguments are inputs."""
    kept = ipu_jit(add, keep_unused=True).profile(X, X)
    assert kept.cycles == ipu_jit(add).profile(X, X).cycles


@pytest.mark.parametrize("inline", [False, True])
def test_inlined_as_by_jax(inline: bool) -> None:
    def inner(x: Any) -> Any:
        return jnp.sin(x) * 2

    texts = [str(jax.make_jaxpr(lambda x, jit=jit: jit(inner, inline=inline)(x) + 1)(X)) for jit in (jax.jit, ipu_jit)]
    assert texts[0] == texts[1] and ("name=inner" in texts[0]) != inline
    outer = ipu_jit(lambda x: ipu.jit(inner, inline=inline)(x) + 1)
    np.testing.assert_allclose(outer(X), np.sin(X) * 2 + 1, rtol=1e-5)


def test_options_of_xla_reach_xla() -> None:
    quick = {"xla_cpu_enable_fast_math": True}
    np.testing.assert_array_equal(ipu_jit(add, compiler_options=quick)(X, X)["sum"], X + 1)
    wrong = ipu_jit(add, compiler_options={"xla_no_such_option": True})
    for call in (wrong, wrong.lower(X, X).compile()):
        with pytest.raises(jax.errors.JaxRuntimeError, match="No such compile option: 'xla_no_such_option'"):
            call(X, X)
    with pytest.raises(ValueError, match="can only be passed to top-level"):
        ipu_jit(lambda x: wrong(x, x))(X)


def test_several_arguments_in_any_iterable() -> None:
    """As `jax.jit` takes them: keys of a dict, a generator."""
    for names in ({"n": 0}.keys(), (name for name in ["n"]), {"n"}, iter(["n"])):
        np.testing.assert_array_equal(ipu_jit(add, static_argnames=names)(X, X, n=2)["sum"], X + 2)
    for numbers in (np.int64(2), np.array(2), range(2, 3), iter([2]), {2: 0}.keys()):
        np.testing.assert_array_equal(ipu_jit(add, static_argnums=numbers)(X, X, 2)["sum"], X + 2)


@pytest.mark.parametrize("name", ["a", "more"])
@pytest.mark.parametrize("setting", ["donate_argnames", "static_argnames"])
def test_names_of_positional_arguments_are_refused(setting: str, name: str) -> None:
    def fun(a: Any, /, b: Any, *more: Any, **options: Any) -> Any:
        return a

    for jit in (jax.jit, ipu_jit):
        with pytest.raises(ValueError):
            jit(fun, **{setting: name})
        jit(fun, **{setting: ("b", "other")})
    with pytest.raises(ipu.ArgumentError, match="takes by position alone"):
        ipu_jit(fun, **{setting: name})


# --- shardings that ask for nothing -----------------------------------------------------------------------------------

UNSET: dict[str, dict[str, Any]] = {
    "None": {"in_shardings": None, "out_shardings": None},
    "tuple of None": {"in_shardings": (None, None)},
    "list of None": {"in_shardings": [None, None], "out_shardings": {"sum": None, "none": None}},
    "trees of None": {"in_shardings": ({"a": None, "b": (None, None)}, None)},
    "unspecified": {"in_shardings": UNSPECIFIED, "out_shardings": UNSPECIFIED},
    "tuple of unspecified": {"in_shardings": (UNSPECIFIED, None), "out_shardings": {"sum": UNSPECIFIED, "none": None}},
}


@pytest.mark.parametrize("name", UNSET)
def test_unset_shardings_are_none(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls take the dispatch of JAX: after the first nothing is traced or lowered."""
    tree = {"a": X, "b": (X, X)}

    def fun(tree: Any, y: Any) -> Any:
        return {"sum": tree["a"] + tree["b"][1] + y, "none": None}

    function = ipu_jit(fun, **UNSET[name])
    expected = jax.jit(fun, **UNSET[name])(tree, X)
    np.testing.assert_array_equal(function(tree, X)["sum"], expected["sum"])
    assert function.profile(tree, X).cycles == ipu_jit(fun).profile(tree, X).cycles
    monkeypatch.setattr("ipujax.functions.function_compiler.FunctionCompiler.trace", None)
    np.testing.assert_array_equal(function(tree, X)["sum"], expected["sum"])
    np.testing.assert_array_equal(jax.grad(lambda x: function(x, X)["sum"].sum())(tree)["a"], np.ones_like(X))
    assert jax.eval_shape(function, tree, X)["sum"].shape == X.shape


@pytest.mark.parametrize(
    "settings",
    [{"in_shardings": (None,)}, {"in_shardings": ({"z": None}, None)}, {"out_shardings": (None, None, None)}],
    ids=str,
)
def test_unset_shardings_match_the_structure(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        jax.jit(add, **settings)(X, X)
    function = ipu_jit(add, **settings)
    for call in (function, function.lower):
        with pytest.raises(ipu.ArgumentError, match="do not match the structure of their arrays"):
            call(X, X)


def test_unset_shardings_beside_replicas() -> None:
    device = ipu.IPUModel(2, tiles_per_ipu=4)
    split = {"replicas": 2, "in_specs": P("replica"), "out_specs": P("replica")}
    function = ipu.jit(lambda x: x + 1, device=device, in_shardings=(None,), out_shardings=None, **split)
    np.testing.assert_array_equal(function(X), X + 1)
    mesh = ipu.make_mesh((2,), ("data",))
    with pytest.raises(ipu.ArgumentError, match="shardings beside replicas"):
        ipu.jit(lambda x: x, device=device, in_shardings=(NamedSharding(mesh, P("data")),), **split)


# --- shardings over one device ----------------------------------------------------------------------------------------

ONE_DEVICE = jax.sharding.SingleDeviceSharding(jax.devices()[0])
HOST_OF_ONE = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")


@pytest.mark.parametrize("device", [DEVICE, ipu.CPU()], ids=str)
@pytest.mark.parametrize("setting", [ONE_DEVICE, HOST_OF_ONE, {"sum": ONE_DEVICE, "none": None}], ids=str)
def test_shardings_of_one_device_without_a_mesh(setting: Any, device: ipu.IPUModel | ipu.CPU) -> None:
    settings = {"in_shardings": (ONE_DEVICE, None), "out_shardings": setting}
    result = ipu.jit(add, device=device, **settings)(X, X)["sum"]
    expected = jax.jit(add, **settings)(X, X)["sum"]
    np.testing.assert_array_equal(result, expected)
    assert result.sharding.memory_kind == expected.sharding.memory_kind


@pytest.mark.parametrize("device", [DEVICE, ipu.CPU()], ids=str)
@pytest.mark.parametrize("is_named", [True, False], ids=["NamedSharding", "PartitionSpec"])
def test_results_have_the_explicit_axes_of_one_device(is_named: bool, device: ipu.IPUModel | ipu.CPU) -> None:
    """Functions of the script that check them, such as `jax.shard_map`, take the results as they take those of JAX."""
    mesh = jax.make_mesh((1,), ("x",))
    with jax.set_mesh(mesh):
        out_shardings = {"sum": NamedSharding(mesh, P("x")) if is_named else P("x"), "none": None}
        function = ipu.jit(add, device=device, out_shardings=out_shardings)
        expected = jax.jit(add, out_shardings=out_shardings)(X, X)["sum"]
        double = jax.shard_map(lambda x: 2 * x, in_specs=P("x"), out_specs=P("x"))
        for result in (function(X, X)["sum"], function(X, X)["sum"]):
            assert jax.typeof(result) == jax.typeof(expected)
            np.testing.assert_array_equal(double(result), 2 * (X + 1))


@pytest.mark.parametrize("device", [DEVICE, ipu.CPU()], ids=str)
def test_results_lose_explicit_axes_that_out_shardings_leave_out(device: ipu.IPUModel | ipu.CPU) -> None:
    mesh = jax.make_mesh((1,), ("x",))
    settings = {"out_shardings": NamedSharding(mesh, P())}
    x = jax.device_put(X, NamedSharding(mesh, P("x")))
    expected = jax.jit(add, **settings)(x, x)["sum"]
    assert jax.typeof(ipu.jit(add, device=device, **settings)(x, x)["sum"]) == jax.typeof(expected)


# Of arrays without axes, which JAX types without the mesh that is set, while it gives the mesh to new arrays.
IN_EXPLICIT_MESH: dict[str, Callable[[Any], Any]] = {
    "stacked rows of a loop": lambda x: jax.lax.scan(lambda c, row: (c + row, c), x[0], x)[1],
    "scatter to a constant index": lambda x: jnp.zeros(2).at[jnp.array([1])].add(x[0, 0]),
}


@pytest.mark.parametrize("name", IN_EXPLICIT_MESH)
def test_arrays_without_axes_in_an_explicit_mesh_of_one_device(name: str) -> None:
    fun = IN_EXPLICIT_MESH[name]
    with jax.set_mesh(jax.make_mesh((1,), ("x",))):
        expected = jax.jit(fun)(X)
        for call in (ipu_jit(fun), ipu_jit(fun).lower(X).compile()):
            np.testing.assert_array_equal(call(X), expected)


# --- literally --------------------------------------------------------------------------------------------------------

START = """
    import os
    os.environ["JAX_PLATFORMS"] = "cpu"
    import functools, jax, jax.numpy as jnp, numpy as np, ipujax as ipu
    jax.jit = ipu.jit
"""
PLAIN = """
    @jax.jit
    def decorated(x): return jnp.sin(x) * 2

    @functools.partial(jax.jit, static_argnames=["n"], donate_argnums=0)
    def settings(x, *, n): return x * n

    class Trainer:
        rate = 0.5

        @functools.partial(jax.jit, static_argnums=0)
        def step(self, w, x): return w - self.rate * jax.grad(lambda w: ((x @ w) ** 2).sum())(w)

    traces = []

    def recorded(x):
        traces.append(x)
        return x + 1

    x = np.arange(6.0, dtype=np.float32).reshape(2, 3)
    for _ in range(3):
        np.testing.assert_array_equal(jax.jit(recorded)(x), x + 1)
    assert len(traces) == 1, "the first call has imported the compiler"
    np.testing.assert_allclose(decorated(x), np.sin(x) * 2, rtol=1e-5)
    np.testing.assert_allclose(settings(jnp.asarray(x), n=3), x * 3)
    w = Trainer().step(np.ones(3, np.float32), x)
    np.testing.assert_allclose(w, 1 - x.T @ (x @ np.ones(3)), rtol=1e-5)
    np.testing.assert_allclose(jax.vmap(jax.jit(lambda x: x + 1))(x), x + 1)
    nested = jax.jit(lambda x: decorated(x) + jax.jit(jnp.cos)(x))
    np.testing.assert_allclose(nested(x), np.sin(x) * 2 + np.cos(x), rtol=1e-5)

    with ipu.default_device(ipu.IPUModel(2, tiles_per_ipu=4)):
        pod = jax.jit(lambda x: jax.lax.psum(x, "replica"), replicas=2, in_specs=jax.P("replica"))
        np.testing.assert_allclose(pod(x), x.sum(0, keepdims=True))
    compiled = jax.jit(lambda x: x @ x.T, options=ipu.Options(exact_splits=True)).lower(x).compile()
    np.testing.assert_allclose(compiled(x), x @ x.T, rtol=1e-5)
    assert compiled.profile_call(x)[1].cycles > 0
"""
FLAX = """
    import optax
    from flax import nnx

    x = np.ones((2, 3), np.float32)
    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-1), wrt=nnx.Param)

    @nnx.jit
    def train(model, optimizer, x):
        loss, gradients = nnx.value_and_grad(lambda model: (model(x) ** 2).mean())(model)
        optimizer.update(model, gradients)
        return loss

    losses = [float(train(model, optimizer, x)) for _ in range(5)]
    assert losses[-1] < losses[0], losses
    assert type(train.jitted_fn).__name__ == "IpuFunction"
"""
PARTS = {"plain": PLAIN, "flax": FLAX}


@pytest.mark.parametrize("part", ["plain", "flax"])
def test_jax_jit_replaced_in_the_whole_program(part: str) -> None:
    """The compiler itself, imported afterwards, uses the original."""
    script = f"{textwrap.dedent(START)}{textwrap.dedent(PARTS[part])}print('done')\n"
    result = subprocess.run([sys.executable, "-W", "error", "-c", script], capture_output=True, text=True)
    assert result.stdout.endswith("done\n"), result.stderr[-3000:]
