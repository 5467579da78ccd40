"""`ipu.jit` over replicas: split arguments and joined results, refusals, N replicas as good as one."""

from __future__ import annotations

from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training import train_state
from jax import lax
from jax.sharding import AbstractMesh, PartitionSpec as P

import ipujax as ipu
from ipujax.runtime.errors import ArgumentError, GraphError
from ipujax.runtime.graph.program import Collective
from ipujax.runtime.graph.walks import distinct

SPLIT = P("replica")
SAME = P()


def device(ipus: int = 4, tiles: int = 8, **changes: Any) -> ipu.IPUModel:
    return ipu.IPUModel(num_ipus=ipus, tiles_per_ipu=tiles, **changes)


def replicated(fun: Any, replicas: int = 4, in_specs: Any = SPLIT, out_specs: Any = SPLIT, **more: Any) -> Any:
    return ipu.jit(fun, device=device(replicas), replicas=replicas, in_specs=in_specs, out_specs=out_specs, **more)


# --- splitting and joining ---


def test_arguments_are_split_as_their_specs_say():
    x = np.arange(24.0, dtype=np.float32).reshape(4, 6)
    tree = {"a": np.arange(8), "b": [np.ones(3, np.float32)]}

    def fun(x: Any, tree: Any) -> Any:
        assert x.shape == (4, 3) and tree["a"].shape == (4,) and tree["b"][0].shape == (3,)
        return {"x": x * 2, "tree": jax.tree.map(lambda leaf: leaf + 1, tree)}

    specs = {"a": SPLIT, "b": SAME}
    run = replicated(fun, 2, (P(None, "replica"), specs), {"x": P(None, "replica"), "tree": specs})
    out = run(x, tree)
    np.testing.assert_array_equal(out["x"], x * 2)
    np.testing.assert_array_equal(out["tree"]["a"], tree["a"] + 1)
    np.testing.assert_array_equal(out["tree"]["b"][0], tree["b"][0] + 1)


@pytest.mark.parametrize("impl", ["rbg", "unsafe_rbg"])
def test_replicas_draw_from_their_own_keys(impl: str):
    """XLA's generator draws from the first key of a batch alone, and replicas are computed as a batch."""
    keys = jax.random.split(jax.random.key(7, impl=impl), 2)

    def fun(key: Any) -> Any:
        words = jax.random.key_data(key[0])
        return jax.random.bits(key[0], (1, 3)), lax.rng_bit_generator(words, (1, 3))[1]

    alone = [fun(keys[n : n + 1]) for n in range(2)]
    for where in (device(2), ipu.CPU()):
        results = ipu.jit(fun, device=where, replicas=2, in_specs=SPLIT, out_specs=SPLIT)(keys)
        for got, *expected in zip(results, *alone, strict=True):
            np.testing.assert_array_equal(got, np.concatenate(expected))


def test_keywords_statics_keys_and_no_arguments_at_all():
    def fun(x: Any, power: int, *, scale: Any, key: Any) -> Any:
        noise = jax.random.uniform(jax.random.fold_in(key, lax.axis_index("replica")), x.shape)
        return x**power * scale + noise

    x = np.arange(8.0, dtype=np.float32)
    key = jax.random.key(3)
    run = replicated(fun, static_argnums=(1,))
    noise = np.concatenate([jax.random.uniform(jax.random.fold_in(key, r), (2,)) for r in range(4)])
    np.testing.assert_allclose(run(x, 2, scale=np.float32(3), key=key), x**2 * 3 + noise, rtol=1e-6)
    np.testing.assert_array_equal(replicated(lambda: lax.axis_index("replica")[None], in_specs=())(), np.arange(4))


def test_one_replica_has_the_axis_too():
    x = np.arange(4.0, dtype=np.float32)
    np.testing.assert_array_equal(replicated(lambda x: lax.pmean(x, "replica"), 1)(x), x)
    assert ipu.jit(lambda x: x, device=device(1), replicas=1)(x).shape == (4,)


def test_donated_arguments_stay_on_the_device():
    def step(w: Any, x: Any) -> Any:
        return w - 0.1 * lax.pmean(x.sum(0), "replica"), x * 2

    run = replicated(step, in_specs=(SAME, SPLIT), out_specs=(SAME, SPLIT), donate_argnums=(0,))
    x = np.ones((8, 3), np.float32)
    w, _ = run(jnp.zeros(3), x)
    np.testing.assert_allclose(w, np.full(3, -0.2), rtol=1e-6)
    lowered = run.lower(w, x)
    assert lowered.planned.lowered.aliases == (0, None) and [s.broadcast for s in lowered.planned.lowered.inputs] == [
        True,
        False,
    ]


def test_transformations_of_a_replicated_function():
    x = np.arange(8.0, dtype=np.float32)
    loss = replicated(lambda x: lax.psum((x**2).sum(), "replica"), out_specs=SAME)
    np.testing.assert_allclose(jax.grad(loss)(x), 2 * x, rtol=1e-6)
    np.testing.assert_allclose(jax.vmap(loss)(np.stack([x, 2 * x])), [140, 560], rtol=1e-6)
    np.testing.assert_allclose(jax.jit(loss)(x), 140, rtol=1e-6)
    on_cpu = ipu.jit(lambda x: lax.pmax(x, "replica"), device=ipu.CPU(), replicas=4, in_specs=SPLIT, out_specs=SAME)
    np.testing.assert_array_equal(on_cpu(x), [6, 7])
    inner = ipu.jit(lambda x: x + lax.axis_index("replica"))
    np.testing.assert_array_equal(replicated(lambda x: inner(x) * 2)(np.zeros(4, np.int32)), [0, 2, 4, 6])


def test_functions_of_the_host_are_called_for_each_replica():
    recorded: list[float] = []

    def note(x: Any) -> np.ndarray:
        recorded.append(float(x))
        return np.float32(x * 10)

    def fun(x: Any) -> Any:
        return jax.pure_callback(note, jax.ShapeDtypeStruct((), np.float32), x[0])[None]

    np.testing.assert_array_equal(replicated(fun)(np.arange(4, dtype=np.float32)), [0, 10, 20, 30])
    assert recorded == [0, 1, 2, 3]


# --- None, which is a tree without leaves ---


class ScaledState(train_state.TrainState):
    """As flax's examples of training in half precision have it."""

    dynamic_scale: Any = None


DEVICES = [device(2), ipu.CPU()]


@pytest.mark.parametrize("on", DEVICES, ids=["model", "cpu"])
@pytest.mark.parametrize(
    ("in_specs", "out_specs"),
    [
        ((SAME, SPLIT, SAME), (SAME, SAME, SPLIT)),
        ((SAME, {"x": SPLIT, "y": None}, None), (None, SAME, {"x": SPLIT, "y": None})),
        ((SAME, {"x": SPLIT, "y": SAME}, SPLIT), (SPLIT, SAME, {"x": SPLIT, "y": SPLIT})),
    ],
    ids=["prefix", "mirrored", "specs for None"],
)
def test_none_among_arguments_and_results(on: Any, in_specs: Any, out_specs: Any):
    def fun(w: Any, batch: Any, mask: Any, *, key: Any = 1) -> Any:
        assert batch["y"] is mask is key is None
        return mask, lax.pmean(batch["x"].sum() * w, "replica"), {"x": batch["x"] + 1, "y": None}

    x = np.arange(8.0, dtype=np.float32)
    run = ipu.jit(fun, device=on, replicas=2, in_specs=in_specs, out_specs=out_specs)
    nothing, mean, tree = run(np.float32(2), {"x": x, "y": None}, None, key=None)
    assert nothing is None and tree["y"] is None and mean == 28
    np.testing.assert_array_equal(tree["x"], x + 1)


@pytest.mark.parametrize("on", DEVICES, ids=["model", "cpu"])
def test_a_partitioned_equinox_model_on_replicas(on: Any):
    params, static = eqx.partition(eqx.nn.MLP(3, 1, 4, 1, key=jax.random.key(0)), eqx.is_array)
    specs = jax.tree.map(lambda _: SAME, params)

    def step(params: Any, static_params: Any, x: Any) -> Any:
        assert jax.tree.leaves(static_params) == []
        grads = jax.grad(lambda params: jnp.mean(jax.vmap(eqx.combine(params, static))(x) ** 2))(params)
        return jax.tree.map(lambda p, g: p - 0.1 * lax.pmean(g, "replica"), params, grads), static_params

    x = np.ones((4, 3), np.float32)
    nothing = jax.tree.map(lambda _: None, params)
    expected = ipu.jit(step, device=ipu.CPU(), replicas=1, in_specs=SAME)(params, nothing, x)
    got = ipu.jit(step, device=on, replicas=2, in_specs=(specs, SAME, SPLIT), out_specs=(specs, SAME))(
        params, nothing, x
    )
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


@pytest.mark.parametrize("on", DEVICES, ids=["model", "cpu"])
def test_a_flax_state_without_a_dynamic_scale_on_replicas(on: Any):
    def apply_fn(params: Any, x: Any) -> Any:
        return x @ params["w"]

    state = ScaledState.create(apply_fn=apply_fn, params={"w": jnp.ones((3, 1))}, tx=optax.adam(0.1))

    def step(state: Any, x: Any) -> Any:
        grads = jax.grad(lambda params: jnp.mean(state.apply_fn(params, x) ** 2))(state.params)
        return state.apply_gradients(grads=lax.pmean(grads, "replica"))

    for specs in (SAME, jax.tree.map(lambda _: SAME, state)):
        run = ipu.jit(step, device=on, replicas=2, in_specs=(specs, SPLIT), out_specs=specs, donate_argnums=())
        got = run(state, np.ones((4, 3), np.float32))
        assert got.dynamic_scale is None and got.step == 1
        np.testing.assert_allclose(got.params["w"], np.full((3, 1), 0.9), rtol=1e-5)


# --- data-parallel training ---


def init(sizes: tuple[int, ...]) -> Any:
    keys = jax.random.split(jax.random.key(0), len(sizes))
    return [jax.random.normal(k, (a, b)) / a**0.5 for k, a, b in zip(keys, sizes[:-1], sizes[1:], strict=False)]


def forward(params: Any, x: Any, index: Any, key: Any) -> Any:
    """A network with dropout, whose masks depend on which example of the whole batch they are for."""
    for w in params[:-1]:
        x = jax.nn.gelu(x @ w)
        keys = jax.vmap(partial(jax.random.fold_in, key))(index)
        keep = jax.vmap(lambda k, n=x.shape[1]: jax.random.bernoulli(k, 0.8, (n,)))(keys)
        x = jnp.where(keep, x / 0.8, 0)
    return x @ params[-1]


def train_step(optimizer: Any, axis: str | None, params: Any, state: Any, x: Any, y: Any, index: Any, key: Any) -> Any:
    def loss(params: Any) -> Any:
        logits = forward(params, x, index, key)
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    value, grads = jax.value_and_grad(loss)(params)
    if axis is not None:
        value, grads = lax.pmean((value, grads), axis)
    updates, state = optimizer.update(grads, state, params)
    return optax.apply_updates(params, updates), state, value


@pytest.mark.parametrize("replicas", [2, 4])
def test_replicas_with_pmean_are_one_replica_on_the_whole_batch(replicas: int):
    optimizer = optax.adam(1e-2)
    rng = np.random.default_rng(replicas)
    x = rng.normal(size=(8, 6)).astype(np.float32)
    y = rng.integers(0, 5, 8)
    index = np.arange(8)
    key = jax.random.key(1)
    split = replicated(
        partial(train_step, optimizer, "replica"), replicas, (SAME, SAME, SPLIT, SPLIT, SPLIT, SAME), SAME
    )
    whole = jax.jit(partial(train_step, optimizer, None))
    ours = theirs = (init((6, 7, 5)), optimizer.init(init((6, 7, 5))))
    for step in range(20):
        k = jax.random.fold_in(key, step)
        *ours, loss = split(*ours, x, y, index, k)
        *theirs, expected = whole(*theirs, x, y, index, k)
        np.testing.assert_allclose(loss, expected, rtol=1e-6)


# --- jax.shard_map ---


def test_shard_map_over_a_mesh_keeps_its_meaning():
    mesh = AbstractMesh((2, 2), ("data", "model"))

    def inner(w: Any, x: Any) -> Any:
        def loss(w: Any) -> Any:
            hidden = lax.psum(x @ w, "model")
            return lax.pmean(jnp.mean(jnp.tanh(hidden) ** 2), "data")

        value, grad = jax.value_and_grad(loss)(w)
        return value, grad

    def fun(w: Any, x: Any) -> Any:
        specs = (P("model"), P("data", "model"))
        value, grad = jax.shard_map(inner, mesh=mesh, in_specs=specs, out_specs=(P(), P("model")))(w, x * 0.5)
        return value, grad, grad.sum()

    rng = np.random.default_rng(0)
    w = rng.normal(size=(6, 3)).astype(np.float32)
    x = rng.normal(size=(8, 6)).astype(np.float32)
    value, grad = jax.value_and_grad(lambda w: jnp.mean(jnp.tanh(x * 0.5 @ w) ** 2))(w)
    ours = ipu.jit(fun, device=device())(w, x)
    for got, expected in zip(ours, (value, grad, grad.sum()), strict=True):
        np.testing.assert_allclose(got, expected, rtol=2e-6, atol=1e-7)


def test_arguments_that_only_shard_map_splits_are_split_on_the_host():
    mesh = AbstractMesh((4,), ("x",))
    split = jax.shard_map(lambda x: x * lax.axis_index("x"), mesh=mesh, in_specs=P("x"), out_specs=P("x"))
    lowered = ipu.jit(split, device=device()).lower(np.ones(8, np.float32))
    assert lowered.planned.lowered.in_dims == (0,) and lowered.planned.lowered.out_dims == (0,)
    np.testing.assert_array_equal(lowered.compile()(np.ones(8, np.float32)), np.repeat(np.arange(4.0), 2))
    looped = ipu.jit(lambda xs: lax.scan(lambda c, x: (c + split(x).sum(), None), 0.0, xs)[0], device=device())
    np.testing.assert_allclose(looped(np.ones((3, 8), np.float32)), 36)


def test_shard_map_where_jax_checks_types():
    def doubled(x: Any) -> Any:
        return jax.pmap(lambda x: x * 2)(x)  # a shard_map, inside of which axes of the mesh are of another kind

    x = jax.pmap(lambda x: x)(np.ones(1, np.float32))
    with jax.enable_checks(True):
        np.testing.assert_array_equal(ipu.jit(doubled, device=device(1))(x), [2.0])


def test_shard_map_that_cannot_be():
    one, other = (AbstractMesh((n,), ("x",)) for n in (2, 4))

    def over(mesh: Any, x: Any) -> Any:
        return jax.shard_map(lambda x: x * 2, mesh=mesh, in_specs=P("x"), out_specs=P("x"))(x)

    x = np.ones(8, np.float32)
    with pytest.raises(GraphError, match="meshes of different sizes"):
        ipu.jit(lambda x: over(one, x) + over(other, x), device=device())(x)
    with pytest.raises(ArgumentError, match=r"AbstractMesh, which jax.jit cannot run either[\s\S]*ipu.IPUModel"):
        ipu.jit(partial(over, other), device=ipu.CPU())(x)
    with pytest.raises(ArgumentError, match="4 replicas do not fit 2 IPUs"):
        ipu.jit(partial(over, other), device=device(2))(x)


def test_results_of_fused_equations_differ_one_by_one():
    """One vertex computes a count, which is the same on all replicas, and quotients by it, which are not."""

    def step(count, x):
        count = count + 1.0
        return count, x / count

    count, quotients = ipu.jit(step, device=device(2), replicas=2, in_specs=(SAME, SPLIT), out_specs=(SAME, SPLIT))(
        np.float32(3.0), np.arange(2, dtype=np.float32)
    )
    assert (count, *quotients) == (4.0, 0.0, 0.25)


# --- what is refused ---

X = np.ones((8, 4), np.float32)


@pytest.mark.parametrize(
    ("settings", "fun", "match"),
    [
        ({"replicas": 0}, None, "replicas of ipu.jit"),
        ({"replicas": 2.0}, None, "replicas of ipu.jit"),
        ({"replicas": 8}, None, r"8 replicas do not fit 4 IPUs[\s\S]*num_ipus=8"),
        ({"replicas": 4, "in_specs": (P("data"),)}, None, "axes that do not exist"),
        ({"replicas": 4, "in_specs": ("replica",)}, None, "a tree of PartitionSpec"),
        ({"replicas": 4, "in_specs": (SPLIT, SPLIT)}, None, "in_specs of .* do not match"),
        ({"replicas": 4, "in_specs": P(None, None, "replica")}, None, "split dimension 2 of x, which does not exist"),
        ({"replicas": 4, "in_specs": SPLIT, "out_specs": SAME}, lambda x: x, r"result may differ between replicas"),
        (
            {"replicas": 4, "in_specs": SPLIT, "out_specs": {"a": SAME}},
            lambda x: {"a": (lax.psum(x, "replica"), x.sum() + 1)},
            r"result\['a'\]\[1\] may differ[\s\S]*at: test_replicas.py",
        ),
        ({"replicas": 4, "in_specs": SPLIT, "out_specs": SPLIT}, lambda x: x.sum(), "split dimension 0 of result"),
        ({"replicas": 4, "in_specs": SPLIT}, lambda x: lax.psum(x, "data"), "over the axis 'data'"),
        ({}, lambda x: lax.psum(x, "replica"), r"over the axis 'replica'[\s\S]*try: ipu.jit\(..., replicas=N"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_wrong_settings(settings: Any, fun: Any, match: str):
    with pytest.raises(ipu.IpuError, match=match):
        ipu.jit(fun or (lambda x: lax.pmean(x, "replica")), device=device(4), **settings)(X)


def test_a_batch_that_does_not_divide_is_named():
    with pytest.raises(
        ipu.IpuError, match=r"argument batch\['x'\] cannot be split over 4 replicas[\s\S]*float32\[6,4\]"
    ):
        replicated(lambda batch: batch["x"])({"x": X[:6]})


def test_an_inner_function_of_another_number_of_replicas():
    inner = ipu.jit(lambda x: x, replicas=2)
    with pytest.raises(ArgumentError, match="another number of replicas"):
        replicated(lambda x: inner(x))(X)


def test_an_axis_of_a_transformation_around_replicas_is_refused():
    with pytest.raises(ArgumentError, match=r"an axis of a transformation around it[\s\S]*at: test_replicas.py"):
        jax.vmap(replicated(lambda x: lax.psum(x, ("rows", "replica"))), axis_name="rows")(X[None])


# --- on paper ---


def test_only_collectives_cost_more_with_more_replicas():
    def work(x: Any) -> Any:
        return jnp.tanh(x @ x.T).sum(0)

    def profile(replicas: int, fun: Any) -> Any:
        x = jax.ShapeDtypeStruct((16 * replicas, 16), np.float32)
        on = device(replicas * 4)
        run = ipu.jit(fun, device=on, replicas=replicas, in_specs=SPLIT, out_specs=SPLIT)
        return run.lower(x).compile().profile

    alone = profile(1, work)
    for replicas in (4, 16):
        many = profile(replicas, work)
        assert many.phase_cycles == alone.phase_cycles
        np.testing.assert_array_equal(many.memory.tile_bytes, alone.memory.tile_bytes)
    meeting = profile(16, lambda x: work(lax.pmean(x, "replica")))
    assert meeting.phase_cycles["global_exchange"] > 0


# --- several IPUs a replica ---


def test_gradients_of_stages_are_summed_on_their_ipus():
    def loss(w: Any, x: Any) -> Any:
        with ipu.stage(0):
            h = jnp.tanh(x @ w[0])
        with ipu.stage(1):
            return jnp.mean((h @ w[1]) ** 2)

    def step(w: Any, x: Any) -> Any:
        value, grads = lax.pmean(jax.value_and_grad(loss)(w, x), "replica")
        return jax.tree.map(lambda p, g: p - 0.1 * g, w, grads), value

    rng = np.random.default_rng(0)
    w = [rng.normal(size=shape).astype(np.float32) for shape in ((6, 8), (8, 3))]
    x = rng.normal(size=(8, 6)).astype(np.float32)
    settings = {"replicas": 4, "in_specs": (SAME, SPLIT), "out_specs": SAME}
    run = ipu.jit(step, device=device(8), donate_argnums=(0,), **settings)
    compiled = run.lower(w, x).compile()
    (collective,) = [n for n in distinct(compiled.lowered.program) if isinstance(n, Collective)]
    graph = compiled.lowered.graph
    homes = [
        {int(t) // 8 for t in np.unique(_tiles(graph.mappings[v]))} for x in collective.inputs for v in x.variables()
    ]
    assert {frozenset(home) for home in homes} == {frozenset({0}), frozenset({1})}
    value, grads = jax.value_and_grad(loss)([jnp.asarray(p) for p in w], x)
    new, ours = run([jnp.asarray(p) for p in w], x)
    np.testing.assert_allclose(ours, value, rtol=2e-6)
    for p, g, n in zip(w, grads, new, strict=True):
        np.testing.assert_allclose(n, p - 0.1 * g, rtol=1e-5, atol=1e-6)


def _tiles(mapping: Any) -> np.ndarray:
    return mapping.tile if hasattr(mapping, "tile") else mapping.tiles


def test_one_value_summed_twice():
    x = np.arange(8.0, dtype=np.float32)
    twice = replicated(lambda x: (lax.psum(x, "replica"), lax.psum(x, "replica") + 1), out_specs=SAME)
    first, second = twice(x)
    np.testing.assert_array_equal(first, [12, 16])
    np.testing.assert_array_equal(second, [13, 17])


def test_the_profile_names_collectives():
    fun = replicated(lambda x: lax.pmean(x @ x.T, "replica"), out_specs=SAME)
    profile = fun.lower(np.ones((8, 3), np.float32)).compile().profile
    assert "Replicas:         4" in profile.summary(show_execution_steps=True)
    programs = profile.graph()["programs"]
    assert [p["name"] for p in programs if p["type"] == "Sequence" and "name" in p] == ["psum"]
    assert profile.phase_cycles["global_exchange"] > 0 and sum(profile.phase_cycles.values()) == profile.cycles


@pytest.mark.parametrize("statistics_first", [False, True])
def test_merged_sums_are_charged_to_the_line_with_most_bytes(statistics_first: bool):
    def centred(x: Any) -> Any:
        return x - lax.pmean(x.mean(0), "replica")

    def gradient(w: Any, x: Any) -> Any:
        return lax.pmean(jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w), "replica")

    def step(w: Any, x: Any) -> Any:
        order = sorted((centred, gradient), key=lambda part: (part is centred) != statistics_first)
        return {part.__name__: part(*((x,) if part is centred else (w, x))) for part in order}

    run = replicated(step, in_specs=(SAME, SPLIT), out_specs={"centred": SPLIT, "gradient": SAME})
    lowered = run.lower(np.ones((16, 32), np.float32), np.ones((8, 16), np.float32))
    (merged,) = [node for node in distinct(lowered.program) if isinstance(node, Collective)]
    (row,) = [row for row in lowered.compile().profile.operations() if row.phases.get("global_exchange")]
    assert len(merged.inputs) == 2 and row.origin.line.endswith("(gradient)")
    assert any("(centred)" in name for name in row.names), "the other line is in the name"


def test_three_replicas_leave_an_ipu_unused():
    run = ipu.jit(
        lambda x: lax.psum(x, "replica"), device=device(4), replicas=np.int64(3), in_specs=SPLIT, out_specs=SAME
    )
    np.testing.assert_array_equal(run(np.arange(6.0, dtype=np.float32)), [6, 9])
    with pytest.raises(ArgumentError, match=r"5 replicas do not fit 4 IPUs[\s\S]*num_ipus=8"):
        ipu.jit(lambda x: x, device=device(4), replicas=5)(np.ones(5))


@pytest.mark.parametrize("where", [device(4), ipu.CPU()], ids=["IPUs", "CPU"])
def test_refuses_casts_to_varying_by_line(where):
    run = ipu.jit(lambda x: lax.pcast(x, "replica", to="varying"), device=where, replicas=4, in_specs=SPLIT)
    with pytest.raises(ArgumentError, match=r"cannot cast a value by jax.lax.pcast[\s\S]*at: test_replicas.py"):
        run(X)


@pytest.mark.parametrize("where", [device(4), ipu.CPU()], ids=["IPUs", "CPU"])
def test_an_axis_there_is_not_is_named_with_those_there_are(where):
    run = ipu.jit(lambda x: lax.psum(x, "data"), device=where, replicas=4, in_specs=SPLIT)
    with pytest.raises(ArgumentError, match=r"axis 'data'[\s\S]*at: test_replicas.py[\s\S]*\"replica\""):
        run(X)
