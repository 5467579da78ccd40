"""Operands of every operator that has gradients, away from kinks, ties and poles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Case:
    """Operands of one operator.

    Args:
        op_type: operator, of ONNX's own domain unless `domain` says another.
        inputs: float64 arrays, and static operands.
        wrt: positions of operands that the derivative is by.
        attributes: of the node; facts of the node too.
        domain: of the operator.
    """

    op_type: str
    inputs: Sequence[Any]
    wrt: Sequence[int]
    attributes: dict[str, Any]
    domain: str = ""

    def __str__(self) -> str:
        """Operator and attributes: the name of a test."""
        attributes = (f"{k}={v}" for k, v in self.attributes.items() if isinstance(v, (int, str)))
        return "-".join([self.op_type, *attributes])


CASES: list[Case] = []


def case(op_type: str, *inputs: Any, wrt: Sequence[int] = (0,), domain: str = "", **attributes: Any) -> None:
    CASES.append(Case(op_type, inputs, tuple(wrt), attributes, domain))


def uniform(*shape: int, low: float = -2.0, high: float = 2.0) -> np.ndarray:
    return np.random.default_rng(sum(shape) + 7 * len(shape)).uniform(low, high, shape)


def apart(*shape: int) -> np.ndarray:
    """Elements that are 0.1 and more from each other, from zero, and from halves of integers."""
    size = int(np.prod(shape))
    values = 0.15 + 0.2 * (np.arange(size) - size // 2)
    return np.random.default_rng(size).permutation(values).reshape(shape)


def ints(*values: Any) -> np.ndarray:
    return np.array(values, np.int64)


X = apart(3, 4)
POSITIVE = uniform(3, 4, low=0.5, high=2.0)
UNIT = uniform(3, 4, low=-0.8, high=0.8)
IMAGE = apart(2, 4, 5, 4)

for _name in ("Abs", "Asinh", "Atan", "Cos", "Cosh", "Erf", "Exp", "Identity", "Neg", "Sigmoid", "Sin", "Sinh", "Tanh"):
    case(_name, X)
for _name in ("Celu", "Elu", "Gelu", "HardSigmoid", "HardSwish", "LeakyRelu", "LogSoftmax", "Mish", "Relu", "Selu"):
    case(_name, X)
for _name in ("Softmax", "Softplus", "Softsign", "Swish", "ThresholdedRelu", "Shrink"):
    case(_name, X)
for _name in ("Ceil", "Floor", "Round", "Sign", "Hardmax"):
    case(_name, X)  # constant between their steps
for _name in ("Log", "Reciprocal", "Sqrt"):
    case(_name, POSITIVE)
for _name in ("Acos", "Asin", "Atanh", "Tan"):
    case(_name, UNIT)
case("Acosh", POSITIVE + 1)
case("Gelu", X, approximate="tanh")
case("Swish", X, alpha=1.7)
case("SwiGLU", X, UNIT, wrt=(0, 1))
case("PRelu", X, UNIT[0], wrt=(0, 1))
for _name in ("Add", "Sub", "Mul"):
    case(_name, X, UNIT[0], wrt=(0, 1))
case("Div", X, POSITIVE, wrt=(0, 1))
case("Pow", POSITIVE, UNIT[0], wrt=(0, 1))
case("Pow", X, ints(3), wrt=(0,))
case("Mod", X, POSITIVE + 3, wrt=(0,), fmod=1)
for _name in ("Max", "Min", "Mean", "Sum"):
    case(_name, X, UNIT, POSITIVE[0], wrt=(0, 1, 2))
case("Clip", X, np.array(-0.71), np.array(0.62), wrt=(0, 1, 2))
case("Where", X > 0, X, UNIT, wrt=(1, 2))
case("Cast", X, to=11)
case("CastLike", X, UNIT)

case("MatMul", uniform(2, 3, 4), uniform(4, 5), wrt=(0, 1))
case("Gemm", uniform(4, 3), uniform(5, 4), uniform(5), wrt=(0, 1, 2), alpha=0.5, beta=2.0, transA=1, transB=1)
case("Einsum", uniform(2, 3), uniform(3, 4), wrt=(0, 1), equation="ij, jk -> ik")
case("Det", uniform(2, 3, 3))

for _name in ("ReduceL1", "ReduceL2", "ReduceLogSumExp", "ReduceMax", "ReduceMean", "ReduceMin", "ReduceProd"):
    case(_name, X, ints(1))
for _name in ("ReduceSum", "ReduceSumSquare"):
    case(_name, X, keepdims=0)
case("ReduceLogSum", POSITIVE, ints(0))
for _name in ("CumSum", "CumProd"):
    case(_name, X, ints(1), exclusive=1, reverse=1)
case("TopK", X, ints(2), axis=0)
case("TopK", X, ints(2), largest=0)

case("Conv", IMAGE, uniform(6, 2, 3, 2), uniform(6), wrt=(0, 1, 2), group=2, strides=[2, 1], pads=[1, 0, 1, 1])
case("ConvTranspose", uniform(2, 4, 3, 3), uniform(4, 2, 3, 2), wrt=(0, 1), group=2, strides=[2, 1])
OFFSETS = uniform(1, 8, 3, 3, low=0.1, high=0.4)
case("DeformConv", uniform(1, 2, 4, 4), uniform(3, 2, 2, 2), OFFSETS, wrt=(0, 1, 2))
case("Col2Im", uniform(1, 8, 4), ints(3, 3), ints(2, 2))
case("CausalConvWithState", uniform(2, 3, 5), uniform(3, 1, 4), uniform(3), wrt=(0, 1, 2), activation="silu")
case("MaxPool", IMAGE, kernel_shape=[3, 2], strides=[2, 1], pads=[1, 0, 1, 1])
case("MaxPool", IMAGE, kernel_shape=[2, 2], dilations=[2, 1])
case("MaxPool", IMAGE, kernel_shape=[2, 2], output_count=2)
case("AveragePool", IMAGE, kernel_shape=[3, 2], strides=[2, 1], pads=[1, 0, 1, 1])
case("AveragePool", IMAGE, kernel_shape=[2, 2], dilations=[2, 1], ceil_mode=1)
case("LpPool", IMAGE, kernel_shape=[2, 2], p=3)
case("GlobalAveragePool", IMAGE)
case("GlobalLpPool", IMAGE)
case("GlobalMaxPool", IMAGE)
case("MaxUnpool", uniform(1, 1, 2, 2), ints([[[[5, 7], [13, 15]]]]), kernel_shape=[2, 2], strides=[2, 2])
ROIS = np.array([[0.2, 0.3, 2.9, 2.6], [1.1, 0.4, 3.2, 3.7]])
case("MaxRoiPool", IMAGE, np.array([[0.0, 0, 0, 3, 3], [1, 1, 1, 3, 4]]), pooled_shape=[2, 2])

CHANNEL = [uniform(4, low=low, high=2) for low in (0.5, -1, -0.9, 0.3)]
case("BatchNormalization", IMAGE, *CHANNEL, wrt=(0, 1, 2, 3, 4))
case("BatchNormalization", IMAGE, *CHANNEL, wrt=(0, 1, 2), training_mode=1, output_count=3)
case("InstanceNormalization", IMAGE, *CHANNEL[:2], wrt=(0, 1, 2))
case("GroupNormalization", IMAGE, *CHANNEL[:2], wrt=(0, 1, 2), num_groups=2, stash_type=11)
case("LayerNormalization", X, UNIT[0], UNIT[1], wrt=(0, 1, 2), stash_type=11, output_count=3)
case("RMSNormalization", X, UNIT[0], wrt=(0, 1), stash_type=11)
case("LpNormalization", X)
case("LpNormalization", X, p=1, axis=0)
case("LpNormalization", np.array([[0.0, 0.0, 0.0], [1.0, -2.0, 0.5]])[1:])
case("MeanVarianceNormalization", IMAGE)
case("LRN", IMAGE, size=3, alpha=0.1)
case("Dropout", X, node_name="dropout")
case("Dropout", X, np.array(0.4), np.array(True), node_name="dropout", seed=1.0)

HEADS = uniform(2, 4, 3, 6), uniform(2, 2, 5, 6), uniform(2, 2, 5, 4)
case("Attention", *HEADS, wrt=(0, 1, 2))
case("Attention", *HEADS, uniform(3, 5), wrt=(0, 1, 2, 3), softcap=1.5, is_causal=1, left_window_size=1)
case("Attention", *HEADS, np.array([[True] * 5, [False] * 5, [True, False] * 2 + [True]]), wrt=(0, 1, 2))
FLAT = uniform(2, 3, 8), uniform(2, 3, 4), uniform(2, 3, 4)
RATES = uniform(2, 3, 2, low=-1, high=0), uniform(2, 3, 2, low=0.1, high=0.9)
case("FlexAttention", *HEADS, wrt=(0, 1, 2), domain="ai.onnx.preview")
case("RotaryEmbedding", HEADS[0], uniform(2, 3, 3), uniform(2, 3, 3), wrt=(0, 1, 2), interleaved=1)
case("RotaryEmbedding", HEADS[0], uniform(9, 2), uniform(9, 2), ints([0, 1, 2], [3, 8, 5]), rotary_embedding_dim=4)

GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}
for _name, _gates in GATES.items():
    for _direction in ("forward", "bidirectional"):
        _ways = 1 + (_direction == "bidirectional")
        _weights = uniform(_ways, 3 * _gates, 2), uniform(_ways, 3 * _gates, 3), uniform(_ways, 6 * _gates)
        _outputs = 3 if _name == "LSTM" else 2
        _lengths = ints(4, 2) if _ways == 2 else None
        _all = (uniform(4, 2, 2), *_weights, _lengths)
        case(_name, *_all, wrt=(0, 1, 2, 3), direction=_direction, output_count=_outputs)
case("GRU", *_all[:1], uniform(1, 9, 2), uniform(1, 9, 3), wrt=(0, 1, 2), linear_before_reset=1)
PEEPHOLES = uniform(1, 12, 2), uniform(1, 12, 3), None, None, uniform(1, 2, 3), uniform(1, 2, 3), uniform(1, 9)
case("LSTM", uniform(4, 2, 2), *PEEPHOLES, wrt=(0, 1, 2, 5, 6, 7), output_count=3)

case("Gather", X, ints(2, 0, 2), axis=1)
case("GatherElements", X, ints([0, 2, 1, 1], [1, 1, 0, -1]))
case("GatherND", uniform(2, 3, 4), ints([[0], [2]], [[1], [1]]), batch_dims=1)
case("ScatterElements", X, ints([0, 2, 1, 1]), uniform(1, 4), wrt=(0, 2))
case("ScatterElements", X, ints([0, 2, 1, 1]), uniform(1, 4), wrt=(0, 2), reduction="add")
case("Scatter", X, ints([0, 2, 1, 1]), uniform(1, 4), wrt=(0, 2))
case("ScatterND", X, ints([2], [0]), uniform(2, 4), wrt=(0, 2))
for _reduction in ("add", "mul", "max", "min"):
    case("ScatterND", X, ints([2], [0]), uniform(2, 4), wrt=(0, 2), reduction=_reduction)
case("ScatterElements", X, ints([0, 2, 1, 1]), uniform(1, 4), wrt=(0, 2), reduction="mul")
case("TensorScatter", uniform(2, 5, 3), uniform(2, 2, 3), ints(4, 1), wrt=(0, 1), mode="circular")
case("OneHot", ints(1, 0), ints(3), uniform(2), wrt=(2,))
case("Compress", X, np.array([True, False, True]), axis=0)
case("ReverseSequence", X, ints(1, 3, 2, 2))

case("Concat", X, UNIT, wrt=(0, 1), axis=1)
case("CenterCropPad", X, ints(5, 2))
case("DepthToSpace", IMAGE, blocksize=2)
case("SpaceToDepth", IMAGE[:, :, :4], blocksize=2, mode="CRD")
case("Expand", X, ints(2, 3, 4))
case("Flatten", IMAGE, axis=2)
case("Pad", X, ints(0, 1, 2, -1), np.array(0.5), wrt=(0, 2))
for _mode in ("reflect", "edge", "wrap"):
    case("Pad", X, ints(0, 1, 2, 1), mode=_mode)
case("Reshape", X, ints(2, -1))
case("Slice", X, ints(2, 1), ints(0, 4), ints(0, 1), ints(-1, 2))
case("Split", X, ints(1, 3), axis=1, output_count=2)
case("Squeeze", X[:, :1], ints(1))
case("Tile", X, ints(2, 1))
case("Transpose", X)
case("Trilu", X, ints(1))
case("Unsqueeze", X, ints(0))

for _mode in ("linear", "cubic", "nearest"):
    case("Resize", IMAGE, None, np.array([1, 1, 1.7, 0.6]), mode=_mode)
case("Resize", IMAGE, None, None, ints(2, 4, 3, 3), mode="linear", antialias=1)
case("Upsample", IMAGE, np.array([1.0, 1, 2, 2]))
POINTS = uniform(2, 3, 3, 2, low=-0.7, high=0.7)
for _mode in ("linear", "cubic"):
    case("GridSample", IMAGE, POINTS, wrt=(0, 1), mode=_mode)
case("GridSample", IMAGE, 1.3 * POINTS, mode="linear", padding_mode="reflection")
case("GridSample", IMAGE, POINTS, mode="nearest", padding_mode="border")
case("AffineGrid", uniform(2, 2, 3), ints(2, 1, 3, 4))
case("RoiAlign", IMAGE, ROIS, ints(0, 1), wrt=(0, 1), sampling_ratio=2, output_height=2, output_width=2)
case("RoiAlign", IMAGE, ROIS, ints(0, 1), wrt=(0,), mode="max", output_height=2)

case("DFT", uniform(2, 5, 1), onesided=1)
case("DFT", uniform(2, 5, 2), inverse=1)
case("STFT", uniform(2, 12, 1), ints(4)[0], uniform(6), wrt=(0, 2))
TARGETS = ints(0, 3, 2)
case("NegativeLogLikelihoodLoss", X, TARGETS, uniform(4, low=0.5), wrt=(0, 2), ignore_index=3)
case("SoftmaxCrossEntropyLoss", X, TARGETS, output_count=2)
for _reduction in ("none", "sum"):
    case("SoftmaxCrossEntropyLoss", X, TARGETS, reduction=_reduction)

STATE = np.array(0.1), ints(1)[0], X, UNIT
PREVIEW = "ai.onnx.preview.training"
case("Adagrad", *STATE, POSITIVE, wrt=(2, 3, 4), domain=PREVIEW)
case("Adam", *STATE, UNIT, POSITIVE, wrt=(2, 3, 4, 5), domain=PREVIEW)
MOMENTUM = {"alpha": 0.9, "beta": 1.0, "norm_coefficient": 0.01}
case("Momentum", *STATE, POSITIVE, wrt=(2, 3, 4), domain=PREVIEW, mode="nesterov", **MOMENTUM)

# Computed in float32 whatever their operands are.
SINGLE = [
    Case("LinearAttention", (*FLAT, None, *RATES), (0, 1, 2, 4, 5), {"q_num_heads": 4, "kv_num_heads": 2}),
    Case("DequantizeLinear", (X, np.array(0.5)), (1,), {}),
]
