"""Scans as PopART means them: a body gets slices that keep the scanned axis, with length 1, and its results are joined.

ONNX's bodies get slices without the axis, and their results are stacked along a new one. So each body begins with the
missing axis, and the stacked results are joined behind the scan.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import onnx

from ipujax.onnx.front_end import graphs_of, replace_nodes
from ipujax.popart.building.graphcore_operations import DOMAIN


def join_scans(graph: onnx.GraphProto) -> None:
    """Rewrite the scans of a graph and its subgraphs in place."""
    for inner in graphs_of(graph):
        if any(node.op_type == "Scan" for node in inner.node):
            replace_nodes(inner, (new for node in inner.node for new in _with_joined_results(node)))


def _with_joined_results(node: onnx.NodeProto) -> Iterator[onnx.NodeProto]:
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
    added: list[onnx.NodeProto] = []
    for value, axis in zip(list(body.input)[states:], axes, strict=True):
        name = value.name
        value.name = f"{name}/slice"
        # A declared shape is that of the slice with its axis; the evaluation finds shapes itself.
        value.ClearField("type")
        added.append(onnx.helper.make_node("ScanSlice", [value.name], [name], value.name, domain=DOMAIN, axis=axis))
    replace_nodes(body, [*added, *body.node])
