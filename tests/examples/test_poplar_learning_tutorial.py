"""Tutorial 5 of the Poplar user guide: its accuracy and output, and a step of it against plain JAX, tile by tile."""

from __future__ import annotations

import re
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ipujax import poplar
from tests.examples.poplar_examples import example
from tests.ipujax.poplar.engine_helpers import both, new_graph

EPOCH = re.compile(r"^Epoch (\d+): accuracy (\d+\.\d)% in training, (\d+\.\d)% in the test after it$", re.MULTILINE)


@pytest.fixture(scope="module")
def tut5() -> ModuleType:
    return example("tut5_ml")


def test_tutorial_5_learns_the_digits(tut5, capsys):
    accuracy, buffers = tut5.train(15, poplar.IPUModel(tiles_per_ipu=64).create_device())
    text = capsys.readouterr().out
    epochs = [(int(number), float(trained), float(tested)) for number, trained, tested in EPOCH.findall(text)]
    assert [number for number, _, _ in epochs] == list(range(1, 16))
    assert accuracy >= 0.93 and epochs[-1][2] == pytest.approx(100 * accuracy, abs=0.05)
    assert epochs[-1][1] > epochs[0][1] + 10
    assert re.search(r"^Cycles of all programs: [\d,]+$", text, re.MULTILINE)
    # The parameters it hands out answer as often right in plain numpy, and are not those it was given.
    answers = buffers["testImages"] @ buffers["trainedWeights"] + buffers["trainedBiases"]
    assert np.mean(answers.argmax(1) == buffers["testLabels"]) == accuracy
    assert np.abs(buffers["trainedWeights"] - buffers["weights"]).max() > 0.5


def test_tutorial_5_trains_on_other_images_than_it_tests_on(tut5, capsys):
    _, buffers = tut5.train(1, poplar.IPUModel(tiles_per_ipu=8).create_device(), batch=36)
    recorded = {image.tobytes() for image in buffers["trainImages"]}
    assert len(buffers["testImages"]) == 360 and len(buffers["trainImages"]) == 39 * 36
    assert not recorded & {image.tobytes() for image in buffers["testImages"]}


def test_tutorial_5_steps_as_plain_jax_does_tile_by_tile(tut5):
    batch = 4
    batches = 3
    eta = 0.25
    rng = np.random.default_rng(1)
    images = rng.uniform(0, 1, (batches, batch, tut5.PIXELS)).astype(np.float32)
    labels = rng.integers(0, tut5.CLASSES, (batches, batch)).astype(np.uint32)
    weights = rng.normal(0, 0.1, (tut5.PIXELS, tut5.CLASSES)).astype(np.float32)
    biases = rng.normal(0, 0.1, tut5.CLASSES).astype(np.float32)

    graph = new_graph()
    model = tut5.build_model(graph, batch, eta)
    take_in, train, _, _ = tut5.build_programs(graph, model, batches, 1)
    correct = []

    def given(*arrays):
        def make():
            left = iter(arrays)
            return lambda buffer: buffer.__setitem__(slice(None), next(left).ravel())

        return make

    streams = {
        "weights": given(weights),
        "biases": given(biases),
        "trainImages": given(*images),
        "trainLabels": given(*labels),
        "numCorrect": lambda: lambda buffer: correct.append(int(buffer[0])),
    }
    program = poplar.program.Sequence(take_in, train)
    actual = both(graph, program, {"W": model.weights, "b": model.biases}, streams)

    def loss(params, x, expected):
        scores = jax.nn.log_softmax(x @ params[0] + params[1])
        return -jnp.mean(scores[jnp.arange(batch), expected])

    params = (weights, biases)
    right = 0
    for x, expected in zip(images, labels, strict=True):
        right += int(np.sum((x @ params[0] + params[1]).argmax(1) == expected))
        slopes = jax.grad(loss)(params, x, expected)
        params = tuple(value - eta * slope for value, slope in zip(params, slopes, strict=True))
    np.testing.assert_allclose(actual["W"], params[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(actual["b"], params[1], rtol=1e-5, atol=1e-6)
    assert correct == [right, right]
