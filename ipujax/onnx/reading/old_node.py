"""A node of an early opset, and the rewrites of its attributes that many operators share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from ipujax.onnx.onnx_errors import OnnxModelError
from ipujax.onnx.registry import EARLY_DOMAIN

Nodes = list[onnx.NodeProto]


def left_out(*names: str) -> dict[str, Any]:
    """Return the changes that leave attributes out."""
    return dict.fromkeys(names)


@dataclass(frozen=True, slots=True)
class OldNode:
    """A node to be rewritten.

    Args:
        proto: the node.
        name: its name or number in the graph, for errors.
    """

    proto: onnx.NodeProto
    name: str

    @property
    def attributes(self) -> dict[str, Any]:
        """Values of the attributes, by name."""
        return {each.name: helper.get_attribute_value(each) for each in self.proto.attribute}

    @property
    def inputs(self) -> list[str]:
        """Names of the inputs."""
        return list(self.proto.input)

    @property
    def outputs(self) -> list[str]:
        """Names of the outputs."""
        return list(self.proto.output)

    def value(self, role: str) -> str:
        """Return a name for a new value; names of outputs are unique in their graph, so those made of them are too."""
        return f"{next(filter(None, self.outputs))}·{role}"

    def changed(self, inputs: Sequence[str] | None = None, *, domain: str = "", **attributes: Any) -> onnx.NodeProto:
        """Return the node with other inputs, domain and attributes; None leaves an attribute out."""
        operands = self.inputs if inputs is None else inputs
        new = helper.make_node(self.proto.op_type, operands, self.outputs, self.proto.name, domain=domain)
        new.attribute.extend(each for each in self.proto.attribute if each.name not in attributes)
        added = {name: value for name, value in attributes.items() if value is not None}
        new.attribute.extend(helper.make_attribute(name, value) for name, value in added.items())
        return new

    def with_defaults(self, *dropped: str, domain: str = "", **defaults: Any) -> onnx.NodeProto:
        """Return the node without some attributes, and with others where it leaves them at a default that changed."""
        names = {each.name for each in self.proto.attribute}
        missing = {name: value for name, value in defaults.items() if name not in names}
        return self.changed(domain=domain, **missing, **left_out(*dropped))

    def refused(self, reason: str, expected: str, got: str) -> OnnxModelError:
        """Return the error of a node that the newest opset has no counterpart of."""
        return OnnxModelError(f"node {self.name!r} ({self.proto.op_type}) {reason}", expected=expected, got=got)


Rewrite = Callable[[OldNode], Nodes]


def constant(name: str, values: Any, dtype: type = np.int64) -> onnx.NodeProto:
    """Return a node of a constant."""
    return helper.make_node("Constant", [], [name], value=numpy_helper.from_array(np.asarray(values, dtype), name))


def scalar_like(name: str, value: float, like: str) -> Nodes:
    """Return nodes of a scalar in the element type of another value."""
    single = constant(f"{name}·single", value, np.float32)
    return [single, helper.make_node("CastLike", [f"{name}·single", like], [name])]


def without(*names: str, **defaults: Any) -> Rewrite:
    """Leave attributes out, and write out the defaults that others had."""
    return lambda node: [node.with_defaults(*names, **defaults)]


def in_early_domain(**defaults: Any) -> Rewrite:
    """Keep the form of an operator that is evaluated as it was."""
    return lambda node: [node.with_defaults(domain=EARLY_DOMAIN, **defaults)]


def as_operands(*names: str, first: int = 1, dropped: Sequence[str] = (), **defaults: Any) -> Rewrite:
    """Make operands of attributes that are integers, from a position on."""

    def rewrite(node: OldNode) -> Nodes:
        values = {**defaults, **node.attributes}
        present = [name for name in names if name in values]
        constants = [constant(node.value(name), values[name]) for name in present]
        # Those that are left out in front of others keep their place.
        operands = [node.value(name) if name in present else "" for name in names[: _count_up_to(names, present)]]
        absent = [""] * (first - len(node.inputs) if operands else 0)
        return [*constants, node.changed([*node.inputs, *absent, *operands], **left_out(*names, *dropped))]

    return rewrite


def _count_up_to(names: Sequence[str], present: Sequence[str]) -> int:
    return 1 + names.index(present[-1]) if present else 0
