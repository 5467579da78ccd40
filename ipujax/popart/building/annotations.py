"""Annotations of nodes: IPU, pipeline stage, execution phase, recomputation and more, as calls and context managers.

They are saved as attributes of the nodes, with PopART's names.

Source: `willow/include/popart/names.hpp` of github:graphcore/popart.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import onnx

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
