"""From a source to a graph at the newest opset; function bodies: a node as a graph of simpler nodes.

ONNX's schemas give the bodies of operators that have no implementation of their own. Some depend on the types of the
operands, so a node is expanded when these are known, while a model is traced.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import onnx
from onnx import helper

from ipujax.onnx.budget import Budget
from ipujax.onnx.graphs import Graph, Node
from ipujax.onnx.reading.attribute_values import check_attribute_values
from ipujax.onnx.reading.files import Source, read_model
from ipujax.onnx.reading.from_proto import graph_from_proto, sparse_array, tensor_array
from ipujax.onnx.reading.onnx_protos import check_depth, onnx_step, with_inferred_shapes, with_inlined_functions
from ipujax.onnx.reading.rewrites import adopt_unofficial, check_known, mark_opsets, rewrite_old_nodes
from ipujax.onnx.reading.validity import (
    check_attributes,
    check_domains,
    check_functions,
    check_model,
    check_names,
    fill_types,
    put_in_order,
)

_DEFAULT_BUDGET = Budget()
_MAX_SMALL_ELEMENTS = 256  # assumed: shape inference reads only small tensors: axes, shapes, scales
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
    put_in_order(model.graph)
    mark_opsets(model, _standard_opset(model))
    weights = _detach_weights(model, budget)
    model.ir_version = max(model.ir_version, _OLDEST_IR_WITH_FREE_INITIALIZERS)
    # Types before the check: exporters leave out those that inference finds, and the checker insists on them.
    fill_types(model)
    check_model(model)
    model = at_newest_opset(model)
    model = with_inferred_shapes(model)
    return graph_from_proto(model.graph, weights, budget)


def _detach_weights(model: onnx.ModelProto, budget: Budget) -> dict[str, np.ndarray]:
    """Replace the large and the sparse initialisers of the outermost graph by graph inputs; return their values.

    Every step of onnx, as its checker, serialises the model, at a cost in its bytes and never more than 2 GiB.
    """
    graph = model.graph
    weights = {}
    small = []
    types = {}
    for tensor in graph.initializer:
        array = tensor_array(tensor, budget)  # refuses wrong sizes
        if array.size <= _MAX_SMALL_ELEMENTS:
            small.append(tensor)
            continue
        weights[tensor.name] = array
        types[tensor.name] = tensor.data_type
    for sparse in graph.sparse_initializer:
        weights[sparse.values.name] = sparse_array(sparse, budget)
        types[sparse.values.name] = sparse.values.data_type
    rest = [onnx.TensorProto.FromString(tensor.SerializeToString()) for tensor in small]
    graph.ClearField("initializer")
    graph.ClearField("sparse_initializer")
    graph.initializer.extend(rest)
    named = {value.name for value in graph.input}
    for name, array in weights.items():
        if name not in named:
            graph.input.append(onnx.helper.make_tensor_value_info(name, types[name], array.shape))
    return weights


def at_newest_opset(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a model whose functions are inlined and whose standard nodes have the newest opset."""
    if model.functions:
        model = with_inlined_functions(model)
        check_depth(model)
    opset = _standard_opset(model)
    check_known(opset, "the model")
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


_FUNCTION_DOMAIN = "ipujax.bodies"
_BODY_IR_VERSION = 10

Type = tuple[np.dtype, tuple[int, ...]]  # dtype and shape of a tensor


def has_body(domain: str, op_type: str) -> bool:
    """Return whether the schema of an operator has a function body."""
    if not onnx.defs.has(op_type, domain):
        return False
    schema = onnx.defs.get_schema(op_type, domain=domain)
    return schema.has_function or schema.has_context_dependent_function


def expanded(node: Node, operand_types: Sequence[Type | None]) -> Graph:
    """Return the body of a node as a graph; inputs without an operand type are left out."""
    with onnx_step(f"{node.label} cannot be expanded", "compare the shapes and dtypes with the operator's"):
        return _expanded(node.proto.SerializeToString(), tuple(operand_types))


@lru_cache(maxsize=1024)
def _expanded(serialized: bytes, operand_types: tuple[Type | None, ...]) -> Graph:
    proto = onnx.NodeProto.FromString(serialized)
    names = [f"operand_{n}" if operand else "" for n, operand in enumerate(operand_types)]
    results = [f"result_{n}" if name else "" for n, name in enumerate(proto.output)]
    types = [_type_proto(operand) for operand in operand_types]
    body = _body(proto, types)
    call = helper.make_node(body.name, names, results, domain=_FUNCTION_DOMAIN)
    call.attribute.extend([*proto.attribute, *_defaults(proto)])
    inputs = [helper.make_value_info(name, kind) for name, kind in zip(names, types, strict=True) if name]
    outputs = [onnx.ValueInfoProto(name=name) for name in results if name]
    graph = helper.make_graph([call], f"{proto.op_type}_body", inputs, outputs)
    # The body's own opsets: a function may be written in an older one than the model's.
    opsets = [*body.opset_import, helper.make_opsetid(_FUNCTION_DOMAIN, 1)]
    model = helper.make_model(graph, opset_imports=opsets, functions=[body], ir_version=_BODY_IR_VERSION)
    return graph_of_model(with_inlined_functions(model), Budget())


def _defaults(proto: onnx.NodeProto) -> list[onnx.AttributeProto]:
    """Return the attributes that a node leaves at their defaults: the inliner does not know these."""
    names_set = {attribute.name for attribute in proto.attribute}
    attributes = onnx.defs.get_schema(proto.op_type, domain=proto.domain).attributes
    return [
        each.default_value for name, each in attributes.items() if name not in names_set and each.default_value.name
    ]


def _body(proto: onnx.NodeProto, types: Sequence[onnx.TypeProto]) -> onnx.FunctionProto:
    schema = onnx.defs.get_schema(proto.op_type, domain=proto.domain)
    if schema.has_context_dependent_function:
        operand_types = [kind.SerializeToString() for kind in types]
        data = schema.get_context_dependent_function(proto.SerializeToString(), operand_types)
        body = onnx.FunctionProto.FromString(data)
    else:
        body = onnx.FunctionProto()
        body.CopyFrom(schema.function_body)
    body.domain = _FUNCTION_DOMAIN
    return body


def _type_proto(operand: Type | None) -> Any:
    if operand is None:
        return onnx.TypeProto()
    dtype, shape = operand
    return helper.make_tensor_type_proto(helper.np_dtype_to_tensor_dtype(dtype), shape)
