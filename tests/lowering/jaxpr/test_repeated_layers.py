"""Rows for layers that one line makes: by loops of C code, nested loops, recursion, and scopes of one name."""

from __future__ import annotations

import dis
from collections.abc import Callable
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from ipujax.lowering.jaxpr.loops_of_code import with_blocks_around
from tests.lowering.jaxpr.test_layer_names import layers

X = jnp.ones((3, 4))
W = jnp.ones((4, 4))


def dense(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.tanh(x @ w)


def chain(ws: Any, x: jax.Array) -> jax.Array:
    for w in ws:
        x = jnp.tanh(x @ w)
    return x


def recursive(ws: Any, x: jax.Array) -> jax.Array:
    return recursive(ws[1:], jnp.tanh(x @ ws[0])) if ws else x


class Layer:
    def cell(self, x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
        return jnp.tanh(x @ w), None

    def apply(self, ws: jax.Array, x: jax.Array) -> jax.Array:
        return jax.lax.scan(self.cell, x, ws)[0]


def loss_by_reduce(ws: Any, x: jax.Array) -> jax.Array:
    return reduce(lambda x, w: jnp.tanh(x @ w), ws, x).sum()


def loss_by_function(ws: Any, x: jax.Array) -> jax.Array:
    return reduce(lambda x, w: dense(w, x), ws, x).sum()


def loss_by_map(ws: Any, x: jax.Array) -> jax.Array:
    return sum(map(lambda w: jnp.tanh(x @ w).sum(), ws))


def loss_by_generator(ws: Any, x: jax.Array) -> jax.Array:
    return sum(jnp.tanh(x @ w).sum() for w in ws)


@pytest.mark.parametrize(
    ("loss", "name"),
    [(loss_by_reduce, "loop"), (loss_by_function, "dense"), (loss_by_map, "loop"), (loss_by_generator, "loop")],
)
@pytest.mark.parametrize("part", ["forward", "backward"])
def test_repeated_calls_from_c_code_are_numbered(loss: Callable[..., Any], name: str, part: str) -> None:
    rows = layers(jax.grad(loss), [W] * 3, X, part=part)
    assert {row for row in rows if "[" in row} == {f"{loss.__name__}/{name}[{n}]" for n in range(3)}


@pytest.mark.parametrize("part", ["forward", "backward"])
def test_a_layer_of_a_loop_alone_begins_with_inputs_of_its_own(part: str) -> None:
    def loss(ws: Any, x: jax.Array) -> jax.Array:
        for layer in jax.tree.map(lambda w: w.astype(jnp.float16), ws):
            x = chain(layer, x)
        return x.sum()

    counts = (2, 3, 1, 2)
    rows = layers(jax.grad(loss), [[W] * count for count in counts], X, part=part)
    numbers = {f"loss/chain[{n}]/loop[{k}]" for n, count in enumerate(counts) for k in range(count)}
    # A single iteration has no number of its own.
    assert {row for row in rows if "[" in row} == numbers - {"loss/chain[2]/loop[0]"} | {"loss/chain[2]"}


def test_nested_loops_of_one_function_have_two_numbers() -> None:
    def loss(ws: Any, x: jax.Array) -> jax.Array:
        for layer in ws:
            for w in layer:
                x = jnp.tanh(x @ w)
        return x

    assert layers(loss, [[W] * 2] * 3, X) == {f"loss/loop[{n}][{k}]" for n in range(3) for k in range(2)}


@pytest.mark.parametrize("part", ["forward", "backward"])
def test_scans_of_methods_are_numbered_though_one_is_longer(part: str) -> None:
    def loss(ws: Any, x: jax.Array) -> jax.Array:
        for w in ws:
            x = Layer().apply(w, x)
        return x.sum()

    rows = layers(jax.grad(loss), [jnp.ones((n, 4, 4)) for n in (2, 2, 5, 2)], X, part=part)
    assert {f"loss/apply[{n}]" for n in range(4)} <= rows


def test_depths_of_a_recursion_are_rows_beside_each_other() -> None:
    def loss(ws: Any, x: jax.Array) -> jax.Array:
        return recursive(ws, x).sum()

    assert layers(jax.grad(loss), [W] * 3, X, part="backward") - {"loss"} == {f"loss/recursive[{n}]" for n in range(3)}


def test_numbers_follow_the_scope_that_repeats() -> None:
    def fwd(ws: Any, x: jax.Array) -> jax.Array:
        with jax.named_scope("net"):
            for w in ws:
                with jax.named_scope("layer"):
                    with jax.named_scope("up"):
                        h = x @ w
                    with jax.named_scope("down"):
                        x = h @ w
            for w in ws:
                x = jnp.tanh(x @ w)
        return x

    rows = {f"net/layer[{n}]/{name}" for n in range(2) for name in ("up", "down")}
    assert layers(fwd, [W] * 2, X) == rows | {f"net/loop[{n}]" for n in range(2)}


def test_blocks_that_open_the_same_scope_are_numbered() -> None:
    def fwd(ws: Any, x: jax.Array) -> jax.Array:
        with jax.named_scope("layer"):
            x = x @ ws[0]
        with jax.named_scope("layer"):
            x = dense(ws[1], x)
        with jax.named_scope("head"), jax.default_matmul_precision("highest"):
            return x @ ws[2]

    assert layers(fwd, [W] * 3, X) == {"layer[0]", "layer[1]/dense", "head"}


def test_with_blocks_around_a_place() -> None:
    def nested() -> None:
        with a:  # noqa: F821
            with b:  # noqa: F821
                inside()  # noqa: F821
            between()  # noqa: F821
        after()  # noqa: F821

    code = nested.__code__
    places = {x.argval: x.offset for x in dis.get_instructions(code) if x.opname == "LOAD_GLOBAL"}
    counts = [len(with_blocks_around(code, places[name])) for name in ("a", "b", "inside", "between", "after")]
    assert counts == [0, 1, 2, 1, 0]
    assert with_blocks_around(code, places["inside"])[0] == with_blocks_around(code, places["between"])[0]
