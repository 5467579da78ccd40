"""Attributes whose values are names or codes, and which values ONNX gives a meaning: the one check of them all.

A row has operators, an attribute, and the allowed values from an opset on; a later row of the same attribute takes its
place. Values of a list are checked one by one.

Source: ONNX, docs/Operators.md and docs/Changelog.md. Names that have one meaning are allowed in the opsets too that do
not list them, where onnxruntime runs them: `tf_half_pixel_for_nn` from 13 on, `wrap` before 19, `cubic` in 10.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import onnx
from onnx import TensorProto, helper

from ipujax.front_end import nearest
from ipujax.onnx.onnx_errors import OnnxModelError
from ipujax.onnx.reading.onnx_protos import graphs_of, opset_of

_Values = Collection[Any]
_Row = tuple[tuple[str, ...], str, _Values, int]

_PREVIEW_DOMAINS = ("ai.onnx.preview", "ai.onnx.preview.training")
_FLAG = (0, 1)
_TYPES = TensorProto.DataType
_ELEMENT_TYPES = tuple(filter(None, _TYPES.values()))
_FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE, TensorProto.BFLOAT16)
_POSITIONS = ("half_pixel", "pytorch_half_pixel", "align_corners", "asymmetric", "tf_half_pixel_for_nn")
_ACTIVATIONS = (
    *("Affine", "Elu", "HardSigmoid", "LeakyRelu", "Relu", "ScaledTanh", "Sigmoid", "Softplus", "Softsign", "Tanh"),
    "ThresholdedRelu",
)

_RECURRENT = ("GRU", "LSTM", "RNN")
_WINDOWED = ("AveragePool", "Conv", "ConvInteger", "ConvTranspose", "LpPool", "MaxPool", "QLinearConv")
_RANDOM = ("Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike")
_SPECTRAL = ("BlackmanWindow", "HammingWindow", "HannWindow")
_NORMALIZATIONS = ("GroupNormalization", "LayerNormalization", "RMSNormalization")
_REDUCTIONS = tuple(
    f"Reduce{name}" for name in ("L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "Sum", "SumSquare")
)
_ARITHMETIC = ("Add", "And", "Div", "Equal", "Gemm", "Greater", "Less", "Mul", "Or", "Pow", "Sub", "Xor")

_NAMES: tuple[_Row, ...] = (
    (_WINDOWED, "auto_pad", ("NOTSET", "SAME_UPPER", "SAME_LOWER", "VALID"), 1),
    (_RECURRENT, "activations", _ACTIVATIONS, 1),
    (_RECURRENT, "direction", ("forward", "reverse", "bidirectional"), 1),
    (("BitShift",), "direction", ("LEFT", "RIGHT"), 1),
    (("Cast",), "to", tuple(name for name, code in _TYPES.items() if code), 1),
    (("Cast",), "to", _ELEMENT_TYPES, 6),
    (("Cast", "CastLike"), "round_mode", ("up", "down", "nearest"), 1),
    (("CausalConvWithState",), "activation", ("none", "silu", "swish"), 1),
    (("DepthToSpace", "SpaceToDepth"), "mode", ("DCR", "CRD"), 1),
    (("Gelu",), "approximate", ("none", "tanh"), 1),
    (("GridSample",), "mode", ("bilinear", "nearest", "bicubic"), 1),
    (("GridSample",), "mode", ("linear", "nearest", "cubic"), 20),
    (("GridSample",), "padding_mode", ("zeros", "border", "reflection"), 1),
    (("StringNormalizer",), "case_change_action", ("NONE", "LOWER", "UPPER"), 1),
    (("LinearAttention",), "update_rule", ("linear", "gated", "delta", "gated_delta"), 1),
    (("Momentum",), "mode", ("nesterov", "standard"), 1),
    (("NegativeLogLikelihoodLoss", "SoftmaxCrossEntropyLoss"), "reduction", ("none", "sum", "mean"), 1),
    (("Pad",), "mode", ("constant", "reflect", "edge", "wrap"), 1),
    (("Resize",), "coordinate_transformation_mode", (*_POSITIONS, "half_pixel_symmetric", "tf_crop_and_resize"), 1),
    (("Resize",), "keep_aspect_ratio_policy", ("stretch", "not_larger", "not_smaller"), 1),
    (("Resize",), "mode", ("nearest", "linear", "cubic"), 1),
    (("Resize",), "nearest_mode", ("round_prefer_floor", "round_prefer_ceil", "floor", "ceil"), 1),
    (("RoiAlign",), "coordinate_transformation_mode", ("half_pixel", "output_half_pixel"), 1),
    (("RoiAlign",), "mode", ("avg", "max"), 1),
    (("ScatterElements", "ScatterND"), "reduction", ("none", "add", "mul", "max", "min"), 1),
    (("TensorScatter",), "mode", ("linear", "circular"), 1),
    (("TfIdfVectorizer",), "mode", ("TF", "IDF", "TFIDF"), 1),
    (("Upsample",), "mode", ("nearest", "bilinear"), 1),
    (("Upsample",), "mode", ("nearest", "linear"), 7),
)
_CODES: tuple[_Row, ...] = (
    (("Attention", "FlexAttention"), "softmax_precision", _FLOATS, 1),
    (("Attention",), "qk_matmul_output_mode", (0, 1, 2, 3), 1),
    (("BitCast",), "to", _ELEMENT_TYPES, 1),
    (("DequantizeLinear", "QuantizeLinear"), "output_dtype", (0, *_ELEMENT_TYPES), 1),
    (("EyeLike", "SequenceEmpty", *_RANDOM), "dtype", _ELEMENT_TYPES, 1),
    (("LpNormalization",), "p", (1, 2), 1),
    (("MelWeightMatrix", *_SPECTRAL), "output_datatype", _ELEMENT_TYPES, 1),
    (("QuantizeLinear",), "precision", (0, *_FLOATS), 1),
    (("Range", *_NORMALIZATIONS), "stash_type", _FLOATS, 1),
)
_FLAGS: Mapping[str, tuple[str, ...]] = {
    "align_corners": ("AffineGrid", "GridSample"),
    "allowzero": ("Reshape",),
    "antialias": ("Resize",),
    "batch_axis": ("ReverseSequence",),
    "broadcast": _ARITHMETIC,
    "ceil_mode": ("AveragePool", "LpPool", "MaxPool"),
    "center_point_box": ("NonMaxSuppression",),
    "count_include_pad": ("AveragePool",),
    "detect_negative": ("IsInf",),
    "detect_positive": ("IsInf",),
    "directions": ("Scan",),
    "exclude_outside": ("Resize",),
    "exclusive": ("CumProd", "CumSum"),
    "fmod": ("Mod",),
    "input_forget": ("LSTM",),
    "interleaved": ("RotaryEmbedding",),
    "inverse": ("DFT",),
    "is_causal": ("Attention",),
    "is_test": ("BatchNormalization", "Dropout"),
    "keepdims": ("ArgMax", "ArgMin", "SplitToSequence", *_REDUCTIONS),
    "largest": ("TopK",),
    "layout": _RECURRENT,
    "linear_before_reset": ("GRU",),
    "new_axis": ("ConcatFromSequence",),
    "noop_with_empty_axes": _REDUCTIONS,
    "onesided": ("DFT", "STFT"),
    "output_sequence": _RECURRENT,
    "periodic": _SPECTRAL,
    "reverse": ("CumProd", "CumSum"),
    "saturate": ("Cast", "CastLike", "QuantizeLinear"),
    "scan_input_directions": ("Scan",),
    "scan_output_directions": ("Scan",),
    "select_last_index": ("ArgMax", "ArgMin"),
    "sorted": ("TopK", "Unique"),
    "spatial": ("BatchNormalization",),
    "storage_order": ("MaxPool",),
    "time_axis": ("ReverseSequence",),
    "training_mode": ("BatchNormalization",),
    "transA": ("Gemm",),
    "transB": ("Gemm",),
    "upper": ("Trilu",),
}
_ROWS = (*_NAMES, *_CODES, *((operators, name, _FLAG, 1) for name, operators in _FLAGS.items()))
_FOLDED = frozenset({"activations"})  # written in either case


def _by_attribute(opset: int) -> Mapping[tuple[str, str], _Values]:
    """Return the allowed values of (operator, attribute) in an opset: later rows replace earlier ones."""
    rows = (row for row in _ROWS if row[3] <= opset)
    return {(operator, attribute): values for operators, attribute, values, _ in rows for operator in operators}


def check_attribute_values(model: onnx.ModelProto, opset: int) -> None:
    """Refuse names and codes that ONNX does not define, in a graph and its subgraphs.

    Args:
        model: without functions.
        opset: its version of ONNX's own operators.

    Raises:
        OnnxModelError: names the node, the attribute, its value and the allowed ones.
    """
    allowed: dict[int | None, Mapping[tuple[str, str], _Values]] = {None: {}}
    for graph in graphs_of(model.graph):
        for n, node in enumerate(graph.node):
            version = opset if node.domain in _PREVIEW_DOMAINS else opset_of(node, opset)
            if version is not None and version not in allowed:
                allowed[version] = _by_attribute(version)
            for attribute in node.attribute:
                values = allowed[version].get((node.op_type, attribute.name))
                if values is not None:
                    _check(f"node {node.name or n!r} ({node.op_type})", attribute, values)


def _check(label: str, attribute: onnx.AttributeProto, allowed: _Values) -> None:
    """Refuse a value of an attribute that its operator does not list, with the nearest."""
    folded = {str(value).lower() for value in allowed} if attribute.name in _FOLDED else None
    for value in _values(attribute):
        if value not in allowed if folded is None else value.lower() not in folded:
            names = [str(each) for each in allowed]
            raise OnnxModelError(
                f"{label} has an unknown value of the attribute {attribute.name!r}",
                expected=f"one of {', '.join(names)}",
                got=repr(value),
                hint=nearest(value, names) if isinstance(value, str) else None,
            )


def _values(attribute: onnx.AttributeProto) -> Iterator[Any]:
    value = helper.get_attribute_value(attribute)
    for each in value if isinstance(value, list) else [value]:
        yield each.decode(errors="replace") if isinstance(each, bytes) else each
