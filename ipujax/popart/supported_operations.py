"""Lists of the operators that models may have: of ai.onnx in each version, and of ai.graphcore.

Source: names of the functions as PopART's Python module has them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import onnx

from ipujax.onnx.front_end import OPERATORS, STANDARD_DOMAIN
from ipujax.popart.building import DOMAIN, GRAPHCORE_OPERATIONS
from ipujax.popart.enumerations import DataType

_DOMAIN_NAME = "ai.onnx"  # PopART's name of the domain that is empty in files
_ANY_VALUE = ".*"


@dataclass(frozen=True, slots=True, order=True)
class OperatorIdentifier:
    """An operator in one version.

    Args:
        domain: "ai.onnx", "ai.graphcore" or another.
        type: of its nodes.
        version: of the opset that introduced this form of it.
    """

    domain: str
    type: str
    version: int


@dataclass(frozen=True, slots=True)
class OperandDefinition:
    """An operand or a result of an operator.

    Args:
        name: in ONNX's schema.
        supportedTensors: element types; empty for any.
        constant: whether it has to be a constant; none has to here.
    """

    name: str
    supportedTensors: tuple[DataType, ...] = ()
    constant: bool = False


@dataclass(frozen=True, slots=True)
class AttributeDefinition:
    """An attribute of an operator.

    Args:
        supportedValuesRegex: values that it may have.
    """

    supportedValuesRegex: str = _ANY_VALUE


@dataclass(frozen=True, slots=True)
class OpDefinition:
    """Operands, results and attributes of an operator.

    Args:
        inputs: operands.
        outputs: results.
        attributes: by name.
    """

    inputs: tuple[OperandDefinition, ...]
    outputs: tuple[OperandDefinition, ...]
    attributes: Mapping[str, AttributeDefinition]


def getSupportedOperations(includeInternal: bool) -> list[OperatorIdentifier]:
    """Return the operators that a model may have.

    Args:
        includeInternal: whether operators are listed that no method of a builder adds.
    """
    return list(getSupportedOperationsDefinition(includeInternal))


def getUnsupportedOperations(opsetVersion: int) -> list[OperatorIdentifier]:
    """Return the operators of a version of ai.onnx that no model may have.

    Args:
        opsetVersion: of the opset.
    """
    newest: dict[str, int] = {}
    for schema in _standard_schemas():
        if schema.since_version <= opsetVersion:
            newest[schema.name] = max(newest.get(schema.name, 0), schema.since_version)
    missing = [name for name in newest if (STANDARD_DOMAIN, name) not in OPERATORS]
    return sorted(OperatorIdentifier(_DOMAIN_NAME, name, newest[name]) for name in missing)


def getSupportedOperationsDefinition(includeInternal: bool) -> dict[OperatorIdentifier, OpDefinition]:
    """Return operands, results and attributes of the operators that a model may have.

    Args:
        includeInternal: whether operators are listed that no method of a builder adds.
    """
    definitions = {
        OperatorIdentifier(_DOMAIN_NAME, schema.name, schema.since_version): _of_schema(schema)
        for schema in _standard_schemas()
        if (STANDARD_DOMAIN, schema.name) in OPERATORS
    }
    for operation in GRAPHCORE_OPERATIONS.values():
        if (DOMAIN, operation.op_type) in OPERATORS:
            attributes = {p.attribute or p.name: AttributeDefinition() for p in operation.parameters}
            operands = tuple(OperandDefinition(f"input{i}") for i in range(operation.inputs[0]))
            results = tuple(OperandDefinition(f"output{i}") for i in range(operation.outputs or 1))
            key = OperatorIdentifier(DOMAIN, operation.op_type, 1)
            definitions[key] = OpDefinition(operands, results, attributes)
    if includeInternal:
        listed = {(key.domain, key.type) for key in definitions}
        internal = [key for key in OPERATORS if key[0] != STANDARD_DOMAIN and key not in listed]
        definitions |= {OperatorIdentifier(*key, 1): OpDefinition((), (), {}) for key in internal}
    return dict(sorted(definitions.items()))


def _standard_schemas() -> list[onnx.defs.OpSchema]:
    return [schema for schema in onnx.defs.get_all_schemas_with_history() if schema.domain == STANDARD_DOMAIN]


def _of_schema(schema: onnx.defs.OpSchema) -> OpDefinition:
    operands = tuple(OperandDefinition(each.name, _element_types(each.types)) for each in schema.inputs)
    results = tuple(OperandDefinition(each.name, _element_types(each.types)) for each in schema.outputs)
    return OpDefinition(operands, results, {name: AttributeDefinition() for name in schema.attributes})


def _element_types(types: Iterable[str]) -> tuple[DataType, ...]:
    """Return PopART's element types among those of a schema, as "tensor(float)"."""
    names = {text.removeprefix("tensor(").removesuffix(")").upper() for text in types}
    return tuple(kind for name, kind in DataType.__members__.items() if name in names)
