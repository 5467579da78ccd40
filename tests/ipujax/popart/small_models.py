"""Small models for tests of sessions, and how one is trained."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ipujax import popart

Array = np.ndarray[Any, Any]
FEATURES = 6
HIDDEN = 5
CLASSES = 4


@dataclass(frozen=True)
class Perceptron:
    """A model of two layers, with the names of its tensors."""

    builder: popart.Builder
    data: str
    labels: str
    weights: tuple[str, ...]
    hidden: str
    loss: str


def perceptron(
    batch: int = 4,
    *,
    stages: bool = False,
    phases: bool = False,
    recompute: bool = False,
    reduction: popart.ReductionType = popart.ReductionType.Sum,
) -> Perceptron:
    """Return two dense layers with a softmax and the loss of labels.

    Args:
        batch: samples of a micro-batch.
        stages: whether the layers are on two IPUs, in two pipeline stages.
        phases: whether they are in two execution phases.
        recompute: whether the first layer is computed again in the backward part.
        reduction: of the loss.
    """
    rng = np.random.default_rng(7)
    builder = popart.Builder()
    data = builder.addInputTensor(popart.TensorInfo("FLOAT", [batch, FEATURES]), "data")
    labels = builder.addInputTensor(popart.TensorInfo("INT32", [batch]), "labels")
    first = builder.addInitializedInputTensor(rng.normal(size=(FEATURES, HIDDEN)).astype(np.float32), "w0")
    bias = builder.addInitializedInputTensor(np.zeros(HIDDEN, np.float32), "b0")
    second = builder.addInitializedInputTensor(rng.normal(size=(HIDDEN, CLASSES)).astype(np.float32), "w1")
    product = builder.aiOnnx.matmul([data, first])
    shifted = builder.aiOnnx.add([product, bias])
    hidden = builder.aiOnnx.tanh([shifted])
    logits = builder.aiOnnx.matmul([hidden, second])
    probabilities = builder.aiOnnx.softmax([logits])
    loss = builder.aiGraphcore.nllloss([probabilities, labels], reduction, debugContext="loss")
    halves = (product, shifted, hidden), (logits, probabilities, loss)
    for number, names in enumerate(halves):
        for name in names:
            if stages:
                builder.virtualGraph(name, number)
                builder.pipelineStage(name, number)
            if phases:
                builder.executionPhase(name, number)
    if recompute:
        builder.recomputeOutputInBackwardPass(product)
        builder.recomputeOutputInBackwardPass(shifted)
        builder.recomputeOutputInBackwardPass(hidden)
    return Perceptron(builder, data, labels, (first, bias, second), hidden, loss)


def samples(count: int) -> tuple[Array, Array]:
    """Return data and labels of a number of samples."""
    rng = np.random.default_rng(11)
    return rng.normal(size=(count, FEATURES)).astype(np.float32), rng.integers(CLASSES, size=count).astype(np.int32)


@dataclass(frozen=True)
class Trained:
    """Results of a session."""

    session: popart.TrainingSession
    anchors: Mapping[str, Array]
    weights: Mapping[str, Array]

    def losses(self, name: str) -> Array:
        """Return the losses of batches: sums over accumulation and replicas."""
        losses = self.anchors[name]
        return losses.reshape(losses.shape[0], -1).sum(1)


def train(
    model: Perceptron,
    batches: int = 5,
    device: popart.DeviceInfo | None = None,
    options: popart.SessionOptions | None = None,
    optimizer: popart.Optimizer | None = None,
    anchors: Mapping[str, popart.AnchorReturnType] | None = None,
    samples_per_micro_batch: int = 4,
) -> Trained:
    """Train a model for a step; return anchors and weights.

    Args:
        model: of `perceptron`.
        batches: of the step.
        device: one IPU when None.
        options: of the session.
        optimizer: SGD with momentum when None.
        anchors: all losses when None.
        samples_per_micro_batch: as the model has them.
    """
    manager = popart.DeviceManager()
    reference = anchors or {model.loss: popart.AnchorReturnType("ALL")}
    session = popart.TrainingSession(
        fnModel=model.builder.getModelProto(),
        dataFlow=popart.DataFlow(batches, reference),
        loss=model.loss,
        optimizer=optimizer or popart.SGD({"defaultLearningRate": (0.02, False), "defaultMomentum": (0.9, True)}),
        deviceInfo=device or manager.createIpuModelDevice({"numIPUs": 1, "tilesPerIPU": 16}),
        userOptions=options,
    )
    session.prepareDevice()
    session.weightsFromHost()
    results = session.initAnchorArrays()
    replicas = session.replicationFactor * session.accumulationFactor
    data, labels = samples(batches * replicas * samples_per_micro_batch)
    session.run(popart.PyStepIO({model.data: data, model.labels: labels}, results))
    session.weightsToHost()
    weights = {name: np.empty(session.getInfo(name).shape(), np.float32) for name in model.weights}
    session.readWeights(popart.PyWeightsIO(weights))
    return Trained(session, results, weights)


def first_weights(model: Perceptron) -> dict[str, Array]:
    """Return the parameters of a model before training."""
    import onnx

    tensors = model.builder.model().graph.initializer
    return {tensor.name: np.array(onnx.numpy_helper.to_array(tensor)) for tensor in tensors}
