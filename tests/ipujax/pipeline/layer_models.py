"""Small models that loop over layers: functions of stacked parameters, a key and a batch."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.ipujax.pipeline.pipeline_models import Loss, array

WIDTH = 6
WORDS = 9


def plain(length: int) -> Loss:
    """Dense layers."""
    del length

    def loss(params: Any, key: jax.Array, batch: Any) -> jax.Array:
        del key
        layers = params["w"], params["b"]
        h, _ = lax.scan(lambda h, p: (jnp.tanh(h @ p[0] + p[1]), None), params["table"][batch["words"]], layers)
        return jnp.mean((h - batch["y"]) ** 2)

    return loss


def checkpointed(length: int) -> Loss:
    """Layers with dropout and a residual connection, recomputed; the table of words is used at both ends."""

    def loss(params: Any, key: jax.Array, batch: Any) -> jax.Array:
        @jax.checkpoint
        def layer(h: jax.Array, p: Any) -> tuple[jax.Array, None]:
            key, w, b = p
            kept = jax.random.bernoulli(key, 0.7, h.shape)
            return h + jnp.tanh(h @ w + b) * kept, None

        layers = jax.random.split(key, length), params["w"], params["b"]
        h, _ = lax.scan(layer, params["table"][batch["words"]], layers)
        scores = jax.nn.log_softmax(h @ params["table"].T)
        return -jnp.mean(jnp.take_along_axis(scores, batch["words"][:, None], 1))

    return loss


def rich(length: int) -> Loss:
    """Parameters that all layers share, values of all layers, a cast and a norm of stacks, the loop run twice."""
    del length

    def loss(params: Any, key: jax.Array, batch: Any) -> jax.Array:
        del key
        layers = params["w"].astype(jnp.float32) * 0.5, params["b"]

        def layer(h: jax.Array, p: Any) -> tuple[jax.Array, jax.Array]:
            h = jnp.tanh(h @ p[0] + p[1]) + params["shared"]
            return h, jnp.mean(h)

        h, means = lax.scan(layer, params["table"][batch["words"]], layers)
        h, _ = lax.scan(layer, h, layers, reverse=True)
        return jnp.mean((h - batch["y"]) ** 2) + jnp.sum(means**2) + 1e-2 * jnp.sum(params["w"] ** 2)

    return loss


MODELS = {"plain": plain, "checkpointed": checkpointed, "rich": rich}


def parameters(length: int) -> dict[str, np.ndarray]:
    """Parameters of any of the models."""
    stacks = {"w": array(length, WIDTH, WIDTH), "b": array(length, WIDTH)}
    return stacks | {"table": array(WORDS, WIDTH), "shared": array(WIDTH)}


def batch(rows: int) -> dict[str, np.ndarray]:
    """A batch for any of the models."""
    words = np.random.default_rng(rows).integers(0, WORDS, rows).astype(np.int32)
    return {"words": words, "y": array(rows, WIDTH, seed=1)}
