"""Imports AlexNet from an ONNX file: first for inference, then with a loss and an optimiser for training.

    python examples/popart/alexnet.py --side 224 --width 1

`width` is the share of AlexNet's channels and units, `side` the height and width of pictures. Weights are random.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

import ipujax.popart as popart

CLASSES = 1000
LABELS = "labels"
# Channels, kernel, stride, padding of each convolution, and whether maxima of 3 × 3 follow.
CONVOLUTIONS = ((64, 11, 4, 2, True), (192, 5, 1, 2, True), (384, 3, 1, 1, False), (256, 3, 1, 1, False),
                (256, 3, 1, 1, True))  # fmt: skip
HIDDEN_UNITS = (4096, 4096)


def save_alexnet(path: Path, batch_size: int, side: int, width: float) -> str:
    """Save AlexNet as a file; return the name of its output."""
    rng = np.random.default_rng(0)
    builder = popart.Builder(opsets={"ai.onnx": 11, "ai.graphcore": 1})

    def weights(*shape: int) -> str:
        fan_in = int(np.prod(shape[1:]))
        return builder.addInitializedInputTensor((rng.normal(size=shape) * (2 / fan_in) ** 0.5).astype(np.float32))

    def zeros(size: int) -> str:
        return builder.addInitializedInputTensor(np.zeros(size, np.float32))

    pictures = builder.addInputTensor("FLOAT", [batch_size, 3, side, side], "pictures")
    x = pictures
    channels = 3
    for full_width, kernel, stride, padding, is_pooled in CONVOLUTIONS:
        after = max(1, int(full_width * width))
        x = builder.aiOnnx.conv(
            [x, weights(after, channels, kernel, kernel), zeros(after)], strides=[stride] * 2, pads=[padding] * 4
        )
        x = builder.aiOnnx.relu([x])
        channels = after
        if is_pooled:
            (x,) = builder.aiOnnx.maxpool([x], 1, kernel_shape=[3, 3], strides=[2, 2])
    x = builder.aiOnnx.flatten([x])
    size = int(np.prod(builder.getTensorShape(x)[1:]))
    for units in (*(int(full_width * width) for full_width in HIDDEN_UNITS), CLASSES):
        if units != CLASSES:
            (x,) = builder.aiOnnx.dropout([x], 1, ratio=0.5)
        x = builder.aiOnnx.gemm([x, weights(units, size), zeros(units)], transB=1)
        x = builder.aiOnnx.relu([x]) if units != CLASSES else x
        size = units
    probabilities = builder.aiOnnx.softmax([x])
    builder.addOutputTensor(probabilities)
    builder.saveModelProto(path)
    return probabilities


def main(arguments: Sequence[str] | None = None) -> list[float]:
    """Run inference, then train; print both and the profile, return the losses."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch-size", type=int, default=4, help="examples of a batch")
    parser.add_argument("--batches", type=int, default=4, help="batches to run")
    parser.add_argument("--side", type=int, default=64, help="rows and columns of the pictures")
    parser.add_argument(
        "--width", type=float, default=1 / 16, help="channels of each layer, as a share of the published ones"
    )
    args = parser.parse_args(arguments)

    with tempfile.TemporaryDirectory() as folder:
        return run(args, Path(folder) / "alexnet.onnx")


def run(args: argparse.Namespace, path: Path) -> list[float]:
    """Save the model to a file, and read it for inference and for training."""
    output = save_alexnet(path, args.batch_size, args.side, args.width)
    rng = np.random.default_rng(1)
    samples = args.batches * args.batch_size
    pictures = rng.random((samples, 3, args.side, args.side), np.float32)
    labels = rng.integers(0, CLASSES, samples).astype(np.int32)
    device = popart.DeviceManager().createIpuModelDevice({"numIPUs": 1})

    inference = popart.InferenceSession(
        str(path), popart.DataFlow(args.batches, {output: popart.AnchorReturnType("ALL")}), device
    )
    inference.prepareDevice()
    results = inference.initAnchorArrays()
    inference.run(popart.PyStepIO({"pictures": pictures}, results))
    guesses = results[output].reshape(samples, CLASSES).argmax(1)
    print(f"inference: probabilities {results[output].shape}, first guesses {guesses[:4].tolist()}")

    # The file has no labels: their shape is given separately, and the loss is added to the graph.
    shapes = popart.InputShapeInfo()
    shapes.add(LABELS, popart.TensorInfo("INT32", [args.batch_size]))
    training = popart.TrainingSession(
        str(path),
        popart.DataFlow(args.batches, {"loss": popart.AnchorReturnType("ALL")}),
        losses=[popart.NllLoss(output, LABELS, "loss")],
        optimizer=popart.ConstSGD(0.001),
        deviceInfo=device,
        inputShapeInfo=shapes,
    )
    training.prepareDevice()
    training.weightsFromHost()
    losses = training.initAnchorArrays()
    training.run(popart.PyStepIO({"pictures": pictures, LABELS: labels}, losses))
    print(f"training: losses {losses['loss'].round(2).tolist()}")
    print(training.getReport().summary())
    return [float(loss) for loss in losses["loss"]]


if __name__ == "__main__":
    main()
