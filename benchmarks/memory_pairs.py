"""More memory never makes a program slower, or not fit: random pairs of sizes of a tile's memory.

    python benchmarks/memory_pairs.py [--pairs N] [--seed S]

Programs are those of `tests/ipujax/memory_programs.py` in random sizes, on 8 to 32 tiles. Of each the first plan tells
how many bytes its fullest tile needs, and how many of them are code; pairs of sizes are drawn from a third to a half
more of that, behind an interleaved region that begins at a random offset near the code's end. Attempts are compiled
once a program, and searched for each size as `tests/ipujax/test_memory_monotone.py` does, which also tests that they do
not depend on the size. Prints each pair in which the larger memory holds no plan where the smaller holds one, or in
which its plan takes over 1 % more cycles, a line a program, and a summary; exits 1 if there is a fault. 200 pairs take
about four CPU minutes.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[1]))  # for the tests

import ipujax as ipu
from tests.ipujax import memory_programs as programs
from tests.ipujax.test_memory_monotone import Found, search

_PAIRS_OF_PROGRAM = 10
_MOST_SLOWER = 1.01  # the first cost per byte that fits is taken; see docs/fitting.md
_KIB = 1024
Draw = Callable[[random.Random], programs.Program]


def _width(draw: random.Random) -> int:
    return 8 * draw.randint(2, 20)


PROGRAMS: dict[str, Draw] = {
    "chain": lambda draw: programs.chain(draw.randint(2, 6), _width(draw), _width(draw)),
    "loop": lambda draw: programs.loop(8 * draw.randint(2, 16), _width(draw), _width(draw)),
    "mlp": lambda draw: programs.mlp((_width(draw), _width(draw), 10), _width(draw)),
    "attention": lambda draw: programs.attention(_width(draw), draw.randint(8, 48), draw.randint(1, 4), 2),
}


def fault(smaller: Found, larger: Found) -> str:
    """What is wrong in a pair of plans, empty if nothing is."""
    if smaller is None:
        return ""
    if larger is None:
        return "stops to fit"
    ratio = larger[0] / smaller[0]
    return f"{ratio:.3f} times the cycles" if ratio > _MOST_SLOWER else ""


def pairs_of(program: programs.Program, tiles: int, count: int, draw: random.Random) -> list[tuple[int, Found]]:
    """Sizes of `count` pairs, the smaller first, and the plan found for each."""
    machine = ipu.IPUModel(program.num_ipus, tiles_per_ipu=tiles)
    options = ipu.Options(allow_out_of_memory=True, progress=False)
    memory = ipu.jit(program.fun, device=machine, options=options, **program.jit).profile(*program.args).memory
    offset = -(-int(memory.code_bytes.max() * draw.uniform(0.9, 1.5)) // _KIB)  # KiB
    drawn = [sorted(draw.uniform(1 / 3, 1.5) * memory.max_tile_bytes for _ in range(2)) for _ in range(count)]
    sizes = [max(offset + 1, int(size) // _KIB) * _KIB for pair in drawn for size in pair]
    with pytest.MonkeyPatch.context() as monkeypatch:
        return list(zip(sizes, search(program, tiles, offset, sizes, monkeypatch), strict=True))


def main() -> int:
    """Compares plans of pairs of sizes; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=200, help="pairs of sizes (default 200)")
    parser.add_argument("--seed", type=int, default=0, help="of programs and sizes (default 0)")
    args = parser.parse_args()
    draw = random.Random(args.seed)
    compared = faults = held = replanned = 0
    while compared < args.pairs:
        name = draw.choice(list(PROGRAMS))
        tiles = draw.choice((8, 16, 32))
        plans = pairs_of(PROGRAMS[name](draw), tiles, min(_PAIRS_OF_PROGRAM, args.pairs - compared), draw)
        pairs = list(zip(plans[::2], plans[1::2], strict=True))
        compared += len(pairs)
        held += sum(small is not None for (_, small), _ in pairs)
        replanned += sum(small is not None and small != large for (_, small), (_, large) in pairs)
        for (small_bytes, small), (large_bytes, large) in pairs:
            if text := fault(small, large):
                faults += 1
                print(f"  {small_bytes:,} to {large_bytes:,} bytes a tile: {text}", flush=True)
        print(f"{name} on {tiles} tiles: {compared} pairs so far", flush=True)
    print(
        f"{compared} pairs, in {held} of which the smaller memory holds a plan, "
        f"in {replanned} of these another than the larger: {faults} faults"
    )
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
