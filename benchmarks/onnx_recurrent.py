"""Cycles of one recurrent network as different exporters write it.

    python benchmarks/onnx_recurrent.py [case …]

Ways: a recurrent node; `Scan` over rows; `Loop` that gathers row i; a `Loop` whose step multiplies [x, h] at once;
steps one after the other, each with its input product, and with one product for all. Each file is compared with
onnxruntime. Exits with 1 where two ways of a case differ by more than the bar.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper

import ipujax.onnx

BAR = 1.10
UNITS = {"LSTM": 4, "GRU": 3, "RNN": 1}
WAYS = ("node", "scan", "loop", "joint loop", "steps", "steps, one product")


@dataclass(frozen=True)
class Case:
    """A network of recurrent layers, float32 [steps, batch, inputs] → [steps, batch, directions · hidden]."""

    cell: str = "LSTM"
    layers: int = 2
    steps: int = 12
    batch: int = 8
    inputs: int = 64
    hidden: int = 64
    is_bidirectional: bool = False


CASES = {
    "two LSTM layers": Case(),
    "wide LSTM layers": Case(hidden=128, inputs=32, batch=4),
    "one LSTM layer": Case(layers=1),
    "two GRU layers": Case(cell="GRU"),
    "two RNN layers": Case(cell="RNN"),
    "two LSTM layers, both directions": Case(is_bidirectional=True),
    "one GRU layer": Case(cell="GRU", layers=1, batch=16),
    "one wide RNN layer": Case(cell="RNN", layers=1, hidden=256, inputs=256, batch=16),
}


@dataclass
class Nodes:
    """Nodes and constants of a graph; names are unique over all graphs of a `names`."""

    names: Iterator[int]
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    constants: list[onnx.TensorProto] = field(default_factory=list)
    arrays: dict[int, tuple[str, Any]] = field(default_factory=dict)

    def add(self, op: str, *inputs: str, **attributes: Any) -> str:
        """Add a node with one output; return its name."""
        return self.add_several(op, *inputs, outputs=1, **attributes)[0]

    def add_several(self, op: str, *inputs: str, outputs: int, **attributes: Any) -> list[str]:
        """Add a node; return the names of its outputs."""
        names = [f"v{next(self.names)}" for _ in range(outputs)]
        self.nodes.append(helper.make_node(op, inputs, names, **attributes))
        return names

    def constant(self, array: Any) -> str:
        """Add a constant, each array once; return its name."""
        if id(array) not in self.arrays:
            self.arrays[id(array)] = f"c{next(self.names)}", array  # the array is stored so that its id is not reused
            self.constants.append(numpy_helper.from_array(np.asarray(array), self.arrays[id(array)][0]))
        return self.arrays[id(array)][0]


@dataclass(frozen=True)
class Weights:
    """Weights of a direction, transposed, and biases; `joint` are those of [x, h]."""

    inputs: np.ndarray
    outputs: np.ndarray
    input_bias: np.ndarray
    output_bias: np.ndarray
    joint: np.ndarray
    joint_bias: np.ndarray

    @classmethod
    def of(cls, w: np.ndarray, r: np.ndarray, b: np.ndarray) -> Weights:
        """Return the weights of a recurrent node in this form."""
        input_bias, output_bias = np.split(b, 2)
        joint = np.concatenate([w.T, r.T])
        return cls(w.T.copy(), r.T.copy(), input_bias, output_bias, joint, input_bias + output_bias)


def cell(graph: Nodes, case: Case, from_input: str, from_output: str, state: list[str]) -> list[str]:
    """Add the non-linear part of a cell; `from_output` is empty where both products are in `from_input`."""

    def parts(value: str, number: int) -> list[str]:
        sizes = graph.constant(np.array([case.hidden] * number))
        return graph.add_several("Split", value, sizes, outputs=number, axis=-1)

    if case.cell == "GRU":  # the reset gate multiplies the product
        z, r, n = parts(from_input, 3)
        z_output, r_output, n_output = parts(from_output, 3)
        z = graph.add("Sigmoid", graph.add("Add", z, z_output))
        r = graph.add("Sigmoid", graph.add("Add", r, r_output))
        n = graph.add("Tanh", graph.add("Add", n, graph.add("Mul", r, n_output)))
        carried = graph.add("Mul", z, state[0])
        new = graph.add("Mul", graph.add("Sub", graph.constant(np.float32(1)), z), n)
        return [graph.add("Add", new, carried)]
    sums = graph.add("Add", from_input, from_output) if from_output else from_input
    if case.cell == "RNN":
        return [graph.add("Tanh", sums)]
    i, o, f, g = parts(sums, 4)
    carried = graph.add("Mul", graph.add("Sigmoid", f), state[1])
    new = graph.add("Add", carried, graph.add("Mul", graph.add("Sigmoid", i), graph.add("Tanh", g)))
    return [graph.add("Mul", graph.add("Sigmoid", o), graph.add("Tanh", new)), new]


def product(graph: Nodes, x: str, weights: np.ndarray, bias: np.ndarray) -> str:
    """Add x W + b."""
    return graph.add("Add", graph.add("MatMul", x, graph.constant(weights)), graph.constant(bias))


def step(graph: Nodes, case: Case, way: str, x: str, state: list[str], weights: Weights) -> list[str]:
    """Add a step of a row; return the next state."""
    if way == "joint loop" and case.cell != "GRU":
        both = graph.add("Concat", x, state[0], axis=-1)
        return cell(graph, case, product(graph, both, weights.joint, weights.joint_bias), "", state)
    from_input = x if way == "steps, one product" else product(graph, x, weights.inputs, weights.input_bias)
    return cell(graph, case, from_input, product(graph, state[0], weights.outputs, weights.output_bias), state)


def rows(graph: Nodes, case: Case, way: str, x: str, weights: Weights, *, is_backward: bool) -> str:
    """Add one direction of a layer in one of the ways but `node`; return its outputs."""
    num_states = 2 if case.cell == "LSTM" else 1
    zeros = np.zeros((case.batch, case.hidden), np.float32)
    starts = [graph.constant(zeros) for _ in range(num_states)]
    if way.startswith("steps"):
        if way == "steps, one product":
            x = product(graph, x, weights.inputs, weights.input_bias)
        state = starts
        outputs = [""] * case.steps
        for time in list(range(case.steps))[:: -1 if is_backward else 1]:
            row = graph.add("Gather", x, graph.constant(np.int64(time)), axis=0)
            state = step(graph, case, way, row, state, weights)
            outputs[time] = graph.add("Unsqueeze", state[0], graph.constant(np.array([0])))
        return graph.add("Concat", *outputs, axis=0)
    body = Nodes(graph.names)
    state = [f"state{next(graph.names)}" for _ in starts]
    infos = [helper.make_tensor_value_info(name, TensorProto.FLOAT, zeros.shape) for name in state]
    number, condition, row = (f"{name}{next(graph.names)}" for name in ("number", "condition", "row"))
    if way != "scan":
        place = body.add("Sub", body.constant(np.int64(case.steps - 1)), number) if is_backward else number
        row = body.add("Gather", x, place, axis=0)
    results = step(body, case, way, row, state, weights)
    results.append(body.add("Identity", results[0]))
    if way != "scan":
        results = [body.add("Identity", condition), *results]
        counter = helper.make_tensor_value_info(number, TensorProto.INT64, ())
        inputs = [counter, helper.make_tensor_value_info(condition, TensorProto.BOOL, ()), *infos]
    else:
        inputs = [*infos, helper.make_tensor_value_info(row, TensorProto.FLOAT, None)]
    outputs_info = [
        helper.make_tensor_value_info(name, TensorProto.BOOL if way != "scan" and n == 0 else TensorProto.FLOAT, None)
        for n, name in enumerate(results)
    ]
    inside = helper.make_graph(body.nodes, "body", inputs, outputs_info, body.constants)
    if way == "scan":
        ways = {"scan_input_directions": [1], "scan_output_directions": [1]} if is_backward else {}
        return graph.add_several("Scan", *starts, x, outputs=num_states + 1, body=inside, num_scan_inputs=1, **ways)[-1]
    bounds = graph.constant(np.int64(case.steps)), graph.constant(np.array(True))
    collected = graph.add_several("Loop", *bounds, *starts, outputs=num_states + 1, body=inside)[-1]
    backward = graph.constant(np.arange(case.steps)[::-1].copy())
    return graph.add("Gather", collected, backward, axis=0) if is_backward else collected


def model(case: Case, way: str) -> onnx.ModelProto:
    """Return the network in one of the ways."""
    draw = np.random.default_rng(0).standard_normal
    graph = Nodes(count())
    directions = 2 if case.is_bidirectional else 1
    units = UNITS[case.cell] * case.hidden
    value, width = "x", case.inputs
    for _ in range(case.layers):
        w = (draw((directions, units, width)) / np.sqrt(width)).astype(np.float32)
        r = (draw((directions, units, case.hidden)) / np.sqrt(case.hidden)).astype(np.float32)
        b = (draw((directions, 2 * units)) / 10).astype(np.float32)
        if way == "node":
            settings = {"linear_before_reset": 1} if case.cell == "GRU" else {}
            direction = "bidirectional" if case.is_bidirectional else "forward"
            operands = map(graph.constant, (w, r, b))
            y = graph.add(case.cell, value, *operands, hidden_size=case.hidden, direction=direction, **settings)
            shape = graph.constant(np.array([0, 0, -1]))
            value = graph.add("Reshape", graph.add("Transpose", y, perm=[0, 2, 1, 3]), shape)
        else:
            weights = [Weights.of(w[d], r[d], b[d]) for d in range(directions)]
            parts = [rows(graph, case, way, value, each, is_backward=d == 1) for d, each in enumerate(weights)]
            value = graph.add("Concat", *parts, axis=-1) if directions > 1 else parts[0]
        width = directions * case.hidden
    graph.nodes.append(helper.make_node("Identity", [value], ["y"]))
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, (case.steps, case.batch, case.inputs))
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, (case.steps, case.batch, width))
    proto = helper.make_graph(graph.nodes, way.replace(" ", "_"), [x], [y], graph.constants)
    return helper.make_model(proto, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


def main() -> int:
    """Print the cycles of each way of each case; return 1 where two differ by more than the bar."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", default=[*CASES], help="cases (default all)")
    ort.set_default_logger_severity(3)
    missed = 0
    for name in parser.parse_args().cases:
        case = CASES[name]
        x = np.random.default_rng(1).standard_normal((case.steps, case.batch, case.inputs)).astype(np.float32)
        cycles = {}
        for way in WAYS:
            file = model(case, way)
            expected = ort.InferenceSession(file.SerializeToString()).run(None, {"x": x})[0]
            session = ipujax.onnx.session(file)
            np.testing.assert_allclose(session(x), expected, atol=1e-4)
            cycles[way] = session.profile(x).cycles
        ratio = max(cycles.values()) / min(cycles.values())
        missed += ratio > BAR
        print(f"{name:<34}{ratio:5.2f}  " + ", ".join(f"{way} {each:,}" for way, each in cycles.items()), flush=True)
    return int(missed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
