"""Small models in stages: functions of parameters, a key and a batch, the same with stages and without."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import ipujax as ipu

Loss = Callable[[Any, jax.Array, Any], jax.Array]
WIDTH = 6
WORDS = 9


@contextmanager
def no_stage(number: int) -> Iterator[None]:
    del number
    yield


def array(*shape: int, seed: int = 0) -> np.ndarray:
    """Numbers that differ for each shape and seed."""
    return (np.random.default_rng([*shape, seed]).normal(size=shape) / 2).astype(np.float32)


def mlp(stages: int, stage: Any = ipu.stage) -> Loss:
    """One dense layer a stage."""

    def loss(params: Any, key: jax.Array, batch: Any) -> jax.Array:
        del key
        h = batch["x"]
        for number in range(stages):
            with stage(number):
                h = jnp.tanh(h @ params[f"w{number}"] + params[f"b{number}"])
        return jnp.mean((h - batch["y"]) ** 2)

    return loss


def dropout(stages: int, stage: Any = ipu.stage) -> Loss:
    """A loss with a mask of its own in each stage."""

    def loss(params: Any, key: jax.Array, batch: Any) -> jax.Array:
        h = batch["x"]
        for number in range(stages):
            with stage(number):
                kept = jax.random.bernoulli(jax.random.fold_in(key, number), 0.7, h.shape)
                h = jnp.tanh(h @ params[f"w{number}"] + params[f"b{number}"]) * kept
        return jnp.mean((h - batch["y"]) ** 2)

    return loss


def tied(stages: int, stage: Any = ipu.stage) -> Loss:
    """A table of words that the first and the last stage use."""

    def loss(params: Any, key: jax.Array, batch: Any) -> jax.Array:
        del key
        with stage(0):
            h = params["table"][batch["words"]] + batch["x"]
        for number in range(stages):
            with stage(number):
                h = jnp.tanh(h @ params[f"w{number}"] + params[f"b{number}"])
        with stage(stages - 1):
            scores = jax.nn.log_softmax(h @ params["table"].T)
        return -jnp.mean(jnp.take_along_axis(scores, batch["words"][:, None], 1))

    return loss


def layers(stages: int, stage: Any = ipu.stage) -> Loss:
    """A loop over layers in each stage, checkpointed; a residual connection that skips all stages but the ends."""

    def loss(params: Any, key: jax.Array, batch: Any) -> jax.Array:
        del key
        h = first = batch["x"]
        for number in range(stages):
            with stage(number):
                weights = jnp.stack([params[f"w{number}"], params[f"w{number}"].T])
                layer = jax.checkpoint(lambda h, w: jnp.tanh(h @ w))
                h, _ = lax.scan(lambda h, w: (layer(h, w), None), h, weights)  # noqa: B023
                if number == stages - 1:
                    h = h + first
        return jnp.mean((h - batch["y"]) ** 2)

    return loss


MODELS: dict[str, Callable[..., Loss]] = {"mlp": mlp, "dropout": dropout, "tied": tied, "layers": layers}


def parameters(stages: int) -> dict[str, np.ndarray]:
    """Parameters of any of the models."""
    params = {f"w{n}": array(WIDTH, WIDTH, seed=n) for n in range(stages)}
    params |= {f"b{n}": array(WIDTH, seed=n) for n in range(stages)}
    return params | {"table": array(WORDS, WIDTH)}


def batch(rows: int) -> dict[str, np.ndarray]:
    """A batch for any of the models."""
    words = np.random.default_rng(rows).integers(0, WORDS, rows).astype(np.int32)
    return {"x": array(rows, WIDTH), "y": array(rows, WIDTH, seed=1), "words": words}
