"""Products with block-sparse matrices, of a static and a dynamic pattern, against the dense product.

    python examples/block_sparse/matmul.py --size 1024 --columns 256 --block 16 --densities 0.5 0.25 0.125 0.0625

For each density: the error of both against NumPy, their cycles and memory beside those of the dense product, and the
highest density at which each is faster than the dense one.
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
    """Compare, print, and return the largest relative error."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", type=int, default=1024, help="rows and columns of the sparse matrix")
    parser.add_argument("--columns", type=int, default=256, help="columns of the dense matrix")
    parser.add_argument("--dtype", default="float16", choices=("float16", "float32"), help="of both matrices")
    add_pattern_options(parser)
    args = parser.parse_args(arguments)

    device = ipu.IPUModel(tiles_per_ipu=args.tiles)
    key = jax.random.key(0)
    x = jax.random.normal(key, (args.size, args.columns), args.dtype)
    weight = jnp.zeros((args.size, args.size), args.dtype)
    dense = cost(jnp.matmul, device, weight, x)
    print(f"{args.size} x {args.size} by {args.columns} columns, {args.dtype}, blocks of {args.block}")
    print(f"dense                 {dense}")
    errors: list[float] = []
    costs: dict[str, list[Cost]] = {"static": [], "dynamic": []}
    for density in args.densities:
        pattern = random_pattern(args.size, args.size, args.block, density)
        values = jax.random.normal(key, (pattern.num_blocks, args.block, args.block), args.dtype)
        # Twice the room of an even pattern, and 3 propagation steps: random patterns are uneven.
        plan = popsparse.DynamicPlan(
            pattern.shape, args.block, pattern.num_blocks, args.columns, args.dtype, 3, 1.0, args.tiles
        )
        products = {
            "static": (partial(popsparse.static_matmul, pattern, buckets=args.tiles), values),
            "dynamic": (partial(popsparse.dynamic_matmul, plan), plan.encode(pattern, values)),
        }
        expected = np.asarray(pattern.dense(values), np.float64) @ np.asarray(x, np.float64)
        for name, (product, matrix) in products.items():
            result = np.asarray(jax.jit(product)(matrix, x), np.float64)
            errors.append(float(np.abs(result - expected).max() / np.abs(expected).max()))
            costs[name].append(cost(product, device, matrix, x))
            print(f"{name:<8}density {density:<6.3g}{costs[name][-1]}, error {errors[-1]:.1e}")
    for name, several in costs.items():
        print(f"{name}: {break_even(args.densities, several, dense)}")
    return max(errors)


if __name__ == "__main__":
    main()
