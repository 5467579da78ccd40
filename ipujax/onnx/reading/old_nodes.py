"""Nodes of early opsets as nodes of the newest: the table of `rewrites`, applied to a model and its subgraphs.

onnx's own converter is not used: it takes nodes of early opsets over whose meaning is another one today (Hardmax,
Resize, Pad, PRelu), and stops at others (Scan, If, Loop, arithmetic with an axis).
"""

from __future__ import annotations

from collections.abc import Iterator

import onnx
from onnx import helper

from ipujax.onnx.reading.onnx_protos import all_nodes, graphs_of, replace_nodes
from ipujax.onnx.reading.rewrites import REWRITES, OldNode, Rewrite
from ipujax.onnx.registry import EARLY_DOMAIN, MICROSOFT_DOMAIN

STANDARD_DOMAINS = ("", "ai.onnx")
# Operators that ONNX Runtime has among ONNX's own, and that ONNX lacks: they are read as those of its own domain.
# Source: ONNX Runtime, its schemas of the domain ai.onnx.
_UNOFFICIAL = frozenset({"Affine", "ImageScaler", "ParametricSoftplus", "ScaledTanh", "SimplifiedLayerNormalization"})


def adopt_unofficial(model: onnx.ModelProto) -> None:
    """Move the nodes of ONNX Runtime's own operators among ONNX's to their domain, in place."""
    in_functions = (node for function in model.functions for node in all_nodes(function.node))
    adopted = [
        node
        for node in (*all_nodes(model.graph.node), *in_functions)
        if node.op_type in _UNOFFICIAL and node.domain in STANDARD_DOMAINS
    ]
    for node in adopted:
        node.domain = MICROSOFT_DOMAIN
    for importer in (model, *model.functions) if adopted else ():
        if all(entry.domain != MICROSOFT_DOMAIN for entry in importer.opset_import):
            importer.opset_import.append(helper.make_opsetid(MICROSOFT_DOMAIN, 1))


def rewrite_old_nodes(model: onnx.ModelProto, opset: int) -> None:
    """Rewrite the nodes in place, and the model's opsets with them; `opset` is its version of ONNX's own operators.

    Raises:
        OnnxModelError: a node that has no counterpart in the newest opset.
    """
    for graph in graphs_of(model.graph):
        if any(_row(node, opset) for node in graph.node):
            # Subgraphs are part of their nodes: a node is replaced before they are visited.
            named = [(node.name or str(n), node) for n, node in enumerate(graph.node)]
            replace_nodes(graph, [new for name, node in named for new in _rewritten(node, opset, name)])
    by_domain = {entry.domain: entry.version for entry in model.opset_import if entry.domain not in STANDARD_DOMAINS}
    model.ClearField("opset_import")
    versions = {"": onnx.defs.onnx_opset_version(), **by_domain, EARLY_DOMAIN: 1}
    model.opset_import.extend(helper.make_opsetid(domain, version) for domain, version in versions.items())


def align_functions(model: onnx.ModelProto, opset: int) -> None:
    """Give functions the model's opset, `opset`, where their nodes mean the same in it, so that they can be inlined."""
    for function in model.functions:
        for entry in function.opset_import:
            oldest = min(entry.version, opset)
            if entry.domain in STANDARD_DOMAINS and not any(_row(node, oldest) for node in all_nodes(function.node)):
                entry.version = opset


def _rewritten(node: onnx.NodeProto, opset: int, name: str) -> Iterator[onnx.NodeProto]:
    row = _row(node, opset)
    if row is None:
        yield node
        return
    newer, rewrite = row
    for new in rewrite(OldNode(node, name)):
        # A rewrite makes its own operator in the form of the row's opset, all others in the newest.
        yield from _rewritten(new, newer, name) if new.op_type == node.op_type else [new]


def _row(node: onnx.NodeProto, opset: int) -> tuple[int, Rewrite] | None:
    """Return the first rewrite that a node of an opset needs, and the opset whose form it makes."""
    rows = REWRITES.get(node.op_type, ()) if node.domain in STANDARD_DOMAINS else ()
    return next((row for row in rows if opset < row[0]), None)
