"""`Builder`: ONNX models, an operation at a time; operations take and return names of tensors.

Output: `onnx.ModelProto`, with nodes of ai.onnx and ai.graphcore that carry PopART's annotations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from ipujax.front_end import NotCopied, nearest, write_file
from ipujax.popart.building.annotations import AnnotationScope, GraphNames, NodeAnnotations, as_names
from ipujax.popart.building.builder_operations import DEFAULT_OPSET, DOMAIN, NEWEST_OPSET, OLDEST_OPSET
from ipujax.popart.building.models import (
    declare_outputs,
    inferred_info,
    read_model,
    save_externally,
    tensor_proto,
    variable_settings_of,
    write_variable_settings,
)
from ipujax.popart.building.operation_calls import Operation, OperationCall, attribute_proto
from ipujax.popart.building.opsets import AiGraphcore, AiOnnx, check_windows
from ipujax.popart.enumerations import RecomputeType
from ipujax.popart.exceptions import popart_attribute_error, popart_exception, popart_runtime_error, unknown_name
from ipujax.popart.options import VariableSettings
from ipujax.popart.tensor_info import TensorInfo, onnx_number

# Version of ONNX's file format, which readers compare with their own.
_IR_VERSION = 8


class Builder(NotCopied, NodeAnnotations):
    """Builds an ONNX model.

    Args:
        modelProtoOrFilename: a model to go on with: serialised, as an `onnx.ModelProto`, or the name of a file.
        opsets: versions by domain, as `{"ai.onnx": 11, "ai.graphcore": 1}`; the first opset that is used when None.

    Raises:
        popart_exception: no model, or an unknown opset.
    """

    COPY_HINT = "popart.Builder(builder.getModelProto()), which goes on with its model"

    def __init__(
        self,
        modelProtoOrFilename: bytes | str | onnx.ModelProto | None = None,
        opsets: Mapping[str, int] | None = None,
    ) -> None:
        self._names = GraphNames()
        self._annotations = AnnotationScope()
        self._parent: Builder | None = None
        self._graph = onnx.GraphProto(name="BuilderGraph")
        self._version: int | None = None
        self._domains: dict[str, int] = {}
        self._producers: dict[str, onnx.NodeProto] = {}
        self._variable_settings: dict[str, VariableSettings] = {}  # of parameters that have some
        self._from_parent: dict[str, int] = {}  # name → inputs of this graph that stand before it
        if opsets is not None:
            self._select(_checked_version(opsets.get("ai.onnx", DEFAULT_OPSET)))
        if modelProtoOrFilename is not None:
            self._go_on_with(read_model(modelProtoOrFilename))
        self.aiGraphcore = AiGraphcore(self)
        self.aiGraphcoreOpset1 = self.aiGraphcore

    def __getattr__(self, name: str) -> AiOnnx:
        if name == "aiOnnx":
            return self._select(self.__dict__.get("_version") or DEFAULT_OPSET)
        if name.startswith("aiOnnxOpset") and name.removeprefix("aiOnnxOpset").isdigit():
            return self._select(_checked_version(int(name.removeprefix("aiOnnxOpset"))))
        raise popart_attribute_error(f"a Builder has no {name!r}", got=name, hint=nearest(name, dir(type(self))))

    def _select(self, version: int) -> AiOnnx:
        chosen = self.__dict__.get("_version")
        if chosen is not None and chosen != version:
            selected = f"Invalid opset 'aiOnnxOpset{version}' selected."
            message = f"{selected} Opset for domain ai.onnx already defined as {chosen}"
            raise popart_runtime_error(message, expected=f"aiOnnxOpset{chosen}, as a model has one version of ai.onnx")
        self._version = version
        return AiOnnx(self, version)

    def _go_on_with(self, model: onnx.ModelProto) -> None:
        """Take over the graph, names and opsets of a loaded model, to which the program then adds."""
        self._graph.CopyFrom(model.graph)
        self._variable_settings = variable_settings_of(model)
        for opset in model.opset_import:
            if opset.domain in ("", "ai.onnx"):
                self._select(opset.version)
            else:
                self._domains[opset.domain] = opset.version
        for node in self._graph.node:
            self._producers |= dict.fromkeys(node.output, node)
        # A loaded model keeps its names; new tensors get others.
        for name in [*self._tensor_names()]:
            self._names.reserve(name)

    # Inputs, weights and outputs.

    def setGraphName(self, name: str) -> None:
        """Name the graph."""
        self._graph.name = name

    def addInputTensor(self, *args: Any, **keywords: Any) -> str:
        """Add an input, whose values a step brings.

        Args:
            args: a `TensorInfo`, or an element type and a shape; then, in any order, settings of the transfer, and a
                name.
            keywords: these by PopART's names: tensorInfo, dataType, shape, settings, debugContext.

        Returns:
            Its name.
        """
        values = list(args)
        by_name = dict(keywords)
        info = by_name.pop("tensorInfo", None) or by_name.pop("dataType", None) or values.pop(0)
        if not isinstance(info, TensorInfo):
            info = TensorInfo(info, by_name.pop("shape", None) if "shape" in by_name else values.pop(0))
        words = [value for value in [*values, *by_name.values()] if isinstance(value, str)]
        value = onnx.helper.make_tensor_value_info("", onnx_number(info.data_type()), info.shape())
        return self._add_input(value, words[0] if words else "")

    def addUntypedInputTensor(self, debugContext: str = "", debugPrefix: str = "") -> str:
        """Add an input without element type and shape, as subgraphs have them; return its name.

        Raises:
            popart_exception: a builder of no subgraph.
        """
        if self._parent is None:
            hint = "addInputTensor"
            raise popart_exception("Can not add untyped tensors to the top-level graph.", hint=hint)
        return self._add_input(onnx.ValueInfoProto(), debugContext or debugPrefix)

    def addInputTensorFromParentGraph(self, tensorId: str) -> None:
        """Use a tensor of the graph outside in this subgraph.

        Raises:
            popart_exception: there is no such tensor outside.
        """
        if self._parent is None or not self._parent._sees(tensorId):
            visible = [] if self._parent is None else self._parent._visible()
            raise unknown_name("a subgraph takes a tensor of its parent", tensorId, visible)
        self._from_parent[tensorId] = len(self._graph.input)

    def addInitializedInputTensor(
        self,
        initVal: Any,
        debugContext: str | VariableSettings = "",
        variableSettings: VariableSettings | str | None = None,
        debugPrefix: str = "",
    ) -> str:
        """Add a parameter of the model.

        Args:
            initVal: its first value, an array.
            debugContext: its name.
            variableSettings: groups of replicas with values of their own: the first axis of the array. PopART has it
                before the name, too.
            debugPrefix: as debugContext.

        Returns:
            Its name.
        """
        if isinstance(debugContext, VariableSettings):
            debugContext, variableSettings = variableSettings or "", debugContext
        if not isinstance(debugContext, str) or not isinstance(variableSettings, VariableSettings | None):
            got = repr((debugContext, variableSettings))
            raise popart_exception("a parameter needs a name", expected="a name, and VariableSettings", got=got)
        array = np.asarray(initVal)
        info = TensorInfo(array)
        name = self._names.unique(debugContext or debugPrefix or "init_input")
        if variableSettings is not None:
            self._variable_settings[name] = variableSettings
        self._graph.initializer.append(tensor_proto(array, name))
        self._graph.input.append(onnx.helper.make_tensor_value_info(name, onnx_number(info.data_type()), info.shape()))
        return name

    def addOutputTensor(self, outputName: str) -> None:
        """Mark a tensor as an output of the graph.

        Raises:
            popart_exception: there is no such tensor.
        """
        if not self._sees(outputName):
            raise unknown_name("a graph has an output", outputName, self._visible())
        self._graph.output.append(onnx.ValueInfoProto(name=outputName))

    def _add_input(self, value: onnx.ValueInfoProto, debug_context: str) -> str:
        value.name = self._names.unique(debug_context or "input")
        self._graph.input.append(value)
        return value.name

    # Nodes.

    def add_node(self, operation: Operation, call: OperationCall) -> list[str]:
        """Add a node; return the names of its results.

        Args:
            operation: of an opset.
            call: operands and attributes.

        Raises:
            popart_exception: operands that do not exist, or a value that an attribute cannot have.
        """
        self._check_operands(operation.op_type, call.operands)
        check_windows(operation.op_type, call.attributes)
        attributes = {
            name: _as_graph(value, operation.op_type == "Call")
            for name, value in call.attributes.items()
            if value is not None
        }
        if operation.domain:
            self._domains.setdefault(operation.domain, 1)
        # An empty list of an optional attribute is no attribute, but of reductions: over no axis.
        written = [
            attribute_proto(name, value, call.kinds.get(name))
            for name, value in attributes.items()
            if not (isinstance(value, list) and not value and not operation.op_type.startswith("Reduce"))
        ]
        outputs = [self._names.unique(operation.op_type, i) for i in range(call.output_count)]
        self._append(operation.op_type, operation.domain, call.operands, outputs, written, call.debug_context)
        return outputs

    def _check_operands(self, op_type: str, operands: Sequence[str]) -> None:
        for name in operands:
            if name and not self._sees(name):
                raise unknown_name(f"{op_type} reads a tensor", name, self._visible())

    def _append(
        self,
        op_type: str,
        domain: str,
        operands: Sequence[str],
        outputs: Sequence[str],
        attributes: Sequence[onnx.AttributeProto],
        debug_context: str,
    ) -> None:
        """Append a node, with the name scopes and annotations of the open contexts."""
        name = self._names.path(debug_context)
        node = onnx.NodeProto(op_type=op_type, domain=domain, name=name, input=operands, output=outputs)
        node.attribute.extend(attributes)
        # Annotations of the open contexts are written now: closing a context leaves its nodes annotated.
        for attribute, value in self._annotations.values.items():
            node.attribute.append(attribute_proto(attribute, value, None))
        self._graph.node.append(node)
        self._producers |= dict.fromkeys(outputs, self._graph.node[-1])

    def customOp(
        self,
        opName: str,
        opVersion: int,
        domain: str,
        inputs: Sequence[str],
        attributes: Mapping[str, Any],
        numOutputs: int = 1,
        name: str = "",
    ) -> list[str]:
        """Add an operator of the user's: a function registered with `ipujax.onnx.register(domain, opName)`.

        Returns:
            Names of its results.
        """
        self._check_operands(opName, inputs)
        written = [attribute_proto(key, value, None) for key, value in attributes.items()]
        outputs = [self._names.unique(opName, i) for i in range(numOutputs)]
        self._domains[domain] = opVersion
        self._append(opName, domain, inputs, outputs, written, name)
        return outputs

    def reshape_const(self, aiOnnx: AiOnnx, args: Sequence[str], shape: Sequence[int], debugContext: str = "") -> str:
        """Reshape a tensor to a constant shape; return the name of the result."""
        constant = aiOnnx.constant(np.array(shape, np.int64), debugContext + "_const")
        result: str = aiOnnx.reshape([args[0], constant], debugContext)
        return result

    def checkpointOutput(self, nodeOutputNames: str | Sequence[str]) -> list[str]:
        """Have tensors stored for the backward part, not computed again; return the names of the stored ones."""
        stored: list[str] = []
        for name in as_names(nodeOutputNames):
            (copy,) = self.customOp("Nop", 1, DOMAIN, [name], {}, 1, "Checkpoint")
            self.recomputeOutput(copy, RecomputeType.Checkpoint)
            stored.append(copy)
        return stored

    def createSubgraphBuilder(self) -> Builder:
        """Return a builder for the graph of a call, a loop or a branch."""
        child = Builder()
        # ONNX wants names that are unique over a graph and its subgraphs.
        child._names = self._names
        child._parent = self
        child._version = self._version
        child._domains = self._domains
        child._graph.name = self._names.unique("subgraph")
        return child

    # Reading.

    def getModelProto(self) -> bytes:
        """Return the model, serialised."""
        return self.model().SerializeToString()

    def model(self) -> onnx.ModelProto:
        """Return the model."""
        version = self._version or DEFAULT_OPSET
        opsets = [onnx.helper.make_opsetid("", version)]
        opsets += [onnx.helper.make_opsetid(domain, number) for domain, number in self._domains.items()]
        # A copy: declaring outputs must not change the graph, to which nodes may still be added.
        graph = onnx.GraphProto()
        graph.CopyFrom(self._graph)
        built = onnx.helper.make_model(
            graph, opset_imports=opsets, producer_name="ipujax.popart", ir_version=_IR_VERSION
        )
        write_variable_settings(built, self._variable_settings)
        declare_outputs(built)
        return built

    def saveModelProto(self, filename: str | Path) -> None:
        """Save the model to a file."""
        write_file(Path(filename), self.getModelProto())

    def saveInitializersExternally(self, ids: Sequence[str], filename: str | Path) -> None:
        """Move values of parameters to a file beside that of the model.

        Args:
            ids: names of the parameters.
            filename: of their values.

        Raises:
            popart_exception: a tensor that is not a parameter, or one whose values are in a file already.
        """
        save_externally(self._graph, ids, filename)

    def getInputTensorIds(self) -> list[str]:
        """Return the names of all inputs, parameters included."""
        return [value.name for value in self._graph.input]

    def getOutputTensorIds(self) -> list[str]:
        """Return the names of the outputs."""
        return [value.name for value in self._graph.output]

    def getValueTensorIds(self) -> list[str]:
        """Return the names of the results of all nodes."""
        return [name for node in self._graph.node for name in node.output if name]

    def getTrainableTensorIds(self) -> list[str]:
        """Return the names of the parameters."""
        return [tensor.name for tensor in self._graph.initializer]

    def isInitializer(self, id: str) -> bool:
        """Return whether a tensor is a parameter."""
        return id in self.getTrainableTensorIds()

    def getTensorShape(self, id: str) -> list[int]:
        """Return the shape of a tensor.

        Raises:
            popart_exception: there is no such tensor, or its shape depends on inputs without one.
        """
        return self._info(id).shape()

    def getTensorDtypeString(self, id: str) -> str:
        """Return NumPy's name of the element type of a tensor, as "float32"."""
        return self._info(id).data_type_lcase()

    def _info(self, name: str) -> TensorInfo:
        if not self._sees(name):
            names = sorted(self._visible())
            message = f"{name} is not an input or output tensor. Must be one of {', '.join(names[:8])}"
            raise popart_exception(message, got=name, hint=nearest(name, names))
        return inferred_info(self.model(), name)

    def _tensor_names(self) -> set[str]:
        outputs = {name for node in self._graph.node for name in node.output if name}
        return {*self.getInputTensorIds(), *self.getTrainableTensorIds(), *outputs}

    def _visible(self) -> set[str]:
        return {*self._tensor_names(), *self._from_parent, *(self._parent._visible() if self._parent else ())}

    def _sees(self, name: str) -> bool:
        is_here = name in self._producers or name in self._from_parent
        return is_here or name in self._visible()

    def _node_of(self, name: str) -> onnx.NodeProto:
        if name not in self._producers:
            raise unknown_name("no node has a result", name, self._producers)
        return self._producers[name]


def _as_graph(value: Any, is_called: bool) -> Any:
    """Return the graph of a subgraph's builder; a called one has the tensors of its parent among its inputs."""
    if not isinstance(value, Builder):
        return value
    if not is_called or not value._from_parent:
        return value._graph
    called = onnx.GraphProto()
    called.CopyFrom(value._graph)
    inputs = list(value._graph.input)
    # Inserted from the last to the first, so that earlier positions stay valid.
    for name, place in reversed(value._from_parent.items()):
        inputs.insert(place, onnx.ValueInfoProto(name=name))
    del called.input[:]
    called.input.extend(inputs)
    return called


def _checked_version(version: int) -> int:
    if not OLDEST_OPSET <= version <= NEWEST_OPSET:
        expected = f"a version from {OLDEST_OPSET} to {NEWEST_OPSET}"
        raise popart_exception("there is no such opset of ai.onnx", expected=expected, got=version)
    return version
