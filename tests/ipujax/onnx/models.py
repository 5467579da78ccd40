"""Small ONNX models for tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import helper

OPSET = onnx.defs.onnx_opset_version()


def info(name: str, dtype: Any = np.float32, shape: Sequence[int | str | None] | None = ()) -> onnx.ValueInfoProto:
    """Return the declared type of a value."""
    return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), shape)


def graph_of(
    nodes: Sequence[onnx.NodeProto],
    inputs: Sequence[onnx.ValueInfoProto],
    outputs: Sequence[onnx.ValueInfoProto],
    initializers: Mapping[str, np.ndarray] | None = None,
    name: str = "graph",
) -> onnx.GraphProto:
    """Return a graph."""
    tensors = [onnx.numpy_helper.from_array(array, name) for name, array in (initializers or {}).items()]
    return helper.make_graph(nodes, name, inputs, outputs, tensors)


def model_of(*arguments: Any, opset: int = OPSET, domains: Sequence[str] = (), **keywords: Any) -> onnx.ModelProto:
    """Return a model of a graph with the arguments of `graph_of`."""
    imports = [helper.make_opsetid("", opset), *(helper.make_opsetid(domain, 1) for domain in domains)]
    return helper.make_model(graph_of(*arguments, **keywords), opset_imports=imports, ir_version=10)


def mlp(seed: int = 0) -> onnx.ModelProto:
    """Return two layers of `Gemm(transB=1)`: x[N,8] → y[N,4]."""
    draw = np.random.default_rng(seed).standard_normal
    weights = {"w1": draw((16, 8)) / 3, "b1": draw(16) / 9, "w2": draw((4, 16)) / 4, "b2": draw(4) / 9}
    nodes = [
        helper.make_node("Gemm", ["x", "w1", "b1"], ["h"], "/layer1/Gemm", transB=1),
        helper.make_node("Relu", ["h"], ["a"], "/layer1/Relu"),
        helper.make_node("Gemm", ["a", "w2", "b2"], ["y"], "/layer2/Gemm", transB=1),
    ]
    arrays = {name: array.astype(np.float32) for name, array in weights.items()}
    return model_of(nodes, [info("x", shape=("N", 8))], [info("y", shape=("N", 4))], arrays, name="mlp")
