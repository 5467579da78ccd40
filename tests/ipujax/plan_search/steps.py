"""Steps of the tests of `ipu.search`: small ones, with their arguments."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

TILES = 16
WIDTH = 16
ROWS = 16


def scanned_step(params: Any, momentum: Any, batch: Any) -> Any:
    """Tokens through a loop over layers, with one table for both ends, by momentum."""

    def loss(params: Any) -> Any:
        x = params["table"][batch["ids"]] + params["bias"]
        layer = jax.checkpoint(lambda x, w: (x + jnp.tanh(x @ w), None))
        x, _ = jax.lax.scan(layer, x, params["layers"])
        logits = jax.nn.log_softmax(x @ params["table"].T)
        return -jnp.mean(jnp.take_along_axis(logits, batch["labels"][..., None], -1))

    value, grads = jax.value_and_grad(loss)(params)
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, grads)
    return jax.tree.map(lambda p, m: p - 0.1 * m, params, momentum), momentum, value


def scanned_arguments() -> tuple[Any, Any, Any]:
    """Parameters, momentum and batch of `scanned_step`."""
    keys = iter(jax.random.split(jax.random.key(0), 5))
    params = {
        "table": jax.random.normal(next(keys), (32, WIDTH)) / 4,
        "bias": jax.random.normal(next(keys), (WIDTH,)) / 4,
        "layers": jax.random.normal(next(keys), (4, WIDTH, WIDTH)) / 4,
    }
    ids, labels = (jax.random.randint(next(keys), (ROWS, 4), 0, 32) for _ in range(2))
    return params, jax.tree.map(jnp.zeros_like, params), {"ids": ids, "labels": labels}


def dense_step(weights: Any, batch: Any) -> Any:
    """Dense layers by gradient descent."""

    def loss(weights: Any) -> Any:
        x, y = batch
        for w in weights:
            x = jnp.tanh(x @ w)
        return ((x - y) ** 2).mean()

    value, grads = jax.value_and_grad(loss)(weights)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads), value


def half_step(weights: Any, batch: Any) -> Any:
    """The same with weights in half precision, and their update in single precision."""

    def loss(weights: Any) -> Any:
        x, y = batch
        for w in weights:
            x = jnp.tanh(x @ w)
        return ((x - y) ** 2).mean()

    grads = jax.grad(loss)(weights)
    return jax.tree.map(
        lambda w, g: (w.astype(jnp.float32) - 0.1 * g.astype(jnp.float32)).astype(w.dtype), weights, grads
    )


def dense_arguments() -> tuple[Any, Any]:
    """Weights and batch of `dense_step`."""
    keys = jax.random.split(jax.random.key(1), 6)
    weights = [jax.random.normal(key, (WIDTH, WIDTH)) / 4 for key in keys[:4]]
    return weights, tuple(jax.random.normal(key, (ROWS, WIDTH)) for key in keys[4:])


def scores(weights: Any, x: Any) -> Any:
    """A row of scores for each example: inference."""
    for w in weights:
        x = jnp.tanh(x @ w)
    return x
