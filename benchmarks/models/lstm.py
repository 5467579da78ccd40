"""A classifier of sequences: one LSTM by `lax.scan` and a dense layer on its last output, by Adam."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from ipujax.models.network_layers import cross_entropy, weights

from .model import Model, Struct, trained


def lstm(length: int = 64, units: int = 256, features: int = 64, classes: int = 10, batch: int = 32) -> Model:
    """The training step.

    Args:
        length: steps of a sequence.
        units: of the LSTM.
        features: of each step of a sequence.
        classes: of sequences.
        batch: sequences a step.
    """

    def init(key: jax.Array) -> Any:
        keys = jax.random.split(key, 3)
        shapes = {"wx": (features, 4 * units), "wh": (units, 4 * units), "w": (units, classes)}
        params = {name: weights(k, *shape) for k, (name, shape) in zip(keys, shapes.items(), strict=True)}
        return params | {"b": jnp.zeros(4 * units)}

    def loss(params: Any, x: jax.Array, labels: jax.Array) -> jax.Array:
        def cell(carry: tuple[jax.Array, jax.Array], row: jax.Array) -> Any:
            h, c = carry
            i, f, g, o = jnp.split(row @ params["wx"] + h @ params["wh"] + params["b"], 4, 1)
            c = jax.nn.sigmoid(f + 1) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            return (jax.nn.sigmoid(o) * jnp.tanh(c), c), None

        zeros = jnp.zeros((batch, units))
        (h, _), _ = lax.scan(cell, (zeros, zeros), x)
        return cross_entropy(h @ params["w"], labels)

    x = Struct((length, batch, features), np.float32)
    labels = Struct((batch,), np.int32)
    return trained("lstm", loss, init, optax.adam(1e-3), x, labels)
