"""Time of a pipeline's step by the number of micro-batches stored between forward and backward.

    python benchmarks/pipeline_depth.py [--micro-batches 256] [--rows 16] [--width 256] [--repeats 7]

Network, micro-batches and work are the same: with 1f1b the first of four stages stores 4 micro-batches, with gpipe all.
A loop that copied its rings would take many times longer with gpipe. Prints the median seconds of a step with each, and
their ratio; calls are interleaved, so that other load on the machine affects both alike.
"""

from __future__ import annotations

import argparse
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
from pipeline_compile import STAGES, loss

import ipujax as ipu

SCHEDULES = ("1f1b", "gpipe")


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, value in (("micro-batches", 256), ("rows", 16), ("width", 256), ("repeats", 7)):
        parser.add_argument(f"--{name}", type=int, default=value)
    chosen = parser.parse_args()
    device = ipu.IPUModel(num_ipus=STAGES, tiles_per_ipu=64)
    random = np.random.default_rng(0)
    shape = chosen.width, chosen.width
    names = [f"{name}{n}" for name in ("up", "down") for n in range(STAGES)]
    params = {name: jnp.asarray(random.normal(size=shape) / 99, jnp.float32) for name in names}
    rows = chosen.rows * chosen.micro_batches, chosen.width
    batch = {name: jnp.asarray(random.normal(size=rows), jnp.float32) for name in ("x", "y")}
    steps = {}
    for schedule in SCHEDULES:
        run = ipu.pipeline(jax.value_and_grad(loss), micro_batches=chosen.micro_batches, schedule=schedule)
        steps[schedule] = ipu.jit(run, device=device).lower(params, batch).compile()
        jax.block_until_ready(steps[schedule](params, batch))
    seconds: dict[str, list[float]] = {schedule: [] for schedule in SCHEDULES}
    for _ in range(chosen.repeats):
        for schedule, step in steps.items():
            start = time.perf_counter()
            jax.block_until_ready(step(params, batch))
            seconds[schedule].append(time.perf_counter() - start)
    short_seconds, long_seconds = (statistics.median(seconds[schedule]) for schedule in SCHEDULES)
    print(f"a slot is {chosen.rows * chosen.width * 4 / 1024:.0f} KiB")
    print(f"{STAGES:5} slots {short_seconds * 1e3:8.1f} ms")
    print(f"{chosen.micro_batches:5} slots {long_seconds * 1e3:8.1f} ms, × {long_seconds / short_seconds:.2f}")


if __name__ == "__main__":
    main()
