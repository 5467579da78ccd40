"""Models that ONNX's own tools understand: annotations taken off, training nodes of old opsets replaced.

Calls of subgraphs are replaced by the operations of the subgraphs. ONNX's version converter leaves the graphs of
operators that it does not know as they are, at an old opset; operations of the graph around are converted. The compiler
finds repeated runs of operations itself and lowers them once, as a call would.

A scan as PopART means it has a body that gets slices that keep the scanned axis, with length 1; its results are joined.
ONNX's bodies get slices without the axis, and their results are stacked along a new one. So each body begins with the
missing axis, and the stacked results are joined behind the scan.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import onnx

from ipujax.onnx.front_end import graphs_of, replace_nodes
from ipujax.popart.building.builder_operations import DOMAIN
from ipujax.popart.exceptions import popart_exception

_NOTE = "__"  # begins the names of annotations
Annotations = Mapping[str, Any]


def inline_calls(graph: onnx.GraphProto) -> None:
    """Replace all calls of a graph and its subgraphs.

    Args:
        graph: graph to change in place.

    Raises:
        popart_exception: a call with another number of operands or results than its subgraph.
    """
    for inner in graphs_of(graph):
        replace_nodes(inner, _inlined(inner.node, inner))


def _inlined(nodes: Sequence[onnx.NodeProto], graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    """Yield nodes, each call replaced by copies of its subgraph's nodes with the caller's names."""
    for node in nodes:
        if (node.domain, node.op_type) != (DOMAIN, "Call"):
            yield node
            continue
        callee = next(attribute.g for attribute in node.attribute if attribute.name == "callee")
        _check(node, callee)
        renamed = dict(zip((value.name for value in callee.input), node.input, strict=True))
        results = [value.name for value in callee.output]
        # A result that is an operand, or is there twice, is copied.
        direct = {name: out for name, out in zip(results, node.output, strict=True) if name not in renamed}
        renamed |= direct
        # The name of a result is unique in the graph, so those behind it are.
        prefix = node.output[0] if node.output else f"{node.name or 'Call'}/{len(graph.initializer)}"
        body = [onnx.NodeProto.FromString(inner.SerializeToString()) for inner in callee.node]
        inside = {name for inner in body for name in inner.output} | {tensor.name for tensor in callee.initializer}
        renamed |= {name: f"{prefix}/{name}" for name in inside if name not in renamed}
        for tensor in callee.initializer:
            copied = onnx.TensorProto.FromString(tensor.SerializeToString())
            copied.name = renamed[tensor.name]
            graph.initializer.append(copied)
        # The call's stage or phase holds for its operations, unless they have their own.
        notes = [attribute for attribute in node.attribute if attribute.name.startswith(_NOTE)]
        for inner in body:
            _rename(inner, renamed)
            inner.name = "/".join(filter(None, (node.name, inner.name)))
            annotated = {attribute.name for attribute in inner.attribute}
            inner.attribute.extend(note for note in notes if note.name not in annotated)
        yield from _inlined(body, graph)
        for name, out in zip(results, node.output, strict=True):
            if renamed.get(name, name) != out:
                yield onnx.helper.make_node("Identity", [renamed.get(name, name)], [out])


def _check(node: onnx.NodeProto, callee: onnx.GraphProto) -> None:
    pairs = (("inputs", node.input, callee.input), ("outputs", node.output, callee.output))
    for direction, names, expected in pairs:
        if len(names) != len(expected):
            raise popart_exception(
                f"For CallOp '{node.name}', number of {direction} ({len(names)}) does not match"
                f" that of the callee subgraph ({len(expected)})",
                expected=len(expected),
                got=len(names),
            )


def _rename(node: onnx.NodeProto, renamed: dict[str, str]) -> None:
    """Rename the operands and results of a node, and the outer values that its subgraphs read."""
    inputs = [renamed.get(name, name) for name in node.input]
    outputs = [renamed.get(name, name) for name in node.output]
    del node.input[:]
    del node.output[:]
    node.input.extend(inputs)
    node.output.extend(outputs)
    for attribute in node.attribute:
        if attribute.HasField("g"):
            # An input of a subgraph hides the outer value of its name.
            shadowed = {value.name for value in attribute.g.input}
            visible = {name: other for name, other in renamed.items() if name not in shadowed}
            for inner in attribute.g.node:
                _rename(inner, visible)
            for value in attribute.g.output:
                value.name = visible.get(value.name, value.name)


def join_scans(graph: onnx.GraphProto) -> None:
    """Rewrite the scans of a graph and its subgraphs in place."""
    for inner in graphs_of(graph):
        if any(node.op_type == "Scan" for node in inner.node):
            replace_nodes(inner, (new for node in inner.node for new in _with_joined_results(node)))


def _with_joined_results(node: onnx.NodeProto) -> Iterator[onnx.NodeProto]:
    """Yield a node, or a scan in ONNX's form with the operators that join its stacked results; see the module."""
    if node.op_type != "Scan":
        yield node
        return
    values = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    scanned = values["num_scan_inputs"]
    states = len(node.input) - scanned
    body = next(attribute.g for attribute in node.attribute if attribute.name == "body")
    _keep_axes(body, states, values.get("scan_input_axes", [0] * scanned))
    outputs = list(node.output)
    stacked = [f"{name}/stacked" if name else "" for name in outputs[states:]]
    axes = values.get("scan_output_axes", [0] * len(stacked))
    del node.output[states:]
    node.output.extend(stacked)
    rest = [onnx.AttributeProto.FromString(a.SerializeToString()) for a in node.attribute
            if a.name != "scan_output_axes"]  # fmt: skip
    del node.attribute[:]
    node.attribute.extend(rest)
    yield node
    for before, after, axis in zip(stacked, outputs[states:], axes, strict=True):
        if after:
            yield onnx.helper.make_node("ScanJoin", [before], [after], f"{node.name}/{after}", domain=DOMAIN, axis=axis)


def _keep_axes(body: onnx.GraphProto, states: int, axes: Sequence[Any]) -> None:
    """Rename the scanned inputs of a scan's body, and begin it with operators that restore their scanned axes."""
    added: list[onnx.NodeProto] = []
    for value, axis in zip(list(body.input)[states:], axes, strict=True):
        name = value.name
        value.name = f"{name}/slice"
        # A declared shape is that of the slice with its axis; the evaluation finds shapes itself.
        value.ClearField("type")
        added.append(onnx.helper.make_node("ScanSlice", [value.name], [name], value.name, domain=DOMAIN, axis=axis))
    replace_nodes(body, [*added, *body.node])


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
    notes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute if a.name.startswith(_NOTE)}
    rest = [a for a in node.attribute if not a.name.startswith(_NOTE)]
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
    # PopART reads an empty list of axes as none, see `_OF_ELEMENTS`.
    if node.op_type in _OF_ELEMENTS and any(a.name == "axes" and not a.ints for a in node.attribute):
        node.op_type = _OF_ELEMENTS[node.op_type]
        node.domain = DOMAIN if node.op_type == "Square" else ""
        del node.attribute[:]
    # PopART decides by the number of results whether a batch normalisation trains, ONNX by an attribute; statistics of
    # each element are gone since opset 9. ONNX has dropped results since, so these get PopART's operator.
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
    """Write nearest positions as ONNX names them: PopART's "pytorch", and modes that a node of opset 10 cannot have.

    The latter get an operator of ai.graphcore, which has the attributes of later opsets.
    """
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
