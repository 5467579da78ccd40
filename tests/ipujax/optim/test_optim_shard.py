"""Replicated tensor sharding: the numbers of the whole optimiser, a part of its memory, and refusals by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import ipujax as ipu
from tests.lowering.replicas.replica_helpers import ways

RNG = np.random.default_rng(5)
REPLICAS = 4
STEPS = 20
BATCH = 8
SAME = P()
SPLIT = P("replica")
# 35 and 21 elements, which 4 does not divide; 7 and 1, which stay whole.
PARAMS = {
    "w": jax.device_put(RNG.normal(size=(5, 7)).astype(np.float32)),
    "b": jax.device_put(np.zeros(7, np.float32)),
    "v": jax.device_put(RNG.normal(size=(7, 3)).astype(np.float32)),
    "s": jnp.float32(1.0),
}
X = jax.device_put(RNG.normal(size=(STEPS, BATCH, 5)).astype(np.float32))
Y = jax.device_put(RNG.normal(size=(STEPS, BATCH, 3)).astype(np.float32))


def loss_of(params: Any, batch: Any) -> jax.Array:
    """The mean over examples of a network with two layers."""
    x, y = batch
    hidden = jnp.tanh(x @ params["w"] / 3 + params["b"])
    return jnp.mean((hidden @ params["v"] * params["s"] - y) ** 2)


def shard(optimizer: Any, **settings: Any) -> Any:
    """The optimiser sharded, and so small arrays with it."""
    return ipu.optim.shard(optimizer, **{"replicas": REPLICAS, "min_elements": 8, **settings})


gradients_of = jax.value_and_grad(loss_of)


def replica_step(optimizer: Any, grads_of: Callable[..., Any] = gradients_of) -> Callable[..., Any]:
    """A training step of one replica, which reduces nothing but its loss."""

    def step(params: Any, state: Any, batch: Any) -> Any:
        loss, grads = grads_of(params, batch)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, lax.pmean(loss, "replica")

    return step


def on(device: Any, step: Callable[..., Any], state: Any, replicas: int = REPLICAS) -> Any:
    """A step compiled for all replicas, with such a state."""
    specs = ipu.optim.shard_specs(state)
    return ipu.jit(
        step,
        device=device,
        replicas=replicas,
        in_specs=(SAME, specs, SPLIT),
        out_specs=(SAME, specs, SAME),
        donate_argnums=(0, 1),
    )


def losses(step: Any, state: Any) -> tuple[np.ndarray, Any]:
    """The loss of each of 20 steps, and the state after them."""
    params = jax.tree.map(jnp.copy, PARAMS)
    actual = []
    for batch in zip(X, Y, strict=True):
        params, state, loss = step(params, state, batch)
        actual.append(loss)
    return np.array(actual), state


def whole_run(optimizer: Any) -> tuple[np.ndarray, Any]:
    """A step of one machine with the entire batch, in plain JAX."""

    @jax.jit
    def step(params: Any, state: Any, batch: Any) -> Any:
        loss, grads = gradients_of(params, batch)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    return losses(step, optimizer.init(PARAMS))


def matrices(params: Any) -> Any:
    """A mask that depends on dimensions, which a shard of one dimension would answer otherwise."""
    return jax.tree.map(lambda x: jnp.ndim(x) == 2, params)


# --- numbers ----------------------------------------------------------------------------------------------------------

OPTIMIZERS: dict[str, Any] = {
    "adam": optax.adam(1e-2),
    "momentum": optax.sgd(0.05, momentum=0.9, nesterov=True),
    "masked": optax.adamw(1e-2, weight_decay=0.1, mask=matrices),
    "schedule": optax.chain(optax.clip(0.05), optax.adam(optax.cosine_decay_schedule(1e-2, STEPS))),
    "labels": optax.multi_transform({True: optax.lion(1e-2), False: optax.sgd(0.01)}, matrices),
    # Sums over all elements are taken over all replicas.
    "global norm": optax.chain(optax.clip_by_global_norm(0.1), optax.rmsprop(1e-2)),
    "trust ratio": optax.lamb(1e-2, weight_decay=0.01),
    # Branches: an update every third step.
    "every third": optax.MultiSteps(optax.trace(0.9), 3).gradient_transformation(),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_losses_are_those_of_the_whole_optimizer(name: str) -> None:
    expected, whole_state = whole_run(OPTIMIZERS[name])
    optimizer = shard(OPTIMIZERS[name])
    state = optimizer.init(PARAMS)
    got, state = losses(on(ipu.CPU(), replica_step(optimizer), state), state)
    np.testing.assert_allclose(got, expected, rtol=1e-5)
    for a, b in zip(jax.tree.leaves(ipu.optim.unshard(state)), jax.tree.leaves(whole_state), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_the_machine_computes_the_same() -> None:
    """Engine, engine with exact splits and tile interpreter."""
    params = {"w": PARAMS["w"][:3, :3], "s": PARAMS["s"]}
    decay = optax.add_decayed_weights(0.1, mask=matrices)
    chain = optax.chain(decay, optax.clip_by_global_norm(0.1), optax.trace(0.9))
    optimizer = shard(chain, replicas=2)
    state = optimizer.init(params)
    specs = ipu.optim.shard_specs(state)
    grads = jax.tree.map(lambda p: jax.device_put(RNG.normal(size=(2, *p.shape)).astype(np.float32)), params)

    def update(params: Any, state: Any, grads: Any) -> Any:
        return optimizer.update(jax.tree.map(lambda g: g[0], grads), state, params)

    expected = chain.update(jax.tree.map(lambda g: g.mean(0), grads), chain.init(params), params)
    for way, leaves in ways(update, 2, (SAME, specs, SPLIT), (SAME, specs), params, state, grads).items():
        got = ipu.optim.unshard(jax.tree.unflatten(jax.tree.structure((params, state)), leaves))
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-6, atol=1e-9, err_msg=way)


def test_accumulation_and_loss_scaling_on_the_machine() -> None:
    """Outside of the shards, where replicas leave out a step together, and inside, where its branch is on shards."""
    expected, _ = whole_run(optax.adam(1e-2))
    inner = ipu.optim.automatic_loss_scale(shard(optax.adam(1e-2)), axis="replica", initial_scale=8.0)
    outer = shard(ipu.optim.automatic_loss_scale(optax.adam(1e-2), initial_scale=8.0))
    for optimizer, device in ((inner, ipu.IPUModel(num_ipus=4, tiles_per_ipu=4)), (outer, ipu.CPU())):

        def step(params: Any, state: Any, batch: Any, optimizer: Any = optimizer) -> Any:
            scale = ipu.optim.loss_scale(state)
            scaled = jax.value_and_grad(lambda params, batch: loss_of(params, batch) * scale)
            value, grads = ipu.pipeline(scaled, micro_batches=2)(params, batch)
            updates, state = optimizer.update(grads, state, params)
            return optax.apply_updates(params, updates), state, lax.pmean(value, "replica") / scale

        state = optimizer.init(PARAMS)
        run = on(device, step, state)
        got, after = losses(run, state)
        np.testing.assert_allclose(got, expected, rtol=1e-6)
        # One bad example, which one replica has: all leave out the step.
        params = jax.tree.map(jnp.copy, PARAMS)
        bad = X[0].at[5, 1].set(jnp.inf)
        same, skipped, _ = run(params, after, (bad, Y[0]))
        jax.tree.map(np.testing.assert_array_equal, same, PARAMS)
        assert int(skipped.skipped_steps) == 1 and float(skipped.scale) == 4


def test_sums_and_gradients_that_are_the_same_already() -> None:
    def updates(reduce: Any, grads_of: Callable[..., Any]) -> Any:
        optimizer = shard(optax.sgd(0.1, momentum=0.5), reduce=reduce)

        def first(grads: Any) -> Any:
            return optimizer.update(grads_of(grads), optimizer.init(PARAMS))[0]

        return ipu.jit(first, device=ipu.CPU(), replicas=REPLICAS, in_specs=SPLIT, out_specs=SAME)(grads)

    grads = jax.tree.map(lambda p: jax.device_put(RNG.normal(size=(REPLICAS, *p.shape)).astype(np.float32)), PARAMS)

    def own(grads: Any) -> Any:
        return jax.tree.map(lambda g: g[0], grads)

    total = jax.tree.map(lambda g: g.sum(0), grads)
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5)  # noqa: E731
    jax.tree.map(lambda u, g: close(u, -0.1 * g), updates("sum", own), total)
    jax.tree.map(lambda u, g: close(u, -0.1 * g / REPLICAS), updates("mean", own), total)
    jax.tree.map(lambda u, g: close(u, -0.1 * g), updates("none", lambda g: lax.psum(own(g), "replica")), total)


# --- state ------------------------------------------------------------------------------------------------------------


def test_init_inside_and_outside() -> None:
    optimizer = shard(optax.chain(optax.adagrad(1e-2), optax.ema(0.9)))
    outside = optimizer.init(PARAMS)
    specs = ipu.optim.shard_specs(jax.eval_shape(optimizer.init, PARAMS))
    assert specs == ipu.optim.shard_specs(outside)
    unaware = shard(optax.chain(optax.adagrad(1e-2), optax.ema(0.9)), replicas=None)
    inside = ipu.jit(unaware.init, device=ipu.CPU(), replicas=REPLICAS, in_specs=SAME, out_specs=specs)(PARAMS)
    assert jax.tree.structure(inside) == jax.tree.structure(outside)
    jax.tree.map(np.testing.assert_array_equal, ipu.optim.unshard(inside), ipu.optim.unshard(outside))
    full = optax.chain(optax.adagrad(1e-2), optax.ema(0.9)).init(PARAMS)
    jax.tree.map(np.testing.assert_array_equal, ipu.optim.unshard(outside), full)
    accumulator = outside[0][0].sum_of_squares
    assert accumulator["w"].value.shape == (36,) and accumulator["w"].shape == (5, 7)
    assert accumulator["b"].shape == (7,) and not isinstance(accumulator["b"], ipu.optim.Shard)
    assert specs[0][0].sum_of_squares == {"w": SPLIT, "v": SPLIT, "b": SAME, "s": SAME}


@pytest.mark.parametrize("replicas", [1, 2, 4, 8])
def test_bytes_of_the_state_fall_as_one_over_the_replicas(replicas: int) -> None:
    """By the memory report of a step that is lowered on paper; 8,192 elements are enough by default."""
    params = {"w": jax.ShapeDtypeStruct((64, 129), jnp.float32), "v": jax.ShapeDtypeStruct((129, 63), jnp.float32)}
    optimizer = ipu.optim.shard(optax.adam(1e-3), replicas=replicas)
    state = jax.eval_shape(optimizer.init, params)

    def loss(params: Any, batch: Any) -> jax.Array:
        return jnp.mean(jnp.square(batch @ params["w"] @ params["v"]))

    batch = jax.ShapeDtypeStruct((replicas, 64), jnp.float32)
    device = ipu.IPUModel(num_ipus=replicas, tiles_per_ipu=32)
    step = on(device, replica_step(optimizer, jax.value_and_grad(loss)), state, replicas)
    memory = step.lower(params, state, batch).compile().profile.memory
    held = {v.name: v.size * v.dtype.itemsize for v in memory.arguments if v.name.startswith("state")}
    full = 64 * 129
    small = 129 * 63
    assert sum(held.values()) == 2 * 4 * (-(-full // replicas) + small) + 4
    assert len(held) == 5


def test_tiles_have_that_memory_back() -> None:
    """Buffers and code of exchanges of shards are less than half of the bytes that shards save.

    Shards are of parameters by rows, products keep these with columns in groups: they move in small pieces. A fused
    update has no intermediate values in memory that a shard of it could save too.
    """
    params = {"w": jax.ShapeDtypeStruct((256, 512), jnp.float32), "v": jax.ShapeDtypeStruct((512, 64), jnp.float32)}

    def loss(params: Any, batch: Any) -> jax.Array:
        return jnp.mean(jnp.square(jnp.tanh(batch @ params["w"]) @ params["v"]))

    def averaged(params: Any, batch: Any) -> Any:
        return lax.pmean(jax.value_and_grad(loss)(params, batch), "replica")

    def total_bytes(optimizer: Any, grads_of: Callable[..., Any]) -> int:
        state = jax.eval_shape(optimizer.init, params)
        step = on(ipu.IPUModel(num_ipus=4, tiles_per_ipu=64), replica_step(optimizer, grads_of), state)
        batch = jax.ShapeDtypeStruct((64, 256), jnp.float32)
        return step.lower(params, state, batch).compile().profile.memory.total_bytes

    saved = total_bytes(optax.adam(1e-3), averaged) - total_bytes(shard(optax.adam(1e-3)), jax.value_and_grad(loss))
    parameters = 256 * 512 + 512 * 64
    elsewhere = 2 * 4 * parameters * 3 / 4  # two moments, of which three of four parts are on other replicas
    assert elsewhere / 2 < saved < elsewhere


def test_gradients_travel_together() -> None:
    def counts(**settings: Any) -> tuple[int, int]:
        optimizer = shard(optax.adam(1e-2), **settings)
        step = on(ipu.IPUModel(num_ipus=4, tiles_per_ipu=4), replica_step(optimizer), optimizer.init(PARAMS))
        text = step.lower(PARAMS, optimizer.init(PARAMS), (X[0], Y[0])).as_text(after="dce")
        return text.count(" reduce_scatter["), text.count(" all_gather[")

    assert counts() == (1, 1)
    assert counts(merge_bytes=0) == (2, 2)


# --- what is refused --------------------------------------------------------------------------------------------------


def by_columns() -> Any:
    """An optimiser of the user's own, whose line is known."""

    def update(grads: Any, state: Any, params: Any = None) -> Any:
        return jax.tree.map(lambda g: g / (1 + jnp.abs(g).max(0, keepdims=True)), grads), state  # this line

    return optax.GradientTransformation(lambda params: (), update)


def in_a_loop() -> Any:
    def update(grads: Any, state: Any, params: Any = None) -> Any:
        return jax.tree.map(lambda g: lax.fori_loop(0, 3, lambda _, x: x / 2, g), grads), state

    return optax.GradientTransformation(lambda params: (), update)


NOT_ELEMENTWISE: dict[str, tuple[Any, str]] = {
    "adafactor": (
        optax.adafactor(1e-2, min_dim_size_to_factor=2),
        "scale_by_factored_rms .*\n.*(step).*\n.*\n.*reduce_sum of",
    ),
    "by unit": (optax.adaptive_grad_clip(0.1), "adaptive_grad_clip .*\n.*(step).*\n.*\n.*reduce_sum of"),
    "sm3": (optax.sm3(0.1), "scale_by_sm3 .*\n.*\n.*\n.*reduce_max of"),
    "muon": (optax.contrib.muon(0.1), "muon"),
    "own": (by_columns(), "by_columns .*\n.*test_optim_shard.py:%d"),
    "loop": (in_a_loop(), "in_a_loop .*\n.*\n.*\n.*(scan|while) of"),
}


@pytest.mark.parametrize("name", NOT_ELEMENTWISE)
def test_refuses_updates_that_need_the_entire_array(name: str) -> None:
    optimizer, match = NOT_ELEMENTWISE[name]
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    own = next(n for n, line in enumerate(lines, 1) if line.endswith("# this line"))
    sharded = shard(optimizer)
    params = {"w": PARAMS["w"]}
    batch = (X[0], Y[0, :, :1])
    state = sharded.init(params)
    grads_of = jax.value_and_grad(lambda params, batch: jnp.mean((batch[0] @ params["w"]) ** 2))
    with pytest.raises(ipu.ArgumentError, match=match.replace("%d", str(own))) as error:
        on(ipu.IPUModel(num_ipus=4), replica_step(sharded, grads_of), state).lower(params, state, batch)
    assert "whole gradient first" in str(error.value)


def test_a_refused_update_may_come_before_the_shards() -> None:
    """As the error advises."""
    first = optax.adaptive_grad_clip(0.1)
    then = optax.sgd(0.05, momentum=0.9)
    expected, _ = whole_run(optax.chain(first, then))
    optimizer = optax.chain(first, shard(then, reduce="none"))

    def grads_of(params: Any, batch: Any) -> Any:
        return lax.pmean(gradients_of(params, batch), "replica")

    state = optimizer.init(PARAMS)
    got, _ = losses(on(ipu.CPU(), replica_step(optimizer, grads_of), state), state)
    np.testing.assert_allclose(got, expected, rtol=1e-6)


def run_with(optimizer: Any, state: Any, specs: Any, replicas: int) -> None:
    step = replica_step(optimizer)
    ipu.jit(step, device=ipu.CPU(), replicas=replicas, in_specs=(SAME, specs, SPLIT), out_specs=(SAME, specs, SAME))(
        PARAMS, state, (X[0], Y[0])
    )


def adam_state(**settings: Any) -> tuple[Any, Any]:
    state = shard(optax.adam(1.0), **settings).init(PARAMS)
    return state, ipu.optim.shard_specs(state)


BAD: dict[str, tuple[Callable[[], Any], str]] = {
    "no optimiser": (lambda: ipu.optim.shard(optax.adam), "shard needs an optimiser"),
    "replicas": (lambda: shard(optax.adam(1.0), replicas=0), "replicas of ipu.optim.shard\n.*\n.*from 1"),
    "min_elements": (lambda: shard(optax.adam(1.0), min_elements=0.5), "min_elements"),
    "merge_bytes": (lambda: shard(optax.adam(1.0), merge_bytes=-1), "merge_bytes"),
    "reduce": (lambda: shard(optax.adam(1.0), reduce="max"), 'expected: "mean", "sum" or "none"'),
    "init outside": (
        lambda: shard(optax.adam(1.0), replicas=None).init(PARAMS),
        r"test_optim_shard.py[\s\S]*try: .*replicas=N",
    ),
    "update outside": (
        lambda: shard(optax.adam(1.0)).update(PARAMS, adam_state()[0]),
        "inside of the axis 'replica'\n.*test_optim_shard.py",
    ),
    "other replicas": (
        lambda: run_with(shard(optax.adam(1.0)), *adam_state(), 2),
        "expected: replicas=2.*\n.*got: replicas=4",
    ),
    "state of others": (
        lambda: run_with(shard(optax.adam(1.0), replicas=None), *adam_state(), 2),
        r"must be that of 2 replicas\n.*\n.*expected: 11 elements of an array of shape \(7, 3\)\n.*got: 12 elements",
    ),
    "state not split": (
        lambda: run_with(shard(optax.adam(1.0)), adam_state()[0], SAME, 4),
        r"expected: 6 elements of an array of shape \(7, 3\)\n.*got: 24 elements\n.*shard_specs",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_refuses_invalid_settings(name: str) -> None:
    call, match = BAD[name]
    with pytest.raises(ipu.ArgumentError, match=match):
        call()
