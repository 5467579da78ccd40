"""QR decomposition of a tall matrix on tiles: each tile decomposes its rows, then pairs of tiles combine their factors.

    python examples/tile_level/tiled_qr.py --tiles 8 --rows 16 --columns 4

Upwards in the tree, half of a level's tiles decompose two triangles each; downwards, each tile multiplies its
part of Q by its pair's. Source: J. Demmel et al., Communication-optimal parallel and sequential QR and LU (2012).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

import ipujax as ipu


def combined(upper: jax.Array, lower: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return Q, [2 columns, columns], and R of two triangles, one above the other."""
    return jnp.linalg.qr(jnp.concatenate([upper, lower]))


def tiled_qr(blocks: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Decompose a matrix whose rows are divided among tiles.

    Args:
        blocks: [tiles, rows, columns], a power of two of tiles, with no fewer rows than columns.

    Returns:
        Q in blocks of rows, [tiles, rows, columns], R, [columns, columns], and the cycles, uint32[].
    """
    num_tiles, _, columns = blocks.shape
    blocks, start = ipu.cycle_count(ipu.tile_put_sharded(blocks, range(num_tiles)))
    q, r = ipu.tile_map(jnp.linalg.qr, blocks)
    levels = []
    while len(r) > 1:
        pairs = range(len(r) // 2)
        upper = ipu.tile_gather(r, range(0, len(r), 2), pairs)
        lower = ipu.tile_gather(r, range(1, len(r), 2), pairs)
        level, r = ipu.tile_map(combined, upper, lower, tiles=pairs)
        levels.append(level)

    factor = ipu.tile_map(lambda r: jnp.eye(len(r), dtype=r.dtype), r)
    for level in reversed(levels):
        # Half n % 2 of the pair's Q belongs to tile n of the level below.
        pair_q = ipu.tile_map(jnp.matmul, level, factor)
        halves = pair_q.reshape(2 * len(level), columns, columns)
        factor = ipu.tile_put_sharded(halves, range(len(halves)))
    q = ipu.tile_map(jnp.matmul, q, factor)
    q, end = ipu.cycle_count(q)
    return q, r[0], (end - start)[0, 0]


def main(arguments: Sequence[str] | None = None) -> float:
    """Decompose a random matrix, print errors and cycles, and return the error of Q R."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--tiles", type=int, default=8, help="a power of two")
    parser.add_argument("--rows", type=int, default=16, help="rows of a tile")
    parser.add_argument("--columns", type=int, default=4, help="columns of the matrix")
    args = parser.parse_args(arguments)

    matrix = np.random.default_rng(0).normal(size=(args.tiles * args.rows, args.columns)).astype(np.float32)
    blocks = matrix.reshape(args.tiles, args.rows, args.columns)
    q, r, cycles = ipu.jit(tiled_qr, device=ipu.IPUModel(tiles_per_ipu=args.tiles))(blocks)
    q = np.asarray(q).reshape(matrix.shape)
    error = float(np.abs(q @ r - matrix).max())
    orthogonality = float(np.abs(q.T @ q - np.eye(args.columns)).max())
    print(f"QR of {matrix.shape[0]} x {args.columns} on {args.tiles} tiles: {int(cycles):,} cycles")
    print(f"largest error of Q R {error:.1e}, of Q^T Q {orthogonality:.1e}")
    return max(error, orthogonality)


if __name__ == "__main__":
    main()
