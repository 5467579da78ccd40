"""Divides the layers of a model between two IPUs, which compute one after the other.

    python examples/popart/sharding.py

One IPU works while the other waits: sharding gives more memory, not more speed. `pipelining.py` gives both.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import numpy as np

import ipujax.popart as popart

FEATURES = 64
CLASSES = 10


def main(arguments: Sequence[str] | None = None) -> np.ndarray:
    """Train a sharded model on generated data; print losses and profile, return the losses."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ipus", type=int, choices=(1, 2), default=2, help="IPUs of the device")
    parser.add_argument("--batches", type=int, default=20, help="batches to run")
    args = parser.parse_args(arguments)
    rng = np.random.default_rng(0)

    builder = popart.Builder()
    x = builder.addInputTensor("FLOAT", [16, FEATURES], "data")
    labels = builder.addInputTensor("INT32", [16], "labels")
    first = builder.addInitializedInputTensor(rng.normal(size=(FEATURES, 32)).astype(np.float32) / 8)
    second = builder.addInitializedInputTensor(rng.normal(size=(32, CLASSES)).astype(np.float32) / 6)
    with builder.virtualGraph(0), builder.nameScope("first"):
        hidden = builder.aiOnnx.tanh([builder.aiOnnx.matmul([x, first])])
    with builder.virtualGraph(args.ipus - 1), builder.nameScope("second"):
        probabilities = builder.aiOnnx.softmax([builder.aiOnnx.matmul([hidden, second])])
        # PopART's loss takes probabilities, not logits.
        loss = builder.aiGraphcore.nllloss([probabilities, labels], debugContext="loss")

    options = popart.SessionOptions()
    # Without this mode the IPUs named by `virtualGraph` have no effect.
    options.virtualGraphMode = popart.VirtualGraphMode.Manual
    session = popart.TrainingSession(
        builder.getModelProto(),
        popart.DataFlow(args.batches, {loss: popart.AnchorReturnType("ALL")}),
        loss,
        popart.SGD({"defaultLearningRate": (0.2, False)}),  # False: the rate may change between steps
        popart.DeviceManager().createIpuModelDevice({"numIPUs": args.ipus}),
        userOptions=options,
    )
    session.prepareDevice()
    session.weightsFromHost()
    results = session.initAnchorArrays()
    data = rng.normal(size=(args.batches, 16, FEATURES)).astype(np.float32)
    classes = data[:, :, :CLASSES].argmax(-1).astype(np.int32)
    session.run(popart.PyStepIO({x: data, labels: classes}, results))
    print(f"{args.ipus} IPUs: loss {results[loss][0]:.3f} to {results[loss][-1]:.3f}")
    print(session.getReport().summary())
    return results[loss]


if __name__ == "__main__":
    main()
