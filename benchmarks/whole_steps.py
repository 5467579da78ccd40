"""Cycles, memory and lowering time of whole training steps: the figures by which changes of the planners are judged.

    python benchmarks/whole_steps.py --json old.json
    python benchmarks/whole_steps.py --against old.json

Small sizes of models of `models/`: MLP and CNN of `examples/digits.py` (batch 64), a 2-layer transformer (width 128,
batch 8 of 64 tokens) and an LSTM (16 steps, 64 units, batch 16), float32, Adam, state donated, one Mk2. Cycles are
those of the compiled step without host exchange. Lowering time is from jaxpr to executable, without tracing and XLA:
the median of processes that each lower one step, so that no cache is warm. On a busy machine its CPU seconds (with
tracing) are the better measure. This file uses only names that every version of the package has, so that it can measure
an older checkout by PYTHONPATH. For sizes that do not fit, and the contents of a tile, see `fit.py`.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import jax
import numpy as np
from models import Model
from models.digits import digits
from models.gpt import gpt
from models.lstm import lstm

import ipujax as ipu

MODELS: dict[str, Callable[[], Model]] = {
    "digits mlp": partial(digits, "mlp"),
    "digits cnn": partial(digits, "cnn"),
    "transformer": partial(gpt, layers=2, width=128, length=64),
    "lstm": partial(lstm, length=16, units=64, batch=16),
}
RATIOS = ("cycles", "max_tile_bytes", "lowering_seconds", "cpu_seconds")
Figures = dict[str, float]


def measure(name: str) -> Figures:
    """Figures of one step, lowered once in this process."""
    model = MODELS[name]()
    device = model.device()
    args = model.args
    # What happens once in a process, as imports inside functions, is not measured.
    ipu.jit(lambda x: x + 1, device=device).lower(jax.ShapeDtypeStruct((4,), np.float32)).compile()
    # Whether a step fits is one of the figures.
    options = ipu.Options(allow_out_of_memory=True)
    step = ipu.jit(model.step, device=device, donate_argnums=model.donate_argnums, options=options)
    start = time.process_time()
    compiled = step.lower(*args).compile()
    cpu_seconds = time.process_time() - start
    profile = compiled.profile
    return {
        "cycles": profile.cycles - profile.phase_cycles["host_exchange"],
        "max_tile_bytes": int(profile.memory.max_tile_bytes),
        "fits": float(profile.memory.max_tile_bytes <= device.target.bytes_per_tile),
        "lowering_seconds": sum(spent for part, spent in compiled.timings.items() if part != "trace"),
        "cpu_seconds": cpu_seconds,
    }


def median_figures(name: str, repetitions: int) -> Figures:
    """Figures of a step, its lowering the median of processes of their own.

    Raises:
        AssertionError: two processes disagree on cycles or bytes.
    """
    spawn = get_context("spawn")
    with ProcessPoolExecutor(max_workers=1, mp_context=spawn, max_tasks_per_child=1) as pool:
        results = list(pool.map(measure, [name] * repetitions))
    times = {
        key: statistics.median(result.pop(key) for result in results) for key in ("lowering_seconds", "cpu_seconds")
    }
    assert all(result == results[0] for result in results), results
    return {**results[0], **times}


def geometric_mean(values: list[float]) -> float:
    """The nth root of the product."""
    return math.exp(statistics.fmean(map(math.log, values)))


def main() -> None:
    """Prints a row a model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=MODELS, action="append", help="these models alone")
    parser.add_argument("--repetitions", type=int, default=3, help="lowerings of each step")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--against", type=Path, help="figures of another version, for ratios to them")
    arguments = parser.parse_args()
    old = json.loads(arguments.against.read_text()) if arguments.against else {}
    print(f"{'':<12}{'cycles':>10}{'tile bytes':>12}{'fits':>6}{'lowering s':>12}{'CPU s':>8}", end="")
    print("".join(f"{key:>19} ×" for key in RATIOS) if old else "")
    new: dict[str, Figures] = {}
    ratios: dict[str, list[float]] = {key: [] for key in RATIOS}
    for name in arguments.only or MODELS:
        row = new[name] = median_figures(name, arguments.repetitions)
        print(f"{name:<12}{row['cycles']:>10,}{row['max_tile_bytes']:>12,}{'yes' if row['fits'] else 'NO':>6}", end="")
        print(f"{row['lowering_seconds']:>12.2f}{row['cpu_seconds']:>8.2f}", end="")
        if name in old:
            for key, values in ratios.items():
                values.append(row[key] / old[name][key])
                print(f"{values[-1]:>21.3f}", end="")
        print(flush=True)
    if ratios["cycles"]:
        print(f"{'geometric mean':<60}", *(f"{geometric_mean(values):>21.3f}" for values in ratios.values()), sep="")
    if arguments.json:
        arguments.json.write_text(json.dumps(new, indent=1) + "\n")


if __name__ == "__main__":
    main()
