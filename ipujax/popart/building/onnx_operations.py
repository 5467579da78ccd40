"""Operations of ai.onnx as methods of a builder, generated from ONNX's schemas, for each version of the opset.

PopART's rules: lower-case names; `args` first, then `num_outputs` where results are optional or variadic, then required
attributes and optional ones, each in alphabetical order, and `debugContext` last.
"""

from __future__ import annotations

from functools import cache
from types import MappingProxyType
from typing import Any

import onnx

from ipujax.popart.building.operation_calls import NOT_GIVEN, AttributeType, Operation, Parameter

OLDEST_OPSET = 6
NEWEST_OPSET = int(onnx.defs.onnx_opset_version())
DEFAULT_OPSET = 10  # PopART's
NUM_OUTPUTS = "num_outputs"  # of Split since opset 18: what the parameter of this name says
# Words of Python that are operators of ONNX.
_METHODS = {"And": "logical_and", "Or": "logical_or", "Not": "logical_not", "Xor": "logical_xor",
            "If": "logical_if"}  # fmt: skip
# Attributes that PopART's methods lack: left over from opset 1, or behind the others, as a keyword.
_WITHOUT = {"consumed_inputs", NUM_OUTPUTS}
_LAST = ("auto_pad",)
MOST_INPUTS = 2**31 - 1  # ONNX's number for any


@cache
def onnx_operations(version: int) -> MappingProxyType[str, Operation]:
    """Return the operations of a version of ai.onnx by method.

    Args:
        version: of the opset, 6 to that of the installed onnx.
    """
    schemas: dict[str, onnx.defs.OpSchema] = {}
    # The history has all versions; the newest that is not newer than the opset is the one in force.
    for schema in onnx.defs.get_all_schemas_with_history():
        newest = schemas.get(schema.name)
        is_newer = newest is None or schema.since_version > newest.since_version
        if schema.domain == "" and schema.since_version <= version and is_newer:
            schemas[schema.name] = schema
    operations = [_operation(schema) for schema in schemas.values()]
    return MappingProxyType({operation.method: operation for operation in operations})


def _operation(schema: onnx.defs.OpSchema) -> Operation:
    is_constant = schema.name == "Constant"
    attributes: list[Any] = sorted(
        (a for name, a in schema.attributes.items() if name not in _WITHOUT),
        key=lambda a: (not a.required, a.name in _LAST, a.name),
    )
    parameters = tuple(
        Parameter(a.name, int(a.type.value), NOT_GIVEN if a.required else None)
        for a in attributes
        if not is_constant or a.name == "value"
    )
    if is_constant:  # builder.aiOnnx.constant(array), and since opset 11 constant(array, False)
        is_sparse = Parameter("is_value_sparse", AttributeType.INT, default=False, is_written=False)
        parameters = (Parameter("value", AttributeType.TENSOR, NOT_GIVEN), is_sparse)
    # PopART returns a name, not a list, for exactly one result; variadic ones are lists even of one.
    is_fixed = schema.min_output == schema.max_output
    return Operation(
        method=_METHODS.get(schema.name, schema.name.lower()),
        op_type=schema.name,
        domain="",
        inputs=(schema.min_input, schema.max_input),
        outputs=schema.max_output if is_fixed else None,
        parameters=parameters,
        returns_list=not (is_fixed and schema.max_output == 1),
        takes_operands=schema.max_input > 0,
        count_attribute=NUM_OUTPUTS if NUM_OUTPUTS in schema.attributes else "",
        most_outputs=schema.max_output,
    )
