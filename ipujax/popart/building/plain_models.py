"""Models that ONNX's own tools understand: annotations taken off, training nodes of old opsets replaced."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import onnx

from ipujax.popart.building.graphcore_operations import DOMAIN
from ipujax.popart.building.inlined_calls import inline_calls
from ipujax.popart.building.scan_bodies import join_scans

Annotations = Mapping[str, Any]
_PREFIX = "__"


def detach_annotations(model: onnx.ModelProto) -> dict[str, Annotations]:
    """Take the annotations off all nodes; return those of the main graph by the names of results. Calls are inlined.

    Training batch normalisations get PopART's operator, as ONNX has dropped their outputs since.

    Args:
        model: model to change in place.
    """
    graph = model.graph
    inline_calls(graph)
    annotations = {output: notes for node in graph.node for notes in [_detached(node)] for output in node.output}
    join_scans(graph)
    _fill_empty_scales(graph)
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


def use_strided_groups(graph: onnx.GraphProto) -> None:
    """Have all group normalisations of a graph and its subgraphs group every n-th channel.

    Args:
        graph: graph to change in place.
    """
    for node in graph.node:
        if (node.domain, node.op_type) == (DOMAIN, "GroupNormalization"):
            node.attribute.append(onnx.helper.make_attribute("strided", 1))
        for attribute in node.attribute:
            use_strided_groups(attribute.g)


def _fill_empty_scales(graph: onnx.GraphProto) -> None:
    """Give resizing by sizes the scales that opset 11 demands: none, as a tensor."""
    empty = [node for node in graph.node if node.op_type == "Resize" and len(node.input) > 3 and not node.input[2]]
    if empty:
        graph.initializer.append(onnx.helper.make_tensor(_NO_SCALES, onnx.TensorProto.FLOAT, [0], []))
    for node in empty:
        node.input[2] = _NO_SCALES


_NO_SCALES = "no scales"  # no name of a builder has spaces

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
    """Rewrite a node that ONNX reads otherwise than PopART."""
    # A training batch normalisation of old opsets gets PopART's operator: ONNX has dropped its outputs since.
    if node.op_type in _OF_ELEMENTS and any(a.name == "axes" and not a.ints for a in node.attribute):
        node.op_type = _OF_ELEMENTS[node.op_type]
        node.domain = DOMAIN if node.op_type == "Square" else ""
        del node.attribute[:]
    # PopART decides by the number of results whether a batch normalisation trains, ONNX by an attribute; statistics of
    # each element are gone since opset 9.
    values = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    is_old = sum(map(bool, node.output)) > 1 or values.get("spatial") == 0
    if node.op_type == "BatchNormalization" and is_old and node.domain in ("", "ai.onnx"):
        node.domain = DOMAIN
        _keep_attributes(node, ("epsilon", "momentum", "spatial"))
    if node.op_type == "Resize":
        _rewrite_resize(node, values)
    # ONNX exchanged the two sides of an odd padding after opset 11, whose text PopART follows.
    if node.op_type == "ConvTranspose" and "output_shape" in values and "pads" not in values:
        side = _OTHER_SIDE.get(values.get("auto_pad", b"NOTSET"), "NOTSET")
        _keep_attributes(node, [name for name in values if name != "auto_pad"])
        node.attribute.append(onnx.helper.make_attribute("auto_pad", side))


def _rewrite_resize(node: onnx.NodeProto, values: Annotations) -> None:
    """Rewrite PopART's name for the positions of PyTorch, and modes that opset 10 does not have."""
    names = ("nearest_mode", "coordinate_transformation_mode")
    rest = [name for name in values if name not in names]
    is_of_opset_10 = len(node.input) == 2
    if values.get("nearest_mode") == b"pytorch":
        _keep_attributes(node, rest)
        # It is what opset 10 has without a mode.
        pairs = [] if is_of_opset_10 else list(zip(names, ("floor", "asymmetric"), strict=True))
        node.attribute.extend(onnx.helper.make_attribute(*pair) for pair in pairs)
    elif is_of_opset_10 and "nearest_mode" in values:
        node.domain = DOMAIN


_OTHER_SIDE = {b"NOTSET": "SAME_UPPER", b"SAME_LOWER": "SAME_UPPER", b"SAME_UPPER": "SAME_LOWER", b"VALID": "VALID"}


def _keep_attributes(node: onnx.NodeProto, names: Sequence[str]) -> None:
    supported = [a for a in node.attribute if a.name in names]
    attributes = [onnx.AttributeProto.FromString(a.SerializeToString()) for a in supported]
    del node.attribute[:]
    node.attribute.extend(attributes)
