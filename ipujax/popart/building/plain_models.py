"""Models that ONNX's own tools understand: annotations taken off, training nodes of old opsets replaced."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import onnx

from ipujax.popart.building.graphcore_operations import DOMAIN
from ipujax.popart.building.inlined_calls import inline_calls

Annotations = Mapping[str, Any]
_PREFIX = "__"


def detach_annotations(model: onnx.ModelProto) -> dict[str, Annotations]:
    """Take the annotations off all nodes; return those of the main graph by the names of results. Calls are inlined.

    Training batch normalisations get PopART's operator, as ONNX has dropped their outputs since.

    Args:
        model: changed.
    """
    graph = model.graph
    inline_calls(graph)
    annotations = {output: notes for node in graph.node for notes in [_detached(node)] for output in node.output}
    for node in graph.node:
        _rewrite(node)
    if DOMAIN not in {opset.domain for opset in model.opset_import}:
        model.opset_import.append(onnx.helper.make_opsetid(DOMAIN, 1))
    return annotations


def _detached(node: onnx.NodeProto) -> Annotations:
    """Take the annotations off a node and the nodes of its subgraphs; return those of the node."""
    notes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute if a.name.startswith(_PREFIX)}
    rest = [a for a in node.attribute if not a.name.startswith(_PREFIX)]
    for attribute in rest:
        for inner in attribute.g.node:
            _detached(inner)
            _rewrite(inner)
    if notes:
        attributes = [onnx.AttributeProto.FromString(a.SerializeToString()) for a in rest]
        del node.attribute[:]
        node.attribute.extend(attributes)
    return notes


# Reductions over no axis → the operator of each element; ONNX reads an empty list as all axes.
_OF_ELEMENTS = {
    "ReduceL1": "Abs",
    "ReduceL2": "Abs",
    "ReduceLogSum": "Log",
    "ReduceLogSumExp": "Identity",
    "ReduceMax": "Identity",
    "ReduceMean": "Identity",
    "ReduceMin": "Identity",
    "ReduceProd": "Identity",
    "ReduceSum": "Identity",
    "ReduceSumSquare": "Square",
}


def _rewrite(node: onnx.NodeProto) -> None:
    """Rewrite a node that ONNX reads otherwise than PopART.

    A training batch normalisation of old opsets gets PopART's operator: ONNX has dropped its outputs since.
    """
    if node.op_type in _OF_ELEMENTS and any(a.name == "axes" and not a.ints for a in node.attribute):
        node.op_type = _OF_ELEMENTS[node.op_type]
        node.domain = DOMAIN if node.op_type == "Square" else ""
        del node.attribute[:]
    # PopART decides by the number of results whether a batch normalisation trains, ONNX by an attribute.
    is_training = node.op_type == "BatchNormalization" and sum(map(bool, node.output)) > 1
    if is_training and node.domain in ("", "ai.onnx"):
        node.domain = DOMAIN
        supported = [a for a in node.attribute if a.name in ("epsilon", "momentum")]
        attributes = [onnx.AttributeProto.FromString(a.SerializeToString()) for a in supported]
        del node.attribute[:]
        node.attribute.extend(attributes)
