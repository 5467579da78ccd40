"""Checks of nodes on their operands, with PopART's sentences: programs and tests compare them.

A check, `_<operator>_refusal`, returns the sentence for operands that do not fit, None for others. Operands that decide
shapes are known while tracing; a check that needs the values of another one passes it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import numpy as np
import onnx

from ipujax.onnx.front_end import Node
from ipujax.popart.exceptions import popart_exception
from ipujax.popart.tensor_info import TensorInfo

Check = Callable[[Node, Sequence[Any], int], str | None]
_BATCH_NORM_OPERANDS = ("scale", "B", "mean", "var")


def check_operands(node: Node, operands: Sequence[Any], opset: int) -> None:
    """Refuse operands, None where left out, that PopART refuses in a model of an opset, with PopART's sentence."""
    check = CHECKS.get(node.op_type)
    sentence = None if check is None else check(node, operands, opset)
    if sentence is not None:
        raise popart_exception(sentence, got=node.label)


def identifier(node: Node, opset: int) -> str:
    """Return PopART's name of an operator: "ai.onnx.MatMul:9"."""
    if node.domain:
        return f"{node.domain}.{node.op_type}:1"
    return f"ai.onnx.{node.op_type}:{onnx.defs.get_schema(node.op_type, opset).since_version}"


def _described(node: Node, opset: int) -> str:
    inputs, outputs = (", ".join(names) for names in (node.inputs, node.outputs))
    return f"Op({identifier(node, opset)}, inputs=[{inputs}], outputs=[{outputs}])"


def _shape(shape: Sequence[int]) -> str:
    return f"[{' '.join(map(str, shape))}]"


def _info(x: Any) -> str:
    info = TensorInfo(x.dtype, x.shape)
    return f"{info.data_type():8}{_shape(info.shape())}"


def _static_value(x: Any) -> np.ndarray[Any, Any] | None:
    return None if x is None or isinstance(x, jax.core.Tracer) else np.asarray(x)


def _ratio_refusal(node: Node, ratio: float) -> str | None:
    if 0 <= ratio < 1:
        return None
    return f"{node.op_type}: ratio value {ratio:g} is not valid. Please use a value in the interval [0,1)"


def _dropout_refusal(node: Node, operands: Sequence[Any], opset: int) -> str | None:
    ratio = _static_value(operands[1]) if len(operands) > 1 else None
    return None if ratio is None else _ratio_refusal(node, float(ratio.reshape(())))


def _shaped_dropout_refusal(node: Node, operands: Sequence[Any], opset: int) -> str | None:
    shape = tuple(node.attributes["shape"])
    pairs = zip(reversed(operands[0].shape), reversed(shape), strict=False)
    if len(shape) > operands[0].ndim or any(size not in (1, n) for n, size in pairs):
        return "ShapedDropout: incompatible input tensor and dropout shape."
    return _ratio_refusal(node, float(node.attributes.get("ratio", 0.5)))


def _reverse_refusal(node: Node, operands: Sequence[Any], opset: int) -> str | None:
    dimensions = list(node.attributes.get("dimensions", ()))
    rank = operands[0].ndim
    for dimension in dimensions:
        if dimension < 0:
            return f"Reverse: invalid dimension '{dimension}'. Only positive dimensions are supported"
        if dimension >= rank:
            return f"Reverse: invalid dimension '{dimension}' for input tensor of rank {rank}"
        if dimensions.count(dimension) > 1:
            return f"Reverse: Dimension {dimension} appears multiple times in the list of dimensions"
    return None


def _subsample_refusal(node: Node, operands: Sequence[Any], opset: int) -> str | None:
    strides = list(node.attributes["strides"])
    zero = next((i for i, stride in enumerate(strides) if stride == 0), None)
    return None if zero is None else f"Strides invalid. 0 stride at index {zero}"


def _transpose_refusal(node: Node, operands: Sequence[Any], opset: int) -> str | None:
    order = node.attributes.get("perm")
    x = operands[0]
    if order is None or len(order) == x.ndim:
        return None
    return (
        f"Rank of permutation tensor {_shape(order)}, rank {len(order)} must be equal to rank of input tensor,"
        f" shape {_shape(x.shape)}, rank {x.ndim}."
    )


def _matmul_refusal(node: Node, operands: Sequence[Any], opset: int) -> str | None:
    left, right = operands
    for x, side in ((left, "lhs"), (right, "rhs")):
        if np.ndim(x) == 0:
            return f"{_described(node, opset)} doesn't support scalar tensor input as the {side} input"
    if left.shape[-1] != right.shape[max(right.ndim - 2, 0)]:
        names = (f"{side} '{name}' {_shape(x.shape)}" for side, name, x in zip(
            ("lhs", "rhs"), node.inputs, operands, strict=True))  # fmt: skip
        return f"{_described(node, opset)} contracting dimensions unequal: {', '.join(names)}"
    return None


def _reshape_refusal(node: Node, operands: Sequence[Any], opset: int) -> str | None:
    shape = _static_value(operands[1]) if not node.domain else np.asarray(node.attributes["shape"])
    if shape is None or (shape == -1).sum() < 2:
        return None
    return "shape input to ReshapeOp can only use -1 to specify one unknown dimension"


def _slice_refusal(node: Node, operands: Sequence[Any], opset: int) -> str | None:
    names = ("starts", "ends", "axes", "steps")
    # The slices of ai.graphcore have attributes, not operands.
    for name, tensor, x in zip(names, node.inputs[1:], operands[1:], strict=False):
        if x is not None and _static_value(x) is None:
            return (
                f"Need the value of the {identifier(node, opset)} input '{name}' to determine the output shape, but was"
                f" unable because [Tensor::getDataViaGraphTraversal] Could not work out tensor data for {tensor}."
            )
    return None


def _tile_refusal(node: Node, operands: Sequence[Any], opset: int) -> str | None:
    repeats = _static_value(operands[1])
    if repeats is None:
        return f"{identifier(node, opset)}: the input 'repeats' must be of type Constant"
    if repeats.size != operands[0].ndim:
        return (
            f"{identifier(node, opset)}: the input 'repeats' should have one element for each dimension of the data"
            " tensor"
        )
    if (repeats < 0).any():
        return f"{identifier(node, opset)}: Values must be non-negative in each shape dimension"
    return None


def _nll_refusal(node: Node, operands: Sequence[Any], opset: int) -> str | None:
    probabilities, labels = operands
    if tuple(labels.shape) == tuple(probabilities.shape[:-1]):
        return None
    return (
        f"The label tensor ({_info(labels)}) must have shape {_shape(probabilities.shape[:-1])} to match all but the"
        f" final dimension of the probabilities tensor ({_info(probabilities)})"
    )


def _batch_normalization_refusal(node: Node, operands: Sequence[Any], opset: int) -> str | None:
    x = operands[0]
    if x.ndim < 3:
        return f"batch norm requires an input of rank 3 or more, not {x.ndim}"
    size = x.shape[1:] if node.attributes.get("spatial") == 0 else x.shape[1:2]
    for name, operand in zip(_BATCH_NORM_OPERANDS, operands[1:], strict=False):
        if tuple(operand.shape) != tuple(size):
            return f"expected shape of batch norm input {name} ({_shape(operand.shape)}) to be {_shape(size)}"
    return None


def _random_refusal(node: Node, operands: Sequence[Any], opset: int) -> str | None:
    if node.attributes.get("seed") is not None:
        return (
            f"{identifier(node, opset)}: Optional seed attribute is not supported. Use session::setRandomSeed instead."
        )
    if node.attributes.get("dtype") == onnx.TensorProto.DOUBLE:
        return f"{identifier(node, opset)}: The data type DOUBLE is not supported in Poplar"
    return None


def _resize_refusal(node: Node, operands: Sequence[Any], opset: int) -> str | None:
    tensors = [x for x in operands[2:4] if x is not None and np.size(x)]
    if len(tensors) < 2:
        return None
    return (
        "Resize op has inputs for `sizes` and `scales`. Only one of these tensors should be present. If `sizes` is"
        " needed, please pass an empty string as the name of `scales` in the input list ( resize([X, roi, '', sizes])"
        " ). If the proto is not generated from the PopART Builder, please confirm that only one of the two tensors"
        " shall have data."
    )


def _reduction_refusal(node: Node, operands: Sequence[Any], opset: int) -> str | None:
    axes = node.attributes.get("axes")
    if axes is None and len(operands) > 1:
        axes = _static_value(operands[1])
    rank = operands[0].ndim
    outside = next((axis for axis in np.ravel([] if axes is None else axes) if not -rank <= axis < rank), None)
    return None if outside is None else f"Axis {outside} is out of acceptable range [{-rank}, {rank - 1}]"


def _elementwise_refusal(node: Node, operands: Sequence[Any], opset: int) -> str | None:
    shapes = [list(x.shape) for x in operands]
    pairs = zip(*(reversed(shape) for shape in shapes), strict=False)
    if all(a == b or 1 in (a, b) for a, b in pairs):
        return None
    frames = " and ".join(map(str, shapes))
    return f"np broadcasting failed on '{_described(node, opset)}', frames {frames} are not aligned"


def _average_pool_refusal(node: Node, operands: Sequence[Any], opset: int) -> str | None:
    return "`count_include_pad` is not supported" if node.attributes.get("count_include_pad") else None


def _max_pool_refusal(node: Node, operands: Sequence[Any], opset: int) -> str | None:
    if all(n == 1 for n in node.attributes.get("dilations") or ()):
        return None
    return f"{identifier(node, opset)}: Dilations of value other than 1 are currently not supported."


def _mean_refusal(node: Node, operands: Sequence[Any], opset: int) -> str | None:
    kinds = {(str(x.dtype), tuple(x.shape)) for x in operands}
    # Operands broadcast since opset 8.
    return (
        None
        if len(kinds) == 1 or opset >= 8
        else f"Inputs to {identifier(node, opset)} do not all the same type & shape"
    )


def _expand_refusal(node: Node, operands: Sequence[Any], opset: int) -> str | None:
    shape = _static_value(operands[1])
    if shape is None:
        return None
    pairs = zip(reversed(operands[0].shape), reversed(shape.tolist()), strict=False)
    if all(a == b or 1 in (a, b) for a, b in pairs):
        return None
    shapes = f"{_shape(operands[0].shape)} and {_shape(shape.tolist())}"
    return f"{shapes}: corresponding dimensions must have the same value or one of them must be 1"


# Activations that a recurrent layer of PopART has. Source: `willow/include/popart/op/lstmutil.hpp`.
_ACTIVATIONS = ("sigmoid", "relu", "tanh", "gelu", "swish", "softmax", "softmaxstable", "softmaxscaled", "hardsigmoid")


def _recurrent_refusal(node: Node, operands: Sequence[Any], opset: int) -> str | None:
    attributes = node.attributes
    for name in ("activation_alpha", "activation_beta", "clip"):
        if name in attributes:
            return f"Attribute `{name}' of {node.op_type} is not supported"
    if attributes.get("direction", "forward") != "forward":
        return f"{node.op_type} only supports `forward' direction"
    activations = [str(name) for name in attributes.get("activations", ())]
    other = next((name for name in activations if name.lower() not in _ACTIVATIONS), None)
    if other is not None:
        return f"Activation type '{other}' is not supported for {node.op_type}"
    if node.op_type == "RNN" and "activations" in attributes and len(activations) != 1:
        return f"RNN only supports 1 activation, {len(activations)} were specified"
    hidden = attributes.get("hidden_size")
    size = operands[2].shape[-1]
    if hidden is not None and hidden != size:
        return f"hidden_size attribute ({hidden}) does not match that of the weights ({size})"
    return None


_REDUCTIONS = ("L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Median", "Min", "Prod", "Sum", "SumSquare")
CHECKS: Mapping[str, Check] = MappingProxyType(
    {
        "AveragePool": _average_pool_refusal,
        "BatchNormalization": _batch_normalization_refusal,
        "Dropout": _dropout_refusal,
        "Expand": _expand_refusal,
        "MatMul": _matmul_refusal,
        "MaxPool": _max_pool_refusal,
        "Mean": _mean_refusal,
        "Nll": _nll_refusal,
        "Reshape": _reshape_refusal,
        "Resize": _resize_refusal,
        "Reverse": _reverse_refusal,
        "ShapedDropout": _shaped_dropout_refusal,
        "Slice": _slice_refusal,
        "Subsample": _subsample_refusal,
        "Tile": _tile_refusal,
        "Transpose": _transpose_refusal,
        **dict.fromkeys(("RNN", "GRU", "LSTM"), _recurrent_refusal),
        **dict.fromkeys(("Add", "Div", "Mul", "Pow", "Sub"), _elementwise_refusal),
        **dict.fromkeys(map("Reduce{}".format, _REDUCTIONS), _reduction_refusal),
        **dict.fromkeys(("RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"), _random_refusal),
    }
)
