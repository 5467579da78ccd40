"""Shardings under `ipu.jit`: of arguments, settings, constraints and types; those that are refused."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
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
    *("copies", "copies, explicit", "last device", "auto mesh is set", "explicit mesh is set", "replicas", "on CPU"),
    *("under jax.jit", "inside jax.jit", "static", "shard_map", "shard_map, auto mesh is set", "closed over"),
    "ratio of a sweep",
)
SPLIT = (
    *("argument", "argument, explicit", "keyword", "second call", "compiled", "in_shardings", "out_shardings"),
    *("constraint", "inner jit", "inner ipu.jit", "shapes"),
)
TERMS = (
    *("of a whole value", "of a split value", "gradient of a sum", "gradient of a split", "counts"),
    *("reduced, by a number", "reduced, moved", "reduced, product", "reduced, in a loop", "reduced, beside a split"),
    *("reduced, unused", "one device", "one device, moved", "one device, split inside", "one device, dimension added"),
)
REFUSED = {
    "replicas": "argument x of sine is sharded over 4 devices",
    "a Ref": "argument ref of <lambda> is sharded over 4 devices",
    "a Ref closed over": "a jax.Ref that <lambda> takes from outside is sharded over 4 devices",
    "compiled for one IPU": "argument x of sine is sharded over 4 devices",
    "compiled otherwise": r"argument x of sine has another sharding than the compiled program",
    "another mesh": r"one program has shardings over different meshes[\s\S]*one: 1, x: 4[\s\S]*y: 4",
    "in_shardings differ": r"has another sharding than in_shardings[\s\S]*P\(None, 'x'\) over",
}


@pytest.mark.parametrize("name", [*(f"whole: {name}" for name in WHOLE), *(f"split: {name}" for name in SPLIT)])
def test_arrays_have_the_numbers_of_jax(outcomes: dict[str, Any], name: str):
    x = np.arange(32, dtype=np.float32).reshape(8, 4)
    np.testing.assert_allclose(outcomes[name].get("result", outcomes[name]), np.sin(x), rtol=2e-6)


@pytest.mark.parametrize("name", SPLIT)
def test_results_are_on_the_devices_of_the_mesh(outcomes: dict[str, Any], name: str):
    assert outcomes[f"split: {name}"]["devices"] == 4


@pytest.mark.parametrize("name", REFUSED)
def test_arrays_of_several_devices_that_nothing_partitions_are_refused(outcomes: dict[str, Any], name: str):
    assert re.search(REFUSED[name], outcomes[name]["error"])


@pytest.mark.parametrize("name", TERMS)
def test_devices_have_the_terms_of_jax_of_sums_that_are_left_to_be_taken(outcomes: dict[str, Any], name: str):
    assert outcomes[f"terms: {name}"] is True


def test_every_call_of_the_script_is_looked_at(outcomes: dict[str, Any]):
    groups = {"whole": WHOLE, "split": SPLIT, "terms": TERMS}
    assert set(outcomes) == {*REFUSED, *(f"{group}: {name}" for group, names in groups.items() for name in names)}


# --- shardings inside of a function, over meshes without devices ---


def on_four(fun: Callable[..., Any], *args: Any, **settings: Any) -> ipu.Compiled:
    return ipu.jit(fun, device=ipu.IPUModel(num_ipus=4, tiles_per_ipu=8), **settings).lower(*args or [X]).compile()


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
def test_constraints_partition(fun: Callable[..., Any]):
    compiled = on_four(fun)
    assert compiled.profile.replicas == 4
    np.testing.assert_allclose(compiled(X), fun(X) if "pipeline" in str(fun) else jax.jit(fun)(X), rtol=1e-6)


def test_each_replica_has_a_mesh():
    settings = {"replicas": 2, "in_specs": P("replica"), "out_specs": P("replica")}
    with pytest.raises(ipu.GraphError, match=r"larger than the device[\s\S]*4 devices of the mesh, 2 replicas"):
        lowered(split, **settings)
    fun = ipu.jit(lambda x: split(x) @ x.T, device=ipu.IPUModel(num_ipus=8, tiles_per_ipu=8), **settings)
    compiled = fun.lower(X).compile()
    assert compiled.profile.replicas == 8
    np.testing.assert_allclose(compiled(X), np.concatenate([X[:4] @ X[:4].T, X[4:] @ X[4:].T]), rtol=1e-6)


def test_axes_of_a_mesh_have_other_names_than_the_replicas():
    mesh = AbstractMesh((2,), ("replica",), (AxisType.Auto,))
    with pytest.raises(ArgumentError, match=r"same name as the replicas[\s\S]*test_shardings\.py"):
        lowered(lambda x: constrained(x, P("replica"), mesh), replicas=2, in_specs=P("replica"), out_specs=P("replica"))


def test_shardings_of_results_are_known_without_devices():
    compiled = on_four(lambda x: (x.T, x.sum()), in_shardings=NamedSharding(AUTO, P("x")))
    assert [sharding.spec for sharding in compiled.output_shardings] == [P(None, "x"), P()]
    (sharding,), _ = compiled.input_shardings
    assert sharding.spec == P("x")
    with pytest.raises(AttributeError, match="only for functions that shardings partition"):
        _ = lowered(jnp.sin).compile().output_shardings


def test_the_choice_is_printed():
    settings = {"in_shardings": (NamedSharding(AUTO, P(None, "x")), NamedSharding(AUTO, P("x")))}
    fun = ipu.jit(lambda x, w: x @ w, device=ipu.IPUModel(num_ipus=4, tiles_per_ipu=8), **settings)
    lines = fun.lower(X, X[:4]).shardings().splitlines()
    assert lines[:4] == [
        "a mesh of one: 1 (Auto), x: 4 (Auto)",
        "argument x: P(None, 'x')",
        "argument w: P('x',)",
        "result 0: P()",
    ]
    assert re.match(r"all_reduce over x: 128 B of each IPU, for dot_general at test_shardings.py:\d+", lines[4])


def test_explicit_types_partition():
    mesh = ipu.make_mesh((1, 4), ("one", "x"))

    def fun(x: Any) -> Any:
        return jnp.einsum("ab,cb->ac", x, x, out_sharding=P("x")) + jnp.zeros((8, 8), out_sharding=P("x"))

    shape = jax.ShapeDtypeStruct((8, 4), np.float32, sharding=NamedSharding(mesh, P("x")))
    compiled = on_four(fun, shape)
    assert compiled.output_shardings.spec == P("x", None)
    np.testing.assert_allclose(compiled(X), X @ X.T, rtol=1e-6)


def test_specs_need_a_mesh_that_is_set():
    with pytest.raises(ArgumentError, match=r"has a PartitionSpec, and no mesh is set[\s\S]*ipu.make_mesh"):
        on_four(jnp.sin, in_shardings=P("x"))
    with jax.sharding.use_abstract_mesh(AUTO):
        assert on_four(jnp.sin, in_shardings=P("x")).output_shardings.spec == P("x")
        with pytest.raises(ArgumentError, match="in_shardings of sin"):
            on_four(jnp.sin, in_shardings=P("y"))


def test_meshes_larger_than_the_device_are_refused():
    with pytest.raises(ipu.GraphError, match=r"x: 4, which is larger than the device[\s\S]*num_ipus=4"):
        lowered(split)


@pytest.mark.parametrize(
    ("fun", "settings"),
    [
        (jnp.sin, {"in_shardings": NamedSharding(AUTO, P("x"))}),
        (jnp.sin, {"out_shardings": NamedSharding(AUTO, P("x"))}),
        (split, {}),
        (lambda x: lax.scan(lambda c, _: (split(c), None), x, None, length=2)[0], {}),
    ],
    ids=["in_shardings", "out_shardings", "constraint", "constraint in a loop"],
)
def test_dimensions_that_do_not_divide_are_refused_in_the_words_of_jax(fun: Any, settings: Any):
    with pytest.raises(ArgumentError, match=r"dimension 0 should be divisible by 4, but .*6[\s\S]*test_shardings\.py"):
        on_four(fun, np.ones(6, np.float32), **settings)


def test_unequal_blocks_are_refused_by_argument_shape_axis_and_remedy():
    def scaled(scale: Any, batch: Any) -> Any:
        return scale * batch["x"]

    with pytest.raises(ArgumentError) as caught:
        on_four(
            scaled, np.float32(2), {"x": np.ones((6, 8), np.float32)}, in_shardings=(None, NamedSharding(AUTO, P("x")))
        )
    text = str(caught.value)
    for part in (
        "argument batch['x'] of scaled",
        "shape (6, 8)",
        "mesh axis 'x' (4)",
        "8 elements there, as of jnp.pad",
    ):
        assert part in text


def test_unequal_blocks_of_a_function_of_jax_jit_inside_are_refused():
    inner = jax.jit(jnp.sin, in_shardings=NamedSharding(AUTO, P("x")))
    with pytest.raises(ArgumentError, match=r"calls a function of jax.jit .* dimension 0 should be divisible by 4"):
        on_four(lambda x: inner(x) * 2, np.ones(6, np.float32))


@pytest.mark.parametrize("setting", ["in_shardings", "out_shardings"])
def test_shardings_have_no_more_dimensions_than_their_array(setting: str):
    with pytest.raises(ArgumentError, match="has fewer dimensions than its sharding"):
        on_four(jnp.sin, **{setting: NamedSharding(AUTO, P(None, None, "x"))})


def mapped(mesh: Any, axis: str, **settings: Any) -> Any:
    return jax.shard_map(lambda x: 2 * x, mesh=mesh, in_specs=P(axis), out_specs=P(axis), **settings)


@pytest.mark.parametrize(
    ("fun", "words"),
    [
        (lambda x: mapped(AbstractMesh((4,), ("y",)), "y")(split(x)), "over another mesh.*x: 4.*y: 4"),
        (lambda x: mapped(AbstractMesh((2, 2), ("x", "y")), "x", axis_names={"x"})(x), "leaves axes of its mesh to"),
        (lambda x: constrained(split(x), P("y"), AbstractMesh((4,), ("y",))), "different meshes.*x: 4.*y: 4"),
    ],
    ids=["shard_map over another mesh", "axes left to the compiler", "constraints over two meshes"],
)
def test_meshes_that_do_not_fit_together_are_refused_with_their_line(fun: Callable[..., Any], words: str):
    with pytest.raises(ipu.GraphError, match=rf"(?s){words}") as refused:
        on_four(fun)
    assert re.search(r"at: test_shardings\.py:\d+", str(refused.value))


def test_conflicts_of_automatic_axes_are_decided_by_cycles_and_printed():
    settings = {"in_shardings": (NamedSharding(AUTO, P("x")), NamedSharding(AUTO, P(None, "x")))}
    fun = ipu.jit(lambda x, y: x + y, device=ipu.IPUModel(num_ipus=4, tiles_per_ipu=8), **settings)
    *_, move, conflict = fun.lower(X, X).shardings().splitlines()
    assert re.match(
        r"all_to_all over x: 32 B of each IPU, for add at test_shardings.py:\d+.*P\(None, 'x'\) to P\('x',\)", move
    )
    actual = re.match(
        r"conflict in add at test_shardings.py:\d+ .*: its result as P\('x',\) costs ([\d,]+) cycles,"
        r" P\(None, 'x'\) costs ([\d,]+) cycles, P\(\) costs ([\d,]+) cycles",
        conflict,
    )
    assert actual is not None
    cycles = [int(text.replace(",", "")) for text in actual.groups()]
    assert cycles == sorted(cycles)


def accumulating(w: Any, x: Any, *, stages: bool) -> Any:
    def loss(w: Any, x: Any) -> Any:
        with ipu.stage(0):
            h = jnp.tanh(constrained(x, P("x"), AbstractMesh((2,), ("x",), (AxisType.Auto,))) @ w)
        with ipu.stage(int(stages)):
            return ((h @ w) ** 2).mean()

    return lax.fori_loop(0, 2, lambda _, w: w - 0.1 * ipu.pipeline(jax.grad(loss), micro_batches=2)(w, x), w)


def test_pipelines_in_loops_are_partitioned_without_stages_and_refused_with_some():
    w = np.eye(4, dtype=np.float32)
    x = np.linspace(0, 1, 32, dtype=np.float32).reshape(8, 4)
    compiled = on_four(partial(accumulating, stages=False), w, x)
    assert {move.step.kind for move in compiled.partitioning.notes.moves} == {"all_reduce"}
    np.testing.assert_allclose(compiled(w, x), jax.jit(partial(accumulating, stages=False))(w, x), rtol=1e-6)
    with pytest.raises(ArgumentError, match=r"a pipeline with stages is inside a scan[\s\S]*one iteration of the loop"):
        on_four(partial(accumulating, stages=True), w, x)


def test_shardings_beside_replicas_are_refused():
    with pytest.raises(ArgumentError, match="shardings beside replicas"):
        ipu.jit(jnp.sin, replicas=2, in_shardings=NamedSharding(AUTO, P("x")))


def test_other_in_shardings_leave_out_shardings_as_they_are():
    rows, columns = (NamedSharding(AUTO, spec) for spec in (P("x"), P(None, "x")))
    settings = {"device": ipu.IPUModel(num_ipus=4, tiles_per_ipu=8), "in_shardings": rows, "out_shardings": rows}
    changed = ipu.jit(lambda x: x * 2, **settings).with_options(in_shardings=columns)
    (result,) = jax.tree.leaves(changed.lower(X).compile().output_shardings)
    assert result.spec == P("x")


def test_meshes_need_a_size_for_each_name():
    assert ipu.make_mesh((2, 4), ("data", "model")).shape == {"data": 2, "model": 4}
    with pytest.raises(ArgumentError, match=r"ipu\.make_mesh needs a size"):
        ipu.make_mesh((2,), ("data", "model"))


def test_meshes_of_one_device_are_no_meshes():
    mesh = jax.make_mesh((1,), ("x",))

    def fun(x: Any) -> Any:
        return jax.sharding.reshard(jnp.sin(x), P("x")) + jnp.ones((8, 4), out_sharding=P("x"))

    x = jax.device_put(X, NamedSharding(mesh, P("x")))
    with jax.set_mesh(mesh):
        np.testing.assert_allclose(lowered(fun, x).compile()(x), np.sin(X) + 1, rtol=2e-6)


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
    full = jax.shard_map(fun, mesh=AbstractMesh((2,), ("d",)), in_specs=P("d"), out_specs=P("d"))
    run = ipu.jit(full, device=ipu.IPUModel(2, tiles_per_ipu=16))
    parts = {accumulated: lambda x: x.sum(0), doubled_in_a_ref: lambda x: 8 * x}[fun]
    np.testing.assert_allclose(run(x), np.concatenate([parts(x[:2]), parts(x[2:])]))
