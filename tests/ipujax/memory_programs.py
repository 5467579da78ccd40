"""Programs of several kinds that fill small chips: functions, shapes of their arguments, arguments of `ipu.jit`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import PartitionSpec as P

import ipujax as ipu

OPTIMIZER = optax.adam(1e-3)


@dataclass(frozen=True)
class Program:
    """A function to compile for `num_ipus`, with the shapes of its arguments and further arguments of `ipu.jit`."""

    fun: Callable[..., Any]
    args: tuple[Any, ...]
    num_ipus: int = 1
    jit: dict[str, Any] = field(default_factory=dict)


def floats(*shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, np.float32)


def trained(loss: Callable[..., jax.Array], params: Any, *batch: Any) -> Program:
    """A step of Adam, its state donated."""

    def step(params: Any, state: Any, *batch: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, *batch)
        updates, state = OPTIMIZER.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    state = jax.eval_shape(OPTIMIZER.init, params)
    return Program(step, (params, state, *batch), jit={"donate_argnums": (0, 1)})


def chain(products: int = 12, width: int = 256, rows: int = 256) -> Program:
    """Products one after the other."""

    def fun(ws: list[jax.Array], x: jax.Array) -> jax.Array:
        for w in ws:
            x = jnp.tanh(x @ w)
        return x

    return Program(fun, ([floats(width, width)] * products, floats(rows, width)))


def loop(iterations: int, rows: int, width: int) -> Program:
    """A product of each batch of a stack, which may stream."""
    return Program(
        lambda w, xs: lax.map(lambda x: jnp.tanh(x @ w), xs), (floats(width, width), floats(iterations, rows, width))
    )


def attend(p: dict[str, jax.Array], x: jax.Array, heads: int) -> jax.Array:
    """Self-attention of [batch, length, width]."""
    q, k, v = (part.reshape(*part.shape[:2], heads, -1) for part in jnp.split(x @ p["qkv"], 3, -1))
    shares = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k))
    return jnp.einsum("bhqk,bkhd->bqhd", shares, v).reshape(x.shape) @ p["out"]


def attention(width: int = 64, length: int = 64, batch: int = 8, heads: int = 4) -> Program:
    """Attention alone."""
    params = {"qkv": floats(width, 3 * width), "out": floats(width, width)}
    return Program(lambda p, x: attend(p, x, heads), (params, floats(batch, length, width)))


def gpt_block(width: int = 64, length: int = 32, batch: int = 4, heads: int = 4) -> Program:
    """A training step of attention and a layer of four times the width, on normalised inputs."""

    def norm(x: jax.Array) -> jax.Array:
        return (x - x.mean(-1, keepdims=True)) * lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)

    def loss(p: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        x = x + attend(p, norm(x), heads)
        x = x + jax.nn.gelu(norm(x) @ p["up"]) @ p["down"]
        return ((x - y) ** 2).mean()

    shapes = {"qkv": (width, 3 * width), "out": (width, width), "up": (width, 4 * width), "down": (4 * width, width)}
    x = floats(batch, length, width)
    return trained(loss, {name: floats(*shape) for name, shape in shapes.items()}, x, x)


def cnn(side: int = 28, channels: tuple[int, int] = (16, 32), batch: int = 16) -> Program:
    """A training step of two convolutions, each pooled, and a dense layer."""

    def loss(p: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        for kernel in p["kernels"]:
            x = jax.nn.relu(
                lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
            )
            x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
        return ((x.reshape(batch, -1) @ p["out"] - y) ** 2).mean()

    first, second = channels
    kernels = [floats(3, 3, 1, first), floats(3, 3, first, second)]
    params = {"kernels": kernels, "out": floats((side // 4) ** 2 * second, 10)}
    return trained(loss, params, floats(batch, side, side, 1), floats(batch, 10))


def mlp(widths: tuple[int, ...] = (784, 256, 256, 10), batch: int = 64) -> Program:
    """A training step of dense layers."""

    def loss(ws: list[jax.Array], x: jax.Array, y: jax.Array) -> jax.Array:
        for w in ws:
            x = jnp.tanh(x @ w)
        return ((x - y) ** 2).mean()

    params = [floats(a, b) for a, b in pairwise(widths)]
    return trained(loss, params, floats(batch, widths[0]), floats(batch, widths[-1]))


def lstm(length: int = 16, units: int = 128, batch: int = 32) -> Program:
    """A training step of a recurrent network, by a loop."""

    def loss(p: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        def cell(carry: tuple[jax.Array, jax.Array], row: jax.Array) -> Any:
            h, c = carry
            i, f, g, o = jnp.split(row @ p["wx"] + h @ p["wh"], 4, -1)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            return (jax.nn.sigmoid(o) * jnp.tanh(c), c), None

        zeros = jnp.zeros((batch, units))
        return ((lax.scan(cell, (zeros, zeros), x)[0][0] - y) ** 2).mean()

    params = {"wx": floats(units, 4 * units), "wh": floats(units, 4 * units)}
    return trained(loss, params, floats(length, batch, units), floats(batch, units))


def pipeline(width: int = 128, rows: int = 512) -> Program:
    """Gradients of two stages."""

    def loss(ws: list[jax.Array], x: jax.Array) -> jax.Array:
        for stage in range(2):
            with ipu.stage(stage):
                for w in ws[stage::2]:
                    x = jnp.tanh(x @ w)
                value = (x**2).mean()
        return value

    run = ipu.pipeline(jax.value_and_grad(loss), micro_batches=4)
    return Program(run, ([floats(width, width)] * 6, floats(rows, width)), num_ipus=2)


def replicas(width: int = 128, rows: int = 512) -> Program:
    """A step of gradient descent on two replicas."""

    def step(ws: list[jax.Array], x: jax.Array) -> list[jax.Array]:
        def loss(ws: list[jax.Array]) -> jax.Array:
            h = x
            for w in ws:
                h = jnp.tanh(h @ w)
            return (h**2).mean()

        grads = lax.pmean(jax.grad(loss)(ws), "replica")
        return [w - 0.1 * g for w, g in zip(ws, grads, strict=True)]

    settings = {"replicas": 2, "in_specs": (P(), P("replica")), "out_specs": P(), "donate_argnums": 0}
    return Program(step, ([floats(width, width)] * 4, floats(rows, width)), 2, settings)
