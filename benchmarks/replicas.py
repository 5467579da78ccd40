"""Time of several replicas over that of one, for the models of `examples/digits.py` trained data-parallel.

    python benchmarks/replicas.py

Two ratios with their bars, each of medians of runs that alternate within this process, since absolute times depend on
the machine and its other load:
- compiling for 16 replicas to compiling for one, without XLA, in seconds of this process's CPU time; every repetition
  traces and lowers a new function;
- a warm step of 8 replicas to one of one replica on an eighth of the batch, over the number of replicas.
The micro-batch of a replica is the same everywhere. Exits with 1 when a bar is missed.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P
from step_time import Case, load_example, median_times, new_step, row

import ipujax as ipu

MICRO_BATCH = 32
COMPILED_FOR = 16
STEPPED_WITH = 8
COMPILE_BAR = 1.1
STEP_BAR = 1.2


def replicated(case: Case, replicas: int) -> Any:
    """A new training step whose gradients are averaged over replicas."""
    return ipu.jit(
        new_step(case.model, case.optimizer, mean=lambda tree: lax.pmean(tree, "replica")),
        device=ipu.IPUModel(num_ipus=replicas),
        replicas=replicas,
        in_specs=(P(), P(), P("replica"), P("replica")),
        out_specs=P(),
        donate_argnums=(0, 1),
    )


def batch(case: Case, replicas: int) -> tuple[np.ndarray, ...]:
    """As many examples as replicas take at once."""
    chosen = np.arange(MICRO_BATCH * replicas) % len(case.batch[0])
    return tuple(part[chosen] for part in case.batch)


def compile_seconds(case: Case, replicas: int) -> float:
    """CPU seconds from a function nobody has seen to its profile."""
    step = replicated(case, replicas)
    data = batch(case, replicas)
    state = case.state()
    jax.clear_caches()
    start = time.process_time()
    _ = step.profile(*state, *data).cycles
    return time.process_time() - start


def stepping(case: Case, replicas: int, steps: int = 10) -> Callable[[], float]:
    """Measures seconds of one warm step."""
    step = replicated(case, replicas)
    data = batch(case, replicas)
    state = list(step(*case.state(), *data)[:2])

    def run() -> float:
        start = time.perf_counter()
        for _ in range(steps):
            *state[:], _ = step(*state, *data)
        jax.block_until_ready(state)
        return (time.perf_counter() - start) / steps

    return run


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures and prints the table; returns 1 when a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=5)
    repetitions = parser.parse_args(arguments).repetitions
    digits = load_example()
    are_met = []
    print(f"{'':<26} {'':<5} {'base ms':>10} {'other ms':>10} {'ratio':>7} {'bar':>6}")
    for name in digits.MODELS:
        case = Case(digits, name)
        compiles = {str(n): lambda n=n, case=case: compile_seconds(case, n) for n in (1, COMPILED_FOR)}
        for run in compiles.values():
            run()  # planned once in a process
        compiled = median_times(compiles, repetitions)
        stepped = median_times({str(n): stepping(case, n) for n in (1, STEPPED_WITH)}, repetitions)
        title = f"compile, {COMPILED_FOR} replicas / 1"
        are_met.append(row(title, name, compiled["1"], compiled[str(COMPILED_FOR)], COMPILE_BAR))
        one_by_one = STEPPED_WITH * stepped["1"]
        are_met.append(
            row(
                f"step, {STEPPED_WITH} replicas / {STEPPED_WITH} x 1",
                name,
                one_by_one,
                stepped[str(STEPPED_WITH)],
                STEP_BAR,
            )
        )
    return 0 if all(are_met) else 1


if __name__ == "__main__":
    sys.exit(main())
