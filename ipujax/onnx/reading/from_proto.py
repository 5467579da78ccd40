"""Protobuf messages at the newest opset → `Graph`, `Node`, `ValueInfo`, and NumPy arrays within a model's budget.

Gradient nodes of ai.onnx.preview.training name values of the graph around them: `y`, and `xs` and `zs` that it depends
on. They get a subgraph, the part of the graph between these; values that depend on neither come from outside.

Source: ONNX operator Gradient, version 1 of ai.onnx.preview.training.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import onnx

from ipujax.onnx.budget import Budget
from ipujax.onnx.graphs import Dim, Graph, Node, ValueInfo
from ipujax.onnx.onnx_errors import OnnxModelError
from ipujax.onnx.reading.onnx_protos import onnx_step
from ipujax.onnx.registry import STANDARD_DOMAIN, operator_key

_Types = Mapping[str, ValueInfo]


def graph_from_proto(graph: onnx.GraphProto, weights: Mapping[str, np.ndarray], budget: Budget) -> Graph:
    """Return a graph of a message at the newest opset with inferred types; `weights` are initialisers outside of it."""
    initializers = {tensor.name: tensor_array(tensor, budget) for tensor in graph.initializer} | dict(weights)
    initializers |= {sparse.values.name: sparse_array(sparse, budget) for sparse in graph.sparse_initializer}
    inputs = tuple(value_info(value) for value in graph.input if value.name not in initializers)
    outputs = tuple(value_info(value) for value in graph.output)
    types = {info.name: info for info in (*map(value_info, graph.value_info), *inputs, *outputs)}
    constants = dict(initializers)
    nodes = []
    for n, proto in enumerate(graph.node):
        if operator_key(proto.domain, proto.op_type) == (STANDARD_DOMAIN, "Constant"):
            constants[proto.output[0]] = _constant(proto, budget)
        else:
            nodes.append(_node(proto, n, types, budget))
    named = _with_gradient_bodies(_unique(nodes), types)
    return Graph(graph.name, inputs, outputs, constants, named, frozenset(initializers))


def value_info(value: onnx.ValueInfoProto) -> ValueInfo:
    """Return the declared type of a value."""
    kind = "tensor"
    type_proto = value.type
    while (field := type_proto.WhichOneof("value")) in _CONTAINERS:
        kind = kind if kind != "tensor" else _CONTAINERS[field]
        type_proto = getattr(type_proto, field).elem_type
    tensor = type_proto.tensor_type
    is_ranked = kind == "tensor" and tensor.HasField("shape")
    shape = tuple(map(_dim, tensor.shape.dim)) if is_ranked else None
    return ValueInfo(value.name, tensor_dtype(tensor.elem_type), shape, kind)


_CONTAINERS: Mapping[str | None, str] = {"sequence_type": "sequence", "optional_type": "optional"}


_INFERRED = "unk__"  # what shape inference names sizes that it does not know


def _dim(dim: onnx.TensorShapeProto.Dimension) -> Dim:
    """Return a size, or the name of one; exporters write −1 and "?" for open ones."""
    if dim.HasField("dim_value"):
        return dim.dim_value if dim.dim_value >= 0 else None
    is_name = any(map(str.isalnum, dim.dim_param)) and not dim.dim_param.startswith(_INFERRED)
    return dim.dim_param if is_name else None


def _node(proto: onnx.NodeProto, n: int, types: _Types, budget: Budget) -> Node:
    """Return the record of a node; one without a name is called by operator and number."""
    domain, op_type = operator_key(proto.domain, proto.op_type)
    outputs = tuple(proto.output)
    # Trailing empty names stand for optional results that nobody reads.
    while outputs and not outputs[-1]:
        outputs = outputs[:-1]
    return Node(
        name=proto.name or f"{proto.op_type}_{n}",
        domain=domain,
        op_type=op_type,
        inputs=tuple(proto.input),
        outputs=outputs,
        attributes={each.name: _attribute(each, budget) for each in proto.attribute},
        output_dtypes=tuple(types[name].dtype if name in types else None for name in outputs),
        proto=proto,
    )


def _unique(nodes: list[Node]) -> tuple[Node, ...]:
    """Number nodes whose name another one has already."""
    used_names: set[str] = set()
    result = []
    for n, node in enumerate(nodes):
        name = node.name if node.name not in used_names else f"{node.name}_{n}"
        used_names.add(name)
        result.append(replace(node, name=name))
    return tuple(result)


def _text(data: bytes) -> str:
    # ONNX's strings are bytes; surrogates keep those that are not UTF-8 without a loss.
    return data.decode("utf-8", errors="surrogateescape")


_Kind = onnx.AttributeProto.AttributeType
_ATTRIBUTES: Mapping[int, Callable[[onnx.AttributeProto, Budget], Any]] = {
    _Kind.FLOAT: lambda a, _: a.f,
    _Kind.INT: lambda a, _: a.i,
    _Kind.STRING: lambda a, _: _text(a.s),
    _Kind.TENSOR: lambda a, budget: tensor_array(a.t, budget),
    _Kind.SPARSE_TENSOR: lambda a, budget: sparse_array(a.sparse_tensor, budget),
    _Kind.GRAPH: lambda a, budget: graph_from_proto(a.g, {}, budget),
    _Kind.TYPE_PROTO: lambda a, _: value_info(onnx.helper.make_value_info(a.name, a.tp)),
    _Kind.FLOATS: lambda a, _: list(a.floats),
    _Kind.INTS: lambda a, _: list(a.ints),
    _Kind.STRINGS: lambda a, _: [_text(text) for text in a.strings],
    _Kind.TENSORS: lambda a, budget: [tensor_array(tensor, budget) for tensor in a.tensors],
    _Kind.GRAPHS: lambda a, budget: [graph_from_proto(graph, {}, budget) for graph in a.graphs],
}


def _attribute(attribute: onnx.AttributeProto, budget: Budget) -> Any:
    read = _ATTRIBUTES.get(attribute.type)
    if read is None:
        kind = _Kind.Name(attribute.type) if attribute.type in _Kind.values() else attribute.type
        raise OnnxModelError(
            f"attribute {attribute.name!r} cannot be read", expected="numbers, text, tensors", got=kind
        )
    return read(attribute, budget)


def _constant(proto: onnx.NodeProto, budget: Budget) -> np.ndarray:
    """Return the value of a `Constant` node."""
    attribute = proto.attribute[0]
    value = _attribute(attribute, budget)
    dtype = _CONSTANT_DTYPES.get(attribute.name)
    return value if dtype is None else np.asarray(value, dtype)


_CONSTANT_DTYPES: Mapping[str, type] = {
    "value_float": np.float32,
    "value_floats": np.float32,
    "value_int": np.int64,
    "value_ints": np.int64,
    "value_string": np.object_,
    "value_strings": np.object_,
}


_MAX_GRADIENT_NODES = 10_000  # assumed: each is traced again
_GRADIENT = ("ai.onnx.preview.training", "Gradient")


def _with_gradient_bodies(nodes: Sequence[Node], types: Mapping[str, ValueInfo]) -> tuple[Node, ...]:
    """Return nodes of a graph, in order of evaluation; those that differentiate get an attribute `body`."""
    if not any(map(_is_gradient, nodes)):
        return tuple(nodes)
    result: list[Node] = []
    total = 0
    for node in nodes:
        if not _is_gradient(node):
            result.append(node)
            continue
        body = _gradient_body(node, result, types)
        # A part with gradients in it has their parts once more: gradients of gradients double it each time.
        total += sum(1 for _ in body.all_nodes())
        if total > _MAX_GRADIENT_NODES:
            message = f"{node.label} and those before it differentiate one another too often"
            raise OnnxModelError(
                message, expected=f"at most {_MAX_GRADIENT_NODES:,} nodes in their parts", got=f"{total:,}"
            )
        result.append(replace(node, attributes={**node.attributes, "body": body}))
    return tuple(result)


def _is_gradient(node: Node) -> bool:
    return (node.domain, node.op_type) == _GRADIENT


def _gradient_body(node: Node, before: Sequence[Node], types: Mapping[str, ValueInfo]) -> Graph:
    inputs = [*node.attributes["xs"], *node.attributes.get("zs", ())]
    target = node.attributes["y"]
    inside = _on_the_way(before, set(inputs), target)

    def info(name: str) -> ValueInfo:
        return types.get(name, ValueInfo(name, None, None))

    return Graph(node.name, tuple(map(info, inputs)), (info(target),), {}, inside, frozenset())


def _on_the_way(nodes: Sequence[Node], inputs: set[str], target: str) -> tuple[Node, ...]:
    """Nodes that depend on the inputs, and that the target depends on."""
    after = set(inputs)
    depending = []
    for node in nodes:
        if after.intersection(node.names_read()):
            # a node that computes an input of the part is not in it: that value is given
            after.update(node.outputs)
            depending.append(node)
    needed = {target}
    inside = []
    for node in reversed(depending):
        if needed.intersection(node.outputs) and not inputs.intersection(node.outputs):
            needed.update(node.names_read())
            inside.append(node)
    return tuple(reversed(inside))


def tensor_dtype(data_type: int) -> np.dtype | None:
    """Return the NumPy dtype of a data type of ONNX; None where it is not declared."""
    with onnx_step(f"this onnx has no {dtype_name(data_type)}", "upgrade onnx, or export another dtype"):
        return onnx.helper.tensor_dtype_to_np_dtype(data_type) if data_type else None


def check_declared_size(tensor: onnx.TensorProto, budget: Budget) -> None:
    """Refuse a tensor whose declared shape is negative or larger than the budget."""
    name = f"tensor {tensor.name!r}"
    if min(tensor.dims, default=0) < 0:
        raise OnnxModelError(f"{name} has a negative size", expected="sizes ≥ 0", got=list(tensor.dims))
    budget.check(tensor.dims, tensor_dtype(tensor.data_type), name)


def tensor_array(tensor: onnx.TensorProto, budget: Budget) -> np.ndarray:
    """Return the values of a tensor; refuse data of another size than shape and dtype say."""
    check_declared_size(tensor, budget)
    if tensor.data_location == onnx.TensorProto.EXTERNAL:
        # onnx would look for the file in the working directory.
        raise OnnxModelError(f"external data of tensor {tensor.name!r} were not read", expected="data in the model")
    try:
        return onnx.numpy_helper.to_array(tensor)
    except Exception as error:  # of any class: from NumPy, ml_dtypes and onnx
        dtype = dtype_name(tensor.data_type)
        expected = f"{dtype}{list(tensor.dims)}"
        message = f"tensor {tensor.name!r} cannot be read"
        got = f"{len(tensor.raw_data):,} bytes ({error})" if tensor.raw_data else error
        raise OnnxModelError(message, expected=expected, got=got, hint="export the model again") from error


def sparse_array(sparse: onnx.SparseTensorProto, budget: Budget) -> np.ndarray:
    """Return a sparse tensor as a dense array."""
    name = f"sparse tensor {sparse.values.name!r}"
    values = tensor_array(sparse.values, budget)
    indices = tensor_array(sparse.indices, budget)
    if min(sparse.dims, default=0) < 0:
        raise OnnxModelError(f"{name} has a negative size", expected="sizes ≥ 0", got=list(sparse.dims))
    budget.check(sparse.dims, values.dtype, name)
    dense = np.zeros(tuple(sparse.dims), values.dtype)
    try:
        if indices.ndim == 1:
            dense.reshape(-1)[indices] = values
        else:
            dense[tuple(indices.T)] = values
    except (IndexError, ValueError, TypeError) as error:
        message = f"{name} cannot be read"
        raise OnnxModelError(message, expected=f"indices into {list(sparse.dims)}", got=error) from error
    return dense


def dtype_name(data_type: int) -> str:
    """Return the name of a data type of ONNX, also of one that this onnx does not know."""
    names = onnx.TensorProto.DataType
    return names.Name(data_type).lower() if data_type in names.values() else f"data type {data_type}"
