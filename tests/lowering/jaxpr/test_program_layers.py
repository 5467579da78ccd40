"""Layers in a lowered program: composed over calls of outlined functions, and inside the stages of pipelines."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import ipujax as ipu
from ipujax.lowering.lower import lower
from ipujax.lowering.passes import run_passes
from ipujax.runtime.graph import Call, Execute, Program
from ipujax.runtime.target.presets import preset
from ipujax.runtime.tensor import OF_CALLER, Origin, compose
from tests.lowering.jaxpr.test_layer_names import block

WIDTH = 64


def params(count: int) -> list[dict[str, Any]]:
    return [{"w": jnp.ones((WIDTH, WIDTH)), "b": jnp.ones(WIDTH)} for _ in range(count)]


def composed(node: Program, calls: Sequence[Origin] = ()) -> Iterator[tuple[Origin, bool]]:
    """The origins of compute sets as seen from outside, and whether they are in a function."""
    if isinstance(node, Execute):
        origin = node.compute_set.origin
        for call in reversed(calls):
            origin = compose(call, origin)
        yield origin, bool(calls)
    inside = [*calls, node.origin] if isinstance(node, Call) else calls
    for child in node.children():
        yield from composed(child, inside)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.checkpoint], ids=["plain", "checkpoint"])
def test_the_calls_of_a_function_are_the_layers_it_was_made_of(wrap: Callable[..., Any]) -> None:
    def loss(ps: Any, x: jax.Array) -> jax.Array:
        for p in ps:
            x = wrap(block)(p, x)
        return (x**2).mean()

    jaxpr = jax.make_jaxpr(jax.grad(loss))(params(12), jnp.ones((16, WIDTH)))
    program = lower(list(run_passes(jaxpr).values())[-1], preset("mk2")).program
    origins = list(composed(program))
    assert not [origin for origin, _ in origins if OF_CALLER in origin.layer]
    for part in ("forward", "backward"):
        called = {origin.layer for origin, is_called in origins if is_called and origin.part == part}
        assert len(called & {f"loss/block[{n}]/dense[{k}]" for n in range(12) for k in range(2)}) >= 5, (
            part
        )  # functions, with layers apart
        everywhere = {origin.layer for origin, _ in origins if origin.part == part}
        assert {f"loss/block[{n}]/dense[{k}]" for n in range(12) for k in range(2)} <= everywhere


def test_stages_of_a_pipeline_have_layers() -> None:
    def loss(ps: Any, x: jax.Array) -> jax.Array:
        for n, p in enumerate(ps):
            with ipu.stage(n // 2):
                x = block(p, x)
        return (x**2).mean()

    step = ipu.pipeline(jax.grad(loss), micro_batches=4)
    lowered = ipu.jit(step, device=ipu.IPUModel(num_ipus=2)).lower(params(4), jnp.ones((16, WIDTH)))
    origins = [origin for origin, _ in composed(lowered.program)]
    for part in ("forward", "backward"):
        layers = {origin.layer for origin in origins if origin.part == part}
        assert {f"loss/block[{n}]/dense[{k}]" for n in range(4) for k in range(2)} <= layers, part
    assert not any("ipu_" in origin.layer for origin in origins)


def test_layers_with_names_of_their_own_stay_apart_in_a_function() -> None:
    """As Keras names them: no two layers of a model have the same name, at whatever depth."""

    def loss(ps: Any, x: jax.Array) -> jax.Array:
        for n, p in enumerate(ps):
            for name in (f"dense_{2 * n}", f"dense_{2 * n + 1}"):
                with jax.named_scope(name):
                    x = jnp.tanh(x @ p["w"] + p["b"])
        return (x**2).mean()

    jaxpr = jax.make_jaxpr(jax.grad(loss))(params(8), jnp.ones((16, WIDTH)))
    program = lower(list(run_passes(jaxpr).values())[-1], preset("mk2")).program
    origins = list(composed(program))
    assert not [origin for origin, _ in origins if OF_CALLER in origin.layer]
    for part in ("forward", "backward"):
        called = {origin.layer for origin, is_called in origins if is_called and origin.part == part}
        assert len(called) > 5, part
        everywhere = {origin.layer for origin, _ in origins if origin.part == part}
        assert {f"dense_{n}" for n in range(16)} <= everywhere <= {f"dense_{n}" for n in range(16)} | {"loss"}, part
