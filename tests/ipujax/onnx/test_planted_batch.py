"""A planted cause of an ONNX session, a small batch, is named, and promises what a larger batch saves."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

import ipujax as ipu
from ipujax.onnx import sessions
from tests.ipujax.causes.planted_programs import HOST, Planted, check_planted

WIDTH = 256


def profile_of_call(rows: int) -> ipu.Profile:
    """Return the profile of a call of an ONNX model of three layers on a batch."""
    weights = [numpy_helper.from_array(np.ones((WIDTH, WIDTH), np.float32), f"w{n}") for n in range(3)]
    nodes = [helper.make_node("MatMul", [f"x{n}", f"w{n}"], [f"h{n}"]) for n in range(3)]
    nodes += [helper.make_node("Tanh", [f"h{n}"], [f"x{n + 1}"]) for n in range(3)]
    nodes.sort(key=lambda node: (node.input[0][1], node.op_type))
    values = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [rows, WIDTH]) for name in ("x0", "x3")]
    graph = helper.make_graph(nodes, "layers", values[:1], values[1:], weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    with TemporaryDirectory() as folder:
        path = Path(folder) / "layers.onnx"
        onnx.save(model, str(path))
        session: Any = sessions.session(str(path))
    result: ipu.Profile = session.profile_call(np.zeros((rows, WIDTH), np.float32))[1]
    return result


def test_a_small_batch_is_named_and_promises_what_a_larger_one_saves() -> None:
    check_planted(Planted(HOST, lambda: profile_of_call(4), lambda: profile_of_call(256).cycles * 4 / 256))
