"""Runs a network over two IPUs in execution phases, with the weights in streaming memory.

    python examples/popart/phased_execution.py --num-layers 8 --io-tiles 4

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
    x = builder.addInputTensor(popart.TensorInfo(args.dtype, [args.batch_size, args.dsize]), "data")
    y = x
    for layer in range(args.num_layers):
        weights = (rng.normal(size=(args.dsize, args.dsize)) / args.dsize**0.5).astype(args.dtype)
        w = builder.addInitializedInputTensor(weights, f"w{layer}")
        with builder.executionPhase(layer // args.layers_of_phase), builder.nameScope(f"layer{layer}"):
            y = builder.aiOnnx.tanh([builder.aiOnnx.matmul([y, w])])
    options = popart.SessionOptions()
    if has_phases:
        options.virtualGraphMode = popart.VirtualGraphMode.ExecutionPhases
        # Rounded up: the last phase may have fewer layers.
        options.executionPhaseSettings.phases = -(-args.num_layers // args.layers_of_phase)
        # Only weights off chip save memory: a phase has those of its own layers alone.
        options.weightTensorLocationSettings.location.storage = popart.TensorStorage.OffChip
        options.numIOTiles = args.io_tiles
    if args.profile:
        options.engineOptions = {"autoReport.all": "true", "autoReport.directory": args.profile_dir}
    flow = popart.DataFlow(args.batches_per_step, {y: popart.AnchorReturnType("ALL")})
    device = popart.DeviceManager().createIpuModelDevice({"numIPUs": 2, "tilesPerIPU": args.tiles})
    name = "phased" if has_phases else "resident"
    session = popart.InferenceSession(builder.getModelProto(), flow, device, userOptions=options, name=name)
    session.prepareDevice()
    return session, x, y


def main(arguments: Sequence[str] | None = None) -> dict[str, int]:
    """Run with and without phases; print memory and cycles, return the bytes of the fullest tiles."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-layers", type=int, default=8, help="layers of the network")
    parser.add_argument("--layers-of-phase", type=int, default=1, help="layers of a phase")
    parser.add_argument("--dsize", type=int, default=192, help="units of a layer")
    parser.add_argument("--batch-size", type=int, default=16, help="examples of a batch")
    parser.add_argument("--tiles", type=int, default=16, help="tiles of the IPU")
    parser.add_argument("--io-tiles", type=int, default=0, help="tiles of them that only move data")
    parser.add_argument("--batches-per-step", type=int, default=1, help="batches of a step")
    parser.add_argument("--iters", type=int, default=1, help="steps to run")
    parser.add_argument("--dtype", choices=["float32", "float16"], default="float32", help="element type")
    parser.add_argument("--sharded-execution", action="store_true", help="run without phases alone")
    parser.add_argument("--profile", action="store_true", help="save profiles, NAME.profile of each session")
    parser.add_argument("--profile-dir", default=".", help="their folder")
    args = parser.parse_args(arguments)

    shape = args.batches_per_step, args.batch_size, args.dsize
    data = np.random.default_rng(1).normal(size=shape).astype(args.dtype)
    used: dict[str, int] = {}
    results = []
    for has_phases in (False,) if args.sharded_execution else (False, True):
        session, x, y = session_of(has_phases, args)
        anchors = session.initAnchorArrays()
        for _ in range(args.iters):
            session.run(popart.PyStepIO({x: data}, anchors))
        results.append(anchors[y])
        report = session.getReport()
        used[session.name] = int(report.memory.max_tile_bytes)
        print(f"{session.name}: {used[session.name]:,} bytes on the fullest tile, {report.cycles:,} cycles")
    # Phases change memory and cycles, not results.
    tolerance = 1e-2 if args.dtype == "float16" else 1e-4
    np.testing.assert_allclose(results[0], results[-1], rtol=tolerance, atol=tolerance / 100)
    print(report.summary())
    return used


if __name__ == "__main__":
    main()
