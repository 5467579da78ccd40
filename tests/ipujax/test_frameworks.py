"""Training steps as scripts of flax, equinox and haiku have them, with all their state: the numbers of `jax.jit`.

Tiny models on a few tiles. Plain gradient descent with momentum: Adam would scale gradients that are nothing but
rounding up to the size of a step. Larger ones are in `test_training_steps.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen, nnx
from flax.training.train_state import TrainState

import ipujax as ipu
from tests.ipujax.models.base import numbers

FEATURES = 6
CLASSES = 3
BATCH = 8
STEPS = 3
RTOL = 1e-5
FEW_TILES = ipu.IPUModel(tiles_per_ipu=4)
SGD = optax.sgd(0.1, momentum=0.9)

Step = Callable[[Any, jax.Array, jax.Array], tuple[Any, jax.Array]]


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def as_numbers(tree: Any) -> list[np.ndarray]:
    """The leaves of a tree; of keys their data."""
    is_key = [jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) for leaf in jax.tree.leaves(tree)]
    leaves = zip(jax.tree.leaves(tree), is_key, strict=True)
    return [np.asarray(jax.random.key_data(leaf) if key else leaf) for leaf, key in leaves]


def assert_same_training(step: Step, state: Any) -> Any:
    """Trains with both some steps; compares losses and all state, and returns the state."""
    on_ipu = ipu.jit(step, device=FEW_TILES)
    plain = jax.jit(step)
    ours = theirs = state
    for number in range(STEPS):
        x = numbers(BATCH, FEATURES, seed=number)
        labels = np.argmax(x[:, :CLASSES], axis=1).astype(np.int32)
        ours, loss = on_ipu(ours, x, labels)
        theirs, expected = plain(theirs, x, labels)
        np.testing.assert_allclose(loss, expected, RTOL)
        assert jax.tree.structure(ours) == jax.tree.structure(theirs) == jax.tree.structure(state)
        for got, right in zip(as_numbers(ours), as_numbers(theirs), strict=True):
            assert (got.dtype, got.shape) == (right.dtype, right.shape)
            np.testing.assert_allclose(got, right, RTOL, atol=RTOL * max(np.abs(right).max(), 0.1))
    return ours


def changed(before: Any, after: Any) -> list[bool]:
    return [not np.array_equal(a, b) for a, b in zip(as_numbers(before), as_numbers(after), strict=True)]


def test_a_train_state_of_flax_linen() -> None:
    model = linen.Sequential([linen.Dense(5), linen.tanh, linen.Dense(CLASSES)])
    params = jax.jit(model.init)(jax.random.key(0), jnp.ones((1, FEATURES)))["params"]
    state = TrainState.create(apply_fn=model.apply, params=params, tx=SGD)

    def step(state: TrainState, x: jax.Array, labels: jax.Array) -> tuple[TrainState, jax.Array]:
        def loss(params: Any) -> jax.Array:
            return cross_entropy(state.apply_fn({"params": params}, x), labels)

        value, grads = jax.value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=grads), value

    trained = assert_same_training(step, state)
    assert isinstance(trained, TrainState) and trained.step == STEPS
    assert all(changed(state.params, trained.params))


class Normalised(nnx.Module):
    """A hidden layer with running statistics, and dropout with a stream of random numbers."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.hidden = nnx.Linear(FEATURES, 5, rngs=rngs)
        self.out = nnx.Linear(5, CLASSES, rngs=rngs)
        self.norm = nnx.BatchNorm(5, rngs=rngs)
        self.dropout = nnx.Dropout(0.3, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.out(self.dropout(nnx.relu(self.norm(self.hidden(x)))))


def test_statistics_and_random_numbers_of_nnx() -> None:
    """Parameters, statistics, keys and counts of keys are one state, split from the graph and merged in the step."""
    model = nnx.jit(lambda: Normalised(nnx.Rngs(params=0, dropout=1)))()
    model.train()
    graph, state = nnx.split((model, nnx.Optimizer(model, SGD, wrt=nnx.Param)))

    def step(state: Any, x: jax.Array, labels: jax.Array) -> tuple[Any, jax.Array]:
        model, optimizer = nnx.merge(graph, state)
        value, grads = nnx.value_and_grad(lambda model: cross_entropy(model(x), labels))(model)
        optimizer.update(model, grads)
        return nnx.state((model, optimizer)), value

    trained, _ = nnx.merge(graph, assert_same_training(step, state))
    assert trained.dropout.rngs.count.get_value() == STEPS
    assert all(changed(nnx.state(model, nnx.BatchStat), nnx.state(trained, nnx.BatchStat)))


class Stateful(eqx.Module):
    """A layer for one example: statistics are a state that goes in and out, and dropout takes a key."""

    hidden: eqx.nn.Linear
    norm: eqx.nn.BatchNorm
    dropout: eqx.nn.Dropout
    out: eqx.nn.Linear

    def __init__(self, key: jax.Array) -> None:
        first, last = jax.random.split(key)
        self.hidden = eqx.nn.Linear(FEATURES, 5, key=first)
        self.out = eqx.nn.Linear(5, CLASSES, key=last)
        self.norm = eqx.nn.BatchNorm(5, axis_name="batch", mode="batch")
        self.dropout = eqx.nn.Dropout(0.3)

    def __call__(self, x: jax.Array, statistics: eqx.nn.State, key: jax.Array) -> tuple[jax.Array, eqx.nn.State]:
        x, statistics = self.norm(self.hidden(x), statistics)
        return self.out(self.dropout(jax.nn.relu(x), key=key)), statistics


def test_statistics_and_keys_of_equinox() -> None:
    model, statistics = eqx.filter_jit(eqx.nn.make_with_state(Stateful))(jax.random.key(0))
    arrays, static = eqx.partition(model, eqx.is_inexact_array)

    def step(state: Any, x: jax.Array, labels: jax.Array) -> tuple[Any, jax.Array]:
        arrays, opt_state, statistics, key = state
        key, *keys = jax.random.split(key, 1 + BATCH)

        def loss(arrays: Any) -> tuple[jax.Array, eqx.nn.State]:
            batched = jax.vmap(eqx.combine(arrays, static), axis_name="batch", in_axes=(0, None, 0), out_axes=(0, None))
            logits, new = batched(x, statistics, jnp.stack(keys))
            return cross_entropy(logits, labels), new

        (value, new), grads = jax.value_and_grad(loss, has_aux=True)(arrays)
        updates, opt_state = SGD.update(grads, opt_state)
        return (eqx.apply_updates(arrays, updates), opt_state, new, key), value

    state = arrays, SGD.init(arrays), statistics, jax.random.key(1)
    trained = assert_same_training(step, state)
    assert all(changed(state[2], trained[2])) and all(changed(state[3], trained[3]))


def hidden_haiku(x: jax.Array) -> jax.Array:
    return hk.Linear(CLASSES)(jnp.tanh(hk.Linear(5)(x)))


def test_a_transformed_function_of_haiku() -> None:
    model = hk.without_apply_rng(hk.transform(hidden_haiku))
    params = jax.jit(model.init)(jax.random.key(0), jnp.ones((1, FEATURES)))

    def step(state: Any, x: jax.Array, labels: jax.Array) -> tuple[Any, jax.Array]:
        params, opt_state = state
        value, grads = jax.value_and_grad(lambda params: cross_entropy(model.apply(params, x), labels))(params)
        updates, opt_state = SGD.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), value

    trained, _ = assert_same_training(step, (params, SGD.init(params)))
    assert set(trained) == {"linear", "linear_1"} and all(changed(params, trained))


def test_statistics_and_keys_of_haiku() -> None:
    """Statistics are a state that goes in and out; keys of dropout are asked for inside."""

    def forward(x: jax.Array, is_training: bool) -> jax.Array:
        x = hk.BatchNorm(True, True, decay_rate=0.9)(hk.Linear(5)(x), is_training)
        return hk.Linear(CLASSES)(hk.dropout(hk.next_rng_key(), 0.3, jax.nn.relu(x)))

    model = hk.transform_with_state(forward)
    init = jax.jit(model.init, static_argnums=2)
    params, statistics = init(jax.random.key(0), jnp.ones((2, FEATURES)), True)

    def step(state: Any, x: jax.Array, labels: jax.Array) -> tuple[Any, jax.Array]:
        params, statistics, opt_state, key = state
        key, own = jax.random.split(key)

        def loss(params: Any) -> tuple[jax.Array, Any]:
            logits, new = model.apply(params, statistics, own, x, True)
            return cross_entropy(logits, labels), new

        (value, new), grads = jax.value_and_grad(loss, has_aux=True)(params)
        updates, opt_state = SGD.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), new, opt_state, key), value

    trained = assert_same_training(step, (params, statistics, SGD.init(params), jax.random.key(1)))
    assert all(changed(params, trained[0])) and all(changed(statistics, trained[1]))
