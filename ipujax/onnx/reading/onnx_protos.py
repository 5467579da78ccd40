"""Messages of onnx: graphs visited, their depth checked, their nodes replaced; calls of the package.

Errors of the package, of a dozen classes, become `OnnxModelError`s that name the step of reading.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import onnx
import onnx.checker
import onnx.inliner
import onnx.shape_inference

import ipujax as ipu
from ipujax.onnx.onnx_errors import OnnxModelError

STANDARD_DOMAINS = ("", "ai.onnx")
_MARK = "ai.onnx·"  # before the opset of a function's nodes, as long as the model's is another one
# Protobuf reads messages nested 100 deep, and a subgraph is nested three deep in the graph around it.
_MAX_DEPTH = 30


def marked_domain(opset: int) -> str:
    """Return the domain of standard nodes of another opset than the model's."""
    return f"{_MARK}{opset}"


def is_standard(domain: str) -> bool:
    """Return whether a domain is that of ONNX's own operators, also of a marked opset."""
    return domain in STANDARD_DOMAINS or domain.startswith(_MARK)


def opset_of(node: onnx.NodeProto, opset: int) -> int | None:
    """Return the opset of a standard node in a model of `opset`, None of other nodes."""
    if node.domain in STANDARD_DOMAINS:
        return opset
    return int(node.domain.removeprefix(_MARK)) if is_standard(node.domain) else None


def graphs_of(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """Yield a graph and its subgraphs, outermost first; a visit may replace the nodes of its graph."""
    yield graph
    for node in graph.node:
        for subgraph in subgraphs_of(node):
            yield from graphs_of(subgraph)


def subgraphs_of(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    """Yield the graphs among the attributes of a node."""
    for attribute in node.attribute:
        yield from ([attribute.g] if attribute.HasField("g") else [])
        yield from attribute.graphs


def all_nodes(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    """Yield nodes, each before those of its subgraphs."""
    for node in nodes:
        yield node
        for graph in subgraphs_of(node):
            yield from all_nodes(graph.node)


def check_depth(model: onnx.ModelProto) -> None:
    """Refuse subgraphs that are nested too deep for protobuf, onnx and Python, which visit them recursively."""
    nodes = [*model.graph.node, *(node for function in model.functions for node in function.node)]
    depth = 0
    while nodes:
        if depth > _MAX_DEPTH:
            message = "subgraphs are nested too deep"
            hint = "export the model again"
            raise OnnxModelError(message, expected=f"at most {_MAX_DEPTH} levels", got="more", hint=hint)
        nodes = [inner for node in nodes for graph in subgraphs_of(node) for inner in graph.node]
        depth += 1


def replace_nodes(graph: onnx.GraphProto, nodes: Iterable[onnx.NodeProto]) -> None:
    """Replace the nodes of a graph by others, some of which may be the graph's own."""
    # Messages of a graph are invalid once they are deleted from it, so copies take their place.
    copies = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
    graph.ClearField("node")
    graph.node.extend(copies)


_EXPORT_AGAIN = "export the model again; onnx.checker.check_model(model, full_check=True) looks at more of it"


@contextmanager
def onnx_step(failure: str, hint: str = _EXPORT_AGAIN) -> Iterator[None]:
    """Turn the errors of onnx or protobuf in a block into an `OnnxModelError`; `failure` names the step that fails."""
    try:
        yield
    except ipu.IpuError:
        raise
    # C++ exceptions arrive as bare RuntimeError, IndexError and MemoryError, Python ones as any class.
    except Exception as error:
        text = str(error).strip()
        got = f"{type(error).__name__}: {text}" if text else type(error).__name__
        raise OnnxModelError(failure, got=got, hint=hint) from error


def run_checker(model: onnx.ModelProto) -> None:
    """Run onnx's checker; refuse a model with the checker's text."""
    with onnx_step("the model is not valid ONNX", "export the model again"):
        onnx.checker.check_model(model)


def with_inferred_shapes(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a model with the types and shapes that onnx infers.

    Values of shapes are not followed (`data_prop`): onnx would list every element of vectors of 10^18.
    """
    with onnx_step("onnx cannot infer the types and shapes of the model"):
        return onnx.shape_inference.infer_shapes(model)


def with_inlined_functions(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a model whose own functions are inlined; calls in the given one get the defaults of their attributes.

    Outermost calls are inlined first: a call inside may refer to an attribute of the function around it, and has its
    own default where that has no value.
    """
    _name_overloads(model)
    _align_imports(model)
    while model.functions:
        _write_defaults(model)
        nodes = [node for function in model.functions for node in all_nodes(function.node)]
        called = {(node.domain, node.op_type) for node in nodes}
        outermost = {(function.domain, function.name) for function in model.functions} - called
        with onnx_step("onnx cannot inline the functions of the model"):
            model = onnx.inliner.inline_selected_functions(model, sorted(outermost))
    return model


def _name_overloads(model: onnx.ModelProto) -> None:
    """Give each overload of a function a name of its own: the inliner selects functions by domain and name."""
    overloads = {(each.domain, each.name, each.overload) for each in model.functions if each.overload}
    nodes = [*model.graph.node, *(node for function in model.functions for node in function.node)]
    for node in all_nodes(nodes if overloads else ()):
        if (node.domain, node.op_type, node.overload) in overloads:
            node.op_type = _name_of_overload(node.op_type, node.overload)
            node.overload = ""
    for function in model.functions:
        function.name = _name_of_overload(function.name, function.overload)
        function.overload = ""


def _name_of_overload(name: str, overload: str) -> str:
    return f"{name}·{overload}" if overload else name


def _align_imports(model: onnx.ModelProto) -> None:
    """Give a domain one version in the model and its functions, without which the inliner refuses them.

    ONNX's own operators have one by now, see `mark_opsets`; those of other domains are the same in all versions.
    """
    versions: dict[str, int] = {}
    for owner in (model, *model.functions):
        for entry in owner.opset_import:
            entry.version = versions.setdefault(entry.domain, entry.version)


def _write_defaults(model: onnx.ModelProto) -> None:
    """Give the graph's calls of functions the attributes that they leave at the function's defaults.

    The inliner drops these.
    """
    defaults = {(each.domain, each.name): each.attribute_proto for each in model.functions}
    for node in all_nodes(model.graph.node):
        names_set = {attribute.name for attribute in node.attribute}
        of_function = defaults.get((node.domain, node.op_type), ())
        node.attribute.extend([each for each in of_function if each.name not in names_set])
