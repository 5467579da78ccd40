"""Inference sessions: numbers, cycles wherever an exporter puts weights, states, refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

import ipujax as ipu
import ipujax.onnx
from tests.ipujax.onnx.models import info, mlp, model_of

STORES = ("initializer", "constant", "identity")
DRAW = np.random.default_rng(0).standard_normal
WEIGHTS = {"w": DRAW((64, 96)) / 8, "b": DRAW(96) / 9, "v": DRAW((96, 32)) / 9, "e": np.array(2.0)}
ARRAYS = {name: x.astype(np.float32) for name, x in WEIGHTS.items()}
X = np.random.default_rng(1).standard_normal((8, 64)).astype(np.float32)


def network(store: str, power: str = "e") -> onnx.ModelProto:
    """Return (x w + b)² v, whose weights are initialisers, values of `Constant` nodes, or behind `Identity`."""
    first: list[onnx.NodeProto] = [helper.make_node("Constant", [], ["two"], value_float=2.0)]
    for name, array in ARRAYS.items():
        if store == "constant":
            first.append(helper.make_node("Constant", [], [name], value=onnx.numpy_helper.from_array(array, name)))
        if store == "identity":
            first.append(helper.make_node("Identity", [f"{name}.stored"], [name]))
    nodes = [
        *first,
        helper.make_node("MatMul", ["x", "w"], ["product"]),
        helper.make_node("Add", ["product", "b"], ["h"]),
        helper.make_node("Pow", ["h", power], ["squared"]),
        helper.make_node("MatMul", ["squared", "v"], ["y"]),
    ]
    stored = {f"{name}.stored" if store == "identity" else name: x for name, x in ARRAYS.items()}
    ins, outs = [info("x", shape=(8, 64))], [info("y", shape=(8, 32))]
    return model_of(nodes, ins, outs, {} if store == "constant" else stored, name="network")


def expected() -> Any:
    """Return the network's result by NumPy."""
    return (X @ ARRAYS["w"] + ARRAYS["b"]) ** 2 @ ARRAYS["v"]


@pytest.fixture(scope="module")
def sessions() -> dict[str, ipujax.onnx.Session]:
    """A session of the network for each way of storing its weights."""
    return {store: ipujax.onnx.session(network(store)) for store in STORES}


def test_weights_are_no_part_of_a_call(sessions):
    cycles = {store: session.profile(X).cycles for store, session in sessions.items()}
    assert max(cycles.values()) <= 1.02 * min(cycles.values()), cycles
    model = ipujax.onnx.load(network("initializer"))
    assert cycles["initializer"] < ipu.jit(model).profile(model.params, X).cycles


def test_functions_of_parameters_have_the_same_cycles_too():
    # A number of a formula among initialisers may be trained, and is a parameter: an exponent of any value costs more.
    models = {store: ipujax.onnx.load(network(store, "two")) for store in STORES}
    cycles = [ipu.jit(model).profile(model.params, X).cycles for model in models.values()]
    assert max(cycles) <= 1.02 * min(cycles), cycles


def test_numbers_of_several_calls(sessions):
    for session in sessions.values():
        for _ in range(2):
            np.testing.assert_allclose(session(X), expected(), rtol=2e-5, atol=1e-5)


def test_profiled_call_keeps_the_state(sessions):
    session = sessions["initializer"]
    y, profile = session.profile_call(X)
    assert profile.cycles == session.profile(X).cycles
    np.testing.assert_allclose(session(X), y, rtol=1e-6)


def test_outputs_by_name(sessions):
    session = sessions["constant"]
    np.testing.assert_allclose(session.run(["y"], {"x": X})[0], expected(), rtol=2e-5, atol=1e-5)
    assert len(session.run(None, {"x": X})) == 1
    with pytest.raises(ipujax.onnx.OnnxError, match="the session has no output 'z'"):
        session.run(["z"], {"x": X})
    with pytest.raises(ipujax.onnx.OnnxError, match="the session has no input 'z'"):
        session.run(None, {"z": X})
    with pytest.raises(ipujax.onnx.OnnxError, match="the feed has no input 'x'"):
        session.run(None, {})


def test_a_session_has_the_name_of_its_file(tmp_path: Path):
    (tmp_path / "net.onnx").write_bytes(mlp().SerializeToString())
    assert "<ONNX session net: (x: float32[N,8])" in repr(ipujax.onnx.session(tmp_path / "net.onnx"))


def test_refused_calls(sessions):
    with pytest.raises(ipujax.onnx.OnnxError, match="wrong number of inputs"):
        sessions["constant"](X, X)
    with pytest.raises(ipujax.onnx.OnnxError, match="wrong number of inputs"):
        sessions["constant"].profile()
    with pytest.raises(ipujax.onnx.OnnxError, match="input 'x' has the wrong shape"):
        sessions["constant"](X[:3])


def accumulator(grows: bool) -> onnx.ModelProto:
    """Return a model of a state: a sum, or rows to which one is added."""
    if grows:
        nodes = [helper.make_node("Concat", ["past", "x"], ["present"], axis=0)]
        present = info("present", shape=(5, 3))
    else:
        nodes = [helper.make_node("Add", ["past", "x"], ["present"])]
        present = info("present", shape=("rows", 3))
    nodes.append(helper.make_node("ReduceSum", ["present"], ["total"], keepdims=0))
    past = info("past", shape=("rows", 3))
    return model_of(nodes, [past, info("x", shape=(1, 3))], [info("total"), present], name="accumulator")


def test_states_go_from_call_to_call():
    session = ipujax.onnx.session(accumulator(False), states={"past": "present"}, input_shapes={"past": (1, 3)})
    x = np.ones((1, 3), np.float32)
    assert [float(session(x)) for _ in range(3)] == [3, 6, 9]
    assert session.inputs[0].name == "x" and [each.name for each in session.outputs] == ["total"]
    session.reset()
    assert float(session(x)) == 3


def test_states_that_grow_keep_their_last_rows():
    session = ipujax.onnx.session(accumulator(True), states={"past": "present"}, input_shapes={"past": (4, 3)})
    totals = [float(session(np.full((1, 3), n, np.float32))) for n in range(1, 7)]
    # of the past four rows and the new one
    assert totals == [3, 9, 18, 30, 45, 60]


@pytest.mark.parametrize(
    ("states", "shapes", "text"),
    [
        ({"pasd": "present"}, {}, "states names 'pasd', which is none of the inputs"),
        ({"past": "presents"}, {}, "states names 'presents', which is none of the outputs"),
        ({"past": "present"}, {}, "state 'past' has open sizes"),
        ({"past": "present", "x": "present"}, {}, "states gives an output to two inputs"),
        ({"past": "total"}, {"past": (1, 3)}, "the output for state 'past' does not fit its input"),
    ],
)
def test_refused_states(states, shapes, text):
    with pytest.raises(ipujax.onnx.OnnxError, match=text):
        ipujax.onnx.session(accumulator(False), states=states, input_shapes=shapes)(np.ones((1, 3), np.float32))
