"""Checks of a model before it is converted: declared types, names, order, onnx's own checker, the model's functions.

onnx's checker demands a type and a shape of every graph input and output, which early guides and builders leave out.
Missing types are inferred, else float32; a shape that stays unknown is taken from the arguments of a call.

Functions are checked before they are inlined: imported domains, no recursion, a bounded expansion. Those that call one
another twice each double the graph: forty functions of a file become 2^40 nodes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Container, Iterable, Mapping
from graphlib import CycleError, TopologicalSorter
from itertools import chain

import onnx

from ipujax.onnx.onnx_errors import OnnxModelError
from ipujax.onnx.reading.onnx_protos import (
    STANDARD_DOMAINS,
    all_nodes,
    graphs_of,
    replace_nodes,
    run_checker,
    subgraphs_of,
    with_inferred_shapes,
)
from ipujax.onnx.registry import EARLY_DOMAIN, operator_key

# assumed: more than the nodes of any network; what a larger file has may grow a few times.
_MAX_NODES = 1 << 16
_MAX_GROWTH = 8

Key = tuple[str, str, str]  # domain, name, overload


def check_functions(model: onnx.ModelProto) -> None:
    """Refuse functions that are defined twice, call themselves, are not imported, or grow beyond any network."""
    functions = {_key(function.domain, function.name, function.overload): function for function in model.functions}
    if len(functions) < len(model.functions):
        raise OnnxModelError("a function of the model is defined twice", expected="one definition of each")
    nodes = {key: list(all_nodes(function.node)) for key, function in functions.items()}
    graph_nodes = list(all_nodes(model.graph.node))
    calls = {key: _calls(each, functions) for key, each in nodes.items()}
    graph_calls = _calls(graph_nodes, functions)
    _check_imports("the graph", graph_calls, model)
    for key, function in functions.items():
        _check_imports(f"function {_function_label(key)}", calls[key], function)
    sizes: dict[Key, int] = {}
    for key in _callees_first(calls):
        sizes[key] = len(nodes[key]) + _expanded_size(calls[key], sizes)
    size = len(graph_nodes) + _expanded_size(graph_calls, sizes)
    limit = max(_MAX_NODES, _MAX_GROWTH * (len(graph_nodes) + sum(map(len, nodes.values()))))
    if size > limit:
        message = "the functions of the model call one another too often"
        hint = "export the model without functions"
        raise OnnxModelError(message, expected=f"at most {limit:,} nodes", got=f"{size:,} nodes", hint=hint)


def _key(domain: str, name: str, overload: str) -> Key:
    return *operator_key(domain, name), overload


def _function_label(key: Key) -> str:
    domain, name, overload = key
    return repr(f"{domain}:{name}" + (f":{overload}" if overload else ""))


def _calls(nodes: Iterable[onnx.NodeProto], functions: Container[Key]) -> Counter[Key]:
    keys = Counter(_key(node.domain, node.op_type, node.overload) for node in nodes)
    return Counter({key: count for key, count in keys.items() if key in functions})


def _expanded_size(calls: Mapping[Key, int], sizes: Mapping[Key, int]) -> int:
    return sum(count * sizes[key] for key, count in calls.items())


def _check_imports(caller: str, calls: Iterable[Key], importer: onnx.ModelProto | onnx.FunctionProto) -> None:
    imported = {_key(entry.domain, "", "")[0] for entry in importer.opset_import}
    for key in calls:
        if key[0] not in imported:
            message = f"{caller} calls function {_function_label(key)}, whose domain {key[0]!r} it does not import"
            hint = f"add helper.make_opsetid({key[0]!r}, 1) to its opset_import"
            got = ", ".join(map(repr, sorted(imported))) or "no domain"
            raise OnnxModelError(message, expected=f"an import of {key[0]!r}", got=got, hint=hint)


def _callees_first(calls: Mapping[Key, Iterable[Key]]) -> list[Key]:
    try:
        return list(TopologicalSorter(calls).static_order())
    except CycleError as error:
        circle = " → ".join(_function_label(key) for key in reversed(error.args[1]))
        message = "a function of the model calls itself"
        raise OnnxModelError(message, expected="functions without recursion", got=circle) from error


_MAX_RANK = 64  # as NumPy
_AXES = ("axis", "batch_dims")


def put_in_order(graph: onnx.GraphProto, outer: Collection[str] = ()) -> None:
    """Sort nodes that quantisers append behind their readers; refuse unknown names, repeated ones, and circles."""
    initializers = [*(t.name for t in graph.initializer), *(s.values.name for s in graph.sparse_initializer)]
    if len(set(initializers)) < len(initializers):
        repeated = next(name for name, count in Counter(initializers).items() if count > 1)
        message = f"graph {graph.name!r} has several initialisers {repeated!r}"
        raise OnnxModelError(message, expected="a name for each", got=repeated, hint="export the model again")
    defined = {*outer, *(value.name for value in graph.input), *initializers}
    producers = {name: n for n, node in enumerate(graph.node) for name in node.output if name}
    for n, node in enumerate(graph.node):
        missing = [name for name in _read_names(node) if name not in defined and name not in producers]
        if missing:
            message = f"{_label(node, n)} reads {missing[0]!r}, which nothing defines"
            hint = "the model lacks an initialiser or an input: export it again with its weights"
            raise OnnxModelError(message, expected="an input, an initialiser or an output of a node", hint=hint)
        for subgraph in subgraphs_of(node):
            put_in_order(subgraph, defined | set(producers))
    edges = {
        n: {producers[name] for name in _names_from_around([node]) if name in producers}
        for n, node in enumerate(graph.node)
    }
    try:
        if any(source >= n for n, sources in edges.items() for source in sources):
            replace_nodes(graph, [graph.node[n] for n in TopologicalSorter(edges).static_order()])
    except CycleError as error:
        circle = " → ".join(_label(graph.node[n], n) for n in error.args[1])
        raise OnnxModelError("the graph has a cycle", expected="an acyclic graph", got=circle) from error
    for value in graph.output:
        if value.name not in defined and value.name not in producers:
            message = f"graph {graph.name!r} has an output {value.name!r} that nothing defines"
            raise OnnxModelError(message, expected="an input, an initialiser or an output of a node")


def _names_from_around(nodes: Iterable[onnx.NodeProto]) -> set[str]:
    """Return the names that nodes and their subgraphs read, less those that these define."""
    names: set[str] = set()
    for node in nodes:
        names.update(_read_names(node))
        for graph in subgraphs_of(node):
            own = {
                *(value.name for value in (*graph.input, *graph.initializer)),
                *chain.from_iterable(each.output for each in graph.node),
            }
            names |= {*_names_from_around(graph.node), *(value.name for value in graph.output)} - own
    return names


def _read_names(node: onnx.NodeProto) -> list[str]:
    return [name for name in node.input if name]


def _label(node: onnx.NodeProto, n: int) -> str:
    return f"node {node.name or n!r} ({node.op_type})"


def check_names(model: onnx.ModelProto) -> None:
    """Refuse names that are no text: protobuf gives those that are not UTF-8 as bytes."""
    functions = (name for each in model.functions for name in (each.domain, each.name, *each.input, *each.output))
    in_functions = (node for function in model.functions for node in all_nodes(function.node))
    of_nodes = (
        name
        for node in (*all_nodes(model.graph.node), *in_functions)
        for name in (node.name, node.op_type, node.domain, *node.input, *node.output, *(a.name for a in node.attribute))
    )
    of_graphs = (
        name
        for graph in graphs_of(model.graph)
        for values in (graph.input, graph.output, graph.value_info, graph.initializer)
        for name in (graph.name, *(each.name for each in values))
    )
    dimensions = (
        dim.dim_param
        for graph in graphs_of(model.graph)
        for value in (*graph.input, *graph.output, *graph.value_info)
        for dim in value.type.tensor_type.shape.dim
    )
    domains = (entry.domain for entry in model.opset_import)
    for name in chain(functions, of_nodes, of_graphs, dimensions, domains):
        if not isinstance(name, str):
            raise OnnxModelError("a name of the model is no text", expected="UTF-8", got=repr(name))


def check_domains(model: onnx.ModelProto) -> None:
    """Refuse nodes of a domain of which the model imports no version."""
    imported = {entry.domain for entry in model.opset_import}
    domains = imported | (set(STANDARD_DOMAINS) if imported & set(STANDARD_DOMAINS) else set())
    for n, node in enumerate(all_nodes(model.graph.node)):
        if node.domain not in domains:
            message = f"{_label(node, n)} is of domain {node.domain!r}, of which the model imports no opset"
            hint = f"add it: model.opset_import.append(onnx.helper.make_opsetid({node.domain!r}, 1))"
            raise OnnxModelError(message, expected=node.domain, got=", ".join(map(repr, sorted(imported))), hint=hint)


def check_attributes(model: onnx.ModelProto) -> None:
    """Refuse attributes that onnx does not check before it counts up to them: axes, and the number of parts."""
    in_functions = (node for function in model.functions for node in all_nodes(function.node))
    for n, node in enumerate((*all_nodes(model.graph.node), *in_functions)):
        for attribute in node.attribute:
            if attribute.name in _AXES and abs(attribute.i) > _MAX_RANK:
                message = f"{_label(node, n)} has an axis that no array has"
                got = f"{attribute.name}={attribute.i}"
                raise OnnxModelError(message, expected=f"−{_MAX_RANK} to {_MAX_RANK}", got=got)
            if attribute.name == "num_outputs" and node.op_type == "Split" and attribute.i != len(node.output):
                message = f"{_label(node, n)} has another number of outputs than parts"
                raise OnnxModelError(message, expected=f"{len(node.output)} parts", got=f"num_outputs={attribute.i}")


def fill_types(model: onnx.ModelProto) -> None:
    """Fill in missing types and shapes of inputs and outputs, as far as they are known."""
    for graph in graphs_of(model.graph):
        complete = [value for value in graph.value_info if _has_type(value) and _has_shape(value)]
        if len(complete) < len(graph.value_info):
            complete = [onnx.ValueInfoProto.FromString(value.SerializeToString()) for value in complete]
            graph.ClearField("value_info")
            graph.value_info.extend(complete)
    for value in model.graph.input:
        if not _has_type(value):
            value.type.tensor_type.elem_type = onnx.TensorProto.FLOAT
    if all(_has_type(value) and _has_shape(value) for value in model.graph.output):
        return
    # An output whose declared type is incomplete would stop the inference: it is inferred from a model without.
    inferred = _inferred(model)
    for value in model.graph.output:
        declared = inferred.get(value.name)
        if declared is None:
            continue
        if not _has_type(value) or not _has_shape(value):
            value.type.CopyFrom(declared.type)


def _inferred(model: onnx.ModelProto) -> dict[str, onnx.ValueInfoProto]:
    """Return the inferred types of all values by name, outputs included, whatever type the file declares."""
    bare = onnx.ModelProto()
    bare.CopyFrom(model)
    for value in bare.graph.output:
        value.ClearField("type")
    graph = with_inferred_shapes(bare).graph
    return {value.name: value for value in (*graph.value_info, *graph.input, *graph.output) if _has_type(value)}


def _has_type(value: onnx.ValueInfoProto) -> bool:
    kind = value.type.WhichOneof("value")
    return kind is not None and (kind != "tensor_type" or value.type.tensor_type.elem_type != 0)


def _has_shape(value: onnx.ValueInfoProto) -> bool:
    return not value.type.HasField("tensor_type") or value.type.tensor_type.HasField("shape")


def check_model(model: onnx.ModelProto) -> None:
    """Run onnx's checker, and refuse a model with the checker's text."""
    checked = onnx.ModelProto()
    checked.CopyFrom(model)
    for graph in graphs_of(checked.graph):
        for value in (*graph.input, *graph.output):
            _complete(value)
        for node in graph.node:
            # Deprecated before opset 21 for a fault of its body; exporters wrote it, and it is defined.
            is_deprecated = node.op_type == "GroupNormalization" and not node.domain
            # What ONNX does not have may be registered; if not, all of it is refused in one error, after this.
            is_unknown = not onnx.defs.has(node.op_type, "" if node.domain in STANDARD_DOMAINS else node.domain)
            node.domain = EARLY_DOMAIN if is_deprecated or is_unknown else node.domain
    checked.opset_import.append(onnx.helper.make_opsetid(EARLY_DOMAIN, 1))
    run_checker(checked)


def _complete(value: onnx.ValueInfoProto) -> None:
    """Give a value whose type or rank is open one that the checker accepts; it does not compare them with nodes."""
    if not _has_type(value):
        value.type.tensor_type.elem_type = onnx.TensorProto.FLOAT
    if not _has_shape(value):
        value.type.tensor_type.shape.SetInParent()
