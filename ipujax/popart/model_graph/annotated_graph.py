"""Models as sessions evaluate them: a graph at the newest opset, and the annotations of its nodes.

Annotations are taken off the nodes before the model is converted, as ONNX does not know them, and are found again by
the names of results. Nodes that the conversion adds have those of the node that reads them.

As text the operations of a graph are JSON, or a DOT file.

Settings of products are annotations of nodes, and options: partials, and the share of memory of a plan. The compiler
has one setting of each kind for a program. Annotations become it where they are equal on all nodes that it holds for;
where they are not, they stay without effect and are listed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

import onnx

from ipujax.onnx.front_end import Graph, Node, check_operators, read_graph, shape_sources, sides_of
from ipujax.popart import operators as operators
from ipujax.popart.building import DEFAULT_OPSET, Annotations, detach_annotations
from ipujax.popart.building.annotations import AVAILABLE_MEMORY, PARTIALS_TYPE, WITHOUT_EFFECT
from ipujax.popart.exceptions import as_popart_exception, popart_exception, unknown_name
from ipujax.popart.flow import InputShapeInfo
from ipujax.popart.tensor_info import TensorInfo, onnx_number


@dataclass(frozen=True, slots=True, eq=False)
class AnnotatedGraph:
    """A graph with the annotations of its nodes.

    Args:
        graph: at the newest opset.
        annotations: of each node of `graph.nodes`, in their order.
        inputs: element type and shape of each input of a step.
        tensors: names of all tensors of the model.
        constants: names of values that decide shapes, or that 32 bits do not hold; they are no parameters.
        opset: version of ai.onnx that the model is written in.
    """

    graph: Graph
    annotations: tuple[Annotations, ...]
    inputs: Mapping[str, TensorInfo]
    tensors: frozenset[str]
    constants: frozenset[str]
    opset: int

    def annotated_nodes(self) -> Iterator[tuple[Node, Annotations]]:
        """Yield nodes with their annotations, in order."""
        return zip(self.graph.nodes, self.annotations, strict=True)


def annotated_graph(model: onnx.ModelProto, results: Sequence[str], shapes: InputShapeInfo) -> AnnotatedGraph:
    """Return the graph of a model.

    Args:
        model: of a builder or a file; it is changed.
        results: names of the tensors that are asked for; the model's own outputs do not matter.
        shapes: of inputs that the model leaves open.

    Raises:
        popart_exception: a result that does not exist, an input without a shape, or a model that cannot be evaluated.
    """
    graph = model.graph
    tensors = tensor_names(graph)
    for name in results:
        if name not in tensors:
            raise unknown_name("a session is asked for a tensor", name, tensors)
    _declare_inputs(graph, shapes)
    annotations = detach_annotations(model)
    opset = next((entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")), DEFAULT_OPSET)
    produced = {name for node in graph.node for name in node.output}
    # Outputs decide which nodes survive the conversion: anchors and the loss must be among them.
    del graph.output[:]
    graph.output.extend(onnx.ValueInfoProto(name=name) for name in dict.fromkeys(results) if name in produced)
    with as_popart_exception():
        read = read_graph(model)
        check_operators(read)
    inputs = {info.name: TensorInfo(info.dtype, _whole_shape(info.name, info.shape)) for info in read.inputs}
    by_node = _by_node(read.nodes, annotations)
    wide = {name for name, array in read.constants.items() if sides_of(array) is not None}
    return AnnotatedGraph(read, by_node, inputs, frozenset(tensors), shape_sources(read) | wide, opset)


def tensor_names(graph: onnx.GraphProto) -> set[str]:
    """Return the names of inputs, parameters and results of a graph.

    Args:
        graph: of a model.
    """
    results = {name for node in graph.node for name in node.output if name}
    return {*(value.name for value in graph.input), *(tensor.name for tensor in graph.initializer), *results}


def _declare_inputs(graph: onnx.GraphProto, shapes: InputShapeInfo) -> None:
    declared = {value.name for value in graph.input}
    for name, info in shapes.infos().items():
        value = onnx.helper.make_tensor_value_info(name, onnx_number(info.data_type()), info.shape())
        if name in declared:
            next(each for each in graph.input if each.name == name).CopyFrom(value)
        else:
            # Labels of a loss that was added to the model are not among its inputs.
            graph.input.append(value)


def _whole_shape(name: str, shape: Any) -> tuple[int, ...]:
    """Return the shape of an input; refuse unknown dimensions, with PopART's sentence."""
    if shape is None or not all(isinstance(n, int) and n >= 0 for n in shape):
        hint = "inputShapeInfo.add(name, TensorInfo(...))"
        message = f"Input tensor '{name}' must be specified in InputShapeInfo, as it has "
        if shape is None:
            raise popart_exception(f"{message}no shape", hint=hint)
        # ONNX has −1 for a dimension without a name, which reading makes None.
        named = [-1 if n is None else n for n in shape]
        unknown = next(n for n in named if not isinstance(n, int) or n < 0)
        dims = ", ".join(map(str, named))
        message = f"{message}shape [{dims}], which uses an unknown value '{unknown}'."
        raise popart_exception(message, expected="whole numbers", hint=hint)
    return tuple(shape)


def _by_node(nodes: Sequence[Node], by_output: Mapping[str, Annotations]) -> tuple[Annotations, ...]:
    """Return the annotations of each node; a node of the conversion has those of its first reader."""
    # Readers come before producers, so that a node without annotations finds those of its reader.
    by_node: list[Annotations] = []
    of_value: dict[str, Annotations] = {}
    for node in reversed(nodes):
        declared = next((by_output[name] for name in node.outputs if name in by_output), None)
        if declared is None:
            declared = next((of_value[name] for name in node.outputs if name in of_value), {})
        by_node.append(declared)
        for name in node.inputs:
            of_value[name] = declared
    return tuple(reversed(by_node))


def ir_text(graph: AnnotatedGraph) -> str:
    """Return the operations of a graph as JSON, with their annotations.

    Args:
        graph: of a session.
    """
    operations = [
        _operation(node, node.inputs, node.outputs, {**node.attributes, **notes})
        for node, notes in graph.annotated_nodes()
    ]
    return json.dumps({"maingraph": operations})


def ir_text_of_failed(model: onnx.ModelProto, error: Exception) -> str:
    """Return the operations of a model that no session can have as JSON, as they are in the model, with the error.

    Args:
        model: as the program gave it.
        error: of its preparation.
    """
    operations = [
        _operation(node, node.input, node.output, {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute})
        for node in model.graph.node
    ]
    return json.dumps({"maingraph": operations, "failed": str(error)})


def _operation(
    node: Node | onnx.NodeProto, inputs: Sequence[str], outputs: Sequence[str], attributes: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the record of a node in the text of the graph that programs dump."""
    return {
        "type": node.op_type,
        "domain": node.domain or "ai.onnx",
        "name": node.name,
        "inputs": list(inputs),
        "outputs": list(outputs),
        "attributes": {name: str(value) for name, value in attributes.items()},
    }


def dot_text(graph: AnnotatedGraph) -> str:
    """Return a graph in DOT, operations as nodes and tensors as edges.

    Args:
        graph: of a session.
    """
    lines = ["digraph main {"]
    producers: dict[str, int] = {}
    for i, node in enumerate(graph.graph.nodes):
        lines.append(f'  n{i} [label="{node.op_type}\\n{node.name}"];')
        for name in node.inputs:
            if name in producers:
                lines.append(f'  n{producers[name]} -> n{i} [label="{name}"];')
        producers |= dict.fromkeys(node.outputs, i)
    return "\n".join([*lines, "}", ""])


Partials = Literal["float32", "float16"]  # as `ipu.Options` takes them
_PRODUCTS = frozenset({"Conv", "ConvTranspose", "MatMul", "Gemm", "MultiConv", "LSTM", "GRU", "RNN"})
# PopART's name of an element type of partial results → that of `Options.partials`.
_PARTIALS: Mapping[str, Partials | None] = MappingProxyType(
    {"": None, "float": "float32", "FLOAT": "float32", "half": "float16", "HALF": "float16"}
)
SETTINGS = (PARTIALS_TYPE, AVAILABLE_MEMORY)


def common_settings(graph: AnnotatedGraph) -> dict[str, Any]:
    """Return the annotations of `SETTINGS` that are equal on all products of a graph, by their names.

    Args:
        graph: graph of a session.
    """
    products = [notes for node, notes in graph.annotated_nodes() if node.op_type in _PRODUCTS]
    values = {name: {notes.get(name) for notes in products} for name in SETTINGS}
    return {name: next(iter(each)) for name, each in values.items() if len(each) == 1 and None not in each}


# Attributes of nodes of ai.graphcore that have no effect here, with PopART's defaults, which builders write.
_ATTRIBUTES_WITHOUT_EFFECT: Mapping[str, Mapping[str, Any]] = MappingProxyType({
    "MultiConv": {
        "availableMemoryProportions": [], "partialsTypes": [], "planType": None, "perConvReservedTiles": None,
        "cycleBackOff": None, "enableConvDithering": [],
    },
    "PrintTensor": {
        "summariseThreshold": 1000, "edgeItems": 3, "maxLineWidth": 75, "digits": 8, "floatFormat": 0,
        "separator": " ", "openBracket": "[", "closeBracket": "]",
    },
})  # fmt: skip


def settings_without_effect(graph: AnnotatedGraph, settings: Mapping[str, Any]) -> list[str]:
    """Return the annotations, as "builder.call", and attributes, as "operator.attribute", that have no effect here.

    Args:
        graph: graph of a session.
        settings: result of `common_settings`.
    """
    annotated = {name for notes in graph.annotations for name in notes} - set(settings)
    calls = [f"builder.{call}" for name, call in WITHOUT_EFFECT.items() if name in annotated]
    attributes = [
        f"{node.op_type}.{name}"
        for node in graph.graph.nodes
        for name, default in _ATTRIBUTES_WITHOUT_EFFECT.get(node.op_type, {}).items()
        if node.attributes.get(name, default) != default
    ]
    return [*calls, *dict.fromkeys(attributes)]


def partials_of(settings: Mapping[str, Any], option: str) -> Partials | None:
    """Return the dtype of partial results, as `Options.partials` takes it; annotations go before the option.

    Args:
        settings: result of `common_settings`.
        option: `partialsTypeMatMuls`.

    Raises:
        popart_exception: an unknown element type, with the nearest.
    """
    annotated = settings.get(PARTIALS_TYPE)
    name = option if annotated is None else annotated.decode() if isinstance(annotated, bytes) else str(annotated)
    if name not in _PARTIALS:
        raise unknown_name("partial results have an element type", name, _PARTIALS)
    return _PARTIALS[name]
