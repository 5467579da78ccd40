"""Runs a network over two IPUs in execution phases, with the weights in streaming memory.

    python examples/popart/phased_execution.py --layers 8 --io-tiles 4

Layers alternate between the two IPUs: while one computes, the other loads the weights of the next layers. With I/O
tiles each IPU loads while it computes, too.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import numpy as np

import ipujax.popart as popart


def session_of(has_phases: bool, args: argparse.Namespace) -> tuple[popart.InferenceSession, str, str]:
    """Return a prepared session, and the names of its input and its output."""
    rng = np.random.default_rng(0)
    builder = popart.Builder()
    x = builder.addInputTensor("FLOAT", [args.batch_size, args.width], "data")
    y = x
    for layer in range(args.layers):
        weights = (rng.normal(size=(args.width, args.width)) / args.width**0.5).astype(np.float32)
        w = builder.addInitializedInputTensor(weights, f"w{layer}")
        with builder.executionPhase(layer // args.layers_of_phase), builder.nameScope(f"layer{layer}"):
            y = builder.aiOnnx.tanh([builder.aiOnnx.matmul([y, w])])
    options = popart.SessionOptions()
    if has_phases:
        options.virtualGraphMode = popart.VirtualGraphMode.ExecutionPhases
        # Rounded up: the last phase may have fewer layers.
        options.executionPhaseSettings.phases = -(-args.layers // args.layers_of_phase)
        # Only weights off chip save memory: a phase has those of its own layers alone.
        options.weightTensorLocationSettings.location.storage = popart.TensorStorage.OffChip
        options.numIOTiles = args.io_tiles
    flow = popart.DataFlow(1, {y: popart.AnchorReturnType("ALL")})
    device = popart.DeviceManager().createIpuModelDevice({"numIPUs": 2, "tilesPerIPU": args.tiles})
    name = "phased" if has_phases else "resident"
    session = popart.InferenceSession(builder.getModelProto(), flow, device, userOptions=options, name=name)
    session.prepareDevice()
    return session, x, y


def main(arguments: Sequence[str] | None = None) -> dict[str, int]:
    """Run with and without phases; print memory and cycles, return the bytes of the fullest tiles."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8, help="layers of the network")
    parser.add_argument("--layers-of-phase", type=int, default=1, help="layers of a phase")
    parser.add_argument("--width", type=int, default=192, help="units of a layer")
    parser.add_argument("--batch-size", type=int, default=16, help="examples of a batch")
    parser.add_argument("--tiles", type=int, default=16, help="tiles of the IPU")
    parser.add_argument("--io-tiles", type=int, default=0, help="tiles of them that only move data")
    args = parser.parse_args(arguments)

    data = np.random.default_rng(1).normal(size=(args.batch_size, args.width)).astype(np.float32)
    used: dict[str, int] = {}
    results = []
    for has_phases in (False, True):
        session, x, y = session_of(has_phases, args)
        anchors = session.initAnchorArrays()
        session.run(popart.PyStepIO({x: data}, anchors))
        results.append(anchors[y])
        report = session.getReport()
        used[session.name] = int(report.memory.max_tile_bytes)
        print(f"{session.name}: {used[session.name]:,} bytes on the fullest tile, {report.cycles:,} cycles")
    # Phases change memory and cycles, not results.
    np.testing.assert_allclose(results[0], results[1], rtol=1e-4, atol=1e-6)
    print(report.summary())
    return used


if __name__ == "__main__":
    main()
