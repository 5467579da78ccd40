"""Checks of a model before it is converted: declared types, names, order, onnx's own checker.

onnx's checker demands a type and a shape of every graph input and output, which early guides and builders leave out.
Missing types are inferred, else float32; a shape that stays unknown is taken from the arguments of a call.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from graphlib import CycleError, TopologicalSorter

import onnx
import onnx.checker
import onnx.shape_inference

from ipujax.onnx.onnx_errors import OnnxModelError
from ipujax.onnx.reading.proto_graphs import graphs_of
from ipujax.onnx.registry import EARLY_DOMAIN


def check_order(graph: onnx.GraphProto, outer: Collection[str] = ()) -> None:
    """Refuse names that nothing defines, and circles."""
    initializers = [*(t.name for t in graph.initializer), *(s.values.name for s in graph.sparse_initializer)]
    defined = {*outer, *(value.name for value in graph.input), *initializers}
    producers = {name: n for n, node in enumerate(graph.node) for name in node.output if name}
    for n, node in enumerate(graph.node):
        missing = [name for name in _read_names(node) if name not in defined and name not in producers]
        if missing:
            message = f"{_label(node, n)} reads {missing[0]!r}, which nothing defines"
            hint = "the model lacks an initialiser or an input: export it again with its weights"
            raise OnnxModelError(message, expected="an input, an initialiser or an output of a node", hint=hint)
        for subgraph in _subgraphs(node):
            check_order(subgraph, defined | set(producers))
    edges = {
        n: {producers[name] for name in _read_names(node) if name in producers} for n, node in enumerate(graph.node)
    }
    try:
        TopologicalSorter(edges).prepare()
    except CycleError as error:
        circle = " → ".join(_label(graph.node[n], n) for n in error.args[1])
        raise OnnxModelError("the graph has a cycle", expected="an acyclic graph", got=circle) from error
    for value in graph.output:
        if value.name not in defined and value.name not in producers:
            message = f"graph {graph.name!r} has an output {value.name!r} that nothing defines"
            raise OnnxModelError(message, expected="an input, an initialiser or an output of a node")


def _subgraphs(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    for attribute in node.attribute:
        yield from ([attribute.g] if attribute.HasField("g") else [])
        yield from attribute.graphs


def _read_names(node: onnx.NodeProto) -> list[str]:
    return [name for name in node.input if name]


def _label(node: onnx.NodeProto, n: int) -> str:
    return f"node {node.name or n!r} ({node.op_type})"


def fill_types(model: onnx.ModelProto) -> None:
    """Fill in missing types and shapes of inputs and outputs, as far as they are known."""
    for graph in graphs_of(model.graph):
        complete = [value for value in graph.value_info if _has_type(value) and _has_shape(value)]
        if len(complete) < len(graph.value_info):
            complete = [onnx.ValueInfoProto.FromString(value.SerializeToString()) for value in complete]
            graph.ClearField("value_info")
            graph.value_info.extend(complete)
    for value in model.graph.input:
        if not _has_type(value):
            value.type.tensor_type.elem_type = onnx.TensorProto.FLOAT
    if all(_has_type(value) and _has_shape(value) for value in model.graph.output):
        return
    # An output whose declared type is incomplete would stop the inference: it is inferred from a model without.
    inferred = _inferred(model)
    for value in model.graph.output:
        declared = inferred.get(value.name)
        if declared is None:
            continue
        if not _has_type(value) or not _has_shape(value):
            value.type.CopyFrom(declared.type)


def _inferred(model: onnx.ModelProto) -> dict[str, onnx.ValueInfoProto]:
    bare = onnx.ModelProto()
    bare.CopyFrom(model)
    for value in bare.graph.output:
        value.ClearField("type")
    graph = onnx.shape_inference.infer_shapes(bare).graph
    return {value.name: value for value in (*graph.value_info, *graph.input, *graph.output) if _has_type(value)}


def _has_type(value: onnx.ValueInfoProto) -> bool:
    kind = value.type.WhichOneof("value")
    return kind is not None and (kind != "tensor_type" or value.type.tensor_type.elem_type != 0)


def _has_shape(value: onnx.ValueInfoProto) -> bool:
    return not value.type.HasField("tensor_type") or value.type.tensor_type.HasField("shape")


def check_model(model: onnx.ModelProto) -> None:
    """Run onnx's checker, and refuse a model with the checker's text."""
    checked = onnx.ModelProto()
    checked.CopyFrom(model)
    for graph in graphs_of(checked.graph):
        for value in (*graph.input, *graph.output):
            _complete(value)
        for node in graph.node:
            # Deprecated before opset 21 for a fault of its body; exporters wrote it, and it is defined.
            node.domain = EARLY_DOMAIN if node.op_type == "GroupNormalization" and not node.domain else node.domain
    checked.opset_import.append(onnx.helper.make_opsetid(EARLY_DOMAIN, 1))
    try:
        onnx.checker.check_model(checked)
    except onnx.checker.ValidationError as error:
        raise OnnxModelError("the model is not valid ONNX", got=str(error).strip()) from error


def _complete(value: onnx.ValueInfoProto) -> None:
    """Give a value whose type or rank is open one that the checker accepts; it does not compare them with nodes."""
    if not _has_type(value):
        value.type.tensor_type.elem_type = onnx.TensorProto.FLOAT
    if not _has_shape(value):
        value.type.tensor_type.shape.SetInParent()
