"""Jacobi iterations of Laplace's equation: strips of a grid, one a tile, with a halo exchange each iteration.

    python examples/tile_level/jacobi_stencil.py --tiles 8 --rows 4 --columns 32 --iterations 50

A tile needs the last row of the tile above it and the first row of the tile below: two rows by `ipu.tile_gather`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

import ipujax as ipu


def relaxed(above: jax.Array, strip: jax.Array, below: jax.Array) -> jax.Array:
    """Return a strip, [rows, columns], whose inner columns are the means of their four neighbours."""
    padded = jnp.concatenate([above[None], strip, below[None]])
    means = (padded[:-2, 1:-1] + padded[2:, 1:-1] + strip[:, :-2] + strip[:, 2:]) / 4
    return jnp.concatenate([strip[:, :1], means, strip[:, -1:]], 1)


def solve(strips: jax.Array, top: jax.Array, bottom: jax.Array, iterations: int) -> tuple[jax.Array, jax.Array]:
    """Iterate.

    Args:
        strips: the grid, [tiles, rows, columns].
        top: boundary above the grid, [columns].
        bottom: boundary below the grid, [columns].
        iterations: their number.

    Returns:
        The grid after the iterations, and the cycles of one, float32[].
    """
    num_tiles = len(strips)
    tiles = range(num_tiles)
    strips = ipu.tile_put_sharded(strips, tiles)

    def iterate(_: int, strips: jax.Array) -> jax.Array:
        # Row n of `last_rows` is above strip n, and row n + 1 of `first_rows` is below it.
        last_rows = jnp.concatenate([top[None], strips[:, -1]])
        first_rows = jnp.concatenate([strips[:, 0], bottom[None]])
        above = ipu.tile_gather(last_rows, tiles, tiles)
        below = ipu.tile_gather(first_rows, range(1, num_tiles + 1), tiles)
        return ipu.tile_map(relaxed, above, strips, below, tiles=tiles)

    strips, start = ipu.cycle_count(strips)
    strips = jax.lax.fori_loop(0, iterations, iterate, strips)
    strips, end = ipu.cycle_count(strips)
    return strips, (end - start)[0, 0] / iterations


def main(arguments: Sequence[str] | None = None) -> float:
    """Solve, print the residual and cycles, and return the largest difference from an iteration in NumPy."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--tiles", type=int, default=8, help="tiles of the IPU")
    parser.add_argument("--rows", type=int, default=4, help="rows of a strip")
    parser.add_argument("--columns", type=int, default=32, help="columns of the grid")
    parser.add_argument("--iterations", type=int, default=50, help="iterations to run")
    args = parser.parse_args(arguments)

    strips = np.zeros((args.tiles, args.rows, args.columns), np.float32)
    top = np.ones(args.columns, np.float32)
    bottom = np.zeros(args.columns, np.float32)
    step = ipu.jit(
        lambda strips: solve(strips, top, bottom, args.iterations), device=ipu.IPUModel(tiles_per_ipu=args.tiles)
    )
    result, cycles = step(strips)

    grid = np.vstack([top, strips.reshape(-1, args.columns), bottom])
    for _ in range(args.iterations):
        means = (grid[:-2, 1:-1] + grid[2:, 1:-1] + grid[1:-1, :-2] + grid[1:-1, 2:]) / 4
        residual = np.abs(means - grid[1:-1, 1:-1]).max()
        grid[1:-1, 1:-1] = means
    error = float(np.abs(np.asarray(result).reshape(-1, args.columns) - grid[1:-1]).max())
    print(f"{args.tiles} strips of {args.rows} x {args.columns}: last change {residual:.5f}, error {error:.1e}")
    print(f"{float(cycles):,.0f} cycles an iteration")
    return error


if __name__ == "__main__":
    main()
