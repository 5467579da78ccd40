"""A recogniser of sequences: a bidirectional LSTM with a label at each step, as for phonemes or characters, by Adam.

Source: Graves and Schmidhuber, "Framewise phoneme classification with bidirectional LSTM" (2005).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from ipujax.models.network_layers import cross_entropy, dense, dense_init, weights

from .model import Model, Struct, trained


def recogniser(length: int = 100, units: int = 128, features: int = 40, classes: int = 32, batch: int = 8) -> Model:
    """The training step.

    Args:
        length: steps of a sequence.
        units: of the LSTM of each direction.
        features: of each step of a sequence.
        classes: of steps.
        batch: sequences a step.
    """

    def init(key: jax.Array) -> Any:
        forward, backward, out = jax.random.split(key, 3)
        directions = {}
        for name, k in (("forward", forward), ("backward", backward)):
            keys = jax.random.split(k)
            wx, wh = (weights(each, 4 * units, inputs) for each, inputs in zip(keys, (features, units), strict=True))
            directions[name] = {"wx": wx, "wh": wh, "b": jnp.zeros(4 * units)}
        return directions | {"out": dense_init(out, 2 * units, classes)}

    def run(p: Any, x: jax.Array, reverse: bool) -> jax.Array:
        def cell(carry: tuple[jax.Array, jax.Array], row: jax.Array) -> Any:
            h, c = carry
            i, f, g, o = jnp.split(row + h @ p["wh"].T, 4, 1)
            c = jax.nn.sigmoid(f + 1) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
            return (h, c), h

        zeros = jnp.zeros((batch, units))
        return lax.scan(cell, (zeros, zeros), jnp.einsum("tbi,gi->tbg", x, p["wx"]) + p["b"], reverse=reverse)[1]

    def loss(params: Any, x: jax.Array, labels: jax.Array) -> jax.Array:
        both = [run(params["forward"], x, False), run(params["backward"], x, True)]
        return cross_entropy(dense(params["out"], jnp.concatenate(both, -1)), labels)

    x = Struct((length, batch, features), np.float32)
    labels = Struct((length, batch), np.int32)
    return trained("recogniser", loss, init, optax.adam(1e-3), x, labels)
