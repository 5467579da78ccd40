"""More memory never makes a program slower, or not fit: random pairs of sizes of a tile's memory.

    python benchmarks/memory_pairs.py [--pairs N] [--seed S]

Networks are random perceptrons, as in `monotone.py`, on 64 tiles. Of each the first plan tells how many bytes its
fullest tile has; pairs of sizes are drawn from a third to one and a third of that. Prints each pair in which the larger
memory holds no plan where the smaller holds one, or in which its plan takes over 1 % more cycles, and a summary; exits
1 if there is one.
"""

from __future__ import annotations

import argparse
import random
import sys
from typing import Any

import jax
import optax
from monotone import Network, networks

import ipujax as ipu

_TILES = 64
_BATCH = 64
_PAIRS_A_NETWORK = 4
_MOST_SLOWER = 1.01  # the first cost per byte that fits is taken; see docs/fitting.md
_ALIGNMENT = 64  # bytes


def plan(network: Network, tile_bytes: int | None) -> ipu.Profile | None:
    """Profile of a training step on tiles of some bytes, None where it does not fit; None for tiles of any size."""
    _, loss, params, shapes, optimizer = network

    def train_step(params: Any, opt_state: Any, x: jax.Array, labels: jax.Array) -> Any:
        value, grads = jax.value_and_grad(loss)(params, x, labels)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    sizes = {} if tile_bytes is None else {"bytes_per_tile": tile_bytes}
    device = ipu.IPUModel(tiles_per_ipu=_TILES, **sizes)
    options = ipu.Options(allow_out_of_memory=tile_bytes is None, progress=False)
    run = ipu.jit(train_step, device=device, donate_argnums=(0, 1), options=options)
    try:
        return run.profile(params, jax.eval_shape(optimizer.init, params), *shapes(_BATCH))
    except ipu.TileMemoryError:
        return None


def fault(smaller: ipu.Profile | None, larger: ipu.Profile | None) -> str:
    """What is wrong in a pair of plans, empty if nothing is."""
    if smaller is None:
        return ""
    if larger is None:
        return "stops to fit"
    ratio = larger.cycles / smaller.cycles
    return f"{ratio:.3f} times the cycles" if ratio > _MOST_SLOWER else ""


def main() -> int:
    """Compares plans of pairs of sizes; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=200, help="pairs of sizes (default 200)")
    parser.add_argument("--seed", type=int, default=0, help="of the sizes (default 0)")
    args = parser.parse_args()
    draw = random.Random(args.seed)
    compared = faults = held = 0
    for network in networks(args.pairs):
        first = plan(network, None)
        assert first is not None
        for _ in range(_PAIRS_A_NETWORK):
            if compared == args.pairs:
                break
            sizes = sorted(draw.uniform(1 / 3, 4 / 3) * first.memory.max_tile_bytes for _ in range(2))
            small, large = (int(size) // _ALIGNMENT * _ALIGNMENT for size in sizes)
            plans = plan(network, small), plan(network, large)
            compared += 1
            held += plans[0] is not None
            if text := fault(*plans):
                faults += 1
                print(f"{network[0]}: {small:,} to {large:,} bytes a tile: {text}", flush=True)
        if compared == args.pairs:
            break
    print(f"{compared} pairs, in {held} of which the smaller memory holds a plan: {faults} faults")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
