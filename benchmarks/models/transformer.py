"""A deep transformer written in the three ways in which JAX programs are written; the numbers are the same.

12 blocks of `ipujax/models/network_layers.py`, width 256, 128 tokens, 2 sequences, single precision, Adam.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ipujax.models.network_layers import Params, block

from .gpt import Sizes, language_model
from .model import Model

WAYS = ("loop", "jit", "scan")


def stacked(blocks: list[Params]) -> Params:
    """One tree for all blocks, with a new leading axis."""
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *blocks)


def transformer(way: str, layers: int = 12, **sizes: int) -> Model:
    """The training step.

    Args:
        way: "loop", a Python loop; "jit", the same with each block a call of one jitted function; "scan", `lax.scan`
            over the stacked parameters of all blocks.
        layers: blocks.
        sizes: other fields of `gpt.Sizes`; 2 sequences unless given.
    """
    all_sizes = Sizes(layers, **{"batch": 2, **sizes})
    block_of_heads = partial(block, heads=all_sizes.heads)
    each = jax.jit(block_of_heads) if way == "jit" else block_of_heads

    def loop(blocks: list[Params], x: jax.Array) -> jax.Array:
        for p in blocks:
            x = each(p, x)
        return x

    def scan(blocks: Any, x: jax.Array) -> jax.Array:
        return lax.scan(lambda x, p: (each(p, x), None), x, blocks)[0]

    if way == "scan":
        return language_model("transformer scan", all_sizes, scan, stacked)
    return language_model(f"transformer {way}", all_sizes, loop)
