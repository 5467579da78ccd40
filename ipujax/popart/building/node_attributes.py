"""Methods of a builder that read and write attributes of nodes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import onnx

from ipujax.front_end import nearest
from ipujax.popart.building.annotations import as_names, remove_attribute, set_attribute
from ipujax.popart.building.operation_calls import AttributeType, attribute_proto
from ipujax.popart.exceptions import popart_exception

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
