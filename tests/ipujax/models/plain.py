"""Training steps in plain jax.numpy and optax: an MLP, two CNNs, an LSTM and a small causal transformer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from tests.ipujax.models.base import Params, TrainingStep, images, tokens, weights

CLASSES = 10


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Mean over all positions of the cross entropy with integer labels."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def optax_step(loss: Callable[..., jax.Array], optimizer: optax.GradientTransformation) -> Callable[..., Any]:
    """A step on the state (parameters, optimizer state)."""

    def step(state: Any, *batch: jax.Array) -> tuple[Any, jax.Array]:
        params, opt_state = state
        value, grads = jax.value_and_grad(loss)(params, *batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), value

    return step


def optax_step_with_key(loss: Callable[..., jax.Array], optimizer: optax.GradientTransformation) -> Callable[..., Any]:
    """A step on the state (parameters, optimizer state, key), a new key each step for dropout."""

    def step(state: Any, *batch: jax.Array) -> tuple[Any, jax.Array]:
        params, opt_state, key = state
        key, now = jax.random.split(key)
        value, grads = jax.value_and_grad(loss)(params, now, *batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state, key), value

    return step


def dropout(x: jax.Array, key: jax.Array, rate: float) -> jax.Array:
    """Zeroes a share of the elements and scales up the rest."""
    return jnp.where(jax.random.bernoulli(key, 1 - rate, x.shape), x / (1 - rate), 0.0)


def conv(x: jax.Array, kernel: jax.Array, stride: int = 1, groups: int = 1) -> jax.Array:
    """Convolution of NHWC images with an HWIO kernel, same padding."""
    numbers = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(
        x, kernel, (stride, stride), "SAME", dimension_numbers=numbers, feature_group_count=groups
    )


def max_pool(x: jax.Array) -> jax.Array:
    """Greatest of each 2 × 2 field."""
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")


def average_pool(x: jax.Array) -> jax.Array:
    """Mean of 3 × 3 fields that overlap, a step of 2 apart."""
    return lax.reduce_window(x, 0.0, lax.add, (1, 3, 3, 1), (1, 2, 2, 1), "SAME") / 9


def layer_norm(x: jax.Array, scale: jax.Array, shift: jax.Array) -> jax.Array:
    """Normalises the last dimension."""
    mean = x.mean(-1, keepdims=True)
    variance = ((x - mean) ** 2).mean(-1, keepdims=True)
    return (x - mean) * lax.rsqrt(variance + 1e-5) * scale + shift


def mlp_sgd() -> TrainingStep:
    """A perceptron with two hidden layers, by plain gradient descent."""
    shapes = [(64, 48), (48, 24), (24, CLASSES)]
    params = {f"w{n}": weights(n, *shape) for n, shape in enumerate(shapes)}
    params |= {f"b{n}": jnp.zeros(shape[1]) for n, shape in enumerate(shapes)}

    def loss(params: Params, x: jax.Array, labels: jax.Array) -> jax.Array:
        h = x.reshape((x.shape[0], -1))
        h = jax.nn.relu(h @ params["w0"] + params["b0"])
        h = jnp.tanh(h @ params["w1"] + params["b1"])
        return cross_entropy(h @ params["w2"] + params["b2"], labels)

    optimizer = optax.sgd(0.1)
    contains = frozenset({"dot_general", "tanh", "max", "exp", "log", "reduce_max", "gather"})
    return TrainingStep(optax_step(loss, optimizer), (params, optimizer.init(params)), images(33, 8), contains)


def cnn_batch_norm_adam() -> TrainingStep:
    """Two convolutions with batch normalisation, max pooling and dropout, by Adam; moving statistics in the state."""
    params = {"k0": weights(0, 3, 3, 1, 8), "k1": weights(1, 3, 3, 8, 12), "w": weights(2, 48, CLASSES)}
    params |= {"scale": jnp.ones(8), "shift": jnp.zeros(8), "b": jnp.zeros(CLASSES)}
    moving = {"mean": jnp.zeros(8), "variance": jnp.ones(8)}
    optimizer = optax.adam(3e-3)

    def loss(params: Params, moving: Params, key: jax.Array, x: jax.Array, labels: jax.Array) -> Any:
        h = conv(x, params["k0"])
        mean = h.mean((0, 1, 2))
        variance = h.var((0, 1, 2))
        moving = {"mean": 0.9 * moving["mean"] + 0.1 * mean, "variance": 0.9 * moving["variance"] + 0.1 * variance}
        h = (h - mean) / jnp.sqrt(variance + 1e-3) * params["scale"] + params["shift"]
        h = max_pool(jax.nn.relu(h))
        h = max_pool(jax.nn.relu(conv(h, params["k1"])))
        h = dropout(h.reshape((x.shape[0], -1)), key, 0.25)
        return cross_entropy(h @ params["w"] + params["b"], labels), moving

    def step(state: Any, x: jax.Array, labels: jax.Array) -> tuple[Any, jax.Array]:
        params, moving, opt_state, key = state
        key, now = jax.random.split(key)
        (value, moving), grads = jax.value_and_grad(loss, has_aux=True)(params, moving, now, x, labels)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), moving, opt_state, key), value

    contains = frozenset({"conv_general_dilated", "reduce_window_max", "select_and_scatter_add", "random_bits", "rev"})
    state = (params, moving, optimizer.init(params), jax.random.key(3))
    return TrainingStep(step, state, images(17, 8), contains)


def cnn_layer_norm_momentum() -> TrainingStep:
    """A strided and a depthwise convolution with layer normalisation and average pooling, by Nesterov momentum."""
    params = {"k0": weights(0, 3, 3, 3, 8), "k1": weights(1, 3, 3, 1, 16), "w": weights(2, 16, CLASSES)}
    params |= {"scale": jnp.ones(8), "shift": jnp.zeros(8), "b": jnp.zeros(CLASSES)}

    def loss(params: Params, x: jax.Array, labels: jax.Array) -> jax.Array:
        h = layer_norm(conv(x, params["k0"], stride=2), params["scale"], params["shift"])
        h = average_pool(jax.nn.silu(h))
        h = jax.nn.elu(conv(h, params["k1"], groups=8))
        return cross_entropy(h.mean((1, 2)) @ params["w"] + params["b"], labels)

    optimizer = optax.sgd(0.05, momentum=0.9, nesterov=True)
    contains = frozenset({"conv_general_dilated", "reduce_window_sum", "rsqrt", "logistic", "expm1"})
    return TrainingStep(optax_step(loss, optimizer), (params, optimizer.init(params)), images(9, 11, 3), contains)


def lstm_rmsprop() -> TrainingStep:
    """An LSTM by `lax.scan` over the rows of an image, by RMSProp."""
    units = 20
    params = {"wx": weights(0, 8, 4 * units), "wh": weights(1, units, 4 * units), "b": jnp.zeros(4 * units)}
    params |= {"w": weights(2, units, CLASSES)}

    def loss(params: Params, x: jax.Array, labels: jax.Array) -> jax.Array:
        def cell(carry: tuple[jax.Array, jax.Array], row: jax.Array) -> Any:
            h, c = carry
            i, f, g, o = jnp.split(row @ params["wx"] + h @ params["wh"] + params["b"], 4, axis=1)
            c = jax.nn.sigmoid(f + 1) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            return (jax.nn.sigmoid(o) * jnp.tanh(c), c), None

        zero = jnp.zeros((x.shape[0], units))
        (h, _), _ = lax.scan(cell, (zero, zero), jnp.swapaxes(x[..., 0], 0, 1))
        return cross_entropy(h @ params["w"], labels)

    optimizer = optax.rmsprop(1e-3, momentum=0.5)
    contains = frozenset({"scan", "logistic", "tanh", "split", "transpose"})
    return TrainingStep(optax_step(loss, optimizer), (params, optimizer.init(params)), images(13, 8), contains)


def transformer_adamw() -> TrainingStep:
    """A causal transformer block with dropout, by AdamW under a warm-up cosine schedule and clipped gradients."""
    vocabulary = 29
    length = 12
    width = 24
    heads = 3
    shapes = {"embed": (vocabulary, width), "place": (length, width), "qkv": (width, 3 * width), "out": (width, width)}
    shapes |= {"up": (width, 4 * width), "down": (4 * width, width)}
    params = {name: weights(n, *shape) for n, (name, shape) in enumerate(shapes.items())}
    params |= {f"scale{n}": jnp.ones(width) for n in range(3)} | {f"shift{n}": jnp.zeros(width) for n in range(3)}

    def norm(params: Params, n: int, x: jax.Array) -> jax.Array:
        return layer_norm(x, params[f"scale{n}"], params[f"shift{n}"])

    def attention(params: Params, x: jax.Array) -> jax.Array:
        parts = jnp.split(x @ params["qkv"], 3, axis=-1)
        q, k, v = (part.reshape((*part.shape[:2], heads, -1)) for part in parts)
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5
        causal = jnp.tril(jnp.ones(scores.shape[-2:], bool))
        shares = jax.nn.softmax(jnp.where(causal, scores, -1e9), axis=-1)
        return jnp.einsum("bhqk,bkhd->bqhd", shares, v).reshape(x.shape) @ params["out"]

    def loss(params: Params, key: jax.Array, ids: jax.Array) -> jax.Array:
        x = params["embed"][ids[:, :-1]] + params["place"][: ids.shape[1] - 1]
        x = x + dropout(attention(params, norm(params, 0, x)), key, 0.1)
        x = x + jax.nn.gelu(norm(params, 1, x) @ params["up"]) @ params["down"]
        return cross_entropy(norm(params, 2, x) @ params["embed"].T, ids[:, 1:])

    schedule = optax.warmup_cosine_decay_schedule(0.0, 1e-2, warmup_steps=5, decay_steps=30)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=1e-2))
    step = optax_step_with_key(loss, optimizer)
    contains = frozenset({"gather", "scatter-add", "dot_general", "tanh", "cos", "select_n", "random_bits", "iota"})
    return TrainingStep(
        step, (params, optimizer.init(params), jax.random.key(5)), tokens(7, length, vocabulary), contains
    )
