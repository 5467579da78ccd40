"""An ONNX model in double precision is said to compute in an emulated dtype."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import numpy as np
from onnx import TensorProto, helper

import ipujax as ipu
import ipujax.onnx
from tests.ipujax.causes.planted_programs import Planted, array, check_planted, profile


def onnx_wave(dtype: Any) -> Any:
    kind = {np.float32: TensorProto.FLOAT, np.float64: TensorProto.DOUBLE}[dtype]
    nodes = [helper.make_node("Sin", ["x"], ["s"]), helper.make_node("Mul", ["s", "x"], ["y"])]
    value = partial(helper.make_tensor_value_info, elem_type=kind, shape=[1 << 14])
    graph = helper.make_graph(nodes, "wave", [value("x")], [value("y")])
    return ipujax.onnx.load(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)]))


def onnx_profile(dtype: Any) -> ipu.Profile:
    with jax.enable_x64(dtype is np.float64):
        model = onnx_wave(dtype)
        return profile(lambda x: model({}, x), array(1 << 14, dtype=dtype), donate_argnums=0)


def test_double_precision_is_named() -> None:
    check_planted(Planted("emulated dtypes", lambda: onnx_profile(np.float64), lambda: onnx_profile(np.float32).cycles))


def test_a_cause_in_a_shared_function_has_the_line_of_a_call() -> None:
    nodes = [helper.make_node("MatMul", [f"x{n}", f"w{n}"], [f"x{n + 1}"], name=f"layer_{n}") for n in range(4)]
    value = partial(helper.make_tensor_value_info, elem_type=TensorProto.FLOAT)
    inputs = [value("x0", shape=[64, 64]), *(value(f"w{n}", shape=[64, 64]) for n in range(4))]
    graph = helper.make_graph(nodes, "layers", inputs, [value("x4", shape=[64, 64])])
    model = ipujax.onnx.load(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)]))
    args = [array(64, 64)] * 5
    figures = profile(lambda *args: model({}, *args), *args, donate_argnums=tuple(range(5)))
    assert not any("@caller" in str(cause.origin) for cause in figures.causes)
    assert any("layer_" in str(cause.origin) for cause in figures.causes)
