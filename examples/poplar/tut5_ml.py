"""Tutorial 5: logistic regression by gradient descent, with the libraries.

    python tut5_ml.py --epochs 20

One run of the training program is one epoch: a loop that takes a batch from the streams, compares softmax(xW + b) with
the labels, and moves W and b against the gradient. Images of the next epoch are put in the buffers between two runs.
Data: scikit-learn's 1,797 digits of 8 × 8 pixels, where the guide trains on MNIST.
Source: Poplar & PopLibs user guide, tutorial 5.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import numpy as np
from sklearn.datasets import load_digits

from ipujax import poplar, poplin, popnn, popops, poputil
from ipujax.poplar.program import Copy, Repeat, Sequence

PIXELS = 64
CLASSES = 10
TEST_IMAGES = 360


@dataclass(frozen=True)
class Model:
    """The tensors of the model, with a program that counts right answers and one that also learns from a batch."""

    x: poplar.Tensor
    labels: poplar.Tensor
    weights: poplar.Tensor
    biases: poplar.Tensor
    num_correct: poplar.Tensor
    count: Sequence
    learn: Sequence


def build_model(graph: poplar.Graph, batch: int, eta: float) -> Model:
    """Adds softmax(xW + b) for batches of images, and a step of gradient descent of size `eta`."""
    # Operands of the product are made by the library, which maps them as its plan reads them.
    x = poplin.create_mat_mul_input_lhs(graph, poplar.FLOAT, [batch, PIXELS], [PIXELS, CLASSES], "x")
    weights = poplin.create_mat_mul_input_rhs(graph, poplar.FLOAT, [batch, PIXELS], [PIXELS, CLASSES], "W")
    biases = graph.add_variable(poplar.FLOAT, [CLASSES], "b")
    labels = graph.add_variable(poplar.UNSIGNED_INT, [batch], "labels")
    num_correct = graph.add_variable(poplar.UNSIGNED_INT, [], "numCorrect")
    loss = graph.add_variable(poplar.FLOAT, [batch], "loss")
    delta = graph.add_variable(poplar.FLOAT, [batch, CLASSES], "delta")
    for tensor in (biases, labels, num_correct, loss, delta):
        poputil.map_tensor_linearly(graph, tensor)

    def answers(prog: Sequence) -> poplar.Tensor:
        """Adds the probability of each class, and adds the right answers of the batch to `num_correct`."""
        product = poplin.mat_mul(graph, x, weights, prog, "xW")
        y = popops.add(graph, product, biases.expand([0]).broadcast(batch), prog, "xW+b")
        probabilities = popnn.softmax(graph, y, prog, "softmax(xW+b)")
        right = graph.clone(num_correct, "right")
        popnn.calc_accuracy(graph, probabilities, labels, right, prog, "accuracy")
        popops.add_in_place(graph, num_correct, right, prog, "count")
        return probabilities

    count = Sequence()
    learn = Sequence()
    answers(count)
    probabilities = answers(learn)
    popnn.calc_loss(graph, probabilities, labels, loss, delta, "softmax_cross_entropy", learn, "dE/d(xW+b)")
    slope = poplin.mat_mul(graph, x.transpose(), delta, learn, "dE/dW")
    # The loss of a batch is the mean of its examples.
    popops.scaled_add_to(graph, weights, slope, -eta / batch, learn, "W -= eta * dE/dW")
    popops.reduce(graph, delta, [0], "add", learn, "b -= eta * dE/db", scale=-eta / batch, update=biases)
    return Model(x, labels, weights, biases, num_correct, count, learn)


def build_programs(graph: poplar.Graph, model: Model, train_batches: int, test_batches: int) -> list[Sequence]:
    """The programs of the engine: take the parameters in, train for an epoch, test, give the parameters out."""
    w_in = graph.add_host_to_device_fifo("weights", poplar.FLOAT, model.weights.size)
    b_in = graph.add_host_to_device_fifo("biases", poplar.FLOAT, model.biases.size)
    w_out = graph.add_device_to_host_fifo("trainedWeights", poplar.FLOAT, model.weights.size)
    b_out = graph.add_device_to_host_fifo("trainedBiases", poplar.FLOAT, model.biases.size)
    correct_out = graph.add_device_to_host_fifo("numCorrect", poplar.UNSIGNED_INT, 1)

    def epoch(name: str, batches: int, body: Sequence) -> Sequence:
        """Counts right answers over some batches of the streams of that name."""
        images = graph.add_host_to_device_fifo(f"{name}Images", poplar.FLOAT, model.x.size)
        labels = graph.add_host_to_device_fifo(f"{name}Labels", poplar.UNSIGNED_INT, model.labels.size)
        prog = Sequence()
        popops.zero(graph, model.num_correct, prog, "numCorrect = 0")
        prog.add(Repeat(batches, Sequence(Copy(images, model.x), Copy(labels, model.labels), body)))
        prog.add(Copy(model.num_correct, correct_out))
        return prog

    take_in = Sequence(Copy(w_in, model.weights), Copy(b_in, model.biases))
    give_out = Sequence(Copy(model.weights, w_out), Copy(model.biases, b_out))
    return [take_in, epoch("train", train_batches, model.learn), epoch("test", test_batches, model.count), give_out]


TAKE_IN, TRAIN, TEST, GIVE_OUT = range(4)  # positions of the programs in the engine


def train(epochs: int, device: poplar.Device, batch: int = 40, eta: float = 0.5) -> tuple[float, dict[str, np.ndarray]]:
    """Trains on a device, and prints the accuracy of every epoch.

    Returns:
        The last accuracy on the test images, and the buffers of the streams by name.
    """
    digits = load_digits()
    rng = np.random.default_rng(0)
    order = rng.permutation(len(digits.target))
    images = (digits.data[order] / 16).astype(np.float32)
    labels = digits.target[order].astype(np.uint32)
    train_batches = (len(images) - TEST_IMAGES) // batch
    test_batches = TEST_IMAGES // batch
    num_trained = train_batches * batch
    num_tested = test_batches * batch

    graph = poplar.Graph(device.get_target())
    for library in (popops, poplin, popnn):
        library.add_codelets(graph)
    model = build_model(graph, batch, eta)
    engine = poplar.Engine(graph, build_programs(graph, model, train_batches, test_batches))
    engine.load(device)

    buffers = {
        "weights": rng.normal(0, 0.01, model.weights.shape).astype(np.float32),
        "biases": np.zeros(model.biases.shape, np.float32),
        "trainImages": np.zeros((num_trained, PIXELS), np.float32),
        "trainLabels": np.zeros(num_trained, np.uint32),
        "testImages": images[:num_tested],
        "testLabels": labels[:num_tested],
        "numCorrect": np.zeros(1, np.uint32),
        "trainedWeights": np.zeros(model.weights.shape, np.float32),
        "trainedBiases": np.zeros(model.biases.shape, np.float32),
    }
    for name, buffer in buffers.items():
        engine.connect_stream(name, buffer)

    engine.run(TAKE_IN)
    tested = 0.0
    for epoch in range(1, epochs + 1):
        chosen = rng.choice(np.arange(TEST_IMAGES, len(images)), num_trained, replace=False)
        buffers["trainImages"][:] = images[chosen]
        buffers["trainLabels"][:] = labels[chosen]
        engine.run(TRAIN)
        trained = buffers["numCorrect"].item() / num_trained
        engine.run(TEST)
        tested = buffers["numCorrect"].item() / num_tested
        print(f"Epoch {epoch}: accuracy {trained:.1%} in training, {tested:.1%} in the test after it")
    engine.run(GIVE_OUT)
    print(f"Cycles of all programs: {engine.execution.cycles:,}")
    return tested, buffers


def main() -> None:
    """Reads the number of epochs from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--tiles", type=int, help="tiles of the IPU, all of them when not given")
    arguments = parser.parse_args()
    train(arguments.epochs, poplar.IPUModel(tiles_per_ipu=arguments.tiles).create_device())


if __name__ == "__main__":
    main()
