"""Random numbers of sessions: those of the seed, others in each batch and step, and no dropout in inference."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from ipujax import popart
from ipujax.popart.session.session import RandomState


def model_device() -> popart.DeviceInfo:
    """Return a small simulated IPU."""
    return popart.DeviceManager().createIpuModelDevice({"numIPUs": 1, "tilesPerIPU": 4})


def test_random_numbers_follow_the_seed() -> None:
    builder = popart.Builder()
    x = builder.addInitializedInputTensor(np.ones((32, 32), np.float32))
    (dropped,) = builder.aiOnnx.dropout([x], 1, 0.5)
    loss = builder.aiGraphcore.identityloss([dropped])
    flow = popart.DataFlow(2, {dropped: popart.AnchorReturnType("ALL")})
    frozen = popart.ConstSGD(0.0)
    session = popart.TrainingSession(builder.getModelProto(), flow, loss, frozen, model_device())
    session.prepareDevice()
    session.weightsFromHost()
    session.setRandomSeed(5)
    first = session.initAnchorArrays()
    repeated = session.initAnchorArrays()
    session.run(popart.PyStepIO({}, first))
    state = session.getRNGState()
    assert not np.array_equal(first[dropped][0], first[dropped][1])
    assert set(np.unique(first[dropped])) == {0.0, 2.0}
    session.setRandomSeed(5)
    session.run(popart.PyStepIO({}, repeated))
    np.testing.assert_array_equal(first[dropped], repeated[dropped])
    assert session.getRNGState() == state
    with pytest.raises(popart.popart_exception, match="the seed is no whole number"):
        session.setRandomSeed(0.5)
    with pytest.raises(popart.popart_exception, match="the state of random numbers is no whole number"):
        session.setRNGState([5, 0.5])


def test_random_numbers_of_inference_follow_the_seed_and_dropout_is_left_out() -> None:
    builder = popart.Builder()
    x = builder.addInitializedInputTensor(np.ones((4, 4), np.float32))
    (kept,) = builder.aiOnnx.dropout([x], 1, 0.5)
    drawn = builder.aiOnnx.randomuniform([4, 4])
    anchors = dict.fromkeys((kept, drawn), popart.AnchorReturnType("ALL"))
    session = popart.InferenceSession(builder.getModelProto(), popart.DataFlow(2, anchors), model_device())
    session.prepareDevice()
    results = [session.initAnchorArrays() for _ in range(3)]
    for number, each in enumerate(results):
        if number != 1:
            session.setRandomSeed(5)
        session.run(popart.PyStepIO({}, each))
    first, second, repeated = (each[drawn] for each in results)
    assert (
        len(np.unique(np.concatenate([first, second]))) == 4 * 4 * 4
    )  # all batches and steps have numbers of their own
    np.testing.assert_array_equal(first, repeated)
    np.testing.assert_array_equal(results[0][kept], np.ones((2, 4, 4), np.float32))


def test_random_operators_of_a_branch_follow_the_session() -> None:
    builder = popart.Builder()
    x = builder.addInitializedInputTensor(np.ones(32, np.float32))
    condition = builder.addInputTensor(popart.TensorInfo("BOOL", []))
    branches = []
    for operation in ("dropout", "neg"):
        branch = builder.createSubgraphBuilder()
        branch.addInputTensorFromParentGraph(x)
        result = getattr(branch.aiOnnx, operation)([x], *([1] if operation == "dropout" else []))
        branch.addOutputTensor(result if isinstance(result, str) else result[0])
        branches.append(branch)
    (chosen,) = builder.aiOnnx.logical_if([condition], 1, branches[1], branches[0])
    loss = builder.aiGraphcore.identityloss([chosen])
    flow = popart.DataFlow(2, {chosen: popart.AnchorReturnType("ALL")})
    session = popart.TrainingSession(builder.getModelProto(), flow, loss, popart.ConstSGD(0.0), model_device())
    session.prepareDevice()
    session.weightsFromHost()
    results = session.initAnchorArrays()
    session.run(popart.PyStepIO({condition: np.array([True, True])}, results))
    first, second = results[chosen]
    assert set(np.unique(first)) == {0.0, 2.0} and not np.array_equal(first, second)


def test_seeds_have_64_bits() -> None:
    keys = [jax.random.key_data(RandomState(seed).key()) for seed in (5, 5 + 2**32, 5 + 2**63)]
    assert len({tuple(np.asarray(key)) for key in keys}) == 3


def test_iterations_of_a_loop_draw_numbers_of_their_own() -> None:
    builder = popart.Builder()
    x = builder.addInitializedInputTensor(np.zeros(4, np.float32))
    body = builder.createSubgraphBuilder()
    body.addInputTensor(popart.TensorInfo("INT32", []), "i")
    go_on = body.addInputTensor(popart.TensorInfo("BOOL", []), "go_on")
    before = body.addInputTensor(popart.TensorInfo("FLOAT", [4]), "before")
    # Twice the sum before, plus a number: of equal numbers r it is 3 · r after two iterations.
    body.addOutputTensor(go_on)
    body.addOutputTensor(body.aiOnnx.add([body.aiOnnx.add([before, before]), body.aiOnnx.randomuniform([4])]))
    one, two = (builder.aiOnnx.constant(np.array(n, np.int64)) for n in (1, 2))
    condition = builder.aiOnnx.constant(np.array(True))
    ((first,), (second,)) = (builder.aiOnnx.loop([n, condition, x], 1, body) for n in (one, two))
    flow = popart.DataFlow(1, dict.fromkeys((first, second), popart.AnchorReturnType("ALL")))
    session = popart.InferenceSession(builder.getModelProto(), flow, model_device())
    session.prepareDevice()
    anchors = session.initAnchorArrays()
    session.run(popart.PyStepIO({}, anchors))
    assert (np.abs(anchors[second] - 3 * anchors[first]) > 1e-3).all()
