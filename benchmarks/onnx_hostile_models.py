"""Hostile ONNX models for `onnx_hostile.py` that are well formed and grow: sizes, trip counts, nesting, functions."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

_HUGE = (10**18, 2**63 - 1, 2**62, 10**15, 2**40, 2**33, 2**32, 2**31, 2**31 - 1, 10**9, 3 * 10**8)
OPSET = 18
_IR_VERSION = 8

Family = Callable[[random.Random, Path], "onnx.ModelProto | Path"]
FAMILIES: dict[str, Family] = {}


def written(data: bytes, folder: Path) -> Path:
    """Write a file, with nothing looked at, and return its path."""
    path = folder / "model.onnx"
    path.write_bytes(data)
    return path


def family(function: Family) -> Family:
    """Add a family by the name of its function."""
    FAMILIES[function.__name__] = function
    return function


def huge(draw: random.Random) -> int:
    """Return a size that no machine has."""
    return draw.choice(_HUGE)


def info(name: str, shape: Sequence[int | str] | None, kind: int = TensorProto.FLOAT) -> onnx.ValueInfoProto:
    """Return a declared value."""
    return helper.make_tensor_value_info(name, kind, shape)


def tensor(name: str, values: Any, dtype: Any = np.int64) -> onnx.TensorProto:
    """Return an initialiser."""
    return numpy_helper.from_array(np.asarray(values, dtype), name)


def model_of(
    nodes: Sequence[onnx.NodeProto],
    tensors: Sequence[onnx.TensorProto] = (),
    inputs: Sequence[onnx.ValueInfoProto] | None = None,
    functions: Sequence[onnx.FunctionProto] = (),
    opset: int = OPSET,
    domains: Sequence[str] = (),
) -> onnx.ModelProto:
    """Return a model from x[2,3] to y."""
    inputs = [info("x", [2, 3])] if inputs is None else inputs
    graph = helper.make_graph(list(nodes), "hostile", inputs, [info("y", None)], list(tensors))
    opsets = [helper.make_opsetid("", opset), *(helper.make_opsetid(domain, 1) for domain in domains)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=_IR_VERSION, functions=list(functions))


def one(
    op_type: str,
    operands: Sequence[Any] = (),
    inputs: Sequence[onnx.ValueInfoProto] | None = None,
    opset: int = OPSET,
    **attributes: Any,
) -> onnx.ModelProto:
    """Return a model of one node; an operand is a name, or the values of an initialiser."""
    names = [each if isinstance(each, str) else f"c{n}" for n, each in enumerate(operands)]
    arrays = [(name, each) for name, each in zip(names, operands, strict=True) if not isinstance(each, str)]
    tensors = [tensor(name, each, getattr(each, "dtype", np.int64)) for name, each in arrays]
    return model_of([helper.make_node(op_type, names, ["y"], "node", **attributes)], tensors, inputs, opset=opset)


def floats(*values: float) -> np.ndarray:
    """Return float32 values."""
    return np.asarray(values, np.float32)


@family
def sizes_by_operands(draw: random.Random, _: Path) -> onnx.ModelProto:
    """An operand that says how large a result is."""
    n = huge(draw)
    image = [info("x", [1, 1, 4, 4])]
    indices = info("i", [1, 1, 4, 4], TensorProto.INT64)
    scale = float(min(n, 10**18))
    return draw.choice(
        [
            lambda: one("Pad", ["x", [n, 0, 0, 0]]),
            lambda: one("Pad", ["x", [0, n, 0, 0]], mode=draw.choice(["edge", "reflect", "constant"])),
            lambda: one("Pad", [floats(1, 2), [n, 0]]),
            lambda: one("Expand", ["x", [n, 2, 3]]),
            lambda: one("Expand", [floats(1), [n]]),
            lambda: one("Tile", ["x", [n, 1]]),
            lambda: one("Tile", ["x", [n, n]]),
            lambda: one("Tile", [floats(1), [n]]),
            lambda: one("ConstantOfShape", [[n]]),
            lambda: one("ConstantOfShape", [[2**20, 2**20, draw.choice([1, 2**30])]]),
            lambda: one("Range", [np.int64(0), np.int64(n), np.int64(1)]),
            lambda: one("Range", [np.float32(0), np.float32(n), np.float32(draw.choice([1, 1e-20, -1]))]),
            lambda: one("OneHot", [[1, 2], [n], floats(0, 1)]),
            lambda: one("Resize", ["x", "", floats(scale, 1)]),
            lambda: one("Resize", ["x", "", "", [n, 3]], mode=draw.choice(["nearest", "linear", "cubic"])),
            lambda: one("Resize", ["x", "", floats(1e-6, 1)], mode="linear", antialias=1),
            lambda: one("Upsample", ["x", floats(scale, 1)], opset=9),
            lambda: one("CenterCropPad", ["x", [n, 3]]),
            lambda: one("Col2Im", ["x", [n, 2], [1, 1]], [info("x", [1, 1, 4])]),
            lambda: one("DFT", ["x", np.int64(n)], [info("x", [1, 4, 1])], axis=1),
            lambda: one("STFT", ["x", np.int64(1), "", np.int64(n)], [info("x", [1, 4, 1])]),
            lambda: one("HannWindow", [np.int64(n)]),
            lambda: one("BlackmanWindow", [np.int64(draw.choice([10**7, 10**8, n]))]),
            lambda: one("MelWeightMatrix", [np.int64(n), np.int64(8), np.int64(8), np.float32(0), np.float32(4)]),
            lambda: one("MelWeightMatrix", [np.int64(8), np.int64(n), np.int64(8), np.float32(0), np.float32(4)]),
            lambda: one("AffineGrid", ["x", [1, 1, n, n]], [info("x", [1, 2, 3])], opset=20),
            lambda: one("AffineGrid", ["x", [1, 1, 2**14, 2**14]], [info("x", [1, 2, 3])], opset=20),
            lambda: one("MaxUnpool", ["x", "i", [1, 1, n, 2]], [*image, indices], kernel_shape=[1, 1]),
            lambda: one("TopK", ["x", [n]]),
            lambda: one("Reshape", ["x", [n, -1]]),
            lambda: one("Slice", ["x", [-n], [n], [0], [1]]),
            lambda: one("SplitToSequence", ["x", np.int64(1)], [info("x", [min(n, 2**31)])]),
            lambda: one("Trilu", ["x", np.int64(n)], [info("x", [2**15, 2**15])]),
        ]
    )()


@family
def sizes_by_attributes(draw: random.Random, _: Path) -> onnx.ModelProto:
    """An attribute that says how large a result is."""
    n = huge(draw)
    image = [info("x", [1, 1, 4, 4])]
    weights = np.ones((1, 1, 2, 2), np.float32)
    regions = np.ones((1, 5), np.float32)
    return draw.choice(
        [
            lambda: one("Conv", ["x", weights], image, pads=[n, 0, n, 0]),
            lambda: one("Conv", ["x", weights], image, dilations=[n, 1], pads=[n, 0, n, 0]),
            lambda: one("Conv", ["x", weights], image, strides=[draw.choice([n, 0, -1]), 1]),
            lambda: one("Conv", ["x", weights], image, kernel_shape=[n, n]),
            lambda: one("ConvTranspose", ["x", weights], image, output_shape=[n, 4]),
            lambda: one("ConvTranspose", ["x", weights], image, strides=[n, 1]),
            lambda: one("ConvTranspose", ["x", weights], image, output_padding=[n, 1]),
            lambda: one("MaxPool", ["x"], image, kernel_shape=[2, 2], pads=[n, 0, n, 0]),
            lambda: one("MaxPool", ["x"], image, kernel_shape=[n, 2], pads=[n // 2, 0, n // 2, 0], dilations=[2, 1]),
            lambda: one("AveragePool", ["x"], image, kernel_shape=[2, 2], pads=[n, 0, n, 0], count_include_pad=1),
            lambda: one("AveragePool", ["x"], image, kernel_shape=[2, 2], strides=[0, 0]),
            lambda: one("LpPool", ["x"], image, kernel_shape=[2, 2], pads=[n, 0, n, 0], p=draw.choice([2, 0, n])),
            lambda: one("RandomNormal", shape=[n]),
            lambda: one("RandomUniform", shape=[2**16, 2**17, draw.choice([1, n])]),
            lambda: one("Multinomial", ["x"], sample_size=n),
            lambda: one("MaxRoiPool", ["x", regions], image, pooled_shape=[n, n]),
            lambda: one("RoiAlign", ["x", regions[:, :4], [0]], image, output_height=n, output_width=2),
            lambda: one("RoiAlign", ["x", regions[:, :4] * [0, 0, 1e9, 1e9], [0]], image),
            lambda: one("LRN", ["x"], image, size=n),
            lambda: one("SpaceToDepth", ["x"], image, blocksize=n),
            lambda: one("DepthToSpace", ["x"], image, blocksize=n),
            lambda: one("EyeLike", ["x"], [info("x", [2**20, 2**20])], k=n % 2**62),
            lambda: model_of([helper.make_node("Split", ["x"], ["y"], num_outputs=n)]),
            lambda: one("Upsample", ["x"], opset=7, scales=[float(n), 1.0]),
            lambda: one("Pad", ["x"], opset=2, pads=[n, 0, 0, 0]),
            lambda: one("Unsqueeze", ["x", [n]]),
            lambda: one("Transpose", ["x"], perm=[n, 0]),
            lambda: one("Concat", ["x", "x"], axis=n),
            lambda: one("Gather", ["x", [0]], axis=n),
            lambda: one(
                "TfIdfVectorizer", ["x"], [info("x", [5], 7)], max_gram_length=n, max_skip_count=n, min_gram_length=1,
                mode="TF", ngram_counts=[0], ngram_indexes=[n], pool_int64s=[1],
            ),
            lambda: one("LSTM", ["x", np.ones((1, 8, 3), np.float32), np.ones((1, 8, 2), np.float32)],
                        [info("x", [2, 1, 3])], hidden_size=n),
        ]
    )()  # fmt: skip


@family
def outer_products(draw: random.Random, _: Path) -> onnx.ModelProto:
    """Operands that are small, with a product that is not; of constants, inputs and results."""
    n = draw.choice([2**16, 2**17, 2**20, 2**26])
    column = helper.make_node("ConstantOfShape", ["column"], ["a"], value=tensor("v", [1], np.float32))
    row = helper.make_node("ConstantOfShape", ["row"], ["b"], value=tensor("v", [1], np.float32))
    tensors = [tensor("column", [n, 1]), tensor("row", [1, n])]
    op_type = draw.choice(["Add", "MatMul", "Einsum", "Where", "Max", "Gather", "PRelu", "Equal", "Mean"])
    product = {
        "Einsum": helper.make_node("Einsum", ["a", "b"], ["y"], equation="ij,kl->ijkl"),
        "Where": helper.make_node("Where", ["mask", "a", "b"], ["y"]),
        "Gather": helper.make_node("Gather", ["b", "index"], ["y"], axis=0),
    }.get(op_type, helper.make_node(op_type, ["a", "b"], ["y"]))
    tensors += [tensor("mask", [True], bool), tensor("index", np.zeros((512, 512)))]
    return model_of([column, row, product], tensors)


@family
def static_outer_products(draw: random.Random, _: Path) -> onnx.ModelProto:
    """The same of weights in the file."""
    n = draw.choice([2**15, 2**16, 60_000])
    kind = draw.choice([np.int64, np.float32, bool])
    tensors = [tensor("a", np.ones((n, 1)), kind), tensor("b", np.ones((1, n)), kind)]
    op_type = "Equal" if kind is bool else draw.choice(["Add", "MatMul", "Equal", "Sub"])
    nodes = [helper.make_node(op_type, ["a", "b"], ["c"]), helper.make_node("Cast", ["c"], ["d"], to=1)]
    return model_of([*nodes, helper.make_node("Tile", ["d", "repeats"], ["y"])], [*tensors, tensor("repeats", [n, 1])])


@family
def doubling_chains(draw: random.Random, _: Path) -> onnx.ModelProto:
    """Each node doubles its operand."""
    steps = draw.choice([30, 40, 60, 200])
    op_type = draw.choice(["Concat", "Tile", "Expand", "Resize", "Pad", "Einsum"])
    static = draw.random() < 0.5
    nodes = []
    name = "one" if static else "x"
    for n in range(steps):
        result = f"v{n}" if n < steps - 1 else "y"
        if op_type == "Einsum" and n > 20:
            op_type = "Concat"
        nodes += {
            "Concat": [helper.make_node("Concat", [name, name], [result], axis=0)],
            "Tile": [helper.make_node("Tile", [name, "two"], [result])],
            "Expand": [
                helper.make_node("Unsqueeze", [name, "zero"], [f"u{n}"]),
                helper.make_node("Expand", [f"u{n}", "wide"], [f"e{n}"]),
                helper.make_node("Reshape", [f"e{n}", "flat"], [result]),
            ],
            "Resize": [helper.make_node("Resize", [name, "", "scales"], [result])],
            "Pad": [helper.make_node("Concat", [name, name, name], [result], axis=0)],
            "Einsum": [
                helper.make_node("Einsum", [name, name], [f"m{n}"], equation="i,j->ij"),
                helper.make_node("Reshape", [f"m{n}", "flat"], [result]),
            ],
        }[op_type]
        name = result
    tensors = [
        tensor("one", [1, 2], np.float32), tensor("two", [2]), tensor("zero", [0]), tensor("wide", [2, 1]),
        tensor("flat", [-1]), tensor("scales", [2.0], np.float32),
    ]  # fmt: skip
    return model_of(nodes, tensors, [info("x", [2])])


def body_of(nodes: Sequence[onnx.NodeProto], states: Sequence[Any], results: Sequence[str]) -> onnx.GraphProto:
    """Return the body of a loop."""
    inputs = [info("i", [], 7), info("c", [], 9), *states]
    return helper.make_graph(list(nodes), "body", inputs, [info(name, None) for name in results])


@family
def loops(draw: random.Random, _: Path) -> onnx.ModelProto:
    """Trip counts that no loop ends with, and loops whose values grow."""
    n = draw.choice([*_HUGE, 10**6, 30_000])
    kind = draw.choice(["uniform", "growing", "doubling", "stacked", "sequence", "static", "endless", "nested"])
    go_on = helper.make_node("Identity", ["c"], ["go"])
    tensors = [tensor("n", n), tensor("true", True, bool), tensor("zero", [0])]
    if kind == "nested":
        return _nested_loops(draw)
    if kind == "sequence":
        start = helper.make_node("SequenceEmpty", [], ["s"])
        state = helper.make_tensor_sequence_value_info("s0", 1, None)
        insert = helper.make_node("SequenceInsert", ["s0", "x"], ["s1"])
        body = helper.make_graph(
            [go_on, insert], "body", [info("i", [], 7), info("c", [], 9), state],
            [info("go", [], 9), helper.make_tensor_sequence_value_info("s1", 1, None)],
        )  # fmt: skip
        loop = helper.make_node("Loop", ["n", "true", "s"], ["t"], body=body)
        length = helper.make_node("SequenceLength", ["t"], ["y"])
        return model_of([start, loop, length], tensors)
    step = {
        "growing": [helper.make_node("Concat", ["s0", "x"], ["s1"], axis=0)],
        "doubling": [helper.make_node("Concat", ["s0", "s0"], ["s1"], axis=0)],
        "static": [
            helper.make_node("Reshape", ["i", "one"], ["i1"]),
            helper.make_node("Slice", ["s0", "zero", "i1"], ["s1"]),
        ],
    }.get(kind, [helper.make_node("Add", ["s0", "x"], ["s1"])])
    inner_constants = [helper.make_node("Constant", [], ["one"], value_ints=[1])]
    results = ["go", "s1", *(["s1"] if kind == "stacked" else [])]
    rows = [helper.make_node("Identity", ["s1"], ["row"])] if kind == "stacked" else []
    results = ["go", "s1", *(["row"] if rows else [])]
    body = body_of([*inner_constants, go_on, *step, *rows], [info("s0", None)], results)
    outputs = ["s", "y"] if rows else ["y"]
    count = "" if kind == "endless" else "n"
    loop = helper.make_node("Loop", [count, "true", "x"], outputs, body=body)
    return model_of([loop], tensors)


def _nested_loops(draw: random.Random) -> onnx.ModelProto:
    depth = draw.choice([5, 12, 25])
    names = [f"s{level}" for level in range(depth + 1)]
    inner: list[onnx.NodeProto] = [helper.make_node("Add", [names[depth], "x"], ["r"])]
    for level in reversed(range(depth)):
        go_on = helper.make_node("Identity", [f"c{level}"], [f"go{level}"])
        last = "r" if level == depth - 1 else f"r{level + 1}"
        body = helper.make_graph(
            [go_on, *inner], f"body{level}",
            [info(f"i{level}", [], 7), info(f"c{level}", [], 9), info(names[level + 1], None)],
            [info(f"go{level}", [], 9), info(last, None)],
        )  # fmt: skip
        inner = [helper.make_node("Loop", ["n", "true", names[level]], [f"r{level}"], f"loop{level}", body=body)]
    inner.append(helper.make_node("Identity", ["r0"], ["y"]))
    return model_of(inner, [tensor("n", 3), tensor("true", True, bool)], [info("x", [2, 3]), info("s0", [2, 3])])


@family
def nested_branches(draw: random.Random, folder: Path) -> onnx.ModelProto | Path:
    """If inside If, in one branch or in both."""
    both = draw.random() < 0.4
    depth = draw.choice([2, 4, 6] if both else [10, 28, 33, 60, 1000, 100_000])
    branch = helper.make_graph([helper.make_node("Relu", ["x"], ["r"])], "leaf", [], [info("r", None)])
    other = helper.make_graph([helper.make_node("Neg", ["x"], ["r"])], "other", [], [info("r", None)])
    # Messages are joined as bytes: protobuf does not write those that it would not read.
    inner = branch.SerializeToString()
    for level in range(depth):
        attributes = b"".join(
            _field(
                5, onnx.AttributeProto(name=name, type=onnx.AttributeProto.GRAPH).SerializeToString() + _field(6, graph)
            )
            for name, graph in (
                ("then_branch", inner),
                ("else_branch", inner if both else other.SerializeToString()),
            )
        )
        node = onnx.NodeProto(op_type="If", input=["c"], output=["r"]).SerializeToString() + attributes
        named = onnx.GraphProto(name=f"level{level}", output=[info("r", None)]).SerializeToString()
        inner = named + _field(1, node)
        if len(inner) > 1 << 19:
            break
    model = model_of([], [], [info("x", [2, 3]), info("c", [], 9)])
    model.graph.output[0].name = "r"
    frame = onnx.ModelProto()
    frame.CopyFrom(model)
    frame.ClearField("graph")
    return written(frame.SerializeToString() + _field(7, model.graph.SerializeToString() + _field(1, node)), folder)


def _field(number: int, data: bytes) -> bytes:
    """Return a message as a field of another one, in protobuf's wire format."""
    size = len(data)
    digits = bytearray()
    while size > 0x7F:
        digits.append(size & 0x7F | 0x80)
        size >>= 7
    return bytes([number << 3 | 2, *digits, size]) + data


@family
def functions(draw: random.Random, _: Path) -> onnx.ModelProto:
    """Functions that call one another, themselves, or are not there."""
    opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid("local", 1)]
    levels = draw.choice([10, 14, 17, 20, 40])

    def function(name: str, nodes: Sequence[onnx.NodeProto], imports: Any = opsets) -> onnx.FunctionProto:
        return helper.make_function("local", name, ["a"], ["b"], list(nodes), list(imports))

    def call(name: str, a: str, b: str, domain: str = "local") -> onnx.NodeProto:
        return helper.make_node(name, [a], [b], domain=domain)

    leaf = function("f0", [helper.make_node("Neg", ["a"], ["b"])])
    laughs = [function(f"f{n}", [call(f"f{n - 1}", "a", "c"), call(f"f{n - 1}", "c", "b")]) for n in range(1, levels)]
    deep = [function(f"f{n}", [call(f"f{n - 1}", "a", "b")]) for n in range(1, 20 * levels)]
    to_g = call("g", "x", "y")
    top = call(f"f{levels - 1}", "x", "y")
    return draw.choice(
        [
            lambda: model_of([top], functions=[leaf, *laughs], domains=["local"]),
            lambda: model_of([top], functions=[*reversed(laughs), leaf], domains=["local"]),
            lambda: model_of([call(f"f{20 * levels - 1}", "x", "y")], functions=[leaf, *deep], domains=["local"]),
            lambda: model_of([to_g], functions=[function("g", [call("g", "a", "b")])], domains=["local"]),
            lambda: model_of(
                [to_g],
                functions=[function("g", [call("h", "a", "b")]), function("h", [call("g", "a", "b")])],
                domains=["local"],
            ),
            lambda: model_of([to_g], functions=[leaf], domains=["local"]),
            lambda: model_of([call("f0", "x", "y")], functions=[leaf]),
            lambda: model_of([call("f0", "x", "y")], functions=[leaf, leaf], domains=["local"]),
            lambda: model_of(
                [to_g], functions=[leaf, function("g", [call("f0", "a", "b")], opsets[:1])],
                domains=["local"],
            ),
            lambda: model_of([helper.make_node("f0", [], ["y"], domain="local")], functions=[leaf], domains=["local"]),
            lambda: model_of(
                [helper.make_node("f0", ["x"] * 5, ["y", "z"], domain="local")], functions=[leaf], domains=["local"]
            ),
            lambda: model_of(
                [to_g],
                functions=[function("g", [helper.make_node("Neg", ["zz"], ["b"])])], domains=["local"],
            ),
        ]
    )()  # fmt: skip
