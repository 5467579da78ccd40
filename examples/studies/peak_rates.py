"""Checks a published claim by the bound of a program: the peak rates of matrix products on the first IPU.

    python examples/studies/peak_rates.py --sizes 256 1024 2048

The claim: a GC2 of 1,216 tiles at 1.6 GHz computes 31.1 TFLOP/s in single and 124.5 TFLOP/s in mixed precision, by its
accumulating matrix product. `profile.bound` has the least cycles that any plan of a function takes, so a product of n³
multiply-adds gives the highest rate that a plan could reach. If the claim is right, no size exceeds it, and large ones
come as near as one likes. The rate of the program as it is planned stands beside it. Host transfers take next to no
time, as in the claim. Nothing is run.

Source: Jia, Tillman, Maggioni, Scarpazza, "Dissecting the Graphcore IPU Architecture via Microbenchmarking" (2019),
arXiv:1912.03413; both rates as quoted at apaperaday.com/12/17/2019.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp

import ipujax as ipu

TILES = 1216
CLAIMED_TFLOPS = {"float32": 31.1, "float16": 124.5}  # of all tiles, by the type of the operands
ROUNDING = 0.05  # TFLOP/s: the claim has one digit behind the point
SIZES = (256, 1024, 2048)


@dataclass(frozen=True)
class Rates:
    """Rates of one product of square matrices, in TFLOP/s.

    Args:
        size: rows and columns.
        dtype: of the operands.
        claimed: the published peak, of as many tiles.
        of_any_plan: no plan is faster.
        planned: of the program as it is.
    """

    size: int
    dtype: str
    claimed: float
    of_any_plan: float
    planned: float

    @property
    def is_within(self) -> bool:
        """Whether no plan is faster than the claim, which is rounded."""
        return self.of_any_plan <= self.claimed + ROUNDING


def rates(size: int, dtype: str, tiles: int) -> Rates:
    """Rates of a product on a GC2 of so many tiles, without host."""
    device = ipu.IPUModel(arch="mk1", tiles_per_ipu=tiles, host_latency_seconds=0.0, host_bytes_per_second=1e18)
    matrix = jax.ShapeDtypeStruct((size, size), dtype)
    profile = ipu.jit(jnp.matmul, device=device).profile(matrix, matrix)
    flops = 2 * size**3
    of_any_plan, planned = (
        flops / profile.target.seconds(cycles) / 1e12 for cycles in (profile.bound.cycles, profile.cycles)
    )
    return Rates(size, dtype, CLAIMED_TFLOPS[dtype] * tiles / TILES, of_any_plan, planned)


def main(argv: Sequence[str] | None = None) -> list[Rates]:
    """Prints the table, and whether the claim stands; returns its rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES))
    parser.add_argument("--tiles", type=int, default=TILES)
    args = parser.parse_args(argv)
    rows = [rates(size, dtype, args.tiles) for dtype in CLAIMED_TFLOPS for size in args.sizes]
    print("operands    size  claimed  any plan  planned  TFLOP/s")
    for row in rows:
        figures = f"{row.claimed:>9.1f}{row.of_any_plan:>10.1f}{row.planned:>9.1f}"
        print(f"{row.dtype:<9}{row.size:>7}{figures}  {row.of_any_plan / row.claimed:.1%} of the claim")
    faster = [row for row in rows if not row.is_within]
    print("A plan may be faster than the claim." if faster else "No plan is faster than the claim.")
    return rows


if __name__ == "__main__":
    main()
