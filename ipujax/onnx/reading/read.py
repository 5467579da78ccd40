"""From a source to a graph at the newest opset."""

from __future__ import annotations

from collections.abc import Mapping

import onnx
from onnx import helper

from ipujax.onnx.budget import Budget
from ipujax.onnx.graphs import Graph
from ipujax.onnx.onnx_errors import OnnxModelError
from ipujax.onnx.reading.attribute_values import check_attribute_values
from ipujax.onnx.reading.files import Source, read_model
from ipujax.onnx.reading.from_proto import graph_from_proto
from ipujax.onnx.reading.local_functions import check_functions
from ipujax.onnx.reading.old_nodes import adopt_unofficial, align_functions, rewrite_old_nodes
from ipujax.onnx.reading.onnx_calls import onnx_step, with_inferred_shapes, with_inlined_functions
from ipujax.onnx.reading.proto_graphs import check_depth
from ipujax.onnx.reading.tensors import detach_weights
from ipujax.onnx.reading.validity import (
    check_attributes,
    check_domains,
    check_model,
    check_names,
    check_order,
    fill_types,
)

_DEFAULT_BUDGET = Budget()
_OLDEST_IR_WITH_FREE_INITIALIZERS = 4  # before, every initialiser had to be a graph input too


def read_graph(source: Source, budget: Budget = _DEFAULT_BUDGET) -> Graph:
    """Return the graph of a model at the newest opset that onnx has.

    Args:
        source: path, bytes of a file, or `ModelProto`, which stays unchanged.
        budget: bounds on constants.

    Raises:
        OnnxModelError: a model that cannot be read, is not valid, or is newer than onnx.
    """
    # Errors of the steps are more precise; this one is of messages that no step looks at, as a name that is no UTF-8.
    with onnx_step("the model cannot be read"):
        return graph_of_model(read_model(source, budget), budget)


def graph_of_model(model: onnx.ModelProto, budget: Budget) -> Graph:
    """Return the graph of a model, which is consumed; see `read_graph`."""
    check_names(model)
    adopt_unofficial(model)
    check_functions(model)
    check_domains(model)
    check_attributes(model)
    check_order(model.graph)
    # The checker copies the model; weights of gigabytes would be serialised each time, up to 2 GiB.
    weights = detach_weights(model, budget)
    model.ir_version = max(model.ir_version, _OLDEST_IR_WITH_FREE_INITIALIZERS)
    # Types before the check: exporters leave out those that inference finds, and the checker insists on them.
    fill_types(model)
    check_model(model)
    model = at_newest_opset(model)
    model = with_inferred_shapes(model)
    return graph_from_proto(model.graph, weights, budget)


def at_newest_opset(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a model whose functions are inlined and whose standard nodes have the newest opset."""
    if model.functions:
        align_functions(model, _standard_opset(model))
        model = with_inlined_functions(model, convert_version=True)
        check_depth(model)
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
