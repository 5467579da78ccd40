"""Roles of variables follow the flow of values: weights, optimiser state, gradients, activations, inputs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec as P

import ipujax as ipu
from ipujax.runtime.tensor.roles import (
    ARGUMENTS,
    GRADIENTS,
    INPUTS,
    INTERMEDIATES,
    OPTIMISER_STATE,
    PARTIALS,
    RECOMPUTED,
    RESULTS,
    STATE,
    STORED,
    WEIGHTS,
)

BATCH = 8
WIDTH = 12


def array(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


PARAMS = {"a": array(WIDTH, 2 * WIDTH), "b": array(2 * WIDTH, WIDTH)}
X = array(BATCH, WIDTH)


def loss(params, x, y):
    h = jnp.tanh(x @ params["a"])
    return jnp.mean((jnp.tanh(h @ params["b"]) - y) ** 2)


def roles(fun, *args, num_ipus=1, **settings):
    """The role of each variable by its name, and the lowered graph."""
    graph = ipu.jit(fun, device=ipu.IPUModel(num_ipus, tiles_per_ipu=16), **settings).lower(*args).graph
    return {v.name: graph.notes.roles.get(v) for v in graph.variables if not v.is_constant}, graph


def bytes_of(graph, role):
    return sum(v.num_bytes for v in graph.variables if graph.notes.roles.get(v) == role)


def under(actual, prefix):
    """The roles of the arguments whose name begins so."""
    return {role for name, role in actual.items() if name.startswith(prefix)}


def sgd_step(params, x, y):
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params, x, y))


def adam_step(params, state, x, y):
    gradients = jax.grad(loss)(params, x, y)
    updates, state = optax.adam(1e-3).update(gradients, state)
    return optax.apply_updates(params, updates), state


ADAM = jax.eval_shape(optax.adam(1e-3).init, PARAMS)


@pytest.mark.parametrize("donate", [(), (0, 1)])
def test_moments_of_adam_are_optimiser_state_and_the_values_they_change_weights(donate):
    actual, graph = roles(adam_step, PARAMS, ADAM, X, X, donate_argnums=donate)
    assert under(actual, "params") == {WEIGHTS} and under(actual, "state") == {OPTIMISER_STATE}
    assert actual["x"] == actual["y"] == INPUTS
    assert bytes_of(graph, GRADIENTS) >= sum(p.size * 4 for p in PARAMS.values())
    assert bytes_of(graph, STORED) >= BATCH * 2 * WIDTH * 4


def test_the_order_of_arguments_and_results_does_not_matter():
    def turned(y, state, x, params):
        params, state = adam_step(params, state, x, y)
        return state, loss(params, x, y), params

    actual, _ = roles(turned, X, ADAM, X, PARAMS)
    assert under(actual, "params") == {WEIGHTS} and under(actual, "state") == {OPTIMISER_STATE}
    assert actual["x"] == actual["y"] == INPUTS


def test_a_loop_of_steps_has_the_roles_of_a_step():
    def loop(params, state, xs):
        def step(carry, x):
            return adam_step(*carry, x, x), None

        return jax.lax.scan(step, (params, state), xs)[0]

    actual, _ = roles(loop, PARAMS, ADAM, array(3, BATCH, WIDTH), donate_argnums=(0, 1))
    assert under(actual, "params") == {WEIGHTS} and under(actual, "state") == {OPTIMISER_STATE}
    assert actual["xs"] == actual["scan/slice"] == INPUTS


def test_sums_of_gradients_in_a_loop_are_gradients():
    def step(params, xs):
        def add(total, x):
            gradients = jax.grad(loss)(params, x, x)  # scaled, so that no sum of products leaves the loop
            return jax.tree.map(lambda t, g: t + 0.5 * g, total, gradients), None

        total, _ = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), xs)
        return jax.tree.map(lambda p, g: p - g, params, total)

    actual, _ = roles(step, PARAMS, array(3, BATCH, WIDTH))
    assert under(actual, "params") == {WEIGHTS}
    assert actual["scan/carry0"] == actual["scan/carry1"] == GRADIENTS


def test_values_that_a_checkpoint_repeats_are_recomputed():
    def deep(params, x):
        layer = jax.checkpoint(lambda w, h: jnp.tanh(jnp.tanh(h @ w["a"]) @ w["b"]))
        return jnp.sum(layer(params, layer(params, x)) ** 2)

    def step(params, x):
        return jax.tree.map(lambda p, g: p - g, params, jax.grad(deep)(params, x))

    actual, graph = roles(step, PARAMS, X)
    assert under(actual, "params") == {WEIGHTS}
    assert bytes_of(graph, RECOMPUTED) >= BATCH * 2 * WIDTH * 4
    _, plain = roles(sgd_step, PARAMS, X, X)
    assert bytes_of(plain, RECOMPUTED) == 0


def test_statistics_and_keys_that_come_back_are_other_state():
    def step(params, mean, key, x):
        key, own = jax.random.split(key)

        def with_statistics(params):
            noise = jax.random.normal(own, x.shape)
            return loss(params, x + noise, x), 0.9 * mean + 0.1 * x.mean(0)

        gradients, mean_now = jax.grad(with_statistics, has_aux=True)(params)
        return jax.tree.map(lambda p, g: p - g, params, gradients), mean_now, key

    key = jax.eval_shape(lambda: jax.random.key(0))
    actual, _ = roles(step, PARAMS, array(WIDTH), key, X)
    assert under(actual, "params") == {WEIGHTS} and actual["mean"] == actual["key"] == STATE and actual["x"] == INPUTS


def test_a_gradient_that_is_returned_tells_weights():
    actual, graph = roles(jax.value_and_grad(loss), PARAMS, X, X)
    assert under(actual, "params") == {WEIGHTS} and actual["x"] == INPUTS
    assert bytes_of(graph, GRADIENTS) >= sum(p.size * 4 for p in PARAMS.values())


def test_nothing_tells_weights_from_inputs_in_inference():
    actual, graph = roles(loss, PARAMS, X, X)
    assert under(actual, "params") == {ARGUMENTS} and actual["x"] == ARGUMENTS
    assert bytes_of(graph, STORED) == bytes_of(graph, GRADIENTS) == bytes_of(graph, WEIGHTS) == 0
    assert bytes_of(graph, RESULTS) == 4


def test_a_cast_weight_is_a_weight():
    def half(params, x, y):
        return loss(jax.tree.map(lambda p: p.astype(jnp.float16), params), x, y)

    def step(params, x, y):
        return jax.tree.map(lambda p, g: p - g, params, jax.grad(half)(params, x, y))

    _, graph = roles(step, PARAMS, array(BATCH, WIDTH, dtype=jnp.float16), array(BATCH, WIDTH, dtype=jnp.float16))
    halves = [v for v in graph.variables if v.dtype == jnp.float16 and v.size == 2 * WIDTH * WIDTH]
    assert WEIGHTS in {graph.notes.roles[v] for v in halves if not v.is_constant}


def test_rings_of_pipelines_are_activations_and_their_sums_gradients():
    def staged(params, x, y):
        with ipu.stage(0):
            h = jnp.tanh(x @ params["a"])
        with ipu.stage(1):
            return jnp.mean((jnp.tanh(h @ params["b"]) - y) ** 2)

    def step(params, moments, x, y):
        run = ipu.pipeline(jax.value_and_grad(staged), micro_batches=4, batch_argnums=(1, 2))
        value, gradients = run(params, x, y)
        moments = jax.tree.map(lambda m, g: 0.9 * m + g, moments, gradients)
        return jax.tree.map(lambda p, m: p - 0.1 * m, params, moments), moments, value

    actual, graph = roles(step, PARAMS, PARAMS, array(32, WIDTH), array(32, WIDTH), num_ipus=2)
    assert under(actual, "params") == {WEIGHTS} and under(actual, "moments") == {OPTIMISER_STATE}
    assert actual["staged/stage 0 forward/batch"] == actual["staged/stage 1 forward/batch"] == INPUTS
    assert actual["staged/stage 0 forward/stack"] == actual["staged/stage 1 forward/stack"] == STORED
    assert actual["staged/stage 0 forward/to stage 1/stack"] == STORED
    sums = {role for name, role in actual.items() if "backward/result" in name and name.endswith("/mean")}
    assert sums == {GRADIENTS}
    assert set(graph.notes.roles.values()) <= {
        *(WEIGHTS, OPTIMISER_STATE, INPUTS, STORED, GRADIENTS, RESULTS, PARTIALS, INTERMEDIATES)
    }


def test_values_in_streaming_memory_have_their_role_on_tiles():
    device = ipu.IPUModel(tiles_per_ipu=16)
    fun = ipu.jit(adam_step, device=device, donate_argnums=(0, 1), offload_argnums=(1,))
    graph = fun.lower(PARAMS, ADAM, X, X).graph
    moments = 2 * sum(p.size * 4 for p in PARAMS.values())
    loaded = sum(
        v.num_bytes for v in graph.variables if "remote_load" in v.name and graph.notes.roles[v] == OPTIMISER_STATE
    )
    assert loaded == moments and bytes_of(graph, OPTIMISER_STATE) >= 2 * moments


def test_sums_over_replicas_are_gradients():
    def step(params, x):
        gradients = jax.tree.map(lambda g: jax.lax.pmean(g, "replica"), jax.grad(loss)(params, x, x))
        return jax.tree.map(lambda p, g: p - g, params, gradients)

    settings = {"in_specs": (P(), P("replica")), "out_specs": P(), "replicas": 2}
    actual, _ = roles(step, PARAMS, array(2 * BATCH, WIDTH), num_ipus=2, **settings)
    assert under(actual, "params") == {WEIGHTS} and actual["x"] == INPUTS
    assert actual["all_reduce"] == GRADIENTS


def test_every_variable_of_a_lowered_function_has_a_role():
    _, graph = roles(adam_step, PARAMS, ADAM, X, X)
    assert all(v.is_constant or v in graph.notes.roles for v in graph.variables)


def test_activations_of_a_function_that_is_called_again_are_kept():
    def layers(params, x):
        for p in params:
            x = jnp.tanh(x @ p)
        return jnp.mean(x**2)

    def step(params, x):
        return jax.tree.map(jnp.subtract, params, jax.grad(layers)(params, x))

    width, rows = 64, 32
    actual, graph = roles(step, [array(width, width)] * 6, array(rows, width))
    kept = {role for name, role in actual.items() if name.endswith("/kept") and "transpose(" not in name}
    assert kept == {STORED} and bytes_of(graph, STORED) >= 5 * rows * width * 4


def test_a_buffer_that_is_shifted_by_a_row_is_state():
    def step(buffer, row):
        return jnp.concatenate([buffer[1:], row[None]]), (buffer * row).sum()

    assert roles(step, array(64, WIDTH), array(WIDTH))[0]["buffer"] == STATE
