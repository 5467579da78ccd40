"""Planted bottlenecks are named in the first screen of a profile: text and page."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import ipujax as ipu

DEVICE = ipu.IPUModel(tiles_per_ipu=64)
WIDTH = 64
LAYERS = 12


def block(p: Any, x: jax.Array) -> jax.Array:
    return x + jnp.tanh(x @ p["up"]) @ p["down"]


def loss(params: Any, x: jax.Array) -> jax.Array:
    for p in params:
        x = block(p, x)
    return (x**2).mean()


def scoped_loss(params: Any, x: jax.Array) -> jax.Array:
    for number, p in enumerate(params):
        with jax.named_scope(f"encoder_{number}"):
            x = block(p, x)
    return (x**2).mean()


def train_step(fun: Any) -> Any:
    def step(params: Any, x: jax.Array) -> Any:
        value, grads = jax.value_and_grad(fun)(params, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    return step


def params(hidden: list[int]) -> Any:
    shape = jax.ShapeDtypeStruct
    return [{"up": shape((WIDTH, n), jnp.float32), "down": shape((n, WIDTH), jnp.float32)} for n in hidden]


def profile(fun: Any, hidden: list[int]) -> ipu.Profile:
    step = ipu.jit(train_step(fun), device=DEVICE)
    return step.profile(params(hidden), jax.ShapeDtypeStruct((32, WIDTH), jnp.float32))


@pytest.mark.parametrize(("fun", "name"), [(loss, "block[{}]"), (scoped_loss, "encoder_{}")])
@pytest.mark.parametrize("slow", [2, 7])
def test_the_slow_one_of_twelve_equal_layers_is_named(fun: Any, name: str, slow: int, tmp_path: Any) -> None:
    hidden = [64] * LAYERS
    hidden[slow] = 512
    actual = profile(fun, hidden)
    first_screen = "".join(actual.summary().split("\n\n")[:3])
    assert name.format(slow) in first_screen and "times the median of the 12 layers" in first_screen
    rows = [row for row in actual.layers if name.format(slow) in row.layer.split("/")]
    assert {row.part for row in rows} >= {"forward", "backward"}
    names = {part for row in actual.layers for part in row.layer.split("/") if part.startswith(name.partition("{")[0])}
    assert len(names) == LAYERS  # two layers made by one line are two rows
    actual.to_html(tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert re.search(rf"{re.escape(name.format(slow))}(/\w+)? takes", page)  # it, or a layer of it that is why


@pytest.mark.parametrize(("fun", "name"), [(loss, "block[{}]"), (scoped_loss, "encoder_{}")])
def test_the_layer_whose_width_changed_is_named_by_a_comparison(fun: Any, name: str) -> None:
    before = profile(fun, [64] * LAYERS)
    after = profile(fun, [64] * 5 + [256] + [64] * 6)
    comparison = ipu.compare(before, after)
    assert name.format(5) in comparison.verdict
    assert name.format(5) in next(iter(comparison.layers))
    back = ipu.compare(after, before)
    assert name.format(5) in back.verdict and "-" in back.verdict


def test_a_cause_has_the_sign_of_the_change() -> None:
    before = profile(loss, [64] * LAYERS)
    after = profile(loss, [96] * LAYERS)
    for first, second in ((before, after), (after, before)):
        comparison = ipu.compare(first, second)
        change = second.cycles - first.cycles
        cause = max(comparison.changes, key=lambda c: c.difference("cycles") * (1 if change > 0 else -1))
        assert f"{cause.difference('cycles'):+,} cycles" in comparison.verdict
