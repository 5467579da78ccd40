"""Hostile ONNX files for `onnx_hostile.py`: parts that do not belong together, and mutations of good files."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from benchmarks.onnx_hostile_models import FAMILIES, OPSET, body_of, family, huge, info, model_of, one, tensor, written


def hostile_models(folder: Path, count: int, seed: int) -> Iterator[tuple[str, Path]]:
    """Yield family and path of each model, one after another in a folder of its own."""
    names = list(FAMILIES)
    for n in range(count):
        family = names[n % len(names)]
        place = folder / f"{n:04}"
        place.mkdir()
        content = FAMILIES[family](random.Random(f"{seed} {n}"), place)
        path = content if isinstance(content, Path) else written(content.SerializeToString(), place)
        yield family, path


@family
def initialisers(draw: random.Random, _: Path) -> onnx.ModelProto:
    """Tensors whose shape, type and data do not belong together."""
    n = huge(draw)
    proto = tensor("w", np.ones((2, 3)), np.float32)
    kind = draw.choice(
        ["dims", "overflow", "negative", "type", "short", "long", "fields", "text", "sparse", "twice", "nan"]
    )
    model = model_of([helper.make_node("Add", ["x", "w"], ["y"])], [proto])
    row = model.graph.initializer[0]
    if kind in ("dims", "overflow", "negative"):
        dims = {"dims": [n], "overflow": [2**32, 2**32], "negative": [-1, -6]}[kind]
        row.ClearField("dims")
        row.dims.extend(dims)
        if draw.random() < 0.5:
            row.ClearField("raw_data")
    elif kind == "type":
        row.data_type = draw.choice([0, 8, 16, 99, 10**6, 6, 21, 23, 2**31 - 1])
    elif kind == "short":
        row.raw_data = row.raw_data[: draw.randrange(24)]
    elif kind == "long":
        row.raw_data = row.raw_data * 3
    elif kind == "fields":
        row.float_data.extend([1.0] * draw.randrange(9))
        row.int64_data.append(n)
    elif kind == "text":
        row.data_type = TensorProto.STRING
        row.string_data.append(b"\xff\xfe")
        row.ClearField("raw_data")
    elif kind == "twice":
        large = tensor("w", np.ones((512, 3)), np.float32)
        model.graph.initializer.extend([large, large])
    elif kind == "sparse":
        values = tensor("s", [1.0], np.float32)
        index = draw.choice([[0], [n], [[0, 0]], [-1], [[n, 0]]])
        dims = draw.choice([[n], [n, n], [2, 3], [-2, 3], [2**16, 2**17], [2**15, 2**14]])
        model.graph.sparse_initializer.append(helper.make_sparse_tensor(values, tensor("", index), dims))
        model.graph.node[0].input[1] = "s"
    else:
        model.graph.initializer[0].CopyFrom(tensor("w", [[np.nan, np.inf, -np.inf]] * 2, np.float32))
    return model


@family
def external_data(draw: random.Random, folder: Path) -> onnx.ModelProto:
    """External data beyond the end of a file, outside of the folder, in pipes, and read many times."""
    n = huge(draw)
    (folder / "data.bin").write_bytes(bytes(4096))
    with (folder / "holes.bin").open("wb") as file:
        file.truncate(2**36)
    os.mkfifo(folder / "pipe")
    (folder / "link").symlink_to("/etc/hostname")
    (folder / "loop").symlink_to("loop")
    (folder / "folder").mkdir()
    names = [
        "data.bin",
        "holes.bin",
        "pipe",
        "link",
        "loop",
        "folder",
        "../x",
        "/dev/zero",
        "none",
        "",
        "a\0b",
        "z" * 5000,
    ]
    facts: dict[str, Any] = {"location": draw.choice(names)}
    facts |= draw.choice([{}, {"offset": n}, {"length": n}, {"offset": -1}, {"length": "x"}, {"offset": "9" * 5000}])
    dims = draw.choice([[2, 3], [n], [2**33], [-1], [2**16, 2**14]])
    count = draw.choice([1, 1, 2000])
    model = model_of([helper.make_node("Add", ["x", "w0"], ["y"])])
    for number in range(count):
        row = model.graph.initializer.add(name=f"w{number}", data_type=1, dims=dims if count == 1 else [1024])
        row.data_location = TensorProto.EXTERNAL
        for key, value in (facts if count == 1 else {"location": "data.bin"}).items():
            row.external_data.add(key=key, value=str(value))
    return model


@family
def declarations(draw: random.Random, _: Path) -> onnx.ModelProto:
    """Extreme declared shapes, versions and names."""
    n = huge(draw)
    model = one("Relu", ["x"])
    kind = draw.choice(
        ["input", "output", "value", "version", "opset", "name", "twice", "type", "empty", "optional", "domain"]
    )
    if kind == "input":
        model.graph.input[0].CopyFrom(info("x", draw.choice([[n], [n, n], [0, n], [2**32, 2**32], [-n % 2**63]])))
    elif kind == "output":
        model.graph.output[0].CopyFrom(info("y", [n, n]))
    elif kind == "value":
        model.graph.value_info.append(info(draw.choice(["x", "y", "zz"]), [n]))
    elif kind == "version":
        model.ir_version = draw.choice([0, -1, 1, 2**62, 99])
    elif kind == "opset":
        model.opset_import[0].version = draw.choice([0, -1, 1, 5, 99, n, 2**62])
    elif kind == "name":
        model.graph.node[0].name = draw.choice(["n" * 10**6, "/" * 1000, "a\0b", "\n", "jit(f)", "ü" * 9])
    elif kind == "twice":
        model.graph.node.append(draw.choice([model.graph.node[0], helper.make_node("Neg", ["x"], ["x"])]))
    elif kind == "type":
        model.graph.input[0].type.tensor_type.elem_type = draw.choice([0, 8, 99, 16, 14, 10**8])
    elif kind == "empty":
        getattr(model.graph, draw.choice(["node", "output", "input"])).pop()
    elif kind == "domain":
        model.graph.node[0].domain = draw.choice(["nowhere", "ai.onnx", "ai.onnx.ml", "x" * 10**5])
    else:
        kind_of = helper.make_tensor_type_proto(1, [n])
        for _ in range(draw.choice([1, 20, 45])):
            kind_of = helper.make_optional_type_proto(helper.make_sequence_type_proto(kind_of))
        model.graph.input[0].type.CopyFrom(kind_of)
    return model


@family
def large_graphs(draw: random.Random, _: Path) -> onnx.ModelProto:
    """Many nodes, inputs and outputs; circles, and attributes of the wrong type."""
    kind = draw.choice(["circle", "long circle", "attributes", "many inputs", "many outputs", "gradient", "sequence"])
    if kind == "attributes":
        model = one("If", ["x"], [info("x", [], 9)])
        field = draw.choice(["i", "s", "floats", "tp"])
        value: Any = {"i": 3, "s": b"x", "floats": [1.0], "tp": helper.make_tensor_type_proto(1, [2])}[field]
        model.graph.node[0].attribute.extend(
            helper.make_attribute(name, value) for name in ("then_branch", "else_branch")
        )
        return model
    if kind == "many inputs":
        return one(draw.choice(["Concat", "Sum", "Max"]), ["x"] * 5000, axis=0)
    if kind == "many outputs":
        outputs = [f"y{n}" for n in range(5000)]
        node = helper.make_node("Split", ["x"], outputs, num_outputs=5000)
        return model_of([node, helper.make_node("Identity", ["y0"], ["y"])], [], [info("x", [5000])])
    if kind == "gradient":
        return _gradients(draw.choice([3, 25, 40]))
    if kind == "sequence":
        nodes = [helper.make_node("SequenceConstruct", ["x"] * 100, ["s0"])]
        nodes += [helper.make_node("SequenceInsert", [f"s{n}", "x"], [f"s{n + 1}"]) for n in range(300)]
        return model_of([*nodes, helper.make_node("ConcatFromSequence", ["s300"], ["y"], axis=0)])
    count = 20_000 if kind == "long circle" else 3
    nodes = [helper.make_node("Neg", [f"v{(n - 1) % count}"], [f"v{n}"]) for n in range(count)]
    return model_of([*nodes, helper.make_node("Neg", ["v0"], ["y"])])


def _gradients(count: int) -> onnx.ModelProto:
    domain = "ai.onnx.preview.training"
    nodes = [helper.make_node("Mul", ["x", "x"], ["v0"])]
    for n in range(count):
        nodes.append(helper.make_node("Gradient", ["x"], [f"d{n}"], domain=domain, xs=["x"], y=f"v{n}"))
        nodes.append(helper.make_node("Mul", [f"d{n}", f"v{n}"], [f"v{n + 1}"]))
    return model_of([*nodes, helper.make_node("Neg", [f"v{count}"], ["y"])], domains=[domain])


def good_model(draw: random.Random) -> onnx.ModelProto:
    """Return a small model that is fine: layers, arithmetic on shapes, a branch, a loop, a function, or images."""
    weights = [tensor("w", np.ones((3, 4)), np.float32), tensor("b", np.ones(4), np.float32)]
    mlp = model_of(
        [
            helper.make_node("Gemm", ["x", "w", "b"], ["h"], alpha=0.5),
            helper.make_node("Softmax", ["h"], ["y"], axis=1),
        ],
        weights,
    )
    shapes = model_of(
        [
            helper.make_node("Shape", ["x"], ["s"]), helper.make_node("Gather", ["s", "zero"], ["g"], axis=0),
            helper.make_node("Concat", ["g", "minus"], ["t"], axis=0), helper.make_node("Reshape", ["x", "t"], ["r"]),
            helper.make_node("Expand", ["r", "wide"], ["e"]), helper.make_node("Pad", ["e", "pads"], ["y"]),
        ],
        [tensor("zero", [0]), tensor("minus", [-1]), tensor("wide", [2, 3]), tensor("pads", [1, 0, 0, 1])],
    )  # fmt: skip
    image = [info("x", [1, 2, 6, 6])]
    cnn = model_of(
        [
            helper.make_node("Conv", ["x", "k"], ["h"], pads=[1, 1, 1, 1], strides=[2, 1]),
            helper.make_node("MaxPool", ["h"], ["p"], kernel_shape=[2, 2], strides=[1, 2]),
            helper.make_node("Resize", ["p", "", "scales"], ["z"], mode="linear"),
            helper.make_node("Flatten", ["z"], ["y"]),
        ],
        [tensor("k", np.ones((3, 2, 3, 3)), np.float32), tensor("scales", [1, 1, 2, 1.5], np.float32)],
        image,
    )
    body = body_of(
        [helper.make_node("Identity", ["c"], ["go"]), helper.make_node("Add", ["s0", "x"], ["s1"])],
        [info("s0", [2, 3])],
        ["go", "s1"],
    )
    loop = model_of(
        [helper.make_node("Loop", ["n", "true", "x"], ["y"], body=body)],
        [tensor("n", 3), tensor("true", True, bool)],
    )
    opsets = [helper.make_opsetid("", OPSET)]
    twice = helper.make_function("local", "Twice", ["a"], ["b"], [helper.make_node("Add", ["a", "a"], ["b"])], opsets)
    called = model_of([helper.make_node("Twice", ["x"], ["y"], domain="local")], functions=[twice], domains=["local"])
    old = one("Upsample", ["x"], opset=7, scales=[1.0, 2.0])
    return draw.choice([mlp, shapes, cnn, loop, called, old])


@family
def flipped_bytes(draw: random.Random, folder: Path) -> Path:
    """A good file with some bytes changed."""
    data = bytearray(good_model(draw).SerializeToString())
    for _ in range(draw.choice([1, 1, 2, 5, 20])):
        data[draw.randrange(len(data))] = draw.choice([draw.randrange(256), 0xFF, 0x7F, 0x00])
    return written(bytes(data), folder)


@family
def cut_files(draw: random.Random, folder: Path) -> Path:
    """A good file that ends early, or has bytes missing or repeated."""
    data = good_model(draw).SerializeToString()
    first, second = sorted(draw.randrange(len(data)) for _ in range(2))
    return written(draw.choice([data[:second], data[:first] + data[second:], data[:second] + data[first:]]), folder)


@family
def extreme_fields(draw: random.Random, folder: Path) -> Path:
    """A good file with some fields of its messages replaced by extremes."""
    model = good_model(draw)
    for _ in range(draw.choice([1, 1, 2, 4])):
        replace_field(draw, draw.choice(list(messages(model))))
    return written(model.SerializeToString(), folder)


def messages(message: Any) -> Iterator[Any]:
    """Yield a protobuf message and all inside of it."""
    yield message
    for field, value in message.ListFields():
        if field.type == field.TYPE_MESSAGE:
            for inner in value if field.is_repeated else [value]:
                yield from messages(inner)


_EXTREMES: dict[str, Sequence[Any]] = {
    "int": (0, -1, 1, 2**31 - 1, -(2**31), 7, 99),
    "int64": (0, -1, 2**63 - 1, -(2**63), 10**18, 2**32, 3),
    "float": (0.0, -1.0, float("nan"), float("inf"), 1e30, -1e30, 1e-30),
    "bytes": (b"", b"\xff\xfe", b"x" * 1000, b"constant", bytes(24)),
    "text": ("", "x", "no such name", "w", "y", "ai.onnx", "n" * 10000),
}


def replace_field(draw: random.Random, message: Any) -> None:
    """Replace a field of a message by an extreme, remove it, or repeat it."""
    fields = [field for field, _ in message.ListFields()]
    if not fields:
        return
    field = draw.choice(fields)
    kinds = {
        field.TYPE_INT64: "int64", field.TYPE_UINT64: "int64", field.TYPE_FLOAT: "float", field.TYPE_DOUBLE: "float",
        field.TYPE_BYTES: "bytes", field.TYPE_STRING: "text",
    }  # fmt: skip
    values = getattr(message, field.name)
    if field.type == field.TYPE_MESSAGE or draw.random() < 0.15:
        if field.is_repeated and draw.random() < 0.5:
            values.extend([values[draw.randrange(len(values))]])
        elif field.is_repeated:
            del values[draw.randrange(len(values))]
        else:
            message.ClearField(field.name)
        return
    extreme = draw.choice(_EXTREMES[kinds.get(field.type, "int")])
    try:
        if field.is_repeated:
            values[draw.randrange(len(values))] = extreme
        else:
            setattr(message, field.name, extreme)
    except ValueError:  # an enumeration without that number, or an integer that is out of range
        message.ClearField(field.name)
