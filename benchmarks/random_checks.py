"""Random programs by `ipu.check`: plain JAX, every pass, the lowered program, and the tile interpreter.

    python benchmarks/random_checks.py [--count N] [--seed S] [--kind streamed_loop]

Programs come from the grammars of the tests, on one IPU, on replicas, in pipelines and over meshes, with `tile_map`,
popsparse, Refs and the memories of the host. All run by the default path; every third also with `exact_splits`, and
another third on few tiles, which the interpreter runs too. Programs that JAX refuses are left out. Prints every
mismatch, checks by their kind and way, and a summary; exits 1 if there is a mismatch, or a check fails.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
from hypothesis import HealthCheck, Phase, given, seed, settings

import ipujax as ipu

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for `tests`
sys.path.insert(0, str(Path(__file__).resolve().parent))

from random_check_cases import KINDS, Case, streamed_loop

from tests.lowering.random_programs import Program, programs

Kind = Callable[[Program, int, ipu.Options], Case | None]

_TILES = 72  # more than the interpreter runs
_FEW_TILES = 16
_PROGRAMS_A_CACHE = 25  # after which compiled programs are dropped: XLA's memory of each adds up
# What JAX raises where it refuses a program, such as gradients of some Refs.
_REFUSED = (AttributeError, KeyError, NotImplementedError, TypeError, ValueError)


def ways_of(number: int) -> Iterator[tuple[str, int, ipu.Options]]:
    """Yield name, tiles and options of each way in which a program is checked."""
    if number % 3 == 2:
        yield "tiles", _FEW_TILES, ipu.Options()  # by the default path, then by the interpreter
        return
    yield "default", _TILES, ipu.Options()
    if number % 3 == 1:
        yield "exact_splits", _TILES, ipu.Options(exact_splits=True)


def is_refused_by_jax(case: Case) -> bool:
    """Return whether plain JAX refuses a function."""
    fun, args = case
    plain = fun.with_options(device=ipu.CPU())
    try:
        jax.block_until_ready(plain(*args))
    except ipu.IpuError:
        return False  # ipujax alone refuses it, or a mesh that has no devices
    except _REFUSED:
        return True
    return False


def outcome_of(case: Case) -> tuple[str, str]:
    """Return the outcome of a check, and its text: a mismatch or a failure."""
    fun, args = case
    try:
        report = fun.check(*args)
    except Exception:  # any failure is an outcome, and the next program is tried
        if is_refused_by_jax(case):
            return "left out", ""
        return "failed", traceback.format_exc(limit=-4)
    if not report.agrees:
        return "mismatch", str(report)
    return ("agrees on tiles" if report.on_tiles else "agrees"), ""


def check_program(
    number: int, program: Program, kinds: Sequence[Kind], outcomes: Counter[tuple[str, str, str]]
) -> None:
    """Check a program in all its ways, and count outcomes by kind and way."""
    kind = kinds[number % len(kinds)]
    for way, tiles, options in ways_of(number):
        case = kind(program, tiles, options)
        outcome, text = ("left out", "") if case is None else outcome_of(case)
        outcomes[kind.__name__, way, outcome] += 1
        if text:
            operations = ", ".join(step.op for step in program.steps)
            print(f"{outcome}: program {number}, {kind.__name__}, {way}: {operations}\n{text}", flush=True)


def main() -> int:
    """Check random programs; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=300, help="programs (default 300)")
    parser.add_argument("--seed", type=int, default=0, help="of all programs (default 0)")
    parser.add_argument("--kind", choices=[streamed_loop.__name__], help="this kind alone, which is in no mixture")
    args = parser.parse_args()
    kinds = KINDS if args.kind is None else (streamed_loop,)
    outcomes = Counter[tuple[str, str, str]]()
    numbers = iter(range(sys.maxsize))
    start_seconds = time.monotonic()
    start_cpu_seconds = time.process_time()

    @seed(args.seed)
    @settings(
        max_examples=args.count,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],
    )
    @given(programs(4, 9))
    def run(program: Any) -> None:
        number = next(numbers)
        check_program(number, program, kinds, outcomes)
        if number % _PROGRAMS_A_CACHE == _PROGRAMS_A_CACHE - 1:
            jax.clear_caches()
            ipu.clear_caches()

    run()
    seconds = time.monotonic() - start_seconds
    cpu_seconds = time.process_time() - start_cpu_seconds
    for (kind, way, outcome), count in sorted(outcomes.items()):
        print(f"{kind:<15}{way:<14}{outcome:<17}{count:>6,}")
    totals = Counter[str]()
    for (_, _, outcome), count in outcomes.items():
        totals[outcome] += count
    counts = ", ".join(f"{count:,} {outcome}" for outcome, count in sorted(totals.items()))
    print(f"{next(numbers):,} programs in {seconds:,.0f} s, {cpu_seconds:,.0f} of CPU: {counts}")
    return 1 if totals["mismatch"] or totals["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
