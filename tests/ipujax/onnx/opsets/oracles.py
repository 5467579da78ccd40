"""What onnxruntime and onnx's reference say of a model, and how ipujax compares with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import onnx
import onnx.reference
import onnxruntime

import ipujax as ipu
import ipujax.onnx
from ipujax.onnx.reading import read_graph
from tests.ipujax.onnx.backend import deciding_inputs
from tests.ipujax.onnx.models import info

Arrays = Mapping[str, np.ndarray]
Results = list[np.ndarray]
# onnxruntime has kernels of these opsets; later changes of operators are of element types alone.
OLDEST = 7
NEWEST = 21
UNLIKE = ("Clip", "PRelu")  # mean something else at OLDEST than before
_RTOL = 1e-3
_ATOL = 1e-4


@dataclass(frozen=True, slots=True)
class Outcome:
    """Outcome of a model.

    Args:
        kind: "equal" to onnxruntime, at the opset or the nearest one that it has; "reference": to onnx's reference,
            where onnxruntime does not run it or differs;
            "refused" with a typed error; "without oracle", where neither runs it; "untyped error"; "WRONG".
        text: the error, or how results differ.
        runs: whether onnxruntime runs the model.
    """

    kind: str
    text: str
    runs: bool


def runtime_results(model: onnx.ModelProto, inputs: Arrays) -> Results | str:
    """Return the results of onnxruntime, or its error."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    try:
        session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        return list(session.run(None, dict(inputs)))
    except Exception as error:  # any error of onnxruntime means that it does not run the model
        return str(error)


def reference_results(model: onnx.ModelProto, inputs: Arrays) -> Results | str:
    """Return the results of onnx's reference, or its error."""
    try:
        with np.errstate(all="ignore"):
            results = onnx.reference.ReferenceEvaluator(model).run(None, dict(inputs))
        return list(map(np.asarray, results))
    except Exception as error:  # any error of the reference means that it does not run the model
        return f"{type(error).__name__}: {error}"


def neighbour(model: onnx.ModelProto, inputs: Arrays) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """Return the model in the nearest opset that onnxruntime has, where its node means the same, and its inputs."""
    (node,) = model.graph.node
    opset = model.opset_import[0].version
    newer = onnx.ModelProto.FromString(model.SerializeToString())
    if OLDEST <= opset <= NEWEST or (opset < OLDEST and node.op_type in UNLIKE):
        return newer, dict(inputs)
    newer.opset_import[0].version = OLDEST if opset < OLDEST else NEWEST
    if opset > NEWEST:
        return newer, dict(inputs)
    attributes = {each.name: each for each in node.attribute}
    operands = dict(inputs)
    dropped = {"broadcast", "consumed_inputs", "is_test", "output_sequence"}
    if {"axis", "broadcast"} <= attributes.keys():
        a, b = (inputs[name] for name in node.input)
        operands[node.input[1]] = b.reshape(*b.shape, *(1,) * (a.ndim - attributes["axis"].i - b.ndim))
        dropped.add("axis")
    newer.graph.node[0].ClearField("attribute")
    newer.graph.node[0].attribute.extend(each for name, each in attributes.items() if name not in dropped)
    for value in newer.graph.input:
        if value.name in operands:
            value.CopyFrom(info(value.name, operands[value.name].dtype, operands[value.name].shape))
    return newer, operands


def ipu_results(model: onnx.ModelProto, inputs: Arrays) -> Results:
    """Return the results of ipujax, traced by `jax.jit`."""
    # Operands that decide the size of a result are static.
    static = {name: inputs[name] for name in deciding_inputs(read_graph(model))}
    loaded = ipujax.onnx.load(model, static=static)
    arguments = [inputs[each.name] for each in loaded.inputs]
    results = jax.jit(loaded)(loaded.params, *arguments)
    return list(map(np.asarray, results if len(loaded.outputs) > 1 else (results,)))


def difference(actual: Sequence[Any], expected: Sequence[Any]) -> str:
    """Return how results differ, empty if they do not; 64-bit numbers are computed with 32 bits."""
    for n, (x, y) in enumerate(zip(actual, expected, strict=True)):
        if x.shape != y.shape:
            return f"output {n}: shape {x.shape} for {y.shape}"
        if x.dtype.kind != y.dtype.kind:
            return f"output {n}: dtype {x.dtype} for {y.dtype}"
        if not np.allclose(x.astype(np.float64), y.astype(np.float64), _RTOL, _ATOL, equal_nan=True):
            return f"output {n}: {x.ravel()[:8]} for {y.ravel()[:8]}"
    return ""


def _short(text: str) -> str:
    return " ".join(text.split())[:240]


def outcome(model: onnx.ModelProto, inputs: Arrays) -> Outcome:
    """Compare ipujax with onnxruntime and, where that does not run the model or differs, with onnx's reference."""
    runtime = runtime_results(model, inputs)
    runs = not isinstance(runtime, str)
    try:
        actual = ipu_results(model, inputs)
    except ipu.IpuError as error:
        return Outcome("refused", _short(str(error)), runs)
    except Exception as error:  # what the benchmark looks for
        return Outcome("untyped error", _short(f"{type(error).__name__}: {error}"), runs)
    same, operands = neighbour(model, inputs)
    oracles = {
        "equal": runtime if runs else runtime_results(same, operands),
        "reference": reference_results(same, operands),
    }
    texts = {}
    for kind, expected in oracles.items():
        if not isinstance(expected, str):
            texts[kind] = difference(actual, expected)
            if not texts[kind]:
                return Outcome(kind, _short(str(texts)), runs)
    return Outcome("WRONG", _short(str(texts)), runs) if texts else Outcome("without oracle", "", runs)
