"""Shardings under `ipu.jit`: what is split over several devices is refused by name, what is whole runs."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec as P

import ipujax as ipu
from ipujax.runtime.errors import ArgumentError

SCRIPT = Path(__file__).parent / "sharded_calls.py"
X = np.ones((8, 4), np.float32)
AUTO = AbstractMesh((1, 4), ("one", "x"), (AxisType.Auto,) * 2)
EXPLICIT = AbstractMesh((1, 4), ("one", "x"), (AxisType.Explicit,) * 2)
REMEDY = r"[\s\S]*try: .*jax.shard_map inside ipu.jit.*replicas=N with in_specs="


def lowered(fun: Callable[..., Any], *args: Any, **settings: Any) -> ipu.Lowered:
    device = ipu.IPUModel(num_ipus=settings.get("replicas", 1), tiles_per_ipu=8)
    return ipu.jit(fun, device=device, **settings).lower(*args or [X])


def constrained(x: Any, spec: P, mesh: Any = AUTO) -> Any:
    return lax.with_sharding_constraint(x, NamedSharding(mesh, spec))


def split(x: Any) -> Any:
    return constrained(x, P("x"))


# --- arrays of several devices, in a process that has some ---


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Any]:
    done = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


WHOLE = (
    *("copies", "copies, explicit", "last device", "auto mesh is set", "replicas", "on CPU", "under jax.jit"),
    *("static", "shard_map", "shard_map, auto mesh is set"),
)
REFUSED = {
    "argument": r"argument tree\['w'\] of <lambda> is sharded over 4 devices[\s\S]*P\('x',\) over .*x: 4 \(Auto\)",
    "argument, explicit": r"argument x of sine is sharded over 4 devices[\s\S]*P\(None, 'x'\) over .*x: 4 \(Explicit\)",
    "keyword": "argument x of <lambda> is sharded over 4 devices",
    "replicas": "argument x of sine is sharded over 4 devices",
    "shape": "argument x of sine is sharded over 4 devices",
    "a Ref": "argument ref of <lambda> is sharded over 4 devices",
    "second call": "argument x of sine is sharded over 4 devices",
    "compiled": "argument x of sine is sharded over 4 devices",
    "closed over": r"<lambda> closes over an array that is sharded over 4 devices\n  at: sharded_calls.py:\d+",
    "closed over, inside": "<lambda> closes over an array that is sharded over 4 devices",
    "explicit mesh is set": r"sine is traced under a mesh with explicit axes over 4 devices\n  at: sharded_calls",
}


@pytest.mark.parametrize("name", WHOLE)
def test_arrays_that_are_whole_on_each_device_run(outcomes: dict[str, Any], name: str):
    x = np.arange(32, dtype=np.float32).reshape(8, 4)
    np.testing.assert_allclose(outcomes[f"whole: {name}"]["result"], np.sin(x), rtol=2e-6)


@pytest.mark.parametrize("name", REFUSED)
def test_arrays_that_are_split_are_refused(outcomes: dict[str, Any], name: str):
    assert re.search(REFUSED[name] + REMEDY, outcomes[name]["error"])


def test_every_call_of_the_script_is_looked_at(outcomes: dict[str, Any]):
    assert set(outcomes) == {*REFUSED, *(f"whole: {name}" for name in WHOLE)}


# --- shardings inside of a function ---


def test_constraints_that_split_nothing_have_no_effect():
    def fun(x: Any) -> Any:
        return constrained(constrained(constrained(x * 2, P("one")), P()), P(P.UNCONSTRAINED, None))

    plain = lowered(lambda x: x * 2)
    assert lowered(fun).compile().profile.cycles == plain.compile().profile.cycles
    np.testing.assert_array_equal(lowered(fun).compile()(X), X * 2)


@pytest.mark.parametrize(
    "fun",
    [
        split,
        lambda x: constrained(x, P(P.UNCONSTRAINED, ("one", "x"))),
        lambda x: lax.scan(lambda c, _: (split(c), None), x, None, length=2)[0],
        lambda x: lax.cond(x[0, 0] > 0, split, jnp.sin, x),
        jax.grad(lambda x: (split(x) ** 2).sum()),
        jax.checkpoint(split),
        jax.jit(split),
        ipu.jit(split),
        lambda x: ipu.pipeline(split, micro_batches=2)(x),
    ],
    ids=["plain", "with others", "scan", "cond", "grad", "checkpoint", "jit", "ipu.jit", "pipeline"],
)
def test_constraints_that_split_are_refused_with_their_line(fun: Callable[..., Any]):
    what = r"jax.lax.with_sharding_constraint splits a value over 4 devices inside"
    with pytest.raises(ArgumentError, match=rf"{what}[\s\S]*at: test_shardings.py:\d+ \(constrained\)" + REMEDY):
        lowered(fun)


def test_constraints_inside_of_a_replica_are_refused():
    with pytest.raises(ArgumentError, match=r"jax\.lax\.with_sharding_constraint splits a value over 4 devices"):
        lowered(split, replicas=2, in_specs=P("replica"), out_specs=P("replica"))


def test_the_shardings_of_an_inner_jit_are_refused():
    sharding = NamedSharding(AUTO, P("x"))
    for settings in ({"in_shardings": sharding}, {"out_shardings": sharding}):
        with pytest.raises(ArgumentError, match=r"jax\.jit with in_shardings= or out_shardings= splits a value"):
            lowered(lambda x, settings=settings: jax.jit(jnp.sin, **settings)(x))


@pytest.mark.parametrize(
    ("what", "fun"),
    [
        ("jax.sharding.reshard", lambda x: jax.sharding.reshard(x, P("x"))),
        ("jax.sharding.reshard", jax.sharding.auto_axes(jnp.sin, out_sharding=P("x"))),
        ("jax.sharding.reshard", jax.sharding.explicit_axes(jnp.sin, in_sharding=P("x"))),
        ("broadcast_in_dim", lambda x: jnp.zeros((8, 4), out_sharding=P("x"))),
        ("dot_general", lambda x: jnp.einsum("ab,cb->ac", x, x, out_sharding=P("x"))),
    ],
    ids=["reshard", "auto_axes", "explicit_axes", "zeros", "einsum"],
)
def test_explicit_axes_are_refused_where_they_split(what: str, fun: Callable[..., Any]):
    with jax.sharding.use_abstract_mesh(EXPLICIT), pytest.raises(ArgumentError, match=rf"{what} splits a value"):
        lowered(fun)


def test_sums_left_to_be_added_up_are_refused():
    def fun(x: Any) -> Any:
        return jnp.einsum("ab,ac->bc", x, x, out_sharding=P(unreduced={"x"}))

    shape = jax.ShapeDtypeStruct((8, 4), np.float32, sharding=NamedSharding(EXPLICIT, P("x")))
    traced = jax.jit(fun).trace
    with jax.sharding.use_abstract_mesh(EXPLICIT):
        (made,) = traced(shape).jaxpr.out_avals
        assert "unreduced" in str(made.sharding.spec)
        with pytest.raises(ArgumentError, match="argument x of fun is sharded over 4 devices"):
            lowered(fun, shape)


def test_meshes_of_one_device_are_no_meshes():
    mesh = jax.make_mesh((1,), ("x",))

    def fun(x: Any) -> Any:
        return jax.sharding.reshard(jnp.sin(x), P("x")) + jnp.ones((8, 4), out_sharding=P("x"))

    x = jax.device_put(X, NamedSharding(mesh, P("x")))
    with jax.set_mesh(mesh):
        np.testing.assert_allclose(lowered(fun, x).compile()(x), np.sin(X) + 1, rtol=2e-6)


@pytest.mark.parametrize("keyword", ["in_shardings", "out_shardings"])
def test_keywords_for_shardings_are_refused_with_those_for_replicas(keyword: str):
    with pytest.raises(ArgumentError, match=rf"'{keyword}'[\s\S]*try: {keyword[:-9]}specs= with replicas=N") as error:
        ipu.jit(jnp.sin, **{keyword: NamedSharding(AUTO, P("x"))})
    assert isinstance(error.value, TypeError)


def accumulated(b: Any) -> Any:
    start = lax.pcast(jnp.zeros(b.shape[1]), "d", to="varying")
    return lax.scan(lambda c, row: (c + row, None), start, b)[0]


def doubled_in_a_ref(b: Any) -> Any:
    ref = jax.new_ref(b)
    lax.fori_loop(0, 3, lambda _, __: ref.__setitem__(..., ref[...] * 2), None)
    return ref[...]


@pytest.mark.parametrize("fun", [accumulated, doubled_in_a_ref])
def test_loops_in_a_shard_map_carry_values_that_vary(fun: Any) -> None:
    x = np.arange(24, dtype=np.float32).reshape(4, 6)
    whole = jax.shard_map(fun, mesh=AbstractMesh((2,), ("d",)), in_specs=P("d"), out_specs=P("d"))
    run = ipu.jit(whole, device=ipu.IPUModel(2, tiles_per_ipu=16))
    parts = {accumulated: lambda x: x.sum(0), doubled_in_a_ref: lambda x: 8 * x}[fun]
    np.testing.assert_allclose(run(x), np.concatenate([parts(x[:2]), parts(x[2:])]))
