"""Trains one linear layer on pictures of digits by several processes, whose gradients meet on the host.

    ipujax run --instances 2 examples/popart/distributed_training.py --epochs 3

Each process has its share of the training data; process 0 tests after each epoch. Data: 1,797 digits of scikit-learn.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence

import numpy as np
from sklearn.datasets import load_digits

import ipujax.popart as popart
import ipujax.popart.horovod as hvd

PIXELS = 64
CLASSES = 10
TEST_SAMPLES = 256
SYNTHETIC = {"zeros": popart.SyntheticDataMode.Zeros, "random_normal": popart.SyntheticDataMode.RandomNormal}
Samples = tuple[np.ndarray, np.ndarray]


def digits() -> tuple[Samples, Samples]:
    """Return pictures [n, 64] from 0 to 1 and labels [n]: of this process for training, and for the test."""
    loaded = load_digits()
    pictures = (loaded.images / 16).reshape(-1, PIXELS).astype(np.float32)
    labels = loaded.target.astype(np.int32)
    end = (len(labels) - TEST_SAMPLES) // hvd.size() * hvd.size()
    mine = np.arange(hvd.rank(), end, hvd.size())
    return (pictures[mine], labels[mine]), (pictures[-TEST_SAMPLES:], labels[-TEST_SAMPLES:])


def batches(samples: Samples, size: int, per_step: int) -> list[Samples]:
    """Return samples as steps, [batches, size, ...]; what fills no step is left out."""
    per_step = min(per_step, len(samples[1]) // size)
    count = len(samples[1]) // (per_step * size)
    shape = count, per_step, size
    pictures, labels = (array[: count * per_step * size].reshape(*shape, *array.shape[1:]) for array in samples)
    return list(zip(pictures, labels, strict=True))


def model(batch_size: int) -> tuple[popart.Builder, dict[str, str]]:
    """Return a linear layer and its loss, with the names of its tensors."""
    builder = popart.Builder()
    rng = np.random.default_rng(hvd.rank())  # weights of its own, until all have those of process 0
    pictures = builder.addInputTensor("FLOAT", [batch_size, PIXELS], "pictures")
    labels = builder.addInputTensor("INT32", [batch_size], "labels")
    w = builder.addInitializedInputTensor((rng.normal(size=(PIXELS, CLASSES)) / PIXELS**0.5).astype(np.float32))
    b = builder.addInitializedInputTensor(np.zeros(CLASSES, np.float32))
    probabilities = builder.aiOnnx.softmax([builder.aiOnnx.gemm([pictures, w, b])])
    builder.addOutputTensor(probabilities)
    loss = builder.aiGraphcore.nllloss([probabilities, labels])
    return builder, {"pictures": pictures, "labels": labels, "probabilities": probabilities, "loss": loss}


def run_steps(session: popart.TrainingSession | popart.InferenceSession, names: dict[str, str], steps: list[Samples]):
    """Run steps; return the mean loss and the share of pictures that are recognised."""
    anchors = session.initAnchorArrays()
    losses = []
    hits = []
    for pictures, labels in steps:
        session.run(popart.PyStepIO({names["pictures"]: pictures, names["labels"]: labels}, anchors))
        losses.append(anchors[names["loss"]].mean())
        hits.append((anchors[names["probabilities"]].reshape(*labels.shape, CLASSES).argmax(-1) == labels).mean())
    return float(np.mean(losses)), float(np.mean(hits))


def main(arguments: Sequence[str] | None = None) -> list[float]:
    """Train, test after each epoch, and print accuracies; return them in process 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch-size", type=int, default=16, help="examples of a batch of each process")
    parser.add_argument("--batches-per-step", type=int, default=8, help="batches between two visits of the host")
    parser.add_argument("--epochs", type=int, default=3, help="times that all examples are used")
    parser.add_argument("--num-ipus", type=int, default=1, help="IPUs of each process; several need --pipeline")
    parser.add_argument("--pipeline", action="store_true", help="pipeline the model over its IPUs")
    parser.add_argument("--simulation", action="store_true", help="ask for a model of an IPU, not for a device")
    parser.add_argument("--log-graph-trace", action="store_true", help="log the operations of the graph")
    parser.add_argument(
        "--test-mode", choices=["training", "inference"], help="program whose profile is printed (default training)"
    )
    parser.add_argument("--syn-data-type", choices=SYNTHETIC, help="data made on the device, in the place of digits")
    args = parser.parse_args(arguments)
    if args.log_graph_trace:
        popart.getLogger("ir").setLevel("TRACE")

    hvd.init()
    train_samples, test_samples = digits()
    train_steps = batches(train_samples, args.batch_size, args.batches_per_step)
    test_steps = batches(test_samples, args.batch_size, len(train_steps[0][0]))
    builder, names = model(args.batch_size)
    options = popart.SessionOptions()
    options.constantWeights = False
    options.hostAllReduce = True
    options.enablePipelining = args.pipeline
    if args.num_ipus > 1:
        options.virtualGraphMode = popart.VirtualGraphMode.Auto
    if args.syn_data_type:
        options.syntheticDataMode = SYNTHETIC[args.syn_data_type]
    manager = popart.DeviceManager()
    ask = {"numIPUs": args.num_ipus, "tilesPerIPU": 64}
    device = manager.createIpuModelDevice(ask) if args.simulation else manager.acquireAvailableDevice(args.num_ipus)
    returned = {names[key]: popart.AnchorReturnType("ALL") for key in ("loss", "probabilities")}

    optimizer = popart.ConstSGD(0.1 * hvd.size())
    flow = popart.DataFlow(len(train_steps[0][0]), returned)
    proto = builder.getModelProto()
    training = popart.TrainingSession(proto, flow, names["loss"], optimizer, device, userOptions=options)
    hvd.DistributedOptimizer(optimizer, training, options).insert_host_allreduce()
    training.prepareDevice()
    hvd.broadcast_weights(training, root_rank=0)
    flow = popart.DataFlow(len(test_steps[0][0]), returned)
    testing = popart.InferenceSession(proto, flow, device, userOptions=options)
    testing.prepareDevice()

    accuracies: list[float] = []
    for epoch in range(args.epochs):
        loss, _ = run_steps(training, names, train_steps)
        training.weightsToHost()
        if hvd.rank():
            continue
        with tempfile.TemporaryDirectory() as folder:
            training.modelToHost(f"{folder}/trained.onnx")
            testing.resetHostWeights(f"{folder}/trained.onnx")
        testing.weightsFromHost()
        accuracies.append(run_steps(testing, names, test_steps)[1])
        print(f"epoch {epoch}: loss {loss:.3f}, accuracy {accuracies[-1]:.1%}")
    if hvd.rank() == 0:
        print((testing if args.test_mode == "inference" else training).getReport().summary())
    return accuracies


if __name__ == "__main__":
    main()
