"""Attention of tokens to neighbouring tokens and to the first ones: a band of blocks, against masked dense attention.

    python examples/block_sparse/attention.py --tokens 512 --channels 64 --block 16 --windows 1 2 4 8

Scores and their softmax are computed only in the blocks of the pattern. A window of w has the w blocks on both sides of
the diagonal, and the first column of blocks.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from comparison import Cost, break_even, cost

import ipujax as ipu
from ipujax import popsparse
from ipujax.popsparse import BlockPattern


def banded(tokens: int, block: int, window: int) -> BlockPattern:
    """The pattern of blocks at most `window` from the diagonal, and of the first column."""
    rows, columns = np.indices((tokens // block, tokens // block))
    row, column = np.nonzero((abs(rows - columns) <= window) | (columns == 0))
    return BlockPattern((tokens, tokens), block, tuple(row.tolist()), tuple(column.tolist()))


def sparse_attention(pattern: BlockPattern, tiles: int, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Attention of each token to the tokens of its pattern, [tokens, channels]."""
    scores = popsparse.static_sampled_matmul(pattern, q, k.T, buckets=tiles) / q.shape[1] ** 0.5
    return popsparse.static_matmul(pattern, popsparse.static_softmax(pattern, scores), v, buckets=tiles)


def dense_attention(mask: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Attention with all scores computed, and those outside of the mask left out, [tokens, channels]."""
    scores = jnp.where(mask, q @ k.T / q.shape[1] ** 0.5, -jnp.inf)
    return jax.nn.softmax(scores) @ v


def main(arguments: Sequence[str] | None = None) -> float:
    """Compare, print, and return the largest error."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=512, help="length of the sequence")
    parser.add_argument("--channels", type=int, default=64, help="channels of a token")
    parser.add_argument(
        "--block", type=int, default=16, choices=popsparse.BLOCK_SIZES, help="rows and columns of a block"
    )
    parser.add_argument(
        "--windows", type=int, nargs="+", default=[1, 2, 4, 8], help="blocks on each side that a token attends to"
    )
    parser.add_argument("--tiles", type=int, default=1472, help="tiles of the IPU")
    args = parser.parse_args(arguments)

    device = ipu.IPUModel(tiles_per_ipu=args.tiles)
    q, k, v = jax.random.normal(jax.random.key(0), (3, args.tokens, args.channels))
    # The cost of dense attention does not depend on the mask.
    dense = cost(dense_attention, device, jnp.ones((args.tokens, args.tokens), bool), q, k, v)
    print(f"{args.tokens} tokens of {args.channels} channels, float32, blocks of {args.block}")
    print(f"dense                     {dense}")
    errors: list[float] = []
    costs: list[Cost] = []
    densities: list[float] = []
    for window in args.windows:
        pattern = banded(args.tokens, args.block, window)
        mask = pattern.dense(jnp.ones((pattern.num_blocks, args.block, args.block))) > 0

        # The pattern is part of the compiled program, which is another one for each window.
        def attention(q: jax.Array, k: jax.Array, v: jax.Array, pattern: BlockPattern = pattern) -> jax.Array:
            return sparse_attention(pattern, args.tiles, q, k, v)

        errors.append(float(np.abs(jax.jit(attention)(q, k, v) - dense_attention(mask, q, k, v)).max()))
        costs.append(cost(attention, device, q, k, v))
        densities.append(pattern.density)
        print(f"window {window:<3}density {pattern.density:<8.3f}{costs[-1]}, error {errors[-1]:.1e}")
    print(break_even(densities, costs, dense))
    return max(errors)


if __name__ == "__main__":
    main()
