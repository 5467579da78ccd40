"""64-bit values in sessions: sentinels saturate, all others that 32 bits do not hold are refused. Oracle: NumPy."""

from __future__ import annotations

import numpy as np
import pytest

from ipujax import popart

X = np.array([-5, 7, 2])
HIGH = 2**63 - 1


def session_of(operation: str, constant: int, is_parameter: bool = True, **attributes: int) -> popart.InferenceSession:
    """Return a prepared session of an operation on x and a constant, and the name of its result."""
    builder = popart.Builder()
    x = builder.addInputTensor(popart.TensorInfo("INT64", [3]), "x")
    value = np.array(constant)
    other = builder.addInitializedInputTensor(value, "c") if is_parameter else builder.aiOnnx.constant(value, "c")
    operands = [x, "", other] if operation == "clip" else [x, other]
    y = getattr(builder.aiOnnx, operation)(operands, debugContext="here")
    if attributes.get("recompute"):
        builder.recomputeOutputInBackwardPass(y)
    flow = popart.DataFlow(1, {y: popart.AnchorReturnType("ALL")})
    device = popart.DeviceManager().createCpuDevice()
    options = popart.SessionOptions()
    options.constantWeights = False
    session = popart.InferenceSession(builder.getModelProto(), flow, device, userOptions=options)
    session.prepareDevice()
    return session


def run(session: popart.InferenceSession, x: np.ndarray) -> np.ndarray:
    """Return the only anchor of a step."""
    anchors = session.initAnchorArrays()
    session.run(popart.PyStepIO({"x": x}, anchors))
    [result] = anchors.values()
    return result


@pytest.mark.parametrize("is_parameter", [True, False])
def test_sentinels_saturate(is_parameter: bool) -> None:
    np.testing.assert_array_equal(run(session_of("min", HIGH, is_parameter), X), X)
    np.testing.assert_array_equal(run(session_of("min", HIGH, is_parameter, recompute=1), X), X)


@pytest.mark.parametrize("is_parameter", [True, False])
def test_other_constants_are_refused(is_parameter: bool) -> None:
    with pytest.raises(popart.popart_exception, match=r"\(Mul\): input '.*' has the value 2654435761") as caught:
        session_of("mul", 2654435761, is_parameter)
    assert "jax_enable_x64" in str(caught.value)


def test_inputs_and_weights_are_refused() -> None:
    session = session_of("add", 1)
    with pytest.raises(popart.popart_exception, match="input 'x' has the value 4294967291") as caught:
        run(session, X + 2**32)
    assert "jax_enable_x64" in str(caught.value)
    with pytest.raises(popart.popart_exception, match="weight 'c' has the value 4294967296"):
        session.writeWeights(popart.PyWeightsIO({"c": np.array(2**32)}))
    session.weightsFromHost()
    np.testing.assert_array_equal(run(session, X), X + 1)


def test_conversions_to_32_bits_are_refused() -> None:
    builder = popart.Builder()
    x = builder.addInputTensor(popart.TensorInfo("INT32", [3]), "x")
    y = builder.aiOnnx.neg([x])
    flow = popart.DataFlow(1, {y: popart.AnchorReturnType("ALL")})
    session = popart.InferenceSession(builder.getModelProto(), flow, popart.DeviceManager().createCpuDevice())
    session.prepareDevice()
    np.testing.assert_array_equal(run(session, X), -X)
    with pytest.raises(popart.popart_exception, match="input 'x' has the value 4294967291, which int32") as caught:
        run(session, X + 2**32)
    assert "declare it as int64" in str(caught.value)
