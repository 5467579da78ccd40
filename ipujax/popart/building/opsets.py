"""`builder.aiOnnx` and `builder.aiGraphcore`: objects whose methods add nodes to the graph of a builder.

Errors of the arguments of operations with windows have PopART's sentences: programs compare them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from ipujax.front_end import nearest
from ipujax.popart.building.builder_operations import GRAPHCORE_OPERATIONS, onnx_operations
from ipujax.popart.building.operation_calls import Operation, OperationCall, bound_call
from ipujax.popart.exceptions import popart_attribute_error, popart_exception

_PER_AXIS = ("dilations", "inDilations", "strides")
_PER_SIDE = ("pads", "outPads")


def check_windows(op_type: str, attributes: Mapping[str, Any]) -> None:
    """Refuse paddings that do not fit the window of a node, by its attributes."""
    window = attributes.get("kernel_shape")
    pads = attributes.get("pads")
    if window and pads and op_type != "Pad" and len(pads) != 2 * len(window):
        message = f"Padding vector (length {len(pads)}) does not have twice the length of the window ({len(window)})"
        raise popart_exception(message, expected=2 * len(window), got=list(pads))


def check_convolutions(
    groups: Sequence[Sequence[str]], settings: Mapping[str, Any], rank: Callable[[str], int]
) -> None:
    """Refuse operands, by name for each convolution, and settings of several convolutions that do not fit."""
    # A setting is a list with one list a convolution; `rank` is that of a tensor, by its name.
    for i, group in enumerate(groups):
        if len(group) < 2:
            raise popart_exception(f"convolution {i} must have at least two inputs - data and weights", got=group)
        if len(group) > 3:
            message = f"convolution {i} can have at most three inputs - data, weights, and bias"
            raise popart_exception(message, got=group)
    for name in (*_PER_AXIS, *_PER_SIDE):
        rows = settings.get(name) or []
        if not any(isinstance(row, list | tuple) for row in rows):
            continue
        if len(rows) != len(groups):
            raise popart_exception(
                f"number of {name} parameter sets ({len(rows)}) does not match the number of input sets ({len(groups)})"
            )
        for row, group in zip(rows, groups, strict=True):
            space = rank(group[0]) - 2
            factor = "" if name in _PER_AXIS else "2 * "
            if len(row) != (space if name in _PER_AXIS else 2 * space):
                raise popart_exception(
                    f"Length of {name} vector {len(row)} != {factor}number of spatial dimensions {space}"
                )


class NodeAdder(Protocol):
    """A builder, as opsets see it."""

    def add_node(self, operation: Operation, call: OperationCall) -> list[str]:
        """Add a node; return the names of its results."""

    def getTensorShape(self, id: str) -> list[int]:
        """Return the shape of a tensor."""


class Opset:
    """Operations of one domain in one version.

    Args:
        builder: gets the nodes.
        version: of the opset.
        operations: by method.
    """

    def __init__(self, builder: NodeAdder, version: int, operations: Mapping[str, Operation]) -> None:
        self._builder = builder
        self.version = version
        self._operations = operations

    def __getattr__(self, method: str) -> Callable[..., Any]:
        # `copy` and `pickle` probe for special methods and expect an AttributeError without a hint.
        if method.startswith("__"):
            raise AttributeError(method)
        operation = self._operations.get(method)
        if operation is None:
            raise unknown_method(f"{self}.{method}", method, self._operations)

        def add_node(*args: Any, **kwargs: Any) -> Any:
            return self._add(operation, bound_call(operation, args, kwargs))

        add_node.__name__ = method
        add_node.__signature__ = operation.signature()  # type: ignore[attr-defined]
        return add_node

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self._operations})

    def _add(self, operation: Operation, call: OperationCall) -> Any:
        names = self._builder.add_node(operation, call)
        return names if operation.returns_list else names[0] if names else ""


def unknown_method(call: str, method: str, methods: Mapping[str, Any]) -> popart_attribute_error:
    """Return the error for an unknown method, with the nearest one.

    Args:
        call: the call, for the message.
        method: the unknown name.
        methods: all methods.
    """
    return popart_attribute_error(f"there is no operation {call}", hint=nearest(method, list(methods)))


class AiOnnx(Opset):
    """Operators of ai.onnx in one version."""

    def __init__(self, builder: NodeAdder, version: int) -> None:
        super().__init__(builder, version, onnx_operations(version))

    def __str__(self) -> str:
        return f"aiOnnxOpset{self.version}"


class AiGraphcore(Opset):
    """Operators of ai.graphcore."""

    def __init__(self, builder: NodeAdder, version: int = 1) -> None:
        super().__init__(builder, version, GRAPHCORE_OPERATIONS)

    def __str__(self) -> str:
        return f"aiGraphcoreOpset{self.version}"

    def multiconv(self, args: Sequence[Sequence[str]], *settings: Any, **keywords: Any) -> list[str]:
        """Add several convolutions, each of two or three operands.

        Args:
            args: for each convolution names of data, weights and, where there is one, bias.
            settings: lists with one element a convolution: dilations, inDilations, pads, outPads, strides…
            keywords: the same by name.

        Returns:
            Names of the results.
        """
        operation = self._operations["multiconv"]
        names = list(operation.signature().parameters)[2:]
        values = {**dict(zip(names, settings, strict=False)), **keywords}
        check_convolutions(args, values, lambda name: len(self._builder.getTensorShape(name)))
        flat = {name: _flattened(value) for name, value in values.items()}
        operands = [name for group in args for name in group]
        call = bound_call(operation, (operands, len(args)), flat)
        # Operands of all convolutions are in one flat list; this attribute says where each one begins.
        counts = {"inputsPerConv": [len(group) for group in args]}
        return self._builder.add_node(operation, _with_attributes(call, counts))


def _flattened(value: Any) -> Any:
    is_nested = isinstance(value, list | tuple) and any(isinstance(row, list | tuple) for row in value)
    return [x for row in value for x in row] if is_nested else value


def _with_attributes(call: OperationCall, attributes: Mapping[str, Any]) -> OperationCall:
    return OperationCall(
        call.operands, call.output_count, {**call.attributes, **attributes}, call.kinds, call.debug_context
    )
