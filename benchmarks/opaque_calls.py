"""Prices of opaque calls: exported networks and kernels of Pallas, against XLA's analysis of the same work.

    python benchmarks/opaque_calls.py [--count N] [--seed S]

Each call is compiled by `ipu.jit` from shapes and run. Counted are the FLOPs of its profile, which must be within a
factor of 2 of XLA's `cost_analysis` of the function without loops, the bytes of constants, which must hold the arrays
that the module captured, and the largest difference from plain JAX. Prints a row for each call and a summary; exits 1
if a call misses the bar, or has a part without a price. With `--count` a sample is measured, which `--seed` draws.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

import ipujax as ipu

sys.path.insert(0, str(Path(__file__).resolve().parent))

from opaque_kernels import kernels
from opaque_networks import Case, networks

FACTOR = 2.0  # of FLOPs, either way
TOLERANCE = 2e-4  # of numbers, relative to the largest of an array: the order of sums differs


@dataclass(frozen=True)
class Row:
    """Figures of a call.

    Args:
        name: of the call.
        flops: of its profile.
        xla_flops: of XLA's analysis, transcendental functions as one operation each.
        constant_bytes: of constants in the memory of the tiles.
        captured_bytes: of arrays in the module.
        unpriced: parts without a price.
        difference: largest difference from plain JAX, relative to the largest number of the array.
    """

    name: str
    flops: int
    xla_flops: int
    constant_bytes: int
    captured_bytes: int
    unpriced: int
    difference: float

    @property
    def ratio(self) -> float:
        """FLOPs of the profile by those of XLA."""
        return self.flops / max(1, self.xla_flops)

    @property
    def passes(self) -> bool:
        """True if the call meets the bar."""
        is_within = 1 / FACTOR <= self.ratio <= FACTOR
        return is_within and self.constant_bytes >= self.captured_bytes and not self.unpriced and self.is_right

    @property
    def is_right(self) -> bool:
        """True if the numbers are those of plain JAX."""
        return self.difference <= TOLERANCE


def measure(case: Case) -> Row:
    """Compile, profile and run a call."""
    function = ipu.jit(case.call, options=ipu.Options(allow_out_of_memory=True))
    profile = function.profile(*case.args)
    analysis: Any = jax.jit(case.counted).lower(*case.args).compile().cost_analysis()
    xla_flops = analysis.get("flops", 0) + analysis.get("transcendentals", 0)
    constants = [x for x in profile.executable.graph.variables if x.is_constant]
    flops = sum(row.flops or 0 for row in profile.step_costs)
    pairs = zip(jax.tree.leaves(function(*case.args)), jax.tree.leaves(jax.jit(case.call)(*case.args)), strict=True)
    difference = max(_difference(actual, expected) for actual, expected in pairs)
    unpriced = len(profile.unpriced)
    constant_bytes = sum(x.num_bytes for x in constants)
    return Row(case.name, flops, int(xla_flops), constant_bytes, case.captured_bytes, unpriced, difference)


def _difference(actual: Any, expected: Any) -> float:
    a, b = (np.asarray(x).astype(np.complex128) for x in (actual, expected))
    if not np.array_equal(np.isnan(a), np.isnan(b)):
        return float("inf")
    return float(np.nan_to_num(np.abs(a - b)).max(initial=0) / max(1.0, np.nan_to_num(np.abs(b)).max(initial=0)))


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, help="number of calls, all by default")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    args = parser.parse_args(argv)
    groups = {"exported network": networks(), "kernel of Pallas": kernels()}
    cases = [(kind, case) for kind, group in groups.items() for case in group]
    if args.count is not None:
        cases = random.Random(args.seed).sample(cases, min(args.count, len(cases)))
    print(
        f"{'':<17} {'call':<22} {'FLOPs':>12} {'XLA':>12} {'ratio':>6} {'constants B':>12} {'captured B':>11}  numbers"
    )
    rows = []
    for kind, case in cases:
        row = measure(case)
        rows.append(row)
        note = "" if row.passes else "  MISSED" + (f", {row.unpriced} unpriced" if row.unpriced else "")
        print(
            f"{kind:<17} {row.name:<22} {row.flops:>12,} {row.xla_flops:>12,} {row.ratio:>6.2f}"
            f" {row.constant_bytes:>12,} {row.captured_bytes:>11,}  {row.difference:.0e}{note}",
            flush=True,
        )
    missed = sum(not row.passes for row in rows)
    ratios = [row.ratio for row in rows]
    print(f"{len(rows)} calls, FLOPs {min(ratios):.2f} to {max(ratios):.2f} of XLA's; {missed} missed")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
