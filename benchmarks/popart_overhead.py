"""Time of a session of `ipujax.popart` over that of the same loop written with `ipu.jit`: ratio of medians.

Runs of both alternate. Times are CPU seconds of the process, which other programs on the machine do not change.

    python benchmarks/popart_overhead.py

Both train two dense layers for 50 batches: in one call, in one call with gradient accumulation, and pipelined over two
IPUs with one call for each batch. The losses of both are compared.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import ipujax as ipu
from ipujax import popart

BATCHES = 50
SAMPLES = 16
FEATURES = 128
CLASSES = 10
ROUNDS = 21
RATE = 0.1
RNG = np.random.default_rng(0)
WEIGHTS = {
    "w0": RNG.normal(size=(FEATURES, FEATURES)).astype(np.float32) / 11,
    "w1": RNG.normal(size=(FEATURES, CLASSES)).astype(np.float32) / 11,
}
Run = Callable[[], np.ndarray]


def by_session(accumulation: int, is_pipelined: bool, data: np.ndarray, labels: np.ndarray) -> Run:
    """Return a step of a prepared session."""
    builder = popart.Builder()
    x = builder.addInputTensor("FLOAT", [SAMPLES, FEATURES], "x")
    y = builder.addInputTensor("INT32", [SAMPLES], "y")
    w0, w1 = (builder.addInitializedInputTensor(value, name) for name, value in WEIGHTS.items())
    last = int(is_pipelined)
    with builder.virtualGraph(0), builder.pipelineStage(0):
        hidden = builder.aiOnnx.relu([builder.aiOnnx.matmul([x, w0])])
    with builder.virtualGraph(last), builder.pipelineStage(last):
        probabilities = builder.aiOnnx.softmax([builder.aiOnnx.matmul([hidden, w1])])
        loss = builder.aiGraphcore.nllloss([probabilities, y])
    options = popart.SessionOptions()
    if is_pipelined:
        options.virtualGraphMode = popart.VirtualGraphMode.Manual
        options.enablePipelining = True
    options.enableGradientAccumulation = accumulation > 1
    options.accumulationFactor = accumulation
    session = popart.TrainingSession(
        builder.getModelProto(),
        popart.DataFlow(BATCHES, {loss: popart.AnchorReturnType("ALL")}),
        loss,
        popart.SGD({"defaultLearningRate": (RATE, False)}),
        popart.DeviceManager().createIpuModelDevice({"numIPUs": last + 1, "tilesPerIPU": 32}),
        userOptions=options,
    )
    session.prepareDevice()
    session.weightsFromHost()
    anchors = session.initAnchorArrays()
    stepio = popart.PyStepIO({x: data, y: labels}, anchors)

    def run() -> np.ndarray:
        session.run(stepio)
        return anchors[loss]

    return run


def loss_of(is_pipelined: bool) -> Callable[..., jax.Array]:
    """Return the loss of a micro-batch."""

    def loss(params: Any, batch: Any) -> jax.Array:
        x, y = batch
        with ipu.stage(0) if is_pipelined else nullcontext():
            hidden = jax.nn.relu(x @ params["w0"])
        with ipu.stage(1) if is_pipelined else nullcontext():
            chosen = jnp.take_along_axis(jax.nn.softmax(hidden @ params["w1"]), y[:, None], 1)
            return -jnp.mean(jnp.log(jnp.maximum(chosen, 1e-7)))

    return loss


def by_hand(accumulation: int, is_pipelined: bool, data: np.ndarray, labels: np.ndarray) -> Run:
    """Return the same step written with `ipu.jit`."""
    device = ipu.IPUModel(2 if is_pipelined else 1, tiles_per_ipu=32)
    differentiate = jax.value_and_grad(loss_of(is_pipelined))
    state = {"params": {name: jnp.array(value) for name, value in WEIGHTS.items()}}

    def update(params: Any, gradients: Any, rate: jax.Array) -> Any:
        return jax.tree.map(lambda p, g: p - rate * g, params, gradients)

    @ipu.jit(device=device, donate_argnums=0)
    def pipelined_batch(params: Any, rate: jax.Array, batch: Any) -> Any:
        pipelined = ipu.pipeline(differentiate, micro_batches=accumulation, reduce=("stack", "sum"))
        losses, gradients = pipelined(params, batch)
        return update(params, gradients, rate), losses

    def batch(params: Any, rows: Any) -> Any:
        def micro_batch(total: Any, row: Any) -> Any:
            loss, gradients = differentiate(params, row)
            return jax.tree.map(jnp.add, total, gradients), loss

        return jax.lax.scan(micro_batch, jax.tree.map(jnp.zeros_like, params), rows)

    @ipu.jit(device=device, donate_argnums=0)
    def whole_step(params: Any, rate: jax.Array, rows: Any) -> Any:
        def body(params: Any, row: Any) -> Any:
            gradients, losses = batch(params, row)
            return update(params, gradients, rate), losses

        return jax.lax.scan(body, params, rows)

    def run() -> np.ndarray:
        rate = np.float32(RATE)
        if not is_pipelined:
            rows = (
                data.reshape(BATCHES, accumulation, SAMPLES, FEATURES),
                labels.reshape(BATCHES, accumulation, SAMPLES),
            )
            state["params"], losses = whole_step(state["params"], rate, rows)
            return np.asarray(losses)
        xs = data.reshape(BATCHES, -1, FEATURES)
        ys = labels.reshape(BATCHES, -1)
        losses_by_batch = []
        for i in range(BATCHES):
            state["params"], losses = pipelined_batch(state["params"], rate, (xs[i], ys[i]))
            losses_by_batch.append(losses)
        return np.stack([np.asarray(losses) for losses in losses_by_batch])

    return run


def main() -> None:
    """Print the ratio of each case."""
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    for accumulation, is_pipelined in ((1, False), (4, False), (4, True)):
        count = BATCHES * accumulation * SAMPLES
        data = RNG.normal(size=(count, FEATURES)).astype(np.float32)
        labels = RNG.integers(CLASSES, size=count).astype(np.int32)
        runs = [make(accumulation, is_pipelined, data, labels) for make in (by_session, by_hand)]
        first, other = (run() for run in runs)
        np.testing.assert_allclose(first.ravel(), other.ravel(), rtol=1e-5)
        seconds: list[list[float]] = [[], []]
        for _ in range(ROUNDS):
            for run, spent in zip(runs, seconds, strict=True):
                start = time.process_time()
                run()
                spent.append(time.process_time() - start)
        session, hand = map(statistics.median, seconds)
        name = f"accumulation {accumulation}{', pipelined' if is_pipelined else ''}"
        print(f"{name}: session {1e3 * session:.2f} ms, by hand {1e3 * hand:.2f} ms, ratio {session / hand:.2f}")


if __name__ == "__main__":
    main()
