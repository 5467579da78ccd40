"""Calls of subgraphs, replaced by the operations of the subgraphs.

ONNX's version converter leaves the graphs of operators that it does not know as they are, at an old opset; operations
of the graph around are converted. The compiler finds repeated runs of operations itself and lowers them once, as a call
would.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import onnx

from ipujax.onnx.front_end import graphs_of, replace_nodes
from ipujax.popart.building.graphcore_operations import DOMAIN
from ipujax.popart.exceptions import popart_exception

_NOTE = "__"  # begins the names of annotations


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
