"""Times two kinds of layers with generated data: LSTM and convolution, in inference and in training.

python examples/popart/kernel_benchmarks.py --kernel lstm --train
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence

import numpy as np

import ipujax.popart as popart


def lstm(builder: popart.Builder, args: argparse.Namespace) -> tuple[str, int]:
    """Return the last output of an LSTM, and the operations of its products."""
    units = args.size
    steps = args.steps
    batch = args.batch_size
    rng = np.random.default_rng(0)
    x = builder.addInputTensor("FLOAT", [steps, batch, units], "sequence")
    weights = builder.addInitializedInputTensor(rng.normal(size=(1, 4 * units, units)).astype(np.float32) / 8)
    recurrent = builder.addInitializedInputTensor(rng.normal(size=(1, 4 * units, units)).astype(np.float32) / 8)
    _, last, _ = builder.aiOnnx.lstm([x, weights, recurrent], 3, hidden_size=units)
    # Four gates, each a product with the input and one with the state: 8 multiply-adds a pair of units.
    return last, 2 * steps * batch * 8 * units**2


def convolution(builder: popart.Builder, args: argparse.Namespace) -> tuple[str, int]:
    """Return a convolution of 3 × 3, and its operations."""
    channels = args.size
    side = args.steps
    batch = args.batch_size
    rng = np.random.default_rng(0)
    x = builder.addInputTensor("FLOAT", [batch, channels, side, side], "picture")
    kernel = rng.normal(size=(channels, channels, 3, 3)).astype(np.float32) / 8
    weights = builder.addInitializedInputTensor(kernel)
    return builder.aiOnnx.conv([x, weights], pads=[1, 1, 1, 1]), 2 * batch * side**2 * 9 * channels**2


KERNELS: Mapping[str, Callable[..., tuple[str, int]]] = {"lstm": lstm, "conv": convolution}


def main(arguments: Sequence[str] | None = None) -> float:
    """Run a step of a kernel; print and return its simulated operations a second."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernel", choices=KERNELS, default="lstm", help="operation to measure")
    parser.add_argument("--train", action="store_true", help="measure a training step, not inference")
    parser.add_argument("--size", type=int, default=32, help="units of the LSTM, channels of the convolution")
    parser.add_argument("--steps", type=int, default=16, help="steps of the LSTM, pixels of a side of the convolution")
    parser.add_argument("--batch-size", type=int, default=8, help="examples of a batch")
    parser.add_argument("--batches", type=int, default=4, help="batches to run")
    args = parser.parse_args(arguments)

    builder = popart.Builder()
    with builder.nameScope(args.kernel):
        result, operations = KERNELS[args.kernel](builder, args)
    options = popart.SessionOptions()
    # Data come into being on the device, so that no host exchange is timed.
    options.syntheticDataMode = popart.SyntheticDataMode.RandomNormal
    options.engineOptions = {"debug.instrument": "true"}
    device = popart.DeviceManager().createIpuModelDevice({"numIPUs": 1, "ipuVersion": "ipu21"})
    session: popart.InferenceSession | popart.TrainingSession
    if args.train:
        loss = builder.aiGraphcore.identityloss([result])
        flow = popart.DataFlow(args.batches, {loss: popart.AnchorReturnType("FINAL")})
        proto = builder.getModelProto()
        session = popart.TrainingSession(proto, flow, loss, popart.ConstSGD(1e-3), device, userOptions=options)
    else:
        flow = popart.DataFlow(args.batches, {result: popart.AnchorReturnType("FINAL")})
        session = popart.InferenceSession(builder.getModelProto(), flow, device, userOptions=options)
    session.prepareDevice()
    session.weightsFromHost()
    session.run(popart.PyStepIO({}, session.initAnchorArrays()))

    seconds = session.getReport().seconds / args.batches
    # The backward part has two products for each product of the forward part.
    rate = operations * (3 if args.train else 1) / seconds
    mode = "training" if args.train else "inference"
    print(f"{args.kernel}, {mode}: {session.getCycleCount():,} cycles a step, {rate / 1e9:,.1f} GFLOP/s")
    print(session.getSummaryReport())
    return rate


if __name__ == "__main__":
    main()
