"""Memory that a process still has after many compilations whose functions are dropped.

    python benchmarks/memory_growth.py

The resident set (RSS) after 10 and after 100 different small training steps, each traced, compiled, run once, dropped
and garbage collected; the difference, for `ipu.jit` and for plain `jax.jit`, each in a process of its own. `--clear`
calls `jax.clear_caches()` before each reading; `--first 50 --last 200 --cache` takes readings after 50 and 200 steps,
with a cache on disk.

The row of `jax.jit` is JAX's own growth, and part of that of `ipu.jit`: with jaxlib 0.10 27 of 62 MiB, with
`--clear` 18 of 67 MiB, in one run each. Limits: reads `/proc/self/statm`, so it runs on Linux only.
"""

from __future__ import annotations

import argparse
import gc
import os
import resource
import tempfile
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import ipujax as ipu
from ipujax.storage import CACHE_DIR

FIRST = 10
LAST = 100
BAR_MIB = 40.0  # of the project
MIB = 1 << 20


def compile_and_run(number: int, compiler: str) -> None:
    """A step of a small network whose shapes no other number has."""
    width = 8 + number
    batch = 4 + number % 7

    def step(params: Any, x: jax.Array) -> Any:
        def loss(params: Any) -> jax.Array:
            hidden = jnp.tanh(x @ params["w"] + params["b"])
            return jnp.mean(jax.nn.softmax(hidden @ params["v"]) ** 2)

        return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params))

    shapes = {"w": (16, width), "b": (width,), "v": (width, 5)}
    params = {name: np.ones(shape, np.float32) for name, shape in shapes.items()}
    run = ipu.jit(step) if compiler == "ipu.jit" else jax.jit(step)
    jax.block_until_ready(run(params, np.ones((batch, 16), np.float32)))


def resident_mib(clear: bool) -> float:
    """Resident set of this process in MiB after a garbage collection."""
    if clear:
        jax.clear_caches()
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / MIB


def measure(compiler: str, clear: bool, counts: tuple[int, int], folder: str) -> tuple[float, float]:
    """Resident MiB after the first compilations and after all; `folder` is that of the cache on disk, "" for none."""
    os.environ[CACHE_DIR] = folder
    first, last = counts
    for number in range(first):
        compile_and_run(number, compiler)
    after_first = resident_mib(clear)
    for number in range(first, last):
        compile_and_run(number, compiler)
    return after_first, resident_mib(clear)


def main() -> int:
    """Prints a row a compiler; returns 1 when the bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clear", action="store_true", help="clear JAX's caches before each reading")
    parser.add_argument("--cache", action="store_true", help="store programs in a cache on disk")
    parser.add_argument("--first", type=int, default=FIRST, help="compilations before the first reading")
    parser.add_argument("--last", type=int, default=LAST, help="compilations before the last reading")
    args = parser.parse_args()
    counts = args.first, args.last
    print(f"{'MiB resident':<14}{f'after {args.first}':>11}{f'after {args.last}':>11}{'growth':>9}{'bar':>6}")
    growth = {}
    for compiler in ("jax.jit", "ipu.jit"):
        with (
            tempfile.TemporaryDirectory() as folder,
            ProcessPoolExecutor(max_workers=1, mp_context=get_context("spawn")) as pool,
        ):
            cache_dir = folder if args.cache else ""
            first, last = pool.submit(measure, compiler, args.clear, counts, cache_dir).result()
        growth[compiler] = last - first
        bar = f"{BAR_MIB:>6.0f}" if compiler == "ipu.jit" else ""
        print(f"{compiler:<14}{first:>11.0f}{last:>11.0f}{growth[compiler]:>9.0f}{bar}", flush=True)
    return int(growth["ipu.jit"] > BAR_MIB)


if __name__ == "__main__":
    raise SystemExit(main())
