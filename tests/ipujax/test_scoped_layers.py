"""Layers of functions within `jax.named_scope`: each has a row, and a slow one among equal ones is named."""

from __future__ import annotations

import re
from collections.abc import Callable
from random import Random
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import ipujax as ipu

WIDTH = 32
SLOW = 16  # times the work of the others
Array = jax.Array


def norm(x: Array) -> Array:
    return (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)


def attention(x: Array, w: Array) -> Array:
    y = jnp.einsum("bd,de->be", x, w)
    return jnp.einsum("bc,ce->be", jax.nn.softmax(jnp.einsum("be,ce->bc", y, x)), y)


def ffn(x: Array, w: Array) -> Array:
    return jax.nn.gelu(x @ w) @ w.T


@jax.jit
def gate(x: Array, w: Array) -> Array:
    return x * jax.nn.sigmoid(x @ w @ w.T)


def mixer(x: Array, w: Array) -> Array:
    def project(x: Array) -> Array:
        return jnp.tanh(x @ w) @ w.T

    return project(x) + x


FUNCTIONS = {"attention": attention, "ffn": ffn, "gate": gate, "mixer": mixer}


def with_blocks(functions: list[str], weights: Any, x: Array) -> Array:
    for n, layer in enumerate(weights):
        with jax.named_scope(f"block_{n}"):
            for name, w in zip(functions, layer, strict=True):
                x = norm(x + FUNCTIONS[name](x, w))
    return x


def with_nested_blocks(functions: list[str], weights: Any, x: Array) -> Array:
    with jax.named_scope("model"):
        for n, layer in enumerate(weights):
            with jax.named_scope(f"block_{n}"), jax.default_matmul_precision("default"):
                for name, w in zip(functions, layer, strict=True):
                    x = x + FUNCTIONS[name](norm(x), w)
    return x


def with_calls(functions: list[str], weights: Any, x: Array) -> Array:
    def block(x: Array, layer: Any, n: int) -> Array:
        with jax.named_scope(f"block_{n}"):
            for name, w in zip(functions, layer, strict=True):
                x = norm(x + FUNCTIONS[name](x, w))
            return x

    for n, layer in enumerate(weights):
        x = block(x, layer, n)
    return x


def with_decorators(functions: list[str], weights: Any, x: Array) -> Array:
    for n, layer in enumerate(weights):

        @jax.named_scope(f"block_{n}")
        def run(x: Array, layer: Any = layer) -> Array:
            for name, w in zip(functions, layer, strict=True):
                x = x + jax.checkpoint(FUNCTIONS[name])(x, w)
            return x

        x = run(x)
    return x


MODELS = (with_blocks, with_nested_blocks, with_calls, with_decorators)


def planted(seed: int) -> tuple[ipu.Profile, list[str], int, str]:
    """A profile of random scopes, the functions in each of its blocks, and block and name of the slow one."""
    random = Random(seed)
    model = MODELS[seed % len(MODELS)]
    functions = random.sample(sorted(FUNCTIONS), 3)
    count = random.choice([3, 5])
    slow_block, slow = random.randrange(count), random.randrange(3)
    if functions[slow] == "attention":  # its weight is square
        functions[slow] = next(name for name in ("ffn", "mixer", "gate") if name not in functions)

    def weight(block: int, number: int) -> jax.ShapeDtypeStruct:
        is_slow = (block, number) == (slow_block, slow)
        width = WIDTH if functions[number] == "attention" else 2 * WIDTH * (SLOW if is_slow else 1)
        return jax.ShapeDtypeStruct((WIDTH, width), jnp.float32)

    weights = [[weight(block, number) for number in range(3)] for block in range(count)]

    def loss(weights: Any, x: Array) -> Array:
        return jnp.mean(model(functions, weights, x) ** 2)

    fun: Callable[..., Any] = jax.grad(loss) if random.random() < 0.5 else loss
    x = jax.ShapeDtypeStruct((4 * WIDTH, WIDTH), jnp.float32)
    profile = ipu.jit(fun, device=ipu.IPUModel(tiles_per_ipu=64)).profile(weights, x)
    return profile, functions, count, f"block_{slow_block}/{functions[slow]}"


@pytest.mark.parametrize("seed", range(20))
def test_layers_of_a_slow_function_within_scopes(seed: int) -> None:
    profile, functions, count, slow = planted(seed)
    layers = {row.layer for row in profile.layers if row.cycles}
    for n in range(count):
        for name in functions:
            assert any(f"block_{n}/" in layer and f"/{name}" in layer for layer in layers), (n, name, layers)
    assert not [layer for layer in layers if "->" in layer]
    summary = profile.summary()
    named = re.findall(r"(\S+) takes [\d.]+ times the median of the \d+ layers of its kind", summary)
    assert named and any(slow in re.sub(r"\[\d+\]", "", layer) for layer in named), summary.split("\n\n")[1]


def test_layers_of_einsums_alone_are_no_scopes() -> None:
    def f(x: Array) -> Array:
        with jax.named_scope("a->b"):  # not the specification of a product: the result has a letter of no operand
            return jnp.einsum("ij,jk->ik", x, x)

    profile = ipu.jit(f).profile(jax.ShapeDtypeStruct((32, 32), jnp.float32))
    assert {row.layer for row in profile.layers if row.cycles} == {"(no layer)", "a->b"}


def test_layers_of_a_function_in_a_scope_of_its_own_name() -> None:
    def outer(x: Array) -> Array:
        def helper(x: Array) -> Array:
            return jnp.sin(x @ x)

        with jax.named_scope("part"):
            with jax.named_scope("helper"):
                x = helper(x)
            return jnp.cos(helper(x))

    profile = ipu.jit(outer).profile(jax.ShapeDtypeStruct((32, 32), jnp.float32))
    layers = {row.layer for row in profile.layers if row.cycles}
    assert {re.sub(r"\[\d+\]", "", layer) for layer in layers} == {"(no layer)", "part", "part/helper"}


def test_layers_own_cycles_count() -> None:
    def model(x: Array) -> Array:
        with jax.named_scope("block"):
            return norm(jnp.sort(x @ x, 0))

    profile = ipu.jit(model).profile(jax.ShapeDtypeStruct((128, 128), jnp.float32))
    assert "Of layers without those inside them most is block with" in profile.summary()
