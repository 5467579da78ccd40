"""Rows of the op table for tile-level functions."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

import ipujax as ipu
from tests.lowering.rules.op_case import OpCase, normal

TILES = (3, 0, 2)


def _sharded(x: Any) -> Any:
    return ipu.tile_put_sharded(x, TILES) * 2


def _replicated(x: Any) -> Any:
    return ipu.tile_put_replicated(x, TILES) * 2


def _rotated(x: Any) -> Any:
    y = ipu.tile_map(jnp.sin, x, tiles=TILES)
    # The first row stays on its tile.
    return ipu.tile_gather(y, (0, 2, 1), TILES) * 2


def _mapped(x: Any, y: Any) -> Any:
    return ipu.tile_map(lambda a, b: (a @ b.T, jnp.sum(a, 0)), x, y, tiles=TILES)


def _with_weight(x: Any, w: Any) -> Any:
    return ipu.tile_map(lambda a: jnp.tanh(a @ w), x)


def _ordered(x: Any) -> Any:
    return ipu.tile_barrier(x, x + 1)


def _counted(x: Any) -> Any:
    y, _ = ipu.cycle_count(x * 2, sync=True)
    return y


def tiles() -> list[OpCase]:
    """Rows placed, replicated and gathered, functions mapped over tiles, batches of these, barriers and counters."""
    x = normal(3, 5, 7)
    fused = {"rtol": 1e-5, "atol": 1e-5}  # products and sums round in another order in one vertex
    return [
        OpCase("tile_put", "sharded", _sharded, (x,), grad=True),
        OpCase("tile_put", "replicated", _replicated, (normal(5),), grad=True, **fused),
        OpCase("tile_put", "rotated", _rotated, (x,), grad=True, **fused),
        OpCase("tile_put", "batch", jax.vmap(_replicated), (normal(4, 5),)),
        OpCase("tile_map", "two results", _mapped, (x, x), grad=True, **fused),
        OpCase("tile_map", "closed over", _with_weight, (x, normal(7, 2)), grad=True, **fused),
        OpCase("tile_map", "batch", jax.vmap(_mapped, (0, None)), (normal(2, 3, 5, 7), x), grad=True, **fused),
        OpCase("tile_barrier", "two arrays", _ordered, (x,), grad=True),
        OpCase("cycle_count", "in between", _counted, (x,), grad=True),
    ]
