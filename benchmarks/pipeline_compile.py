"""Compile time of pipelines, which should not depend on the number of micro-batches, and little on that of stages.

    python benchmarks/pipeline_compile.py [--schedules 1f1b gpipe] [--micro-batches 16 512] [--repeats 5]
    python benchmarks/pipeline_compile.py --stages 64 --width 256 --tiles 1472 --micro-batches 64 --repeats 1 --shapes

A network of equal blocks, one on each IPU, its gradients accumulated. Prints for each schedule and number of
micro-batches the median of processor seconds from the function to the executable and its profile, and separately those
of XLA; nothing is run with `--shapes`. Measurements are interleaved, so that other load on the machine affects all of
them alike. At the end the largest memory of the process, which other settings of one run share.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import ipujax as ipu

ROWS = 4


def loss(params: Any, batch: Any) -> jax.Array:
    x = batch["x"]
    for number in range(len(params) // 2):
        with ipu.stage(number):
            x = x + jnp.tanh(x @ params[f"up{number}"]) @ params[f"down{number}"]
    return jnp.mean((x - batch["y"]) ** 2)


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--schedules", nargs="+", default=["1f1b", "gpipe", "grouped"])
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[16, 512])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--tiles", type=int, default=64)
    parser.add_argument("--shapes", action="store_true", help="compile from shapes, run nothing")
    chosen = parser.parse_args()
    device = ipu.IPUModel(num_ipus=chosen.stages, tiles_per_ipu=chosen.tiles)
    array = jax.ShapeDtypeStruct if chosen.shapes else np.ones
    weight = array((chosen.width, chosen.width), np.float32)
    params = {f"{name}{n}": weight for name in ("up", "down") for n in range(chosen.stages)}
    ours: dict[tuple[str, int], list[float]] = {}
    xla: dict[tuple[str, int], list[float]] = {}
    for _ in range(chosen.repeats + 1):
        for schedule in chosen.schedules:
            for count in chosen.micro_batches:
                batch = {name: array((ROWS * count, chosen.width), np.float32) for name in ("x", "y")}
                run = ipu.pipeline(jax.value_and_grad(loss), micro_batches=count, schedule=schedule)
                start = time.process_time()
                compiled = ipu.jit(run, device=device).lower(params, batch).compile()
                assert compiled.profile.cycles > 0
                lowered = time.process_time()
                if not chosen.shapes:
                    jax.block_until_ready(compiled(params, batch))
                ours.setdefault((schedule, count), []).append(lowered - start)
                xla.setdefault((schedule, count), []).append(time.process_time() - lowered)
    for schedule in chosen.schedules:
        first = statistics.median(ours[schedule, chosen.micro_batches[0]][1:])  # what comes first also fills caches
        for count in chosen.micro_batches:
            seconds = statistics.median(ours[schedule, count][1:])
            compiling = statistics.median(xla[schedule, count][1:])
            print(
                f"{schedule:12} {count:5}  {seconds:.3f} s, × {seconds / first:.2f}; XLA and one call {compiling:.2f} s"
            )
    print(f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10:,} MiB at most")


if __name__ == "__main__":
    main()
