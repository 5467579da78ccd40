"""One-node models of the ONNX operators in PopART's user guide, each at the version that the guide lists.

Source: PopART user guide, "Supported operators", domain ai.onnx.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

GUIDE = """
Abs-6 Add-6 Add-7 And-1 And-7 ArgMax-1 ArgMax-11 ArgMin-1 ArgMin-11 Asin-7 Atan-7 AveragePool-1 AveragePool-7
AveragePool-10 AveragePool-11 BatchNormalization-6 BatchNormalization-7 BatchNormalization-9 Cast-6 Cast-9 Ceil-1 Ceil-6
Clip-6 Clip-11 Concat-1 Concat-4 Concat-11 Conv-1 Conv-11 Cos-7 Cosh-9 Div-6 Div-7 Dropout-6 Dropout-7 Dropout-10
Equal-1 Equal-7 Equal-11 Exp-6 Expand-8 Flatten-1 Flatten-9 Flatten-11 Floor-1 Floor-6 Gather-1 Gather-11 Gemm-6 Gemm-7
Gemm-9 Gemm-11 GlobalAveragePool-1 GlobalMaxPool-1 Greater-1 Greater-7 Greater-9 Identity-1 If-1 If-11
InstanceNormalization-6 IsInf-10 IsNaN-9 LRN-1 LSTM-1 LSTM-7 LeakyRelu-1 LeakyRelu-6 Less-7 Less-9 Log-6 LogSoftmax-1
LogSoftmax-11 Loop-1 Loop-11 MatMul-1 MatMul-9 Max-6 Max-8 MaxPool-1 MaxPool-8 MaxPool-10 MaxPool-11 Mean-6 Mean-8 Min-6
Min-8 Mul-6 Mul-7 Neg-6 Not-1 OneHot-9 OneHot-11 Or-1 Or-7 Pad-2 Pad-11 Pow-1 Pow-7 Reciprocal-6 ReduceL1-1 ReduceL1-11
ReduceL2-1 ReduceL2-11 ReduceLogSum-1 ReduceLogSum-11 ReduceLogSumExp-1 ReduceLogSumExp-11 ReduceMax-1 ReduceMax-11
ReduceMean-1 ReduceMean-11 ReduceMin-1 ReduceMin-11 ReduceProd-1 ReduceProd-11 ReduceSum-1 ReduceSum-11
ReduceSumSquare-1 ReduceSumSquare-11 Relu-6 Reshape-5 Scatter-9 Shrink-9 Sigmoid-6 Sign-9 Sin-7 Sinh-9 Slice-1 Slice-10
Slice-11 Softmax-1 Softmax-11 Split-2 Split-11 Sqrt-6 Squeeze-1 Squeeze-11 Sub-6 Sub-7 Sum-6 Sum-8 Tan-7 Tanh-6 Tile-1
Tile-6 TopK-1 TopK-10 TopK-11 Transpose-1 Unsqueeze-1 Unsqueeze-11
"""
ENTRIES = GUIDE.split()

Arrays = Sequence[np.ndarray]


@dataclass(frozen=True)
class Case:
    """A node.

    Args:
        inputs: operands.
        attributes: as the version has them.
        constants: positions of operands that are initialisers.
        results: dtypes.
        expected: results by NumPy, where no other oracle has them.
    """

    inputs: Arrays
    attributes: dict[str, Any] = field(default_factory=dict)
    constants: Sequence[int] = ()
    results: Sequence[Any] = (np.float32,)
    expected: Callable[..., Any] | None = None

    def model(self, entry: str) -> onnx.ModelProto:
        """Return the node as a model."""
        op_type, _, version = entry.partition("-")
        names = [f"x{n}" for n in range(len(self.inputs))]
        outputs = [f"y{n}" for n in range(len(self.results))]
        node = helper.make_node(op_type, names, outputs, entry, **self.attributes)
        tensors = [onnx.numpy_helper.from_array(self.inputs[n], names[n]) for n in self.constants]
        infos = [info(names[n], self.inputs[n].dtype, self.inputs[n].shape) for n in self.traced]
        results = [info(name, dtype, None) for name, dtype in zip(outputs, self.results, strict=True)]
        graph = helper.make_graph([node], entry, infos, results, tensors)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", int(version))], ir_version=8)

    @property
    def traced(self) -> list[int]:
        """Positions of operands that are graph inputs."""
        return [n for n in range(len(self.inputs)) if n not in self.constants]


def info(name: str, dtype: Any, shape: Sequence[int] | None) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), shape)


def floats(*shape: int, low: float = -2.0, high: float = 2.0) -> np.ndarray:
    return np.random.default_rng(sum(shape) + len(shape)).uniform(low, high, shape).astype(np.float32)


def flags(*shape: int) -> np.ndarray:
    return np.random.default_rng(len(shape)).integers(0, 2, shape).astype(bool)


def ints(*values: Any) -> np.ndarray:
    return np.array(values, np.int64)


CASES: dict[str, Case] = {}


def case(entries: str, *inputs: np.ndarray, **keywords: Any) -> None:
    """Add a case for several versions: "Add-6 7" are Add-6 and Add-7."""
    fields = {name: keywords.pop(name) for name in ("constants", "results", "expected") if name in keywords}
    op_type, _, versions = entries.partition("-")
    for version in versions.split():
        CASES[f"{op_type}-{version}"] = Case(inputs, keywords, **fields)


X = floats(3, 4)
POSITIVE = floats(3, 4, low=0.5, high=3.0)
UNIT = floats(3, 4, low=-0.9, high=0.9)
IMAGE = floats(2, 4, 7, 6)
BOOL = (np.bool_,)
INT64 = (np.int64,)

for _entry in ("Abs-6", "Ceil-1 6", "Cos-7", "Cosh-9", "Exp-6", "Floor-1 6", "Identity-1", "LeakyRelu-1 6", "Neg-6"):
    case(_entry, X)
for _entry in ("Relu-6", "Sigmoid-6", "Sign-9", "Sin-7", "Sinh-9", "Tan-7", "Tanh-6"):
    case(_entry, X)
for _entry in ("Log-6", "Reciprocal-6", "Sqrt-6"):
    case(_entry, POSITIVE)
for _entry in ("Asin-7", "Atan-7"):
    case(_entry, UNIT)
case("Ceil-1", X, expected=np.ceil)
case("Floor-1", X, expected=np.floor)
case("LeakyRelu-1", X, alpha=0.2, expected=lambda x: np.where(x < 0, np.float32(0.2) * x, x))
case("Shrink-9", X, lambd=0.6, bias=0.2)
case("IsInf-10", np.array([1, np.inf, -np.inf, np.nan], np.float32), results=BOOL)
case("IsNaN-9", np.array([1, np.inf, np.nan], np.float32), results=BOOL)
case("Not-1", flags(3, 4), results=BOOL)
case("Cast-6", X, to=TensorProto.INT32, results=(np.int32,))
case("Cast-9", X, to=TensorProto.FLOAT16, results=(np.float16,))
case("Clip-6", X, min=-0.5, max=1.0)
case("Clip-11", X, np.array(-0.5, np.float32), np.array(1, np.float32))
case("Dropout-6", X, is_test=1, expected=lambda x: x)
case("Dropout-7 10", X, ratio=0.3)

# Before version 7, the second operand broadcasts from `axis` on, where an attribute says so.
ROW = floats(2, 3, 4, 5), floats(3, 4, low=0.5, high=2.0)


def from_axis(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda a, b: function(a, b[:, :, None])


for _name, _function in (("Add", np.add), ("Sub", np.subtract), ("Mul", np.multiply), ("Div", np.divide)):
    case(f"{_name}-6", *ROW, axis=1, broadcast=1, expected=from_axis(_function))
    case(f"{_name}-7", X, POSITIVE[0])
case("Pow-1", np.abs(ROW[0]), ROW[1], axis=1, broadcast=1, expected=from_axis(np.power))
case("Pow-7", POSITIVE, X[0])
LOGICAL = flags(2, 3, 4, 5), flags(3, 4)
for _name, _logic in (("And", np.logical_and), ("Or", np.logical_or)):
    case(f"{_name}-1", *LOGICAL, axis=1, broadcast=1, results=BOOL, expected=from_axis(_logic))
    case(f"{_name}-7", flags(3, 4), flags(4), results=BOOL)
NUMBERS = ints(*range(12)).reshape(1, 3, 4, 1).astype(np.int32), ints(*range(0, 24, 2)).reshape(3, 4).astype(np.int32)
case("Equal-1", *NUMBERS, axis=1, broadcast=1, results=BOOL, expected=from_axis(np.equal))
case("Equal-7 11", NUMBERS[1], NUMBERS[1][1], results=BOOL)
case("Greater-1", *ROW, axis=1, broadcast=1, results=BOOL, expected=from_axis(np.greater))
case("Greater-7 9", X, X[1], results=BOOL)
case("Less-7 9", X, X[1], results=BOOL)
for _name, _reduce in (("Max", np.max), ("Mean", np.mean), ("Min", np.min), ("Sum", np.sum)):
    case(f"{_name}-6", X, POSITIVE, UNIT, expected=lambda *xs, reduce=_reduce: reduce(xs, axis=0))
    case(f"{_name}-8", X, POSITIVE[0], UNIT)

case("MatMul-1 9", floats(2, 3, 4), floats(4, 5))
GEMM = floats(4, 3), floats(5, 4)
case("Gemm-6", *GEMM, floats(5), alpha=0.5, beta=2.0, transA=1, transB=1, broadcast=1)
case("Gemm-7 9 11", *GEMM, floats(5), alpha=0.5, beta=2.0, transA=1, transB=1)

for _name in ("ReduceL1", "ReduceL2", "ReduceMax", "ReduceMean", "ReduceMin", "ReduceProd", "ReduceSum"):
    case(f"{_name}-1 11", floats(2, 3, 4), axes=[0, 2], keepdims=0)
case("ReduceSumSquare-1 11", floats(2, 3, 4), axes=[1])
case("ReduceLogSum-1 11", floats(2, 3, 4, low=0.5), axes=[1])
case("ReduceLogSumExp-1 11", floats(2, 3, 4))
case("ArgMax-1 11", X, axis=1, results=INT64)
case("ArgMin-1 11", X, axis=0, keepdims=0, results=INT64)
case("TopK-1", X, k=2, axis=1, results=(np.float32, np.int64))
case("TopK-10", X, ints(2), constants=[1], axis=0, results=(np.float32, np.int64))
case("TopK-11", X, ints(2), constants=[1], largest=0, results=(np.float32, np.int64))


def averages(x: np.ndarray) -> np.ndarray:
    """Return means over the elements that are not padding; `onnx.reference` has none for version 1."""
    padded = np.pad(x, ((0, 0), (0, 0), (1, 1), (0, 1)), constant_values=np.nan)
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 2), (2, 3))[:, :, ::2]
    return np.nanmean(windows, axis=(4, 5))


POOL = {"kernel_shape": [3, 2], "strides": [2, 1], "pads": [1, 0, 1, 1]}
case("AveragePool-1", IMAGE, **POOL, expected=averages)
case("AveragePool-7", IMAGE, kernel_shape=[3, 2], pads=[1, 0, 1, 1], count_include_pad=1)
case("AveragePool-10", IMAGE, kernel_shape=[3, 3], strides=[2, 2], ceil_mode=1)
case("AveragePool-11", IMAGE, kernel_shape=[3, 2], strides=[2, 2], auto_pad="SAME_UPPER")
case("MaxPool-1", IMAGE, **POOL)
case("MaxPool-8", IMAGE, kernel_shape=[3, 2], strides=[2, 2], results=(np.float32, np.int64))
case("MaxPool-10", IMAGE, kernel_shape=[2, 2], dilations=[2, 1])
case("MaxPool-11", IMAGE, kernel_shape=[3, 3], strides=[2, 2], ceil_mode=1)
case("GlobalAveragePool-1", IMAGE)
case("GlobalMaxPool-1", IMAGE)
case("LRN-1", IMAGE, size=3, alpha=0.1)
CHANNEL = [floats(4, low=low, high=2) for low in (0.5, -1, -0.9, 0.3)]
case("BatchNormalization-6", IMAGE, *CHANNEL, is_test=1, epsilon=1e-3)
case("BatchNormalization-7 9", IMAGE, *CHANNEL, epsilon=1e-3)
case("InstanceNormalization-6", IMAGE, *CHANNEL[:2])
case("Conv-1", IMAGE, floats(6, 2, 3, 2), floats(6), group=2, strides=[2, 1], pads=[1, 0, 1, 1])
case("Conv-11", IMAGE, floats(6, 4, 3, 2), dilations=[2, 1], auto_pad="SAME_LOWER")
# Before version 13 the axis splits the array in two, and rows are normalised.
for _name in ("LogSoftmax", "Softmax"):
    case(f"{_name}-1 11", floats(2, 3, 4), axis=1)

case("Concat-1", X, UNIT, expected=lambda *xs: np.concatenate(xs, 1))
case("Concat-4 11", X, UNIT, axis=0)
case("Expand-8", floats(3, 1), ints(2, 1, 4), constants=[1])
case("Flatten-1 9", floats(2, 3, 4), axis=2)
case("Flatten-11", floats(2, 3, 4), axis=-1)
case("Gather-1", X, ints(2, 0), axis=1)
case("Gather-11", X, ints(-1, 0).reshape(1, 2), axis=1)
case("OneHot-9 11", ints(1, 0, 5), ints(4), np.array([-1, 2], np.float32), constants=[1], axis=0)
case("Pad-2", X, pads=[0, 1, 2, 1], mode="reflect")
case("Pad-11", X, ints(0, 1, 2, 0), np.array(1.5, np.float32), constants=[1])
case("Reshape-5", floats(2, 3, 4), ints(0, -1), constants=[1])
case("Scatter-9", X, ints(0, 2, 1, 1).reshape(1, 4), floats(1, 4), axis=0)
case("Slice-1", floats(4, 5, 6), starts=[1, -3], ends=[3, 1000], axes=[0, 2])
case("Slice-10 11", floats(4, 5, 6), ints(3, 1), ints(-1000, 5), ints(0, 1), ints(-2, 2), constants=[1, 2, 3, 4])
case("Split-2 11", floats(6, 5), split=[1, 4], axis=1, results=(np.float32,) * 2)
case("Squeeze-1", floats(1, 3, 1), axes=[2])
case("Squeeze-11", floats(1, 3, 1), axes=[-1])
case("Tile-1", X, ints(3), ints(1), constants=[1, 2], expected=lambda x, *_: np.tile(x, (1, 3)))
case("Tile-6", X, ints(2, 3), constants=[1])
case("Transpose-1", floats(2, 3, 4), perm=[2, 0, 1])
case("Unsqueeze-1", X, axes=[0, 2])
case("Unsqueeze-11", X, axes=[0, -1])


def graph(name: str, nodes: Sequence[tuple[Any, ...]], inputs: Sequence[Any], outputs: Sequence[Any]) -> Any:
    made = [helper.make_node(*node) for node in nodes]
    return helper.make_graph(made, name, [info(*each) for each in inputs], [info(*each) for each in outputs])


def constant_graph(name: str, value: np.ndarray) -> onnx.GraphProto:
    node = helper.make_node("Constant", [], [name], value=onnx.numpy_helper.from_array(value))
    return helper.make_graph([node], name, [], [info(name, value.dtype, value.shape)])


case(
    "If-1 11",
    np.array([True]),
    then_branch=constant_graph("then", X),
    else_branch=constant_graph("else", UNIT),
    expected=lambda condition: X,
)
BODY = graph(
    "body",
    [("Add", ["carried", "carried"], ["double"]), ("Identity", ["go"], ["going"]), ("Identity", ["double"], ["row"])],
    [("n", np.int64, ()), ("go", bool, ()), ("carried", np.float32, (3, 4))],
    [("going", bool, ()), ("double", np.float32, (3, 4)), ("row", np.float32, (3, 4))],
)
case(
    "Loop-1 11",
    np.array(3),
    np.array(True),
    X,
    constants=[0, 1],
    body=BODY,
    results=(np.float32,) * 2,
    expected=lambda count, go, x: (8 * x, np.stack([2 * x, 4 * x, 8 * x])),
)
LSTM = floats(5, 2, 3), floats(1, 16, 3), floats(1, 16, 4), floats(1, 32)


def lstm(x: np.ndarray, w: np.ndarray, r: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    hidden = cell = np.zeros((x.shape[1], 4), np.float32)
    rows = []
    for step in x:
        enter, leave, forget, new = np.split(step @ w[0].T + hidden @ r[0].T + b[0, :16] + b[0, 16:], 4, axis=1)
        cell = cell / (1 + np.exp(-forget)) + np.tanh(new) / (1 + np.exp(-enter))
        hidden = np.tanh(cell) / (1 + np.exp(-leave))
        rows.append(hidden)
    return np.stack(rows)[:, None], hidden[None], cell[None]


case("LSTM-1", *LSTM, hidden_size=4, output_sequence=1, results=(np.float32,) * 3, expected=lstm)
case("LSTM-7", *LSTM, hidden_size=4, results=(np.float32,) * 3, expected=lstm)
