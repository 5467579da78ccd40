"""Signatures of the builder's operations, and the calls that fit them.

Input: a table of parameters, and the arguments of a call. Output: operands and attributes of an ONNX node, or an error
with the nearest keyword.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx

from ipujax.front_end import nearest
from ipujax.popart.exceptions import popart_exception, popart_type_error
from ipujax.popart.tensor_info import DTYPES, as_index, onnx_number, type_name, whole_number

AttributeType = onnx.AttributeProto.AttributeType
NOT_GIVEN = inspect.Parameter.empty
# The last parameter of every operation; programs for earlier releases use the other names.
DEBUG_CONTEXT = "debugContext"
_OTHER_NAMES = {"debugPrefix": DEBUG_CONTEXT, "debug_context": DEBUG_CONTEXT, "name": DEBUG_CONTEXT,
                "lambda": "lambda_"}  # fmt: skip


class DebugContext(str):
    """Name of an operation in profiles and in the model; all else in PopART's `DebugContext` has no use here.

    Args:
        name: the name.
    """

    def __new__(cls, name: str = "", *_: Any, **__: Any) -> DebugContext:
        return super().__new__(cls, name)


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of an operation that becomes an attribute of its node.

    Args:
        name: keyword of the call.
        kind: ONNX's type of the attribute; None where the value tells it.
        default: value of a call without it; `NOT_GIVEN` for one that is required, None for no attribute.
        attribute: name of the attribute; the keyword when empty.
        is_written: whether the node gets it.
    """

    name: str
    kind: int | None = None
    default: Any = None
    attribute: str = ""
    is_written: bool = True


@dataclass(frozen=True, slots=True)
class Operation:
    """An operation of a builder.

    Args:
        method: name of the builder's method.
        op_type: type of its node.
        domain: domain of its node, "" for ai.onnx.
        inputs: smallest and largest number of operands.
        outputs: number of results; None where a call says it (`num_outputs`).
        parameters: of its attributes, in the order of positional arguments.
        returns_list: whether a call returns a list of names, also of one result.
        takes_operands: whether the first parameter is `args`.
        count_attribute: attribute that has the number of results, where there is one operand; empty for none.
        most_outputs: largest number of results that a call may ask for; None for any.
    """

    method: str
    op_type: str
    domain: str
    inputs: tuple[int, int]
    outputs: int | None
    parameters: tuple[Parameter, ...]
    returns_list: bool
    takes_operands: bool = True
    count_attribute: str = ""
    most_outputs: int | None = None

    def signature(self) -> inspect.Signature:
        """Return the signature of the builder's method."""
        empty = inspect.Parameter.empty
        counted = [("num_outputs", empty)] if self.outputs is None else []
        operands = [("args", empty)] if self.takes_operands else []
        rows = [*operands, *counted, *((p.name, p.default) for p in self.parameters), (DEBUG_CONTEXT, "")]
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        # A parameter without default may follow one that has a default, as num_outputs does: all are given one then.
        required = [name for name, default in rows if default is empty]
        first = sorted(rows, key=lambda row: row[0] not in required)
        return inspect.Signature([inspect.Parameter(name, kind, default=default) for name, default in first])


@dataclass(frozen=True, slots=True)
class OperationCall:
    """Operands and attributes of one call.

    Args:
        operands: names of tensors.
        output_count: number of results.
        attributes: values by name of the attribute; those that are None are left out.
        kinds: ONNX's types of the attributes that have a fixed one.
        debug_context: name of the node.
    """

    operands: tuple[str, ...]
    output_count: int
    attributes: Mapping[str, Any]
    kinds: Mapping[str, int] = field(default_factory=dict)
    debug_context: str = ""


def bound_call(operation: Operation, args: Sequence[Any], kwargs: Mapping[str, Any]) -> OperationCall:
    """Return operands and attributes of a call.

    Args:
        operation: the operation.
        args: positional arguments.
        kwargs: keyword arguments.

    Raises:
        popart_type_error: arguments that do not fit, with the nearest keyword.
        popart_exception: the wrong number of operands.
    """
    values = _bound(operation, args, kwargs)
    operands = values.get("args", ())
    if not isinstance(operands, str | Iterable):
        message = f"{operation.method}(): incompatible function arguments"
        raise popart_type_error(message, expected="names of tensors", got=repr(operands))
    operands = (operands,) if isinstance(operands, str) else tuple(operands)
    fewest, limit = operation.inputs
    if not fewest <= len(operands) <= limit:
        expected = f"{fewest} to {limit}" if fewest != limit else fewest
        message = f"{operation.op_type} has invalid number of inputs"
        raise popart_exception(message, expected=expected, got=len(operands))
    attributes = {p.attribute or p.name: values[p.name] for p in operation.parameters if p.is_written}
    kinds = {p.attribute or p.name: p.kind for p in operation.parameters if p.kind is not None}
    # Optional results are there if a call counts them; ONNX has no other way to ask.
    count = operation.outputs
    if count is None:
        count = whole_number("number of outputs", values["num_outputs"])
    if operation.most_outputs is not None and count > operation.most_outputs:
        message = f"{operation.op_type} has an invalid number of outputs"
        raise popart_exception(message, expected=f"at most {operation.most_outputs}", got=count)
    if operation.count_attribute and len(operands) == 1:
        attributes[operation.count_attribute] = count
    return OperationCall(operands, count, attributes, kinds, str(values[DEBUG_CONTEXT]))


def _bound(operation: Operation, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Bind the arguments of a call to the operation's signature; return the value of each parameter."""
    signature = operation.signature()
    parameters = list(signature.parameters)
    renamed = {name if name in parameters else _OTHER_NAMES.get(name, name): value for name, value in kwargs.items()}
    values = list(args)
    # A name behind the other arguments, as in builder.aiOnnx.relu([x], "debug-name").
    if (
        values[1:]
        and isinstance(values[-1], str)
        and _expects_no_text(operation, parameters[len(values) - 1 :], values[-1])
    ):
        renamed[DEBUG_CONTEXT] = values.pop()
    try:
        # Python's own binding reports missing and double arguments; only unknown keywords need the nearest name.
        bound = signature.bind(*values, **renamed)
    except TypeError as error:
        unknown = [name for name in renamed if name not in parameters]
        raise popart_type_error(
            f"{operation.method}(): incompatible function arguments. The following argument types are supported:"
            f" {operation.method}{signature}",
            expected=f"arguments of that signature: {error}",
            got=unknown[0] if unknown else f"{len(values)} positional arguments and {sorted(renamed)}",
            hint=nearest(unknown[0], parameters) if unknown else None,
        ) from error
    bound.apply_defaults()
    return dict(bound.arguments)


def _expects_no_text(operation: Operation, places: Sequence[str], text: str) -> bool:
    """Return whether a text stands where its parameter takes none: numbers, but for names of element types."""
    kinds = {p.name: p.kind for p in operation.parameters}
    kind = kinds.get(places[0]) if places else None
    is_type = kind == AttributeType.INT and text.upper() in DTYPES
    return kind is not None and kind != AttributeType.STRING and not is_type


_CONVERSIONS: dict[int, Callable[[Any], Any]] = {
    AttributeType.FLOAT: float,
    AttributeType.FLOATS: lambda values: [float(x) for x in values],
    AttributeType.INTS: lambda values: [as_index(x) for x in np.atleast_1d(values)],
    AttributeType.STRING: str,
    AttributeType.STRINGS: lambda values: [str(x) for x in values],
}


def attribute_proto(name: str, value: Any, kind: int | None) -> onnx.AttributeProto:
    """Return an attribute of a node.

    Args:
        name: of the attribute.
        value: number, text, array, subgraph, or a list of them; an element type may be its name.
        kind: ONNX's type of the attribute; None for that of the value.

    Raises:
        popart_exception: a value that the attribute cannot have.
    """
    try:
        if kind == AttributeType.INT:
            number = onnx_number(type_name(value)) if isinstance(value, str) else as_index(value)
            return onnx.helper.make_attribute(name, number)
        if kind == AttributeType.TENSOR and isinstance(value, np.ndarray):
            return onnx.helper.make_attribute(name, onnx.numpy_helper.from_array(value))
        converted = _CONVERSIONS.get(kind or 0, lambda x: x)(value)
        return onnx.helper.make_attribute(name, converted, attr_type=kind)
    except (TypeError, ValueError) as error:
        raise popart_exception(
            f"attribute {name!r} cannot have this value", expected=_type_of(kind), got=repr(value)
        ) from error


def _type_of(kind: int | None) -> str | None:
    return None if kind is None else str(AttributeType.Name(kind)).lower()
