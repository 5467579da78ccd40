"""A variational autoencoder for images of 28 × 28: 784-400-20 and back, batches of 128, by Adam.

Source: Kingma and Welling, "Auto-Encoding Variational Bayes" (2013): a Gaussian code, pixels by Bernoulli.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from .mlp import perceptron, perceptron_init
from .model import Model, Struct


def vae(pixels: int = 784, hidden: int = 400, code: int = 20, batch: int = 128) -> Model:
    """The training step; the key of the noise is part of its state.

    Args:
        pixels: of an image.
        hidden: units of the one hidden layer of the encoder, and of the decoder.
        code: dimensions of the code.
        batch: images a step.
    """
    optimizer = optax.adam(1e-3)

    def init(key: jax.Array) -> Any:
        key, *keys = jax.random.split(key, 3)
        encoder = (pixels, hidden, 2 * code)
        decoder = (code, hidden, pixels)
        params = {"encoder": perceptron_init(keys[0], *encoder), "decoder": perceptron_init(keys[1], *decoder)}
        return params, optimizer.init(params), key

    def loss(params: Any, key: jax.Array, images: jax.Array) -> jax.Array:
        """Negative evidence lower bound, in nats an image."""
        mean, log_variance = jnp.split(perceptron(params["encoder"], images), 2, -1)
        noise = jax.random.normal(key, mean.shape)
        logits = perceptron(params["decoder"], mean + jnp.exp(log_variance / 2) * noise)
        reconstruction = optax.sigmoid_binary_cross_entropy(logits, images).sum(-1)
        divergence = -0.5 * (1 + log_variance - mean**2 - jnp.exp(log_variance)).sum(-1)
        return (reconstruction + divergence).mean()

    def step(params: Any, opt_state: Any, key: jax.Array, images: jax.Array) -> Any:
        key, now = jax.random.split(key)
        value, grads = jax.value_and_grad(loss)(params, now, images)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, key, value

    return Model("vae", step, init, (Struct((batch, pixels), np.float32),))
