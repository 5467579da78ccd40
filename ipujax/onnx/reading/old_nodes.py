"""Nodes of early opsets that onnx's converter refuses, as nodes of the newest.

The rewritten nodes go through the converter under a domain of their own, which it leaves alone. They are

- `broadcast=1` of arithmetic before opset 7, whose `axis` says where the second operand's dimensions go;
- And, Or, Xor, Equal, Greater and Less of opset 1, which broadcast in the same way;
- `PRelu` with a slope for each channel, which it converts to one for each last index;
- `Tile` of opset 1: one axis and its number of repeats;
- recurrent layers of opsets 1 and 3 with `output_sequence`;
- `Resize` and `Upsample` before opset 11, whose positions are not at the middle of elements;
- `Pad` before opset 11 with a value that its mode does not read.

Source: ONNX, docs/Changelog.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import onnx
from onnx import helper

from ipujax.onnx.onnx_errors import OnnxModelError
from ipujax.onnx.reading.proto_graphs import graphs_of, replace_nodes

_REWRITTEN = "ipujax.newest"  # domain of nodes that are already at the newest opset
_ARITHMETIC = ("Add", "Sub", "Mul", "Div", "Pow")
_LOGIC = ("And", "Or", "Xor", "Equal", "Greater", "Less")
_RECURRENT = ("LSTM", "GRU", "RNN")
_BROADCASTING_OPSET = 7  # from here on operands broadcast as NumPy's do
_HALF_PIXEL_OPSET = 11  # from here on Resize says where its positions are, and Pad takes operands

Ranks = Mapping[str, int]


def rewrite_old_nodes(model: onnx.ModelProto, opset: int) -> None:
    """Rewrite the nodes in place that the converter refuses; `opset` is the model's version of ONNX's own operators."""
    table = _rewrites(opset)
    if not any(node.op_type in table for graph in graphs_of(model.graph) for node in graph.node):
        return
    inferred = onnx.shape_inference.infer_shapes(model).graph
    ranks = _ranks(inferred)
    _declare_results(model.graph, inferred, table)
    for graph in graphs_of(model.graph):
        named = [(f"{node.name}_{n}", node) for n, node in enumerate(graph.node)]
        replace_nodes(graph, (new for prefix, node in named for new in _rewritten(node, opset, ranks, prefix)))
    model.opset_import.append(helper.make_opsetid(_REWRITTEN, 1))


def restore_domain(model: onnx.ModelProto) -> None:
    """Give the rewritten nodes ONNX's own domain, after the converter."""
    for graph in graphs_of(model.graph):
        for node in graph.node:
            if node.domain == _REWRITTEN:
                node.domain = ""
    imports = [entry for entry in model.opset_import if entry.domain != _REWRITTEN]
    versions = [(entry.domain, entry.version) for entry in imports]
    model.ClearField("opset_import")
    model.opset_import.extend(helper.make_opsetid(domain, version) for domain, version in versions)


def _rewrites(opset: int) -> Mapping[str, Rewrite]:
    if opset >= _HALF_PIXEL_OPSET:
        return {}
    return _REWRITES if opset < _BROADCASTING_OPSET else _REWRITES_OF_IMAGES


def _declare_results(graph: onnx.GraphProto, inferred: onnx.GraphProto, table: Mapping[str, Rewrite]) -> None:
    """Declare the results of nodes that leave ONNX's domain: the converter needs ranks behind them."""
    results = {name for node in graph.node if node.op_type in table for name in node.output}
    declared = {value.name for value in (*graph.value_info, *graph.output)}
    graph.value_info.extend(v for v in inferred.value_info if v.name in results - declared)


def _ranks(graph: onnx.GraphProto) -> Ranks:
    values = (*graph.input, *graph.value_info, *graph.output)
    ranks = {v.name: len(v.type.tensor_type.shape.dim) for v in values if v.type.tensor_type.HasField("shape")}
    return ranks | {tensor.name: len(tensor.dims) for tensor in graph.initializer}


def _rewritten(node: onnx.NodeProto, opset: int, ranks: Ranks, prefix: str) -> Iterator[onnx.NodeProto]:
    attributes = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
    rewrite = _rewrites(opset).get(node.op_type) if node.domain in ("", "ai.onnx") else None
    nodes = None if rewrite is None else rewrite(node, attributes, ranks, prefix)
    if nodes is None:
        yield node
        return
    for new in nodes:
        new.domain = _REWRITTEN
        yield new


Rewrite = Callable[[onnx.NodeProto, Mapping[str, object], Ranks, str], list[onnx.NodeProto] | None]


def _arithmetic(node: onnx.NodeProto, attributes: Mapping, ranks: Ranks, prefix: str) -> list[onnx.NodeProto] | None:
    """Rewrite a broadcast with an axis; the converter knows all other arithmetic."""
    return _broadcast(node, attributes, ranks, prefix) if {"broadcast", "axis"} <= attributes.keys() else None


def _logic(node: onnx.NodeProto, attributes: Mapping, ranks: Ranks, prefix: str) -> list[onnx.NodeProto]:
    return _broadcast(node, attributes, ranks, prefix)


def _broadcast(node: onnx.NodeProto, attributes: Mapping, ranks: Ranks, prefix: str) -> list[onnx.NodeProto]:
    a, b = node.input
    if not attributes.get("broadcast") or "axis" not in attributes or ranks.get(b) == 0:
        return [helper.make_node(node.op_type, [a, b], node.output, node.name)]
    for name in (a, b):
        if name not in ranks:
            message = f"node {node.name!r} ({node.op_type}) broadcasts at an axis, and the rank of {name!r} is unknown"
            raise OnnxModelError(message, expected="shapes of all inputs", hint="declare them in the model")
    axis = attributes["axis"] % ranks[a]
    trailing = ranks[a] - axis - ranks[b]
    if trailing < 0:
        message = f"node {node.name!r} ({node.op_type}) broadcasts beyond the last axis"
        raise OnnxModelError(message, expected=f"axis + {ranks[b]} ≤ {ranks[a]}", got=f"axis {axis}")
    if trailing == 0:
        return [helper.make_node(node.op_type, [a, b], node.output, node.name)]
    axes = range(ranks[b], ranks[b] + trailing)
    return [
        _integers(f"{prefix}_axes", axes),
        helper.make_node("Unsqueeze", [b, f"{prefix}_axes"], [f"{prefix}_operand"]),
        helper.make_node(node.op_type, [a, f"{prefix}_operand"], node.output, node.name),
    ]


def _prelu(node: onnx.NodeProto, attributes: Mapping, ranks: Ranks, prefix: str) -> list[onnx.NodeProto] | None:
    """Rewrite a `PRelu` with a slope for each channel, which are the second dimension; the newest aligns the last."""
    x, slope = node.input
    trailing = ranks.get(x, 0) - 2
    if trailing <= 0 or ranks.get(slope) != 1:
        return None
    return [
        _integers(f"{prefix}_axes", range(1, 1 + trailing)),
        helper.make_node("Unsqueeze", [slope, f"{prefix}_axes"], [f"{prefix}_slope"]),
        helper.make_node("PRelu", [x, f"{prefix}_slope"], node.output, node.name),
    ]


def _tile(node: onnx.NodeProto, attributes: Mapping, ranks: Ranks, prefix: str) -> list[onnx.NodeProto] | None:
    """Rewrite `Tile(x, tiles, axis)`: repeats are 1 but for one axis."""
    if len(node.input) != 3:
        return None
    x, tiles, axis = node.input
    names = ("one", "shape", "rank", "ones", "axis", "tiles", "repeats")
    unit, shape, rank, ones, index, update, repeats = (f"{prefix}_{name}" for name in names)
    integer = onnx.TensorProto.INT64
    return [
        _integers(unit, [1]),
        helper.make_node("Shape", [x], [shape]),
        helper.make_node("Shape", [shape], [rank]),
        helper.make_node("Expand", [unit, rank], [ones]),
        helper.make_node("Cast", [axis], [f"{index}_integer"], to=integer),
        helper.make_node("Reshape", [f"{index}_integer", unit], [index]),
        helper.make_node("Cast", [tiles], [f"{update}_integer"], to=integer),
        helper.make_node("Reshape", [f"{update}_integer", unit], [update]),
        helper.make_node("ScatterElements", [ones, index, update], [repeats]),
        helper.make_node("Tile", [x, repeats], node.output, node.name),
    ]


def _recurrent(node: onnx.NodeProto, attributes: Mapping, ranks: Ranks, prefix: str) -> list[onnx.NodeProto]:
    """Rewrite a recurrent layer: the attribute `output_sequence` is gone, results are there where they have a name."""
    supported = {name: value for name, value in attributes.items() if name != "output_sequence"}
    return [helper.make_node(node.op_type, node.input, node.output, node.name, **supported)]


def _resize(node: onnx.NodeProto, attributes: Mapping, ranks: Ranks, prefix: str) -> list[onnx.NodeProto] | None:
    """Rewrite a resizing by scales; the converter takes its positions for those of the newest."""
    positions = {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
    mode = attributes.get("mode", b"nearest")
    if len(node.input) == 2:
        x, scales = node.input
        return [helper.make_node("Resize", [x, "", scales], node.output, node.name, mode=mode, **positions)]
    if "scales" not in attributes:
        return None
    constant = helper.make_node("Constant", [], [f"{prefix}_scales"], value_floats=attributes["scales"])
    operands = [node.input[0], "", f"{prefix}_scales"]
    return [constant, helper.make_node("Resize", operands, node.output, node.name, mode=mode, **positions)]


def _pad(node: onnx.NodeProto, attributes: Mapping, ranks: Ranks, prefix: str) -> list[onnx.NodeProto] | None:
    """Rewrite a padding that repeats elements; the converter leaves the value it is padded with."""
    if attributes.get("mode", b"constant") == b"constant" or "pads" not in attributes:
        return None
    pads = _integers(f"{prefix}_pads", attributes["pads"])
    return [
        pads,
        helper.make_node("Pad", [node.input[0], f"{prefix}_pads"], node.output, node.name, mode=attributes["mode"]),
    ]


def _integers(name: str, values: object) -> onnx.NodeProto:
    return helper.make_node("Constant", [], [name], value_ints=list(values))  # type: ignore[call-overload]


_REWRITES_OF_IMAGES: Mapping[str, Rewrite] = {"Resize": _resize, "Upsample": _resize, "Pad": _pad}
_REWRITES: Mapping[str, Rewrite] = {
    **_REWRITES_OF_IMAGES,
    **dict.fromkeys(_ARITHMETIC, _arithmetic),
    **dict.fromkeys(_LOGIC, _logic),
    **dict.fromkeys(_RECURRENT, _recurrent),
    "PRelu": _prelu,
    "Tile": _tile,
}
