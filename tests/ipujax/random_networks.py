"""Random networks by seed, of functions whose lines are all different: losses, gradients, training steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from random import Random
from typing import Any

import jax
import jax.numpy as jnp
import optax

ROWS, WIDTH, TOKENS = 64, 32, 8
Array = jax.Array
Layer = Callable[[Array, Array], Array]


def dense(w: Array, x: Array) -> Array:
    h = x @ w
    return jax.nn.relu(h)


def normalised(w: Array, x: Array) -> Array:
    mean = x.mean(-1, keepdims=True)
    variance = ((x - mean) ** 2).mean(-1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(variance + 1e-5) * w[0]


def attention(w: Array, x: Array) -> Array:
    tokens = x.reshape(-1, TOKENS, WIDTH)
    keys = jnp.einsum("btd,de->bte", tokens, w)
    weights = jax.nn.softmax(jnp.einsum("bte,bse->bts", keys, tokens) / 6)
    return jnp.einsum("bts,bse->bte", weights, tokens).reshape(x.shape)


def scanned(w: Array, x: Array) -> Array:
    def body(x: Array, row: Array) -> tuple[Array, None]:
        x = jnp.sin(x * row)
        return x + 0.1, None

    return jax.lax.scan(body, x, w[:3])[0]


def chosen(w: Array, x: Array) -> Array:
    return jax.lax.cond(
        w[0, 0] > 0,
        lambda x: jnp.exp(-x * x),
        lambda x: jnp.cos(x),
        x,
    )


def less_than_highest(w: Array, x: Array) -> Array:
    highest = jnp.max(x, -1, keepdims=True)
    return x - highest + w[0]


@partial(jax.jit, static_argnums=2)
def scaled(w: Array, x: Array, power: int) -> Array:
    return x * jnp.tanh(w[1]) ** power


def in_a_call(w: Array, x: Array) -> Array:
    return scaled(w, x, 3)


@jax.custom_vjp
def clipped(w: Array, x: Array) -> Array:
    return jnp.clip(x, -1, 1) * w[0]


def clipped_forward(w: Array, x: Array) -> tuple[Array, tuple[Array, Array]]:
    return clipped(w, x), (w, x)


def clipped_backward(residuals: tuple[Array, Array], g: Array) -> tuple[Array, Array]:
    w, x = residuals
    return jnp.zeros_like(w), jnp.where(jnp.abs(x) < 1, g, 0) * w[0]


clipped.defvjp(clipped_forward, clipped_backward)


def looked_up(w: Array, x: Array) -> Array:
    indices = jnp.argmax(x, -1)
    return x + jax.nn.one_hot(indices, WIDTH) @ w


def accumulated(w: Array, x: Array) -> Array:
    total = jnp.cumsum(x, -1)
    return total / WIDTH + w[2]


def gated(w: Array, x: Array) -> Array:
    with jax.named_scope("gate"):
        gate = jax.nn.sigmoid(x @ w)
    return gate * x


LAYERS: Sequence[Layer] = (
    *(
        dense,
        normalised,
        attention,
        scanned,
        chosen,
        less_than_highest,
        in_a_call,
        clipped,
        looked_up,
        accumulated,
        gated,
    ),
    jax.checkpoint(dense),
    jax.checkpoint(gated),
)
OPTIMISERS = (lambda: optax.sgd(0.1, 0.9), lambda: optax.adamw(1e-3))


def network(layers: Sequence[Layer], weights: Any, x: Array) -> Array:
    for layer, w in zip(layers, weights, strict=True):
        x = layer(w, x)
    return jnp.mean(x**2)


def function_of(seed: int) -> tuple[Callable[..., Any], list[jax.ShapeDtypeStruct]]:
    """Return the function of a seed: a loss, its gradient, or a training step; and the shapes of its weights."""
    random = Random(seed)
    layers = random.choices(LAYERS, k=random.randint(2, 6))
    kind = random.choice(["loss", "gradient", "step"])
    optimiser = random.choice(OPTIMISERS)()
    loss = partial(network, layers)

    def step(weights: Any, x: Array) -> Any:
        grads = jax.grad(loss)(weights, x)
        updates, _ = optimiser.update(grads, optimiser.init(weights), weights)
        return optax.apply_updates(weights, updates)

    functions = {"loss": loss, "gradient": jax.value_and_grad(loss), "step": step}
    return functions[kind], [jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)] * len(layers)
