"""Nodes of early opsets as nodes of the newest: the table of `rewrites`, applied to a model and its subgraphs.

onnx's own converter is not used: it takes nodes of early opsets over whose meaning is another one today (Hardmax,
Resize, Pad, PRelu), and stops at others (Scan, If, Loop, arithmetic with an axis).
"""

from __future__ import annotations

from collections.abc import Iterator

import onnx
from onnx import helper

from ipujax.onnx.onnx_errors import OnnxModelError
from ipujax.onnx.reading.onnx_protos import (
    STANDARD_DOMAINS,
    all_nodes,
    graphs_of,
    is_standard,
    marked_domain,
    opset_of,
    replace_nodes,
)
from ipujax.onnx.reading.rewrites import REWRITES, OldNode, Rewrite
from ipujax.onnx.registry import EARLY_DOMAIN, MICROSOFT_DOMAIN

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
        opsets = [opset_of(node, opset) for node in graph.node]
        for node, version in zip(graph.node, opsets, strict=True):
            node.domain = node.domain if version is None else ""
        if any(map(_row, graph.node, opsets)):
            # Subgraphs are part of their nodes: a node is replaced before they are visited.
            names = [node.name or str(n) for n, node in enumerate(graph.node)]
            rewritten = map(_rewritten, graph.node, opsets, names)
            replace_nodes(graph, [new for nodes in rewritten for new in nodes])
    imports = ((entry.domain, entry.version) for entry in model.opset_import)
    by_domain = {domain: version for domain, version in imports if not is_standard(domain)}
    model.ClearField("opset_import")
    versions = {"": onnx.defs.onnx_opset_version(), **by_domain, EARLY_DOMAIN: 1}
    model.opset_import.extend(helper.make_opsetid(domain, version) for domain, version in versions.items())


def mark_opsets(model: onnx.ModelProto, opset: int) -> None:
    """Name the opset of standard nodes in their domain, in functions of another opset than the model's, `opset`.

    A function is read by its own opset: once it is inlined, its nodes stand beside those of the model.

    Raises:
        OnnxModelError: a function that is newer than onnx.
    """
    own = {(function.domain, function.name) for function in model.functions}  # may be called as ONNX's operators are
    for function in model.functions:
        for entry in [each for each in function.opset_import if each.domain in STANDARD_DOMAINS]:
            check_known(entry.version, f"function {function.domain}:{function.name}")
            if entry.version == opset:
                continue
            marked = marked_domain(entry.version)
            for node in all_nodes(function.node):
                if node.domain in STANDARD_DOMAINS and (node.domain, node.op_type) not in own:
                    node.domain = marked
            entry.version = opset
            function.opset_import.append(helper.make_opsetid(marked, 1))


def check_known(opset: int, owner: str) -> None:
    """Refuse an opset that the installed onnx does not have; `owner` imports it."""
    newest = onnx.defs.onnx_opset_version()
    if opset > newest:
        hint = "upgrade onnx, or export for an earlier opset"
        raise OnnxModelError(f"{owner} is newer than onnx", expected=f"opset ≤ {newest}", got=f"{opset}", hint=hint)


def _rewritten(node: onnx.NodeProto, opset: int | None, name: str) -> Iterator[onnx.NodeProto]:
    row = _row(node, opset)
    if row is None:
        yield node
        return
    newer, rewrite = row
    for new in rewrite(OldNode(node, name)):
        # A rewrite makes its own operator in the form of the row's opset, all others in the newest.
        yield from _rewritten(new, newer, name) if new.op_type == node.op_type else [new]


def _row(node: onnx.NodeProto, opset: int | None) -> tuple[int, Rewrite] | None:
    """Return the first rewrite that a node of an opset, None if no standard one, needs, and the opset of its form."""
    if opset is None:
        return None
    return next((row for row in REWRITES.get(node.op_type, ()) if opset < row[0]), None)
