"""Layers as frameworks name them: Flax, Equinox, Keras, Optax."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import keras
import optax
import pytest
from flax import nnx

from tests.lowering.jaxpr.test_layer_names import layers

X = jnp.ones((3, 4))


class Block(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return x + nn.Dense(4)(nn.gelu(nn.Dense(8)(x)))


class Model(nn.Module):
    block: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for _ in range(2):
            x = self.block()(x)
        return nn.Dense(2, name="head")(x)


@pytest.mark.parametrize("kind", [Block, nn.remat(Block)], ids=["plain", "remat"])
def test_linen(kind: Any) -> None:
    model = Model(kind)
    name = kind.__name__
    variables = model.init(jax.random.key(0), X)
    grad = jax.grad(lambda v: (model.apply(v, X) ** 2).sum())
    forward = layers(grad, variables, part="forward")
    expected = {f"Model/{name}_{n}/Dense_{k}" for n in range(2) for k in range(2)} | {"Model/head"}
    assert expected <= forward
    backward = layers(grad, variables, part="backward")
    assert expected <= backward <= forward
    assert layers(grad, variables, part="recomputed") <= forward


class NnxBlock(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.inner = nnx.Linear(4, 4, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + nnx.gelu(self.inner(x))


class NnxModel(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.blocks = nnx.List([NnxBlock(rngs) for _ in range(2)])

    def __call__(self, x: jax.Array) -> jax.Array:
        for each in self.blocks:
            x = each(x)
        return x


def test_nnx_has_no_scopes_and_is_named_by_classes() -> None:
    graph, state = nnx.split(NnxModel(nnx.Rngs(0)))

    def loss(state: Any) -> jax.Array:
        return nnx.merge(graph, state)(X).sum()

    for part in ("forward", "backward"):
        actual = layers(jax.grad(loss), state, part=part)
        assert {f"loss/NnxModel/NnxBlock[{n}]/Linear" for n in range(2)} <= actual
        assert {f"loss/NnxModel/NnxBlock[{n}]" for n in range(2)} <= actual


class EqxBlock(eqx.Module):
    inner: eqx.nn.Linear

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + jax.nn.tanh(self.inner(x))


class EqxModel(eqx.Module):
    blocks: list[EqxBlock]

    def __call__(self, x: jax.Array) -> jax.Array:
        for each in self.blocks:
            x = each(x)
        return x


def test_equinox() -> None:
    model = EqxModel([EqxBlock(eqx.nn.Linear(4, 4, key=jax.random.key(n))) for n in range(2)])
    arrays, static = eqx.partition(model, eqx.is_array)

    def loss(arrays: Any) -> jax.Array:
        return jax.vmap(eqx.combine(arrays, static))(X).sum()

    for part in ("forward", "backward"):
        actual = layers(jax.grad(loss), arrays, part=part)
        assert {f"loss/EqxModel/EqxBlock[{n}]/eqx.nn.Linear" for n in range(2)} <= actual


def test_keras() -> None:
    dense = [keras.layers.Dense(8, activation="gelu", name="up"), keras.layers.Dense(2, name="head")]
    model = keras.Sequential([keras.layers.Input((4,)), *dense])
    values = [v.value for v in model.trainable_variables]

    def loss(values: Any) -> jax.Array:
        return model.stateless_call(values, [], X)[0].sum()

    for part in ("forward", "backward"):
        assert {"up", "head"} <= layers(jax.grad(loss), values, part=part)


def test_an_optimiser_is_named_by_its_transformations() -> None:
    optimiser = optax.adam(1e-3)
    weights = {"a": jnp.ones(4), "b": jnp.ones(3)}

    def step(weights: Any, state: Any) -> Any:
        updates, state = optimiser.update(weights, state)
        return optax.apply_updates(weights, updates), state

    assert layers(step, weights, optimiser.init(weights)) == {
        "step/scale_by_adam",
        "step/scale",
        "step/apply_updates",
    }
