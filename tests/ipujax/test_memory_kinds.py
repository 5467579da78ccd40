"""Memory kinds: arrays on the host, as `pinned_host`, have the numbers and kinds of `jax.jit`, and are streamed."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.experimental.compute_on import compute_on
from jax.sharding import AbstractMesh, PartitionSpec as P

import ipujax as ipu
from ipujax.runtime.interpreter.interpreter import interpret
from tests.ipujax.memory_kind_cases import (
    CASES,
    OFFLOADING,
    POLICIES,
    SAVING,
    SPLIT,
    array,
    assert_same,
    copied,
    device,
    double,
    get,
    held,
    is_key,
    kind,
    layer,
    layers_loss,
    loop_loss,
    moves,
    on_host,
    put,
    shape,
)


@pytest.mark.parametrize("replicas", [None, 2])
def test_results_are_stored_where_out_shardings_say(replicas: int | None) -> None:
    host = jax.NamedSharding(jax.make_mesh((1,), ("x",)), P(), memory_kind="pinned_host")
    specs = {} if replicas is None else {"replicas": replicas, "in_specs": P("replica"), "out_specs": P("replica")}
    out_shardings = {"kept": host, "sent": None}

    def results(x: Any) -> Any:
        return {"kept": [x * 2, x + 1], "sent": x * x}

    x = np.ones((8, 8), np.float32)
    jitted = ipu.jit(results, device=device(replicas or 1), out_shardings=out_shardings, **specs)
    expected = jax.jit(results, out_shardings=out_shardings)(x)
    assert_same(jitted(x), expected)
    assert_same(jitted.with_options(device=ipu.CPU())(x), expected)
    assert jitted.profile(x).streaming_memory_bytes == 2 * x.nbytes // (replicas or 1)


@pytest.mark.parametrize(
    ("inner_device", "outer_jit"),
    [(device(), jax.jit), (device(), partial(ipu.jit, device=device())), (ipu.CPU(), jax.jit)],
)
def test_out_shardings_of_a_function_inside_another_store_nothing(inner_device: Any, outer_jit: Any) -> None:
    """As in JAX: the result can be added to values of the outer function."""
    host = jax.NamedSharding(jax.make_mesh((1,), ("x",)), P(), memory_kind="pinned_host")

    def adding(jit: Any) -> Any:
        inner = jit(jnp.sin, out_shardings=host)
        return lambda x: inner(x) + x

    x = np.ones(4, np.float32)
    assert_same(outer_jit(adding(partial(ipu.jit, device=inner_device)))(x), jax.jit(adding(jax.jit))(x))


@pytest.mark.parametrize("name", CASES)
def test_numbers_and_kinds_are_those_of_jax(name: str) -> None:
    case = CASES[name]
    args = CASES[name].args()
    jitted = ipu.jit(case.fun, device=device(), **case.settings)
    expected = jax.jit(case.fun)(*copied(args))  # donated across memories, jaxlib 0.10 ends the process
    assert_same(jitted(*copied(args)), expected)
    lowered = jitted.lower(*args)
    if case.streams is not None:
        assert lowered.compile().profile.streaming_memory_bytes == case.streams
    if case.moves is not None:
        assert moves(lowered) == case.moves


@pytest.mark.parametrize("name", CASES)
def test_numbers_with_exact_splits_and_of_the_tile_interpreter(name: str) -> None:
    case = CASES[name]
    args = CASES[name].args()
    expected = jax.jit(case.fun)(*copied(args))
    exact = ipu.jit(case.fun, device=device(), options=ipu.Options(exact_splits=True))
    assert_same(exact(*copied(args)), expected)
    lowered = ipu.jit(case.fun, device=device(tiles_per_ipu=4)).lower(*args)

    def run(inputs: Any) -> Any:
        return interpret(lowered.graph, lowered.program, {s: np.asarray(x) for s, x in inputs.items()}, seed=3)

    if not any(map(is_key, jax.tree.leaves(args))):
        actual = lowered.planned.lowered.evaluate([get(x) for x in jax.tree.leaves(args)], run)
        for x, y in zip(actual, jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(np.asarray(x, np.float32), np.asarray(y, np.float32), rtol=1e-4, atol=1e-5)


# --- machines ---------------------------------------------------------------------------------------------------------


def loss(params: Any, x: jax.Array, stage: Any = ipu.stage) -> jax.Array:
    with stage(0):
        y = jnp.tanh(x @ params["a"])
    with stage(1):
        return jnp.mean((y @ params["b"]) ** 2)


def whole_loss(params: Any, x: jax.Array) -> jax.Array:
    return loss(params, x, lambda _: nullcontext())


def offloading_loss(params: Any, x: jax.Array, part: Any = ipu.stage) -> jax.Array:
    with part(0):
        y = layer(OFFLOADING)(params["a"], x)
    with part(1):
        return jnp.mean((y @ params["b"]) ** 2)


def trained(gradient: Callable[..., Any], reduce: Callable[..., Any] = lambda x: x) -> Callable[..., Any]:
    """A training step with momentum that is on the host."""

    def step(params: Any, momentum: Any, x: jax.Array) -> Any:
        value, grads = reduce(gradient(params, x))
        momentum = jax.tree.map(lambda m, g: 0.9 * m + g, get(momentum), grads)
        return jax.tree.map(lambda p, m: p - 0.1 * m, params, momentum), put(momentum), value

    return step


def training() -> tuple[Any, Any, jax.Array]:
    params = {"a": array(6, 8), "b": array(8, 4)}
    return params, put(jax.tree.map(jnp.zeros_like, params)), array(8, 6)


def mean(tree: Any) -> Any:
    return lax.pmean(tree, "replica")


def batches(gradient: Callable[..., Any], **settings: Any) -> Callable[..., Any]:
    return ipu.pipeline(gradient, micro_batches=4, **settings)


ONE = jax.value_and_grad(whole_loss)
REPLICAS = {"replicas": 2, "in_specs": (P(), P(), SPLIT), "out_specs": P()}
MACHINES: dict[str, tuple[Callable[..., Any], int, dict[str, Any], int]] = {
    "one IPU": (trained(ONE), 1, {}, 320),
    "beside offloaded parameters": (trained(ONE), 1, {"offload_argnums": 0}, 640),
    "offloaded in both ways": (trained(ONE), 1, {"offload_argnums": (0, 1)}, 640),
    "I/O tiles": (trained(ONE), 1, {"options": ipu.Options(io_tiles=4)}, 320),
    "stages": (trained(jax.value_and_grad(loss)), 2, {}, 320),
    "stages that offload": (trained(jax.value_and_grad(offloading_loss)), 2, {}, 576),
    "pipeline": (trained(batches(jax.value_and_grad(loss))), 2, {}, 320),
    "pipeline whose stages are found": (trained(batches(ONE, stages=2)), 2, {}, 320),
    "accumulation": (trained(batches(ONE)), 1, {}, 320),
    "accumulation that offloads": (
        trained(batches(jax.value_and_grad(lambda p, x: offloading_loss(p, x, lambda _: nullcontext())))),
        1,
        {},
        384,
    ),
    "phases": (trained(jax.value_and_grad(lambda p, x: offloading_loss(p, x, ipu.phase))), 1, {}, 0),
    "phases that take turns": (trained(jax.value_and_grad(lambda p, x: offloading_loss(p, x, ipu.phase))), 2, {}, 0),
}


@pytest.mark.parametrize("name", MACHINES)
def test_training_steps(name: str) -> None:
    step, num_ipus, settings, streams = MACHINES[name]
    args = training()
    jitted = ipu.jit(step, device=device(num_ipus), donate_argnums=(0, 1), **settings)
    expected = copied(args)
    got = copied(args)
    reference = jax.jit(step, donate_argnums=(0, 1))
    for _ in range(2):
        got = (*jitted(*got)[:2], array(8, 6))
        expected = (*reference(*expected)[:2], array(8, 6))
        assert_same(got, expected)
    profile = jitted.lower(*args).compile().profile
    assert profile.streaming_memory_bytes == streams if streams else profile.streaming_memory_bytes > 640


@pytest.mark.parametrize("machine", [pytest.param(device(2), id="IPUs"), pytest.param(ipu.CPU(), id="CPU")])
def test_replicas(machine: Any) -> None:
    args = training()
    jitted = ipu.jit(trained(ONE, mean), device=machine, donate_argnums=(0, 1), **REPLICAS)
    assert_same(jitted(*copied(args)), jax.jit(trained(ONE))(*args))

    def update(state: Any, x: jax.Array) -> Any:
        return put(get(state) * 2 + x)

    split = ipu.jit(update, device=machine, replicas=2, in_specs=SPLIT, out_specs=SPLIT)
    assert_same(split(held(8, 3), array(8, 3)), jax.jit(update)(held(8, 3), array(8, 3)))


@pytest.mark.parametrize("donated", ((), (0,)))
@pytest.mark.parametrize("inside", (False, True))
def test_shard_map(inside: bool, donated: tuple[int, ...]) -> None:
    mesh = AbstractMesh((2,), ("x",))
    specs = {"in_specs": (P("x"), P("x")), "out_specs": P("x")}

    def fun(h: jax.Array, w: jax.Array) -> jax.Array:
        if inside:
            return jax.shard_map(lambda h, w: put(get(h) * 2 + w), mesh=mesh, **specs)(h, w)
        return put(jax.shard_map(lambda h, w: h * 2 + w, mesh=mesh, **specs)(get(h), w))

    jitted = ipu.jit(fun, device=device(2), donate_argnums=donated)
    assert_same(jitted(held(8, 3), array(8, 3)), put(get(held(8, 3)) * 2 + array(8, 3)))


@pytest.mark.parametrize("fetch_inside", (False, True))
def test_parameters_of_a_pipeline_that_are_on_the_host(fetch_inside: bool) -> None:
    def forward(params: Any, x: jax.Array) -> jax.Array:
        if fetch_inside:
            return batches(lambda p, x: loss(get(p), x))(params, x)
        return batches(loss)(get(params), x)

    params, _, x = training()
    jitted = ipu.jit(forward, device=device(2))
    assert_same(jitted(put(params), x), jax.jit(forward)(put(params), x))
    assert jitted.lower(put(params), x).compile().profile.streaming_memory_bytes == 320


def test_refuses_offloading_in_a_pipeline_with_stages() -> None:
    params, _, x = training()
    step = ipu.jit(batches(jax.value_and_grad(offloading_loss)), device=device(2))
    with pytest.raises(ipu.IpuError, match=r"(?s)put on the host inside a stage.*test_memory_kinds"):
        step(params, x)


@pytest.mark.parametrize("mode", ("all", "standard", "auto"))
def test_recomputation_leaves_values_offloaded(mode: str) -> None:
    args = [array(4, 4, seed=n) for n in range(3)], array(2, 4)
    step = jax.grad(layers_loss(OFFLOADING))
    jitted = ipu.jit(step, device=device(), options=ipu.Options(recompute=mode))
    assert_same(jitted(*args), jax.jit(step)(*args))
    assert moves(jitted.lower(*args))["remote_put"] == 3


def test_optax_state_on_the_host() -> None:
    optimizer = optax.adam(0.01)

    def step(params: Any, state: Any, x: jax.Array) -> Any:
        updates, state = optimizer.update(jax.grad(whole_loss)(params, x), get(state), params)
        return optax.apply_updates(params, updates), put(state)

    params, _, x = training()
    state = put(optimizer.init(params))
    jitted = ipu.jit(step, device=device(), donate_argnums=(0, 1))
    assert_same(jitted(*copied((params, state)), x), jax.jit(step)(params, state, x))
    lowered = jitted.lower(params, state, x)
    assert moves(lowered) == {"remote_load": 4, "remote_store": 4}
    assert lowered.compile().profile.streaming_memory_bytes == 640


# --- profiles ---------------------------------------------------------------------------------------------------------


def test_shapes_on_the_host_are_streamed() -> None:
    jitted = ipu.jit(lambda h, w: put(get(h) + w), donate_argnums=0)
    lowered = jitted.lower(on_host(256, 256), shape(256, 256))
    assert lowered.compile().profile.streaming_memory_bytes == 256 * 256 * 4
    assert moves(lowered) == {"remote_load": 1, "remote_store": 1}
    assert_same(lowered.compile()(held(256, 256), array(256, 256)), put(array(256, 256) * 2))


@pytest.mark.parametrize(
    ("loss_of", "weights"),
    [
        pytest.param(layers_loss, [shape(64, 64)] * 8, id="layers"),
        pytest.param(loop_loss, shape(8, 64, 64), id="loop"),
    ],
)
def test_offloading_policies_save_tile_memory_and_cost_cycles(loss_of: Callable[..., Any], weights: Any) -> None:
    saved, offloaded = (
        ipu.jit(jax.grad(loss_of(policy)), device=device()).lower(weights, shape(512, 64)).compile().profile
        for policy in (SAVING, OFFLOADING)
    )
    assert (saved.streaming_memory_bytes, offloaded.streaming_memory_bytes) == (0, 8 * 512 * 64 * 4)
    assert offloaded.memory.max_tile_bytes < saved.memory.max_tile_bytes - 4 * 512 * 64 * 4 // 16
    assert offloaded.phase_cycles["host_exchange"] > saved.phase_cycles["host_exchange"]
    assert offloaded.cycles > saved.cycles


def test_values_on_the_host_take_no_tile_memory() -> None:
    def step(h: jax.Array, w: jax.Array) -> Any:
        w = jnp.tanh(w) @ w
        return put(get(h) * 2), w @ w

    args = on_host(256, 256), shape(64, 64)
    there = ipu.jit(step, device=device(), donate_argnums=0).lower(*args).compile().profile
    here = ipu.jit(lambda h, w: (h * 2, step(h, w)[1]), device=device(), donate_argnums=0)
    kept = here.lower(shape(256, 256), shape(64, 64)).compile().profile
    assert there.streaming_memory_bytes == 256 * 256 * 4 and kept.streaming_memory_bytes == 0
    loop = ipu.jit(lambda h, x: lax.scan(lambda x, w: (x @ get(w), None), x, h)[0], device=device())
    layers = loop.lower(on_host(64, 64, 64), shape(16, 64)).compile().profile
    assert layers.streaming_memory_bytes == 64**3 * 4 > 16 * layers.memory.max_tile_bytes


def test_rows_of_layers_that_a_loop_in_python_reads_are_loaded_one_by_one() -> None:
    def forward(h: jax.Array, x: jax.Array) -> jax.Array:
        for number in range(3):
            x = jnp.tanh(x @ get(h[number]))
        return x

    jitted = ipu.jit(forward, device=device())
    assert_same(jitted(held(3, 4, 4), array(2, 4)), jax.jit(forward)(held(3, 4, 4), array(2, 4)))
    text = jitted.lower(held(3, 4, 4), array(2, 4)).as_text(after="offload")
    assert re.findall(r"f32\[([\d,]+)\] = remote_load", text) == ["1,4,4"] * 3


# --- what is refused, or named ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("machine", [pytest.param(device(), id="IPU"), pytest.param(ipu.CPU(), id="CPU")])
@pytest.mark.parametrize(
    "fun",
    [
        pytest.param(lambda h, w: h + w, id="sum"),
        pytest.param(lambda h, w: w @ h, id="product"),
        pytest.param(lambda h, w: h[jnp.array([1, 2])], id="rows"),
        pytest.param(jax.grad(lambda h, w: (get(put(w * 2)) ** 2).sum(), argnums=1), id="gradient"),
    ],
)
def test_errors_of_jax_about_memories_are_ours(fun: Callable[..., Any], machine: Any) -> None:
    args = held(4, 4), array(4, 4)
    with pytest.raises(ValueError):
        jax.jit(fun)(*args)
    with pytest.raises(ipu.IpuError, match=r"(?s)mixes values on the host and on the device.*host>.*Space.Device"):
        ipu.jit(fun, device=machine)(*args)


def test_errors_of_jax_about_memories_are_ours_when_lowering() -> None:
    with pytest.raises(ipu.IpuError, match="mixes values on the host and on the device"):
        ipu.jit(lambda h, w: h + w, device=device()).lower(on_host(4), shape(4))


WITHOUT_EFFECT: dict[str, tuple[Callable[[Any], Any], str]] = {
    "unpinned": (lambda x: jax.device_put(x * 2, kind("unpinned_host")), "puts a value to 'unpinned_host'"),
    "computing": (lambda x: compute_on("device_host")(jax.jit(jnp.sin))(x) + 1, "asks to compute on 'device_host'"),
    "constraint": (
        lambda x: lax.with_sharding_constraint(x * 2, kind("pinned_host")),
        "asks for 'pinned_host' by the sharding of sharding_constraint",
    ),
    "function inside": (
        lambda x: jax.jit(jnp.sin, out_shardings=kind("unpinned_host"))(x),
        "asks for 'unpinned_host' by the sharding of jit",
    ),
}


@pytest.mark.parametrize("name", WITHOUT_EFFECT)
def test_memory_kinds_without_effect_are_named_once(name: str, caplog: pytest.LogCaptureFixture) -> None:
    fun, words = WITHOUT_EFFECT[name]
    with caplog.at_level(logging.WARNING):
        assert_same(ipu.jit(fun, device=device())(array(4, 3)), jax.jit(fun)(array(4, 3)))
    assert caplog.text.count(words) == 1 and "test_memory_kinds.py" in caplog.text


def test_memory_kinds_with_an_effect_are_not_named(caplog: pytest.LogCaptureFixture) -> None:
    def fun(ws: Any, h: jax.Array) -> Any:
        x = lax.with_sharding_constraint(get(h) * 2, kind("device"))
        return put(jax.jit(jnp.sin, out_shardings=kind("device"))(x)), jax.grad(layers_loss(OFFLOADING))(ws, x)

    args = [array(4, 4), array(4, 4, seed=1)], held(2, 4)
    with caplog.at_level(logging.WARNING):
        assert_same(ipu.jit(fun, device=device())(*args), jax.jit(fun)(*args))
    assert not caplog.text


def test_arguments_in_unpinned_memory() -> None:
    given = jax.device_put(array(4, 3), kind("unpinned_host"))
    assert_same(ipu.jit(lambda x: x * 2, device=device())(given), jax.jit(lambda x: x * 2)(given))


# --- policies ---------------------------------------------------------------------------------------------------------


def offloading(dst: Any, src: str = "device") -> Any:
    return POLICIES.save_and_offload_only_these_names(
        names_which_can_be_saved=[], names_which_can_be_offloaded=["pre"], offload_src=src, offload_dst=dst
    )


REFUSED: dict[str, tuple[Any, str]] = {
    "unpinned": (offloading("unpinned_host"), "offload_dst='unpinned_host'"),
    "no kind": (offloading("nonsense"), "offload_dst='nonsense'"),
    "no string": (offloading(None), "offload_dst=None"),
    "source": (offloading("pinned_host", "tpu_hbm"), "offload_src='tpu_hbm'"),
    "products": (POLICIES.offload_dot_with_no_batch_dims("device", "unpinned_host"), "offload_dst='unpinned_host'"),
    "of the user": (lambda *x, **params: offloading("unpinned_host")(*x, **params), "offload_dst='unpinned_host'"),
}
LOSSES = {"layers": (layers_loss, [array(4, 4), array(4, 4)]), "loop": (loop_loss, array(3, 4, 4))}


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("name", REFUSED)
def test_policies_that_offload_to_other_memory_are_refused(name: str, loss: str) -> None:
    policy, got = REFUSED[name]
    (make, ws) = LOSSES[loss]
    x = array(2, 4)
    words = rf"policy of jax.checkpoint in .* offloads a (name|dot_general)(.|\n)*at: \w+.py:(.|\n)*got: {got}"
    fun = ipu.jit(jax.grad(make(policy)), device=device())
    for run in (fun, fun.lower):
        with pytest.raises(ipu.ArgumentError, match=words):
            run(ws, x)


@pytest.mark.parametrize("policy", [OFFLOADING, SAVING, offloading("device"), POLICIES.everything_saveable, None])
def test_other_policies_are_not_nor_those_without_a_gradient(policy: Any) -> None:
    ws = LOSSES["layers"][1]
    x = array(2, 4)
    fun = jax.grad(layers_loss(policy))
    assert_same(ipu.jit(fun, device=device())(ws, x), jax.jit(fun)(ws, x))
    forward = layers_loss(offloading("unpinned_host"))
    assert_same(ipu.jit(forward, device=device())(ws, x), jax.jit(forward)(ws, x))


# --- beside other things ----------------------------------------------------------------------------------------------


def test_calls_of_python_functions(capsys: pytest.CaptureFixture[str]) -> None:
    def fun(number: int, h: jax.Array) -> Any:
        jax.debug.print("sum {}", get(h).sum().astype(int))
        return put(get(h) + number), h

    jitted = ipu.jit(fun, device=device(), static_argnums=0)
    for _ in range(2):
        assert_same(jitted(1, put(jnp.ones((4, 3)))), (put(jnp.full((4, 3), 2.0)), put(jnp.ones((4, 3)))))
    jax.effects_barrier()
    assert capsys.readouterr().out == "sum 12\n" * 2


def test_profiled_calls() -> None:
    def fun(h: jax.Array) -> jax.Array:
        return put(lax.while_loop(lambda c: c.sum() < 50, lambda c: c + 1, get(h)))

    outs, profile = ipu.jit(fun, device=device()).lower(held(4, 3)).compile().profile_call(held(4, 3))
    assert_same(outs, jax.jit(fun)(held(4, 3)))
    assert profile.cycles > 0 and profile.streaming_memory_bytes == 2 * 48


def test_transformations_and_nested_functions() -> None:
    inner = ipu.jit(lambda h: (get(h) ** 2).sum(), device=device())
    reference = jax.jit(lambda h: (get(h) ** 2).sum())
    assert_same(jax.grad(inner)(held(4, 3)), jax.grad(reference)(held(4, 3)))
    assert_same(jax.vmap(inner)(held(4, 3)), jax.vmap(reference)(held(4, 3)))
    doubled = ipu.jit(double)
    outer = ipu.jit(lambda h: get(doubled(h)) + 1, device=device())
    assert_same(outer(held(4, 3)), jax.jit(lambda h: get(double(h)) + 1)(held(4, 3)))


@pytest.mark.parametrize(
    ("fun", "streams"),
    [
        pytest.param(lambda h, w: get(h) + w, 48, id="fetched"),
        pytest.param(lambda h, w: (h, h * 2, w), 96, id="left"),
        pytest.param(lambda h, w: (h, put(w)), 96, id="left beside what is put"),
        pytest.param(lambda h, w: lax.fori_loop(0, 2, lambda _, c: c + get(h), w), 48, id="in a loop"),
    ],
)
def test_values_that_a_function_closes_over(fun: Callable[..., Any], streams: int) -> None:
    h = held(4, 3)
    jitted = ipu.jit(lambda w: fun(h, w), device=device())
    expected = jax.jit(lambda w: fun(h, w))(array(4, 3))
    assert_same(jitted(array(4, 3)), expected)
    compiled = jitted.lower(array(4, 3)).compile()
    assert_same(compiled(array(4, 3)), expected)
    assert compiled.profile.streaming_memory_bytes == streams


def test_names_values_that_an_inner_function_closes_over(caplog: pytest.LogCaptureFixture) -> None:
    h = held(4, 3)
    inner = jax.jit(lambda w: get(h) + w)
    with caplog.at_level(logging.WARNING):
        assert_same(ipu.jit(lambda w: inner(w) * 2, device=device())(array(4, 3)), (get(h) + array(4, 3)) * 2)
    assert "closes over an array on the host" in caplog.text
