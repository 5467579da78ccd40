"""Pipelines two dense layers over two IPUs: both work at once, on consecutive micro-batches.

python examples/popart/pipelining.py --micro-batches 8
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import numpy as np

import ipujax.popart as popart
from ipujax.popart.gcprofile import save_popart_report

FEATURES = 128
HIDDEN = 96
CLASSES = 10


def session_of(is_pipelined: bool, args: argparse.Namespace) -> tuple[popart.TrainingSession, dict[str, str]]:
    """Return a prepared session, and the names of its tensors."""
    rng = np.random.default_rng(0)
    builder = popart.Builder()
    x = builder.addInputTensor("FLOAT", [args.micro_batch_size, FEATURES], "data")
    labels = builder.addInputTensor("INT32", [args.micro_batch_size], "labels")
    first = builder.addInitializedInputTensor(rng.normal(size=(FEATURES, HIDDEN)).astype(np.float32) / 11)
    second = builder.addInitializedInputTensor(rng.normal(size=(HIDDEN, CLASSES)).astype(np.float32) / 10)
    with builder.virtualGraph(0), builder.pipelineStage(0):
        hidden = builder.aiOnnx.relu([builder.aiOnnx.matmul([x, first])])
    with builder.virtualGraph(1), builder.pipelineStage(1):
        probabilities = builder.aiOnnx.softmax([builder.aiOnnx.matmul([hidden, second])])
        loss = builder.aiGraphcore.nllloss([probabilities, labels], popart.ReductionType.Sum)

    if args.export:
        builder.saveModelProto(args.export)
    options = popart.SessionOptions()
    options.virtualGraphMode = popart.VirtualGraphMode.Manual
    options.enablePipelining = is_pipelined
    # Accumulated in both runs, so that both make the same updates and their cycles can be compared.
    options.enableGradientAccumulation = True
    options.accumulationFactor = args.micro_batches
    session = popart.TrainingSession(
        builder.getModelProto(),
        popart.DataFlow(args.batches, {loss: popart.AnchorReturnType("ALL")}),
        loss,
        # The loss is a sum over the examples of a micro-batch.
        popart.ConstSGD(0.01 / args.micro_batch_size),
        popart.DeviceManager().createIpuModelDevice({"numIPUs": 2}),
        userOptions=options,
        name="pipelined" if is_pipelined else "sharded",
    )
    session.prepareDevice()
    session.weightsFromHost()
    return session, {"data": x, "labels": labels, "loss": loss}


def main(arguments: Sequence[str] | None = None) -> dict[str, int]:
    """Train pipelined and sharded; print losses, cycles and profile, return the cycles."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--micro-batches", type=int, default=8, help="micro-batches of a batch")
    parser.add_argument("--micro-batch-size", type=int, default=16, help="examples of a micro-batch")
    parser.add_argument("--batches", type=int, default=4, help="batches to run")
    parser.add_argument("--export", metavar="FILE", help="save the model")
    parser.add_argument("--report", action="store_true", help="save graph.json, execution.json and report.profile")
    parser.add_argument("--no_pipelining", action="store_true", help="train sharded alone")
    parser.add_argument("--test", action="store_true", help="run one batch")
    args = parser.parse_args(arguments)
    if args.test:
        args.batches = 1
    count = args.batches * args.micro_batches * args.micro_batch_size
    rng = np.random.default_rng(1)
    data = rng.normal(size=(count, FEATURES)).astype(np.float32)
    classes = data[:, :CLASSES].argmax(-1).astype(np.int32)

    cycles: dict[str, int] = {}
    losses = []
    for is_pipelined in (False,) if args.no_pipelining else (False, True):
        session, names = session_of(is_pipelined, args)
        results = session.initAnchorArrays()
        session.run(popart.PyStepIO({names["data"]: data, names["labels"]: classes}, results))
        losses.append(results[names["loss"]])
        cycles[session.name] = session.getCycleCount()
        print(f"{session.name}: {cycles[session.name]:,} cycles a step, last loss {losses[-1][-1].sum():.2f}")
    np.testing.assert_allclose(losses[0], losses[-1], rtol=1e-4)
    if args.report:
        save_popart_report(session)
    print(session.getReport().summary())
    return cycles


if __name__ == "__main__":
    main()
