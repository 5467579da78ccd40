"""Operations of ai.onnx and ai.graphcore as methods of a builder.

Source for ai.graphcore: the signatures of `AiGraphcoreOpset1` in PopART's Python module.

Methods of ai.onnx are generated from ONNX's schemas, for each version of the opset, by PopART's rules: lower-case
names; `args` first, then `num_outputs` where results are optional or variadic, then required attributes and optional
ones, each in alphabetical order, and `debugContext` last.
"""

from __future__ import annotations

from functools import cache
from types import MappingProxyType
from typing import Any

import onnx

from ipujax.popart.building.operation_calls import NOT_GIVEN, AttributeType, Operation, Parameter
from ipujax.popart.enumerations import ReductionType, ScatterReduction, TensorRemapType

OLDEST_OPSET = 6
NEWEST_OPSET = int(onnx.defs.onnx_opset_version())
DEFAULT_OPSET = 10  # PopART's
NUM_OUTPUTS = "num_outputs"  # of Split since opset 18: what the parameter of this name says
# Words of Python that are operators of ONNX.
_KEYWORD_METHODS = {"And": "logical_and", "Or": "logical_or", "Not": "logical_not", "Xor": "logical_xor",
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
    operations = [_operation_of_schema(schema) for schema in schemas.values()]
    return MappingProxyType({operation.method: operation for operation in operations})


def _operation_of_schema(schema: onnx.defs.OpSchema) -> Operation:
    """Return the builder's method for an operator of ONNX: parameters in PopART's order, and kinds of results."""
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
        method=_KEYWORD_METHODS.get(schema.name, schema.name.lower()),
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


DOMAIN = "ai.graphcore"
_INT = AttributeType.INT
_INTS = AttributeType.INTS
_FLOAT = AttributeType.FLOAT
_FLOATS = AttributeType.FLOATS
_TEXT = AttributeType.STRING
_TEXTS = AttributeType.STRINGS
_GRAPH = AttributeType.GRAPH


# Methods whose names are not those of their operators in lower case.
_METHODS = {
    "Ctc": "ctcloss",
    "L1": "l1loss",
    "Nll": "nllloss",
    "NormalizeImage": "normalize_image",
    "PackedDataBlock": "packedDataBlock",
}


def _needs(name: str, kind: int, attribute: str = "") -> Parameter:
    return Parameter(name, kind, NOT_GIVEN, attribute)


def _has(name: str, kind: int | None, default: Any = None) -> Parameter:
    return Parameter(name, kind, default)


def _operation(op_type: str, inputs: int | tuple[int, int], *parameters: Parameter, outputs: Any = 1) -> Operation:
    """Return an operation of the builder.

    Args:
        op_type: name of the ONNX operator.
        inputs: number of operands, or fewest and most.
        parameters: parameters of the method beside its operands.
        outputs: number of results; (number,) if the method returns them as a list; None if its caller gives the number.
    """
    number = (inputs, inputs) if isinstance(inputs, int) else inputs
    count = outputs[0] if isinstance(outputs, tuple) else outputs
    return Operation(
        method=_METHODS.get(op_type, op_type.lower()),
        op_type=op_type,
        domain=DOMAIN,
        inputs=number,
        outputs=count,
        parameters=parameters,
        returns_list=count is None or isinstance(outputs, tuple),
        takes_operands=number[1] > 0,
    )


_REDUCTION = _has("reduction", _INT, ReductionType.Mean)
_ANY = (1, MOST_INPUTS)
_MULTICONV = (
    *(_has(name, _INTS, []) for name in ("dilations", "inDilations", "pads", "outPads", "strides")),
    _has("availableMemoryProportions", _FLOATS, []),
    _has("partialsTypes", _TEXTS, []),
    _has("planType", _TEXT),
    _has("perConvReservedTiles", _INT),
    _has("cycleBackOff", _FLOAT),
    _has("enableConvDithering", _INTS, []),
)
_PRINT = (
    _has("print_gradient", _INT, 1),
    _has("title", _TEXT, ""),
    *(_has(n, _INT, x) for n, x in (("summariseThreshold", 1000), ("edgeItems", 3), ("maxLineWidth", 75))),
    *(_has(name, _INT, value) for name, value in (("digits", 8), ("floatFormat", 0))),
    *(_has(name, _TEXT, value) for name, value in (("separator", " "), ("openBracket", "["), ("closeBracket", "]"))),
)
_COLLECTIVE = (_has("collectiveOperator", _INT), _has("commGroup", None))
_SCATTER = (
    _needs("axis_size", _INT),
    _has("axis", _INT, -1),
    _has("reduction", _INT, ScatterReduction.Sum),
)
_DYNAMIC = (_needs("axes", _INTS), _needs("sizes", _INTS))

_TABLE = (
    _operation("Abort", (0, 1)),
    _operation("Atan2", 2),
    _operation("BatchNormalization", 5, _has("epsilon", _FLOAT, 1e-5), _has("momentum", _FLOAT, 0.9), outputs=None),
    _operation("BitwiseAnd", 2),
    _operation("BitwiseNot", 1),
    _operation("BitwiseOr", 2),
    _operation("BitwiseXor", 2),
    _operation("BitwiseXnor", 2),
    _operation("Bucketize", 2, _has("right", _INT, 0)),
    _operation("Call", (0, MOST_INPUTS), _needs("callee", _GRAPH), outputs=None),
    _operation("CacheLoad", 1),
    _operation("CacheStore", 1),
    _operation("ConvFlipWeights", 1),
    _operation("CopyVarUpdate", 2),
    _operation(
        "CtcBeamSearchDecoder", 2,
        _has("blank", _INT, 0), _has("beam_width", _INT, 100), _has("top_paths", _INT, 1),
        outputs=(3,),
    ),
    _operation(
        "Ctc", 4,
        _REDUCTION, _has("blank", _INT, 0), _has("outDataType", _TEXT, "UNDEFINED"), _has("zeroInfinity", _INT, 0),
    ),
    _operation("DepthToSpace", 1, _needs("blocksize", _INT), _has("mode", _TEXT, "DCR")),
    _operation("Detach", 1),
    _operation("DynamicAdd", 3, *_DYNAMIC),
    _operation("DynamicSlice", (2, 3), *_DYNAMIC, _has("noOverlap", _INT, 0)),
    _operation("DynamicUpdate", 3, *_DYNAMIC, _has("noOverlap", _INT, 0)),
    _operation("DynamicZero", 2, *_DYNAMIC),
    _operation("Expm1", 1),
    _operation("Fmod", 2),
    _operation("Gelu", 1),
    _operation("GeluErf", 1),
    _operation("GroupedGather", 2, _has("axis", _INT, 0), _has("group_size", _INT, 1)),
    _operation(
        "GroupedScatterReduce", (2, 3),
        *_SCATTER, _has("group_size", _INT, 1), _has("enable_index_broadcast", _INT, 1),
    ),
    _operation("GroupNormalization", 3, _needs("num_groups", _INT), _has("epsilon", _FLOAT, 1e-5), outputs=(3,)),
    _operation("IdentityLoss", 1, _REDUCTION),
    _operation("IncrementMod", 1, _needs("increment", _FLOAT), _needs("modulus", _FLOAT)),
    _operation(
        "Init", 0,
        _needs("shape", _INTS), _needs("data_type", _INT), _needs("init_type", _INT), _has("batch_axis", _INT, -1),
    ),
    _operation("L1", 1, _needs("lambda_", _FLOAT, "lambda"), _REDUCTION),
    _operation("Log1p", 1),
    _operation("LSTM", (2, 4), _has("outputFullSequence", _INT, 1), outputs=(2,)),
    _operation("MultiConv", _ANY, *_MULTICONV, outputs=None),
    _operation("NearbyInt", 1),
    _operation(
        "Nll", 2,
        _REDUCTION, _has("ignoreIndex", _INT), _has("inputIsLogProbability", _INT, 0),
    ),
    _operation("Nop", 1),
    _operation("NormalizeImage", 3, _has("scale", _FLOAT, 1.0)),
    _operation(
        "PackedDataBlock", _ANY,
        _needs("maxSequenceLengths", _INTS), _needs("resultSize", _INT), _needs("callbackBatchSize", _INT),
        _needs("callback", _GRAPH),
    ),
    _operation("PrintTensor", 1, *_PRINT),
    _operation("ReduceMedian", 1, _has("axes", _INTS), _has("keepdims", _INT, 1), outputs=(2,)),
    _operation("Remainder", 2),
    _operation("ReplicatedAllReduce", _ANY, *_COLLECTIVE),
    _operation("ReplicatedReduceScatter", _ANY, *_COLLECTIVE),
    _operation("Reshape", 1, _needs("shape", _INTS)),
    _operation("Reverse", 1, _needs("dimensions", _INTS)),
    _operation("Round", 1),
    _operation("Scale", 1, _needs("scale", _FLOAT)),
    _operation("ScaledAdd", (2, 4), _has("scale0", _FLOAT, 1.0), _has("scale1", _FLOAT, 1.0)),
    _operation("ScatterReduce", (2, 3), *_SCATTER, _has("enable_index_broadcast", _INT, 1)),
    _operation("SequenceSlice", 5, _has("zeroUnused", _INT, 0)),
    _operation("ShapedDropout", 1, _needs("shape", _INTS), _has("ratio", _FLOAT, 0.5)),
    _operation("Slice", 1, _needs("ends", _INTS), _needs("starts", _INTS), _has("axes", _INTS, [])),
    _operation(
        "Sort", 1,
        _has("axis", _INT, -1), _has("descending", _INT, 0), _has("stable", _INT, 0),
        outputs=(2,),
    ),
    _operation("SplineBasis", 3, _has("degree", _INT, 1), outputs=(2,)),
    _operation("SplineWeighting", 4),
    _operation("Square", 1),
    _operation("Subsample", 1, _needs("strides", _INTS)),
    _operation("Swish", 1),
    _operation("TensorRemap", 1, _has("remap_type", _INT, TensorRemapType.FwdBwdReverse)),
)  # fmt: skip

GRAPHCORE_OPERATIONS = MappingProxyType({operation.method: operation for operation in _TABLE})
