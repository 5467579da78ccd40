"""From a source to a graph at the newest opset."""

from __future__ import annotations

from collections.abc import Mapping

import onnx
import onnx.inliner
from onnx import helper

from ipujax.onnx.graphs import Graph
from ipujax.onnx.onnx_errors import OnnxModelError
from ipujax.onnx.reading.attribute_values import check_attribute_values
from ipujax.onnx.reading.files import Source, read_model
from ipujax.onnx.reading.from_proto import graph_from_proto
from ipujax.onnx.reading.old_nodes import rewrite_old_nodes
from ipujax.onnx.reading.validity import check_model, check_order, fill_types
from ipujax.onnx.reading.weights import detach_weights

_OLDEST_IR_WITH_FREE_INITIALIZERS = 4  # before, every initialiser had to be a graph input too


def read_graph(source: Source) -> Graph:
    """Return the graph of a model at the newest opset that onnx has.

    Args:
        source: path, bytes of a file, or `ModelProto`, which stays unchanged.

    Raises:
        OnnxModelError: a model that cannot be read, is not valid, or is newer than onnx.
    """
    model = read_model(source)
    return graph_of_model(model)


def graph_of_model(model: onnx.ModelProto) -> Graph:
    """Return the graph of a model, which is consumed; see `read_graph`."""
    check_order(model.graph)
    # The checker copies the model; weights of gigabytes would be serialised each time, up to 2 GiB.
    weights = detach_weights(model)
    model.ir_version = max(model.ir_version, _OLDEST_IR_WITH_FREE_INITIALIZERS)
    # Types before the check: exporters leave out those that inference finds, and the checker insists on them.
    fill_types(model)
    check_model(model)
    model = at_newest_opset(model)
    model = onnx.shape_inference.infer_shapes(model, data_prop=True)
    return graph_from_proto(model.graph, weights)


def at_newest_opset(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a model whose functions are inlined and whose standard nodes have the newest opset."""
    if model.functions:
        model = onnx.inliner.inline_local_functions(model, convert_version=True)
    newest = onnx.defs.onnx_opset_version()
    opset = _standard_opset(model)
    if opset > newest:
        hint = "upgrade onnx, or export for an earlier opset"
        raise OnnxModelError("the model is newer than onnx", expected=f"opset ≤ {newest}", got=f"{opset}", hint=hint)
    check_attribute_values(model, opset)
    rewrite_old_nodes(model, opset)
    return model


def _standard_opset(model: onnx.ModelProto) -> int:
    """Return the opset of ONNX's own operators; a model of other domains alone gets the newest."""
    versions: Mapping[str, int] = {entry.domain: entry.version for entry in model.opset_import}
    standard = versions.get("", versions.get("ai.onnx"))
    if standard is not None:
        return standard
    newest = onnx.defs.onnx_opset_version()
    model.opset_import.append(helper.make_opsetid("", newest))
    return newest
