"""Softmax of the rows of a block-sparse matrix, over the elements that have values, against a masked dense softmax.

python examples/block_sparse/softmax.py --size 512 --block 16 --densities 0.5 0.25 0.125 0.0625
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from comparison import Cost, add_pattern_options, break_even, cost, random_pattern

import ipujax as ipu
from ipujax import popsparse


def main(arguments: Sequence[str] | None = None) -> float:
    """Compare, print, and return the largest error."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", type=int, default=512, help="rows and columns of the matrix")
    add_pattern_options(parser)
    args = parser.parse_args(arguments)

    device = ipu.IPUModel(tiles_per_ipu=args.tiles)
    scores = jax.random.normal(jax.random.key(0), (args.size, args.size))
    dense = cost(lambda x, mask: jax.nn.softmax(x, where=mask), device, scores, scores > 0)
    print(f"{args.size} x {args.size}, float32, blocks of {args.block}")
    print(f"dense            {dense}")
    errors: list[float] = []
    costs: list[Cost] = []
    for density in args.densities:
        pattern = random_pattern(args.size, args.size, args.block, density)
        softmax = partial(popsparse.static_softmax, pattern)
        values = pattern.blocks_of(scores)
        mask = pattern.dense(jnp.ones_like(values)) > 0
        expected = pattern.blocks_of(jax.nn.softmax(jnp.where(mask, scores, -jnp.inf)))
        errors.append(float(np.abs(jax.jit(softmax)(values) - expected).max()))
        costs.append(cost(softmax, device, values))
        print(f"density {density:<9.3g}{costs[-1]}, error {errors[-1]:.1e}")
    print(break_even(args.densities, costs, dense))
    return max(errors)


if __name__ == "__main__":
    main()
