"""Is a better machine ever slower, and is a program that is held the one that is compiled again? Neither may be.

    python benchmarks/better_machines.py [--pairs 1000] [--points 200] [--seed 0]

Pairs: machines that differ in 1 to 5 constants over which programs are held, each in its better direction, are swept
with `plan="best"`, a few pairs at a time; the better one must take no more seconds. Points: a function is compiled for
a changed machine; where the program is that of the machine as it was, its cycles, phases and bytes of all tiles must be
those of the latter program, held. Functions are those of the tests of bounds. Prints what differs with its machines,
and both counts; the exit status is 1 if anything does.
"""

from __future__ import annotations

import argparse
import random
import sys
import warnings
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import jax
import numpy as np

import ipujax as ipu
from ipujax.runtime.target import Target, held_constants

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.ipujax.causes.test_bounds import FUNCTIONS

Changes = dict[str, Any]
DEVICE = ipu.IPUModel(1, "mk2", tiles_per_ipu=32)
OPTIONS = ipu.Options(allow_out_of_memory=True, progress=False)
MORE_IS_BETTER = {"B/cycle/tile", "B/s", "MAC/cycle/tile", "Hz"}
LESS_IS_BETTER = {"cycles", "instructions", "s"}
# Constants with a better direction, over which programs are held: +1 or -1.
BETTER = {
    item.name: 1 if item.metadata["unit"] in MORE_IS_BETTER else -1
    for item in fields(Target)
    if item.name in held_constants() and item.metadata["unit"] in MORE_IS_BETTER | LESS_IS_BETTER
}
PAIRS_OF_SWEEP = 5


def changed(draw: random.Random, constants: Changes, names: list[str], direction: int | None) -> Changes:
    """Return constants with some of them changed by up to 4 times, all for the better if there is a direction."""
    result = dict(constants)
    for name in names:
        sign = BETTER[name] * direction if direction else draw.choice([-1, 1])
        value = result.get(name, getattr(DEVICE.target, name)) * 4.0 ** (sign * draw.random())
        is_int = isinstance(getattr(DEVICE.target, name), int)
        result[name] = int(value + (sign > 0)) if is_int else value
    return {name: max(1, value) if isinstance(value, int) else value for name, value in result.items()}


def drawn_names(draw: random.Random, most_names: int) -> list[str]:
    """Return 1 to `most_names` constants."""
    return draw.sample(sorted(BETTER), draw.randint(1, most_names))


def slower_pairs(seed: int, pairs: int) -> Iterator[str | None]:
    """Yield for each pair None, or a text if the better machine is slower."""
    names = sorted(FUNCTIONS)
    for number in range(-(-pairs // PAIRS_OF_SWEEP)):
        draw = random.Random(f"pairs {seed} {number}")
        name = names[number % len(names)]
        fun, args = FUNCTIONS[name]
        bases = [changed(draw, {}, drawn_names(draw, 5), None) for _ in range(PAIRS_OF_SWEEP)]
        betters = [changed(draw, base, drawn_names(draw, 5), 1) for base in bases]
        step = ipu.jit(fun, device=DEVICE, options=OPTIONS)
        sweep = ipu.sweep(step, *args, grid=[*bases, *betters], plan="best", progress=False)
        for n, (base, better) in enumerate(zip(bases, betters, strict=True)):
            before, after = sweep[n], sweep[PAIRS_OF_SWEEP + n]
            is_slower = after["seconds"] > before["seconds"]
            yield f"{name}: {before['cycles']} → {after['cycles']}: {base} → {better}" if is_slower else None


def points_that_differ(seed: int, points: int) -> Iterator[str | None]:
    """Yield for each point with an equal program None, or a text if a held program has other figures."""
    names = sorted(FUNCTIONS)
    plain = {
        name: ipu.jit(fun, device=DEVICE, options=OPTIONS).lower(*args).compile()
        for name, (fun, args) in FUNCTIONS.items()
    }
    num_equal = number = 0
    while num_equal < points:
        draw = random.Random(f"points {seed} {number}")
        name = names[number % len(names)]
        number += 1
        changes = changed(draw, {}, drawn_names(draw, 2), None)
        device = ipu.IPUModel(1, "mk2", tiles_per_ipu=32, **changes)
        fun, args = FUNCTIONS[name]
        recompiled = ipu.jit(fun, device=device, options=OPTIONS).lower(*args).compile()
        recosted = plain[name].on(device)
        if recompiled.as_text() != recosted.as_text():
            continue
        num_equal += 1
        figures = [(x.profile.cycles, x.profile.phase_cycles, x.profile.seconds) for x in (recompiled, recosted)]
        is_equal = figures[0] == figures[1]
        is_equal &= np.array_equal(recompiled.profile.memory.tile_bytes, recosted.profile.memory.tile_bytes)
        yield None if is_equal else f"{name}: {figures[0]} again, {figures[1]} held: {changes}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=1000)
    parser.add_argument("--points", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    failures = 0
    kinds = {
        "pairs, the better one slower": slower_pairs(arguments.seed, arguments.pairs),
        "points with equal programs, other figures": points_that_differ(arguments.seed, arguments.points),
    }
    for title, texts in kinds.items():
        count = wrong = 0
        for text in texts:
            count += 1
            wrong += text is not None
            if text is not None:
                print(text, flush=True)
            if count % 50 == 0:
                print(f"{count:,} {title}: {wrong:,}", file=sys.stderr, flush=True)
                jax.clear_caches()
        print(f"{count:,} {title}: {wrong:,}", flush=True)
        failures += wrong
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
