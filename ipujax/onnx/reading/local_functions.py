"""Checks of a model's own functions before they are inlined: imported domains, no recursion, a bounded expansion.

Functions that call one another twice each double the graph: forty functions of a file become 2^40 nodes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Mapping
from graphlib import CycleError, TopologicalSorter

import onnx

from ipujax.onnx.onnx_errors import OnnxModelError
from ipujax.onnx.reading.proto_graphs import all_nodes

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
        _check_imports(f"function {_label(key)}", calls[key], function)
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
    return ("" if domain == "ai.onnx" else domain), name, overload


def _label(key: Key) -> str:
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
            message = f"{caller} calls function {_label(key)}, whose domain {key[0]!r} it does not import"
            hint = f"add helper.make_opsetid({key[0]!r}, 1) to its opset_import"
            got = ", ".join(map(repr, sorted(imported))) or "no domain"
            raise OnnxModelError(message, expected=f"an import of {key[0]!r}", got=got, hint=hint)


def _callees_first(calls: Mapping[Key, Iterable[Key]]) -> list[Key]:
    try:
        return list(TopologicalSorter(calls).static_order())
    except CycleError as error:
        circle = " → ".join(_label(key) for key in reversed(error.args[1]))
        message = "a function of the model calls itself"
        raise OnnxModelError(message, expected="functions without recursion", got=circle) from error
