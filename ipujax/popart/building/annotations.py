"""Annotations of nodes: IPU, pipeline stage, execution phase, recomputation and more, as calls and context managers.

They are attributes of the nodes, with PopART's names; a builder has methods that set them (`virtualGraph`,
`pipelineStage`, `recomputeOutput` and their like), and those that read and write attributes of nodes.

Names of tensors are unique over a graph and its subgraphs. They are PopART's: operator and number of the result,
`Add:0`; a name in use gets a counter, `Add:0/1`; name scopes stand before it, `layer/Add:0`.

Source: `willow/include/popart/names.hpp` of github:graphcore/popart.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from numbers import Real
from types import MappingProxyType
from typing import Any

import onnx

from ipujax.front_end import nearest
from ipujax.popart.building.operation_calls import AttributeType, attribute_proto
from ipujax.popart.enumerations import CommGroupType, RecomputeType, ReplicatedTensorSharding
from ipujax.popart.exceptions import popart_exception, popart_type_error
from ipujax.popart.options import TensorLocation
from ipujax.popart.tensor_info import whole_number

VIRTUAL_GRAPH = "__ipu_number"
PIPELINE_STAGE = "__pipeline_stage"
EXECUTION_PHASE = "__execution_phase"
RECOMPUTE = "__recompute_output_in_backward_pass"
PARTIALS_TYPE = "__partials_type"
AVAILABLE_MEMORY = "__available_memory"
OUTPUT_LOCATION = "__output_tensor_location"
SCHEDULE_PRIORITY = "__schedule_priority"
CONV_DITHERING = "__enable_conv_dithering"
EXCLUDE_PATTERNS = "__exclude_patterns"
INPLACE_NAMES = "__inplace_op_names"
INPLACE_PRIORITIES = "__inplace_op_priorities"
OUTLINE = "__outline"
COMM_GROUP = "__comm_group_type"
SERIALIZE_MODE = "__serialize_matmul_mode"
SERIALIZE_FACTOR = "__serialize_matmul_factor"
SERIALIZE_PRECISION = "__serialize_matmul_precision"

# Annotation that a session does not read → the call of the builder that sets it. None of them changes numbers.
WITHOUT_EFFECT: Mapping[str, str] = MappingProxyType(
    {
        PARTIALS_TYPE: "setPartialsType",
        AVAILABLE_MEMORY: "setAvailableMemoryProportion",
        OUTPUT_LOCATION: "outputTensorLocation",
        SCHEDULE_PRIORITY: "schedulePriority",
        CONV_DITHERING: "setEnableConvDithering",
        EXCLUDE_PATTERNS: "excludePatterns",
        INPLACE_NAMES: "setInplacePreferences",
        OUTLINE: "outlineAttributes",
        SERIALIZE_MODE: "setSerializeMatMul",
    }
)


class AnnotationScope:
    """Annotations of the nodes that are being added."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}

    @contextmanager
    def annotating(self, attribute: str, value: Any) -> Iterator[None]:
        """Annotate all nodes that are added inside; the innermost value counts."""
        before = dict(self.values)
        self.values[attribute] = value
        try:
            yield
        finally:
            self.values.clear()
            self.values.update(before)


def set_attribute(node: onnx.NodeProto, attribute: onnx.AttributeProto) -> None:
    """Give a node an attribute in place of the one of its name.

    Args:
        node: node to change in place.
        attribute: the new one.
    """
    remove_attribute(node, attribute.name)
    node.attribute.append(attribute)


def remove_attribute(node: onnx.NodeProto, name: str) -> bool:
    """Remove an attribute; return whether the node had it.

    Args:
        node: node to change in place.
        name: of the attribute.
    """
    for i, attribute in enumerate(node.attribute):
        if attribute.name == name:
            del node.attribute[i]
            return True
    return False


def annotation_of(node: onnx.NodeProto, name: str) -> Any:
    """Return the value of an attribute, None where a node lacks it.

    Args:
        node: of a graph.
        name: of the attribute.
    """
    return next((onnx.helper.get_attribute_value(a) for a in node.attribute if a.name == name), None)


def as_names(names: str | Sequence[str] | set[str]) -> list[str]:
    """Return names of tensors as a list.

    Args:
        names: one name, or several.
    """
    return [names] if isinstance(names, str) else list(names)


DELIMITER = "/"


class GraphNames:
    """Names in use, and the name scopes that are open."""

    def __init__(self) -> None:
        self._used: set[str] = set()
        self._scopes: list[str] = []

    def reserve(self, name: str) -> None:
        """Count a name as used."""
        self._used.add(name)

    def unique(self, name: str, output: int | None = None) -> str:
        """Return a new name.

        Args:
            name: operator or debug context.
            output: number of the result; None for an input.
        """
        base = self.path(name) if output is None else f"{self.path(name)}:{output}"
        # Names are searched, not counted: a loaded model may have `Add:0/1` and no `Add:0`.
        proposed = base
        counter = 0
        while proposed in self._used:
            counter += 1
            proposed = f"{base}{DELIMITER}{counter}"
        self._used.add(proposed)
        return proposed

    def path(self, name: str) -> str:
        """Return a name behind the open scopes."""
        return DELIMITER.join([*self._scopes, name]) if name else DELIMITER.join(self._scopes)

    @contextmanager
    def scope(self, name: str) -> Iterator[None]:
        """Put a scope before all names that are made inside."""
        self._scopes.append(name)
        try:
            yield
        finally:
            self._scopes.pop()


Names = str | Sequence[str] | set[str]


class NodeAttributes(ABC):
    """Attributes of the nodes whose results have given names.

    Each method takes `nodeOutputNames`: one name of a result, or several results of one node.
    """

    @abstractmethod
    def _node_of(self, name: str) -> onnx.NodeProto: ...

    def _nodes(self, names: Names) -> list[onnx.NodeProto]:
        nodes: list[onnx.NodeProto] = []
        for name in as_names(names):
            node = self._node_of(name)
            nodes += [] if any(other is node for other in nodes) else [node]
        return nodes

    def addNodeAttribute(self, attributeName: str, attributeValue: Any, nodeOutputNames: Names) -> None:
        """Give nodes an attribute.

        Args:
            attributeName: its name.
            attributeValue: number, text, or a list of them.
            nodeOutputNames: results of the nodes.

        Raises:
            popart_exception: the nodes have the attribute, or there is no such tensor.
        """
        for node in self._nodes(nodeOutputNames):
            if any(a.name == attributeName for a in node.attribute):
                raise popart_exception(f"Node already has attribute {attributeName}.", got=node.op_type)
            node.attribute.append(attribute_proto(attributeName, attributeValue, None))

    def nodeHasAttribute(self, attributeName: str, nodeOutputNames: Names) -> bool:
        """Return whether a node has an attribute."""
        return any(a.name == attributeName for node in self._nodes(nodeOutputNames) for a in node.attribute)

    def getAllNodeAttributeNames(self, nodeOutputNames: Names) -> list[str]:
        """Return the names of all attributes of a node."""
        return [a.name for node in self._nodes(nodeOutputNames) for a in node.attribute]

    def removeNodeAttribute(self, attributeName: str, nodeOutputNames: Names) -> None:
        """Remove an attribute of a node.

        Raises:
            popart_exception: the node lacks it.
        """
        for node in self._nodes(nodeOutputNames):
            if not remove_attribute(node, attributeName):
                message = f"Cannot remove attribute {attributeName} as it does not exist."
                raise popart_exception(message, hint=self._nearest(node, attributeName))

    def getInt64NodeAttribute(self, attributeName: str, nodeOutputNames: Names) -> int:
        """Return a whole number."""
        return int(self._attribute(attributeName, nodeOutputNames, AttributeType.INT))

    def getInt64VectorNodeAttribute(self, attributeName: str, nodeOutputNames: Names) -> list[int]:
        """Return whole numbers."""
        return list(self._attribute(attributeName, nodeOutputNames, AttributeType.INTS))

    def getFloatNodeAttribute(self, attributeName: str, nodeOutputNames: Names) -> float:
        """Return a number."""
        return float(self._attribute(attributeName, nodeOutputNames, AttributeType.FLOAT))

    def getFloatVectorNodeAttribute(self, attributeName: str, nodeOutputNames: Names) -> list[float]:
        """Return numbers."""
        return list(self._attribute(attributeName, nodeOutputNames, AttributeType.FLOATS))

    def getStringNodeAttribute(self, attributeName: str, nodeOutputNames: Names) -> str:
        """Return a text."""
        return str(self._attribute(attributeName, nodeOutputNames, AttributeType.STRING).decode())

    def getStringVectorNodeAttribute(self, attributeName: str, nodeOutputNames: Names) -> list[str]:
        """Return texts."""
        return [text.decode() for text in self._attribute(attributeName, nodeOutputNames, AttributeType.STRINGS)]

    def _attribute(self, name: str, names: Names, kind: int) -> Any:
        node = self._nodes(names)[0]
        for attribute in node.attribute:
            if attribute.name == name and attribute.type == kind:
                return onnx.helper.get_attribute_value(attribute)
            if attribute.name == name:
                expected = str(AttributeType.Name(kind)).lower()
                got = str(AttributeType.Name(attribute.type)).lower()
                raise popart_exception(f"attribute {name!r} has the wrong type", expected=expected, got=got)
        raise self._lacks(node, name)

    def _lacks(self, node: onnx.NodeProto, name: str) -> popart_exception:
        return popart_exception(f"Node does not have an attribute {name}.", hint=self._nearest(node, name))

    def _nearest(self, node: onnx.NodeProto, name: str) -> str | None:
        return nearest(name, [a.name for a in node.attribute])

    def _set(self, attribute: str, value: Any, names: Names, kind: int | None = None) -> None:
        for node in self._nodes(names):
            set_attribute(node, attribute_proto(attribute, value, kind))


# Annotation → its name in PopART's errors.
_SCOPES = {
    VIRTUAL_GRAPH: "Virtual graph",
    PIPELINE_STAGE: "Pipeline stage",
    EXECUTION_PHASE: "Execution phase",
    RECOMPUTE: "Recomputation",
}


class NodeAnnotations(NodeAttributes):
    """Annotations of nodes.

    Methods that take a number first are context managers for the nodes added inside; with names of tensors first they
    annotate the nodes of these.
    """

    _annotations: AnnotationScope
    _names: GraphNames

    def virtualGraph(self, nodeOutputNames: Any = None, value: Any = None) -> Any:
        """Assign nodes to an IPU."""
        return self._place(VIRTUAL_GRAPH, nodeOutputNames, value, 0)

    def pipelineStage(self, nodeOutputNames: Any = None, value: Any = None) -> Any:
        """Assign nodes to a stage of the pipeline."""
        return self._place(PIPELINE_STAGE, nodeOutputNames, value, 0)

    def executionPhase(self, nodeOutputNames: Any = None, value: Any = None) -> Any:
        """Assign nodes to an execution phase."""
        return self._place(EXECUTION_PHASE, nodeOutputNames, value, 0)

    def recomputeOutput(self, nodeOutputNames: Any = None, value: Any = None) -> Any:
        """Say whether results are computed again in the backward part."""
        return self._place(RECOMPUTE, nodeOutputNames, value, RecomputeType.Undefined)

    def schedulePriority(self, value: float) -> AbstractContextManager[None]:
        """Annotate nodes with a priority, which the scheduler of this compiler does not read."""
        return self._annotations.annotating(SCHEDULE_PRIORITY, float(value))

    def commGroup(self, type: int = 0, groupSize: int = 0) -> AbstractContextManager[None]:
        """Annotate nodes with a group of replicas: that of all; other groups are refused, as they change numbers."""
        if int(type) != CommGroupType.All:
            hint = "CommGroupType.All"
            raise popart_exception("commGroup: collectives are over all replicas", expected=hint, got=type)
        return self._annotations.annotating(COMM_GROUP, [int(type), int(groupSize)])

    def outlineAttributes(self, values: Mapping[str, str]) -> AbstractContextManager[None]:
        """Annotate nodes with hints for PopART's outlining, which this compiler does not read."""
        return self._annotations.annotating(OUTLINE, [text for pair in values.items() for text in pair])

    def recomputeOutputInBackwardPass(
        self, nodeOutputName: Names, value: RecomputeType = RecomputeType.Recompute
    ) -> None:
        """Have results computed again in the backward part."""
        self._set(RECOMPUTE, whole_number("recomputation", value), nodeOutputName, AttributeType.INT)

    def getRecomputeOutputInBackwardPass(self, nodeOutputName: Names) -> bool:
        """Return whether results are computed again in the backward part."""
        node = self._nodes(nodeOutputName)[0]
        return bool(annotation_of(node, RECOMPUTE) == RecomputeType.Recompute)

    def getVirtualGraph(self, nodeOutputNames: Names | None = None) -> int:
        """Return the IPU of a node, or that of the open context."""
        return self._placement(VIRTUAL_GRAPH, nodeOutputNames)

    def hasVirtualGraph(self) -> bool:
        """Return whether a context of `virtualGraph` is open."""
        return VIRTUAL_GRAPH in self._annotations.values

    def getPipelineStage(self) -> int:
        """Return the stage of the open context."""
        return self._placement(PIPELINE_STAGE, None)

    def hasPipelineStage(self) -> bool:
        """Return whether a context of `pipelineStage` is open."""
        return PIPELINE_STAGE in self._annotations.values

    def getExecutionPhase(self) -> int:
        """Return the execution phase of the open context."""
        return self._placement(EXECUTION_PHASE, None)

    def hasExecutionPhase(self) -> bool:
        """Return whether a context of `executionPhase` is open."""
        return EXECUTION_PHASE in self._annotations.values

    def outputTensorLocation(self, nodeOutputNames: Any = None, value: Any = None) -> Any:
        """Annotate nodes with the memory of their results, which this compiler does not read: tiles by default.

        Raises:
            popart_exception: results that replicas divide.
            popart_type_error: another value than a `TensorLocation`.
        """
        is_location_alone = value is None and not isinstance(nodeOutputNames, Collection)
        names, location = (None, nodeOutputNames) if is_location_alone else (nodeOutputNames, value)
        location = TensorLocation() if location is None else location
        if not isinstance(location, TensorLocation):
            expected = "a TensorLocation, such as TensorLocation(TensorStorage.OffChip)"
            raise popart_type_error(
                "outputTensorLocation needs a TensorLocation", expected=expected, got=repr(location)
            )
        if location.replicatedTensorSharding != ReplicatedTensorSharding.Off:
            message = "outputTensorLocation: replicatedTensorSharding is not supported"
            raise popart_exception(message, expected="ReplicatedTensorSharding.Off", got=location)
        numbers = [int(location.storage), int(location.replicatedTensorSharding)]
        if names is None:
            return self._annotations.annotating(OUTPUT_LOCATION, numbers)
        self._set(OUTPUT_LOCATION, numbers, names, AttributeType.INTS)
        return None

    def setPartialsType(self, nodeOutputName: Names, partialsType: str) -> None:
        """Set the element type of partial results of a matrix multiplication or convolution: FLOAT or HALF."""
        self._check_type(nodeOutputName, "partials", ("Conv", "ConvTranspose", "MatMul", "Gemm", "MultiConv"))
        self._set(PARTIALS_TYPE, str(partialsType), nodeOutputName, AttributeType.STRING)

    def getPartialsType(self, nodeOutputName: Names) -> str:
        """Return the element type of partial results, FLOAT where none is set."""
        value = annotation_of(self._nodes(nodeOutputName)[0], PARTIALS_TYPE)
        return "FLOAT" if value is None else str(value.decode())

    def setAvailableMemoryProportion(self, nodeOutputNames: Names, availableMemoryProportion: float) -> None:
        """Set the share of tile memory that a product's plan may take, more than 0 and at most 1."""
        if not 0 < availableMemoryProportion <= 1:
            expected = "more than 0, at most 1"
            message = "availableMemoryProportion must be in (0,1]"
            raise popart_exception(message, expected=expected, got=availableMemoryProportion)
        kinds = ("Conv", "ConvTranspose", "MatMul", "Gemm", "MultiConv", "LSTM", "GRU", "RNN", "Gather",
                 "ScatterReduce", "GroupedGather", "GroupedScatterReduce", "TopK")  # fmt: skip
        self._check_type(nodeOutputNames, "a proportion of memory", kinds)
        self._set(AVAILABLE_MEMORY, float(availableMemoryProportion), nodeOutputNames, AttributeType.FLOAT)

    def setEnableConvDithering(self, nodeOutputName: Names, enableConvDithering: int) -> None:
        """Annotate a convolution with PopLibs' dithering of tiles, which this compiler does not read."""
        self._set(CONV_DITHERING, int(enableConvDithering), nodeOutputName, AttributeType.INT)

    def setSerializeMatMul(
        self, nodeOutputName: Names, mode: str, factor: int = 0, keep_precision: bool = False
    ) -> None:
        """Annotate a product with the dimension in which PopART serialises it; the planner here divides on its own."""
        # PopART's documented way to say that a product is not serialised.
        if mode == "none":
            return
        self._check_type(nodeOutputName, "serialisation", ("MatMul",))
        self._set(SERIALIZE_MODE, mode, nodeOutputName, AttributeType.STRING)
        self._set(SERIALIZE_FACTOR, whole_number("factor", factor), nodeOutputName, AttributeType.INT)
        self._set(SERIALIZE_PRECISION, int(keep_precision), nodeOutputName, AttributeType.INT)

    def excludePatterns(self, nodeOutputName: Names, patternNames: Sequence[str]) -> None:
        """Annotate nodes with rewrites that PopART leaves out for them; there are none of these here."""
        self._set(EXCLUDE_PATTERNS, list(patternNames), nodeOutputName, AttributeType.STRINGS)

    def setInplacePreferences(self, nodeOutputName: Names, prefs: Mapping[str, float]) -> None:
        """Annotate nodes with PopART's preferences for computing in place, which this compiler does not read."""
        self._set(INPLACE_NAMES, list(prefs), nodeOutputName, AttributeType.STRINGS)
        self._set(INPLACE_PRIORITIES, list(prefs.values()), nodeOutputName, AttributeType.FLOATS)

    def nameScope(self, name: str) -> AbstractContextManager[None]:
        """Put a scope before the names of all that is added inside, in the model and in profiles."""
        return self._names.scope(name)

    def getNameScope(self, name: str = "") -> str:
        """Return a name behind the open scopes."""
        path = self._names.path("")
        return f"{path}/{name}" if path else name

    def _place(self, attribute: str, target: Any, value: Any, default: int) -> Any:
        """Annotate nodes, named by `target`, with a number; without names return a scope of it, `target` or `value`."""
        is_scope = target is None or isinstance(target, Real)
        if is_scope and target is not None and value is not None:
            message = f"the {_SCOPES[attribute].lower()} of a scope is one number"
            expected = "names of tensors and a number, or a number alone"
            raise popart_type_error(message, expected=expected, got=f"{target}, {value}")
        number = value if target is None or not is_scope else target
        whole = whole_number(_SCOPES[attribute].lower(), default if number is None else number)
        if is_scope:
            return self._annotations.annotating(attribute, whole)
        self._set(attribute, whole, target, AttributeType.INT)
        return None

    def _placement(self, attribute: str, names: Names | None) -> int:
        if names is None:
            value = self._annotations.values.get(attribute)
        else:
            value = annotation_of(self._nodes(names)[0], attribute)
        if value is None:
            raise popart_exception(f"{_SCOPES[attribute]} not set in current scope", got=names or "no open context")
        return int(value)

    def _check_type(self, names: Names, setting: str, op_types: Sequence[str]) -> None:
        node: onnx.NodeProto
        for node in self._nodes(names):
            if node.op_type not in op_types:
                raise popart_exception(
                    f"{node.op_type} has no setting of {setting}", expected=" or ".join(op_types), got=node.op_type
                )
