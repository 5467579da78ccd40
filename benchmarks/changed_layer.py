"""CPU seconds to lower and compile a 12-layer transformer step with one layer changed, with plans of the unchanged one.

    python benchmarks/changed_layer.py
    python benchmarks/changed_layer.py --runs 5

The unchanged step is compiled first; then steps with a tanh before another layer each time, in the same process, and
in new processes with and without a cache on disk. Trace, imports and the unchanged step are not counted, XLA compiles
nothing. A row has medians of `lower` (passes, graph and program) and of `compile` (checks, costs, memory, timeline).
"""

from __future__ import annotations

import argparse
import gc
import statistics
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context

import jax
import jax.numpy as jnp
from models.gpt import Sizes, language_model
from models.model import Model

import ipujax as ipu
from ipujax.models.network_layers import Params, block

LAYERS = 12
Seconds = tuple[float, float]


def model_of(layer: int | None) -> Model:
    """Return the model with a tanh before one layer; None for none."""
    sizes = Sizes(LAYERS, batch=2)
    each = partial(block, heads=sizes.heads)

    def run(blocks: list[Params], x: jax.Array) -> jax.Array:
        for number, p in enumerate(blocks):
            x = each(p, jnp.tanh(x) if number == layer else x)
        return x

    return language_model(f"transformer, layer {layer} changed", sizes, run)


def seconds(layer: int | None, directory: str) -> Seconds:
    """Return CPU seconds of `lower` and `compile`; the cache is in a directory, "" for none."""
    model = model_of(layer)
    options = ipu.Options(allow_out_of_memory=True, progress=False, cache_dir=directory)
    function = ipu.jit(model.step, donate_argnums=model.donate_argnums, device=model.device(), options=options)
    traced = function.trace(*model.args)
    gc.collect()
    start = time.process_time()
    lowered = traced.lower()
    lowered_at = time.process_time()
    lowered.compile()
    return lowered_at - start, time.process_time() - lowered_at


def in_new_process(layer: int | None, directory: str) -> Seconds:
    """Return `seconds` of a process that has compiled only a small function before."""
    with ProcessPoolExecutor(1, get_context("spawn"), _warm_up) as pool:
        return pool.submit(seconds, layer, directory).result()


def _warm_up() -> None:
    options = ipu.Options(progress=False, cache_dir="")
    ipu.jit(lambda x: jax.nn.softmax(x @ x.T), options=options).lower(jnp.ones((8, 8))).compile()


def show(name: str, samples: Sequence[Seconds]) -> None:
    """Print the medians of samples."""
    lower, compiling = map(statistics.median, zip(*samples, strict=True))
    total = statistics.median(map(sum, samples))
    print(f"{name:<44}lower {lower:.2f}  compile {compiling:.2f}  together {total:.2f}", flush=True)


def main() -> None:
    """Print a row for each case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5, help=f"changed layers, from 1 to {LAYERS - 1}")
    layers = range(1, 1 + parser.parse_args().runs)
    with tempfile.TemporaryDirectory() as directory:
        show("unchanged, no cache", [in_new_process(None, "") for _ in layers])
        show("changed, no cache", [in_new_process(layer, "") for layer in layers])
        in_new_process(None, directory)
        show("changed, new process, cache on disk", [in_new_process(layer, directory) for layer in layers])
    _warm_up()
    seconds(None, "")
    show("changed, same process", [seconds(layer, "") for layer in layers])


if __name__ == "__main__":
    main()
