"""Comparison of a sparse and a dense program: results, cycles and memory."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

import ipujax as ipu
from ipujax.popsparse import BLOCK_SIZES, BlockPattern


@dataclass(frozen=True)
class Cost:
    """Cycles of compute and exchange, and bytes of the fullest tile."""

    cycles: int
    tile_bytes: int

    def __str__(self) -> str:
        return f"{self.cycles:>10,} cycles, {self.tile_bytes:>8,} B on the fullest tile"


def cost(function: Callable[..., Any], device: ipu.IPUModel, *arguments: Any) -> Cost:
    """Compile a function for shapes of arguments, and return its cost; nothing runs."""
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arguments)
    profile = ipu.jit(function, device=device).lower(*shapes).compile().profile
    phases = profile.phase_cycles
    return Cost(phases["compute"] + phases["exchange"], profile.memory.max_tile_bytes)


def random_pattern(rows: int, columns: int, block: int, density: float, seed: int = 0) -> BlockPattern:
    """A pattern of blocks at random places."""
    across = columns // block
    places = rows // block * across
    count = max(1, round(density * places))
    chosen = np.random.default_rng(seed).choice(places, count, replace=False)
    row, column = np.divmod(np.sort(chosen), across)
    return BlockPattern((rows, columns), block, tuple(row.tolist()), tuple(column.tolist()))


def add_pattern_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that comparisons of several densities have in common."""
    parser.add_argument("--block", type=int, default=16, choices=BLOCK_SIZES, help="rows and columns of a block")
    densities = [0.5, 0.25, 0.125, 0.0625]
    help_densities = "shares of the blocks that have values"
    parser.add_argument("--densities", type=float, nargs="+", default=densities, help=help_densities)
    parser.add_argument("--tiles", type=int, default=1472, help="tiles of the IPU")


def break_even(densities: list[float], sparse: list[Cost], dense: Cost) -> str:
    """Up to which of some densities the sparse program takes fewer cycles than the dense one."""
    faster = [density for density, product in zip(densities, sparse, strict=True) if product.cycles < dense.cycles]
    return f"sparse wins up to a density of {max(faster):.3g}" if faster else "dense wins at all of these densities"
