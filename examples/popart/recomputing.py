"""Recomputes activations of a network of seven layers in the backward part, chosen by annotations or automatically.

    python examples/popart/recomputing.py

By hand, `recomputeOutputInBackwardPass` names the results that are not stored, and `checkpointOutput` those that are.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import numpy as np

import ipujax.popart as popart
from ipujax.popart.gcprofile import save_popart_report

LAYERS = 7
METHODS = {"OFF": "none", "ON": "manual", "AUTO": "auto"}  # as the option names them


def session_of(method: str, args: argparse.Namespace) -> tuple[popart.TrainingSession, str, str]:
    """Return a prepared session that recomputes by a method, and the names of its input and its loss."""
    rng = np.random.default_rng(0)
    builder = popart.Builder()
    x = builder.addInputTensor("FLOAT", [args.batch_size, args.width], "data")
    y = x
    for layer in range(LAYERS):
        weights = (rng.normal(size=(args.width, args.width)) / args.width**0.5).astype(np.float32)
        w = builder.addInitializedInputTensor(weights)
        product = builder.aiOnnx.matmul([y, w])
        y = builder.aiGraphcore.gelu([product])
        if method == "manual":
            builder.recomputeOutputInBackwardPass({product, y})
            # Stored results bound each recomputed part: at most two layers are computed again at once.
            if layer % 2:
                (y,) = builder.checkpointOutput([y])
    loss = builder.aiGraphcore.l1loss([y], 0.1)
    if args.export:
        builder.saveModelProto(args.export)
    options = popart.SessionOptions()
    if method == "auto":
        options.autoRecomputation = popart.RecomputationType.Standard
    session = popart.TrainingSession(
        builder.getModelProto(),
        popart.DataFlow(1, {loss: popart.AnchorReturnType("ALL")}),
        loss,
        popart.ConstSGD(0.01),
        popart.DeviceManager().createIpuModelDevice({"numIPUs": 1, "tilesPerIPU": args.tiles}),
        userOptions=options,
        name=f"recompute_{method}",
    )
    session.prepareDevice()
    session.weightsFromHost()
    return session, x, loss


def main(arguments: Sequence[str] | None = None) -> dict[str, int]:
    """Train with each method; print memory and cycles, return the bytes of the fullest tiles."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch-size", type=int, default=1024, help="examples of a batch")
    parser.add_argument("--width", type=int, default=64, help="units of a layer")
    parser.add_argument("--tiles", type=int, default=16, help="tiles of the IPU")
    parser.add_argument("--recomputing", choices=METHODS, nargs="+", default=list(METHODS), help="methods, in order")
    parser.add_argument("--export", metavar="FILE", help="save the model, of the last method")
    parser.add_argument("--report", action="store_true", help="save graph.json, execution.json and report.profile")
    parser.add_argument("--show-logs", action="store_true", help="print what the sessions log")
    parser.add_argument("--test", action="store_true", help="use a small batch")
    args = parser.parse_args(arguments)
    if args.test:
        args.batch_size = 64
    if args.show_logs:
        popart.getLogger().setLevel("DEBUG")
    data = np.random.default_rng(1).normal(size=(args.batch_size, args.width)).astype(np.float32)
    used: dict[str, int] = {}
    losses = []
    for method in (METHODS[name] for name in args.recomputing):
        session, x, loss = session_of(method, args)
        results = session.initAnchorArrays()
        session.run(popart.PyStepIO({x: data}, results))
        losses.append(float(results[loss]))
        report = session.getReport()
        used[method] = int(report.memory.max_tile_bytes)
        print(
            f"{method:>6}: {used[method]:,} bytes on the fullest tile, {report.cycles:,} cycles, loss {losses[-1]:.4f}"
        )
    # Recomputation changes memory and cycles, not results.
    np.testing.assert_allclose(losses, losses[0], rtol=1e-5)
    if args.report:
        save_popart_report(session)
    print(report.summary())
    return used


if __name__ == "__main__":
    main()
