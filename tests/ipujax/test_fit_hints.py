"""Proposals of the error of a program that does not fit: only settings that apply and that its user has not chosen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ipujax as ipu

ROWS = 64
WIDTH = 16
WS = [np.ones((WIDTH, WIDTH), np.float32)] * 2
X = np.ones((ROWS, WIDTH), np.float32)
RECOMPUTE = 'Options(recompute="auto")'
PIPELINE = 'recompute="auto" of ipu.pipeline'
OFFLOAD = "offload_argnums of ipu.jit"
FEWER = "Options(io_tiles=…) of fewer than"
ADVISE = "ipu.advise(fun, *args)"


def forward(ws: Sequence[jax.Array], x: jax.Array) -> jax.Array:
    for w in ws:
        x = jnp.sin(jnp.tanh(x @ w))
    return (x**2).sum()


gradient = jax.value_and_grad(forward)


def piped(recompute: str | None) -> Callable[..., Any]:
    return ipu.pipeline(gradient, micro_batches=2, stages=2, recompute=recompute)


def both(ws: Any, x: jax.Array) -> Any:
    """A pipeline that keeps all, and a gradient besides that may be computed in any way."""
    return piped("none")(ws, x), gradient(ws, x)


def phased(ws: Sequence[jax.Array], x: jax.Array) -> jax.Array:
    for number, w in enumerate(ws):
        with ipu.phase(number):
            x = jnp.tanh(x @ w)
    return x.sum()


def scanned(ws: Sequence[jax.Array], x: jax.Array) -> Any:
    """Steps of a gradient that stores what it needs, and no more."""

    def step(ws: Any, x: jax.Array) -> tuple[Any, None]:
        grads = jax.grad(lambda ws: ((x @ ws[0]) ** 2).sum())(ws)
        return jax.tree.map(jnp.subtract, ws, grads), None

    return jax.lax.scan(step, ws, x[:, None])[0]


def of_one(w: jax.Array, unused: jax.Array, number: jax.Array) -> jax.Array:
    return jnp.outer(w + number, w).sum(0)


def proposals(fun: Any, args: Sequence[Any], settings: dict[str, Any], **keywords: Any) -> list[str]:
    """Those of the proposals above that the error of a chip that is far too small begins with, in order."""
    choices = {name: settings[name] for name in ("recompute", "io_tiles", "allow_out_of_memory") if name in settings}
    options = ipu.Options(byte_cost=0.5, **choices)
    inputs = {name: value for name, value in settings.items() if name not in choices}
    device = ipu.IPUModel(2, tiles_per_ipu=8, bytes_per_tile=2_000, interleaved_offset_bytes=1_000)
    with pytest.raises(ipu.TileMemoryError) as error:
        ipu.jit(fun, device=device, options=options, **inputs).lower(*args, **keywords).compile()
    hints = str(error.value.hint).split("\n    or: ")
    known = (RECOMPUTE, PIPELINE, OFFLOAD, FEWER, ADVISE)
    return [each for hint in hints for each in known if hint.startswith(each)]


AUTO = {"recompute": "auto"}
OFF = {"offload_argnums": (0, 1)}
CASES: dict[str, tuple[Callable[..., Any], dict[str, Any], list[str]]] = {
    "no gradient": (forward, {}, [OFFLOAD]),
    "no gradient, all offloaded": (forward, OFF, []),
    "a part offloaded": (forward, {"offload_argnums": 0}, [OFFLOAD]),
    "no gradient, auto": (forward, AUTO, [OFFLOAD]),
    "gradient": (gradient, {}, [RECOMPUTE, OFFLOAD]),
    "scanned gradient without values to recompute": (scanned, OFF, []),
    "gradient, all": (gradient, {"recompute": "all", **OFF}, [RECOMPUTE]),
    "gradient, auto": (gradient, {**AUTO, **OFF}, []),
    "pipeline": (piped(None), OFF, [RECOMPUTE]),
    "pipeline, auto": (piped(None), {**AUTO, **OFF}, []),
    "pipeline that says auto": (piped("auto"), OFF, []),
    "pipeline that says none": (piped("none"), {**AUTO, **OFF}, [PIPELINE]),
    "pipeline that says none, and none": (piped("none"), OFF, [PIPELINE]),
    "pipeline that says none, and another gradient": (both, OFF, [RECOMPUTE, PIPELINE]),
    "phases": (phased, {}, []),
    "I/O tiles": (forward, {"io_tiles": 6}, [FEWER]),
    "I/O tiles, donated": (jax.grad(forward), {"io_tiles": 6, "donate_argnums": 0, **AUTO}, [OFFLOAD, FEWER]),
    "I/O tiles, offloaded": (jax.grad(forward), {"io_tiles": 6, "donate_argnums": 0, **AUTO, **OFF}, [FEWER]),
}


@pytest.mark.parametrize("name", CASES)
def test_options_in_use_or_without_effect_are_not_proposed(name: str) -> None:
    fun, settings, expected = CASES[name]
    assert proposals(fun, (WS, X), settings) == [*expected, ADVISE]


def test_only_arrays_that_can_be_offloaded_count() -> None:
    """No proposal for unused arguments, numbers, and arguments given by name."""
    row = np.ones(4096, np.float32)
    number = np.float32(2)
    assert proposals(of_one, (row, row, number), {}) == [OFFLOAD, ADVISE]
    assert proposals(of_one, (row, row, number), {"offload_argnums": 0}) == [ADVISE]
    assert proposals(of_one, (), {}, w=row, unused=row, number=number) == [ADVISE]
