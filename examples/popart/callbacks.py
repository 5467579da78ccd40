"""Feeds a session by callbacks, and times transfers from the host and back, for several sizes.

python examples/popart/callbacks.py --data-size 1000 100000
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

import numpy as np

import ipujax.popart as popart


def main(arguments: Sequence[str] | None = None) -> dict[int, float]:
    """Run a small graph for each size; print times and the last profile, return seconds by size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = [64, 4096, 65536]
    parser.add_argument(
        "--data-size", type=int, nargs="+", default=sizes, help="elements of the tensors, one after another"
    )
    parser.add_argument("--batches", type=int, default=5, help="batches to run")
    args = parser.parse_args(arguments)

    seconds: dict[int, float] = {}
    for size in args.data_size:
        builder = popart.Builder()
        a = builder.addInputTensor("FLOAT", [size], "a")
        b = builder.addInputTensor("FLOAT", [size], "b")
        total = builder.aiOnnx.add([a, b])
        flow = popart.DataFlow(args.batches, {total: popart.AnchorReturnType("ALL")})
        device = popart.DeviceManager().createIpuModelDevice({"numIPUs": 1})
        session = popart.InferenceSession(builder.getModelProto(), flow, device)
        session.prepareDevice()

        started: list[float] = []
        spent: list[float] = []
        results = iter(np.zeros((args.batches, size), np.float32))

        def feed(name: str, is_prefetch: bool, size: int = size, started: list[float] = started) -> np.ndarray:
            started.append(time.perf_counter())
            return np.full(size, len(started), np.float32)

        def received(name: str, started: list[float] = started, spent: list[float] = spent) -> None:
            spent.append(time.perf_counter() - started[2 * len(spent)])

        def target(name: str, results: object = results) -> np.ndarray:
            return next(results)  # type: ignore[call-overload, no-any-return]

        stepio = popart.PyStepIOCallback(feed, lambda name: None, target, received)
        session.run(stepio)
        seconds[size] = float(np.median(spent))
        simulated = session.getReport().seconds / args.batches
        print(f"{size:>8,} elements: {1e3 * seconds[size]:8.2f} ms here, {1e6 * simulated:8.2f} µs on the IPU")
    print(session.getReport().summary())
    return seconds


if __name__ == "__main__":
    main()
