"""Exported networks of `opaque_calls.py`: with constants, loops, products of all kinds, shapes that are polymorphic.

`networks()` lists them. A network has a second form without loops of which XLA's analysis counts every operation: the
analysis counts one iteration of a loop, and nothing of LAPACK.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import export, lax
from models.cnn import cnn
from models.gcn import gcn
from models.mlp import mlp

Fun = Callable[..., Any]


@dataclass(frozen=True)
class Case:
    """An opaque call.

    Args:
        name: in the table.
        call: the function that is opaque.
        args: its arguments.
        counted: function of equal work, of which XLA counts all operations.
        captured_bytes: arrays that the module of the call holds.
    """

    name: str
    call: Fun
    args: Sequence[Any]
    counted: Fun
    captured_bytes: int = 0


def _exported(
    name: str, fun: Fun, *args: Any, counted: Fun | None = None, captured: Any = (), shapes: Any = None
) -> Case:
    call = export.export(jax.jit(fun))(*(args if shapes is None else shapes)).call
    captured_bytes = sum(np.asarray(x).nbytes for x in jax.tree.leaves(captured))
    return Case(name, call, args, counted or fun, captured_bytes)


def _array(seed: int, *shape: int, scale: float = 1.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(shape) * scale).astype(np.float32)


def _weights(*widths: int) -> list[np.ndarray]:
    return [_array(n, a, b, scale=a**-0.5) for n, (a, b) in enumerate(pairwise(widths))]


def _unrolled(step: Fun, carry: Any, rows: Any) -> tuple[Any, Any]:
    results = []
    for row in rows:
        carry, result = step(carry, row)
        results.append(result)
    return carry, jnp.stack(results)


def _perceptron(weights: Sequence[Any], activation: Fun, x: jax.Array) -> jax.Array:
    for w in weights[:-1]:
        x = activation(x @ w)
    return x @ weights[-1]


def perceptrons() -> list[Case]:
    """Dense networks: activations, dtypes, quantised weights, shapes that are polymorphic."""
    x = _array(9, 32, 64)
    weights = _weights(64, 128, 128, 16)
    relu = partial(_perceptron, weights, jax.nn.relu)
    gelu = partial(_perceptron, weights, partial(jax.nn.gelu, approximate=False))
    half = [w.astype(jnp.bfloat16) for w in weights]
    int8_weights = [np.round(w * 100).astype(np.int8) for w in weights]

    def quantised(x: jax.Array) -> jax.Array:
        for w in int8_weights:
            scale = jnp.abs(x).max() / 127
            product = lax.dot(jnp.round(x / scale).astype(jnp.int8), w, preferred_element_type=jnp.int32)
            x = product.astype(jnp.float32) * (scale / 100)
        return x

    def dequantised(x: jax.Array) -> jax.Array:
        return _perceptron([jnp.asarray(w).astype(jnp.float32) / 100 for w in int8_weights], jnp.tanh, x)

    rows, width = export.symbolic_shape("rows, width")
    inner = export.export(jax.jit(relu))(x).call

    def nested(x: jax.Array) -> jax.Array:
        return jax.nn.log_softmax(inner(x * 2))

    def plainly_nested(x: jax.Array) -> jax.Array:
        return jax.nn.log_softmax(relu(x * 2))

    def of_any_width(x: jax.Array) -> jax.Array:
        return jax.nn.softmax((x @ x.T) / x.shape[1]) @ x

    of_any_rows = jax.ShapeDtypeStruct((rows, 64), np.float32)
    of_any_shape = jax.ShapeDtypeStruct((rows, width), np.float32)
    with_vjp = export.export(jax.jit(relu))(x)
    loaded = export.deserialize(with_vjp.serialize(vjp_order=1)).call
    return [
        _exported("dense, relu", relu, x, captured=weights),
        _exported("dense, gelu", gelu, x, captured=weights),
        _exported("dense, bfloat16", partial(_perceptron, half, jnp.tanh), x.astype(jnp.bfloat16), captured=half),
        _exported("dense, int8 products", quantised, x, captured=int8_weights),
        _exported("dense, int8 weights", dequantised, x, captured=int8_weights),
        _exported("dense, any rows", relu, x, captured=weights, shapes=[of_any_rows]),
        _exported("products, any shape", of_any_width, x, shapes=[of_any_shape]),
        _exported("export in an export", nested, x, counted=plainly_nested, captured=weights),
        Case("gradient of an export", _gradient(loaded), [x], _gradient(relu), sum(w.nbytes for w in weights)),
        _exported("exported gradient", _gradient(gelu), x, captured=weights),
    ]


def _gradient(fun: Fun) -> Fun:
    return jax.grad(lambda x: (fun(x) ** 2).sum())


def loops() -> list[Case]:
    """Recurrent networks and other loops."""
    x = _array(9, 32, 64)
    w, u = _weights(64, 64, 64)
    gates = _array(3, 64, 256, scale=0.1)
    stacked = np.stack(_weights(*[64] * 9))

    def recurrent(h: Any, row: Any) -> tuple[Any, Any]:
        h = jnp.tanh(row @ w + h @ u)
        return h, h

    def lstm(state: Any, row: Any) -> tuple[Any, Any]:
        h, c = state
        i, f, g, o = jnp.split((row + h) @ gates, 4)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    def layer(h: Any, weight: Any) -> tuple[Any, Any]:
        h = jax.nn.relu(h @ weight)
        return h, h.sum()

    def powers(x: jax.Array) -> jax.Array:
        return lax.fori_loop(0, 20, lambda i, c: jnp.tanh(c @ w), x)

    def unrolled_powers(x: jax.Array) -> jax.Array:
        for _ in range(20):
            x = jnp.tanh(x @ w)
        return x

    def until(x: jax.Array) -> jax.Array:
        return lax.while_loop(lambda s: s[0] < 24, lambda s: (s[0] + 3, s[1] @ w), (0, x))[1]

    def unrolled_until(x: jax.Array) -> jax.Array:
        for _ in range(8):
            x = x @ w
        return x

    def nested(x: jax.Array) -> jax.Array:
        return lax.fori_loop(0, 4, lambda i, c: lax.fori_loop(0, 5, lambda j, d: d @ w, c), x)

    def unrolled_nested(x: jax.Array) -> jax.Array:
        for _ in range(20):
            x = x @ w
        return x

    zeros = np.zeros(64, np.float32)
    return [
        _exported(
            "recurrent",
            lambda x: lax.scan(recurrent, zeros, x)[1],
            x,
            counted=lambda x: _unrolled(recurrent, zeros, x)[1],
            captured=[w, u],
        ),
        _exported(
            "LSTM",
            lambda x: lax.scan(lstm, (zeros, zeros), x)[1],
            x,
            counted=lambda x: _unrolled(lstm, (zeros, zeros), x)[1],
            captured=gates,
        ),
        _exported(
            "scanned layers",
            lambda x: lax.scan(layer, x, stacked),
            x,
            counted=lambda x: _unrolled(layer, x, stacked),
            captured=stacked,
        ),
        _exported("20 products", powers, x, counted=unrolled_powers, captured=w),
        _exported("while", until, x, counted=unrolled_until, captured=w),
        _exported("loop in a loop", nested, x, counted=unrolled_nested, captured=w),
    ]


def images_and_text() -> list[Case]:
    """Convolutions, pools, attention; networks of Flax and Equinox."""
    images = _array(1, 4, 16, 16, 8)
    kernel = _array(2, 3, 3, 8, 16, scale=0.1)
    depthwise = _array(2, 3, 3, 1, 8, scale=0.1)
    numbers = ("NHWC", "HWIO", "NHWC")
    x = _array(9, 32, 64)
    q, k, v, o = _weights(64, 64, 64, 64, 64)

    def convolve(images: jax.Array) -> jax.Array:
        y = lax.conv_general_dilated(images, kernel, (2, 2), "SAME", dimension_numbers=numbers)
        return lax.reduce_window(jax.nn.relu(y), -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")

    def separable(images: jax.Array) -> jax.Array:
        y = lax.conv_general_dilated(
            images, depthwise, (1, 1), "SAME", dimension_numbers=numbers, feature_group_count=8
        )
        return lax.conv_general_dilated(y, kernel, (1, 1), [(2, 2)] * 2, rhs_dilation=(2, 2), dimension_numbers=numbers)

    def transposed(images: jax.Array) -> jax.Array:
        return lax.conv_transpose(images, kernel, (2, 2), "SAME", dimension_numbers=numbers)

    def attention(x: jax.Array) -> jax.Array:
        scores = (x @ q) @ (x @ k).T / 8
        masked = jnp.where(jnp.tril(jnp.ones((32, 32), bool)), scores, -1e9)
        return jax.nn.softmax(masked) @ (x @ v) @ o

    def encoder(x: jax.Array) -> jax.Array:
        h = x + attention(jax.nn.standardize(x))
        return h + jax.nn.gelu(jax.nn.standardize(h) @ q) @ k

    dense = nn.Sequential([nn.Dense(128), nn.gelu, nn.LayerNorm(), nn.Dense(10)])
    # MLIR has equal constants once: biases that are not all 0.
    seeds = iter(range(100))
    of_flax = jax.tree.map(lambda p: p + _array(next(seeds), *p.shape, scale=0.1), dense.init(jax.random.key(0), x))
    of_equinox = eqx.nn.MLP(64, 16, 64, 2, key=jax.random.key(1))
    arrays = eqx.filter(of_equinox, eqx.is_array)
    return [
        _exported("convolution, pool", convolve, images, captured=kernel),
        _exported("separable, dilated", separable, images, captured=[kernel, depthwise]),
        _exported("transposed", transposed, images, captured=kernel),
        _exported("gradient of a pool", _gradient(convolve), images, captured=kernel),
        _exported("causal attention", attention, x, captured=[q, k, v, o]),
        _exported("encoder layer", encoder, x, captured=[q, k, v, o]),
        _exported("Flax", partial(dense.apply, of_flax), x, captured=of_flax),
        _exported("Equinox", jax.vmap(of_equinox), x, captured=arrays),
    ]


def reductions_and_steps() -> list[Case]:
    """Reductions, sorts, lookups, branches, transforms, and training steps of `models`."""
    x = _array(9, 64, 128)
    table = _array(4, 1000, 64)
    w = _weights(128, 16)[0]
    tokens = np.random.default_rng(0).integers(0, 1000, (8, 16)).astype(np.int32)

    def moments(x: jax.Array) -> Any:
        return jax.nn.logsumexp(x, 1), x.var(0), x.max(1), jnp.linalg.norm(x, axis=0)

    def sorts(x: jax.Array) -> Any:
        return jnp.sort(x, 1), jnp.argsort(x.reshape(-1)), jnp.median(x, 0)

    def routed(x: jax.Array) -> Any:
        scores, experts = lax.top_k(jax.nn.softmax(x @ w), 2)
        return scores.sum(1) * jax.nn.one_hot(experts, 16).sum(1).T @ x

    def looked_up(tokens: jax.Array) -> jax.Array:
        rows = jnp.asarray(table)[tokens]
        return jax.nn.relu(rows.reshape(-1, 64) @ table[:64].T)

    def branches(x: jax.Array) -> jax.Array:
        return lax.cond(x.sum() > 0, lambda x: x @ w, lambda x: jnp.tanh(x) @ w, x)

    def filtered(x: jax.Array) -> jax.Array:
        return jnp.fft.irfft(jnp.fft.rfft(x) * np.exp(-np.arange(65) / 9).astype(np.float32))

    def summed(x: jax.Array) -> jax.Array:
        segments = np.arange(64) % 8
        return jax.ops.segment_sum(jax.nn.relu(x @ w), segments, 8)

    def step(name: str, model: Any) -> Case:
        state = model.init(jax.random.key(0))
        batch = jax.tree.map(lambda s: np.ones(s.shape, s.dtype), model.batch)
        return _exported(name, model.step, *state, *batch)

    return [
        _exported("reductions", moments, x),
        _exported("sorts", sorts, x),
        _exported("routed experts", routed, x, captured=w),
        _exported("embedding", looked_up, tokens, captured=table),
        _exported("branches", branches, x, captured=w),
        _exported("Fourier filter", filtered, x),
        _exported("sums of segments", summed, x, captured=w),
        step("MLP, training", mlp((64, 128, 10), 32)),
        step("CNN, training", cnn(16, (8, 16), 10, 8)),
        step("GCN, training", gcn(100, 400, (64, 32, 7), 20)),
    ]


def networks() -> list[Case]:
    """All exported networks."""
    return [*perceptrons(), *loops(), *images_and_text(), *reductions_and_steps()]
