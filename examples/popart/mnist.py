"""Trains two small models on pictures of digits: one linear layer, or two convolutions and a dense layer.

    python examples/popart/mnist.py --model conv --epochs 5

Data: the 1,797 digits of scikit-learn, enlarged to the 28 × 28 pixels of MNIST.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from sklearn.datasets import load_digits

import ipujax.popart as popart

SIDE = 28
CLASSES = 10
TEST_SAMPLES = 297


def digits() -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """Return pictures [n, 784] from 0 to 1 and labels [n], for training and for the test."""
    loaded = load_digits()
    enlarged = np.kron(loaded.images / 16, np.ones((3, 3)))  # 8 × 8 pixels to 24 × 24
    pictures = np.pad(enlarged, ((0, 0), (2, 2), (2, 2))).reshape(-1, SIDE * SIDE).astype(np.float32)
    labels = loaded.target.astype(np.int32)
    split = len(labels) - TEST_SAMPLES
    return (pictures[:split], labels[:split]), (pictures[split:], labels[split:])


# --- models -----------------------------------------------------------------------------------------------------------


def parameter(builder: popart.Builder, rng: np.random.Generator, shape: Sequence[int]) -> str:
    """Add weights whose results have a variance of about one."""
    fan_in = int(np.prod(shape[1:])) if len(shape) == 4 else shape[0]
    return builder.addInitializedInputTensor((rng.normal(size=shape) / fan_in**0.5).astype(np.float32))


def dense(builder: popart.Builder, rng: np.random.Generator, x: str, sizes: tuple[int, int]) -> str:
    """Return x · w + b."""
    bias = builder.addInitializedInputTensor(np.zeros(sizes[1], np.float32))
    return builder.aiOnnx.gemm([x, parameter(builder, rng, sizes), bias])


def linear(builder: popart.Builder, rng: np.random.Generator, x: str) -> str:
    """Return the scores of one layer."""
    return dense(builder, rng, x, (SIDE * SIDE, CLASSES))


def convolutional(builder: popart.Builder, rng: np.random.Generator, x: str) -> str:
    """Return the scores of two convolutions, each halved, and a layer."""
    x = builder.reshape_const(builder.aiOnnx, [x], [-1, 1, SIDE, SIDE])
    for channels, before in ((8, 1), (16, 8)):
        kernel = parameter(builder, rng, (channels, before, 3, 3))
        x = builder.aiOnnx.relu([builder.aiOnnx.conv([x, kernel], pads=[1, 1, 1, 1])])
        (x,) = builder.aiOnnx.maxpool([x], 1, kernel_shape=[2, 2], strides=[2, 2])
    x = builder.aiOnnx.flatten([x])
    return dense(builder, rng, x, (16 * 7 * 7, CLASSES))


MODELS: Mapping[str, Callable[..., str]] = {"linear": linear, "conv": convolutional}


# --- training ---------------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> list[float]:
    """Train, test after each epoch, and print accuracies and profile; return the accuracies."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="linear", help="network to train")
    parser.add_argument("--batch-size", type=int, default=50, help="examples of a batch")
    parser.add_argument("--epochs", type=int, default=3, help="times that all examples are used")
    parser.add_argument("--learning-rate", type=float, default=0.1, help="step size of SGD")
    args = parser.parse_args(arguments)

    builder = popart.Builder()
    data = builder.addInputTensor("FLOAT", [args.batch_size, SIDE * SIDE], "pictures")
    labels = builder.addInputTensor("INT32", [args.batch_size], "labels")
    scores = MODELS[args.model](builder, np.random.default_rng(0), data)
    probabilities = builder.aiOnnx.softmax([scores])
    builder.addOutputTensor(probabilities)
    loss = builder.aiGraphcore.nllloss([probabilities, labels], debugContext="loss")

    (pictures, numbers), (test_pictures, test_numbers) = digits()
    batches = len(numbers) // args.batch_size
    test_batches = len(test_numbers) // args.batch_size
    device = popart.DeviceManager().createIpuModelDevice({"numIPUs": 1})
    options = popart.SessionOptions()
    options.constantWeights = False
    training = popart.TrainingSession(
        builder.getModelProto(),
        popart.DataFlow(batches, {loss: popart.AnchorReturnType("ALL")}),
        loss,
        popart.ConstSGD(args.learning_rate),
        device,
    )
    testing = popart.InferenceSession(
        builder.getModelProto(), popart.DataFlow(test_batches, [probabilities]), device, userOptions=options
    )
    training.prepareDevice()
    testing.prepareDevice()
    training.weightsFromHost()
    losses = training.initAnchorArrays()
    results = testing.initAnchorArrays()
    used = batches * args.batch_size
    tested = test_batches * args.batch_size
    accuracies: list[float] = []
    for epoch in range(args.epochs):
        training.run(popart.PyStepIO({data: pictures[:used], labels: numbers[:used]}, losses))
        with tempfile.TemporaryDirectory() as folder:
            trained = f"{folder}/trained.onnx"
            training.modelToHost(trained)
            testing.resetHostWeights(trained)
        testing.weightsFromHost()
        inputs = {data: test_pictures[:tested], labels: test_numbers[:tested]}
        testing.run(popart.PyStepIO(inputs, results))
        guesses = results[probabilities].reshape(-1, CLASSES).argmax(1)
        accuracies.append(float(np.mean(guesses == test_numbers[:tested])))
        print(f"epoch {epoch}: loss {losses[loss].mean():.3f}, accuracy {accuracies[-1]:.1%}")
    print(training.getReport().summary())
    return accuracies


if __name__ == "__main__":
    main()
