"""Errors planted one by one in rules, codelets and passes, and whether `ipu.check` finds each.

    python benchmarks/planted_errors.py [--only TEXT]

Of each error is asked whether the report names the equation, with its line, and whether the numbers of the program
change. Operations that XLA computes whole are right in spite of wrong vertices: there the tile interpreter must tell.
Prints a line for each error; exits 1 if one is missed, or if a program without an error is said to have one.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import jax

import ipujax as ipu

sys.path.insert(0, str(Path(__file__).resolve().parent))

from planted_error_cases import PLANTS, Plant

DEVICE = ipu.IPUModel(tiles_per_ipu=8)


def report_of(plant: Plant) -> ipu.CheckReport:
    """Check the program of a plant."""
    # Plans and codelets in memory may be from without the error, or with it.
    ipu.clear_caches()
    jax.clear_caches()
    return ipu.check(ipu.jit(plant.program, device=DEVICE), *plant.arguments)


def problems_of(plant: Plant) -> list[str]:
    """Return what a check misses of an error."""
    code = plant.program.__code__
    lines = {f"{Path(code.co_filename).name}:{line}" for *_, line in code.co_lines() if line is not None}
    clean = report_of(plant)
    with plant.plant():
        planted = report_of(plant)
    mismatch = planted.mismatch
    problems = [] if clean.agrees else [f"without it: {clean.mismatch}"]
    if mismatch is None:
        return [*problems, "not found"]
    if mismatch.primitive not in plant.primitives or mismatch.line.partition(" ")[0] not in lines:
        problems.append(f"another equation: {mismatch}")
    is_by_tiles = mismatch.found_in == "the tile interpreter"
    changes = any(row.is_error and row.program for row in planted.results)
    if plant.is_on_tiles != is_by_tiles:
        problems.append(f"found by {mismatch.found_in}")
    if plant.is_on_tiles == changes:
        problems.append("numbers change" if changes else "numbers do not change")
    return problems


def main() -> int:
    """Plant all errors; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="TEXT", default="", help="errors whose name contains this text")
    only = parser.parse_args().only
    chosen = [plant for plant in PLANTS if only in plant.name]
    missed = 0
    for plant in chosen:
        problems = problems_of(plant)
        missed += bool(problems)
        print(f"{plant.name} ({', '.join(plant.primitives)}): {'; '.join(problems) or 'named'}", flush=True)
    print(f"{len(chosen) - missed} of {len(chosen)} errors named")
    return 1 if missed or not chosen else 0


if __name__ == "__main__":
    sys.exit(main())
