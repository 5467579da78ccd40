"""Tensors and windows without elements, through every family of operators, as onnxruntime computes or refuses them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

import ipujax as ipu
from tests.ipujax.onnx.models import info, model_of
from tests.ipujax.onnx.opsets.oracles import difference, ipu_results, runtime_results

NONE = np.zeros((0,), np.float32)
ROWS = np.zeros((0, 3), np.float32)
COLUMNS = np.zeros((3, 0), np.float32)
X = np.arange(6, dtype=np.float32).reshape(2, 3)
IMAGE = np.arange(16, dtype=np.float32).reshape(1, 1, 4, 4)
FLAT_IMAGE = np.zeros((1, 1, 0, 4), np.float32)
NO_IMAGES = np.zeros((0, 1, 4, 4), np.float32)
NO_CHANNELS = np.zeros((1, 0, 4, 4), np.float32)
KERNEL = np.ones((1, 1, 2, 2), np.float32)
REDUCTIONS = [
    f"Reduce{name}" for name in ("L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "Sum", "SumSquare")
]


def whole(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


@dataclass(frozen=True)
class Case:
    """A node on operands, None for those that it leaves out."""

    op_type: str
    operands: Sequence[np.ndarray | None]
    attributes: dict[str, Any]
    outputs: int

    def model(self) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
        """Return the model, whose operands are all inputs, and their values."""
        names = [f"x{n}" if x is not None else "" for n, x in enumerate(self.operands)]
        arrays = {name: x for name, x in zip(names, self.operands, strict=True) if x is not None}
        results = [f"y{n}" for n in range(self.outputs)]
        node = helper.make_node(self.op_type, names, results, "empty", **self.attributes)
        inputs = [info(name, x.dtype, x.shape) for name, x in arrays.items()]
        return model_of([node], inputs, [onnx.ValueInfoProto(name=name) for name in results], opset=21), arrays


def case(op_type: str, *operands: np.ndarray | None, outputs: int = 1, **attributes: Any) -> Case:
    return Case(op_type, operands, attributes, outputs)


CASES = [
    *(case(name, ROWS, whole(0), keepdims=0) for name in REDUCTIONS),
    *(case(name, ROWS, whole(1)) for name in REDUCTIONS),
    *(case(f"Reduce{name}", COLUMNS.astype(np.int32), whole(1)) for name in ("Sum", "Prod", "Max", "Min", "Mean")),
    case("ReduceMean", NONE),
    case("ReduceMean", COLUMNS, whole(1)),
    *(case(name, COLUMNS, axis=1) for name in ("ArgMax", "ArgMin")),
    *(case(name, ROWS, axis=1, keepdims=0) for name in ("ArgMax", "ArgMin")),
    case("CumSum", ROWS, whole(0).reshape(()), exclusive=1),
    case("Softmax", COLUMNS, axis=1),
    case("LogSoftmax", ROWS, axis=1),
    case("Hardmax", ROWS, axis=1),
    case("Hardmax", COLUMNS, axis=1),
    *(case(name, NO_IMAGES, kernel_shape=[2, 2]) for name in ("MaxPool", "AveragePool", "LpPool")),
    *(case(name, NO_CHANNELS, kernel_shape=[2, 2]) for name in ("MaxPool", "AveragePool")),
    *(case(name, FLAT_IMAGE, kernel_shape=[2, 2], pads=[1, 0, 1, 0]) for name in ("MaxPool", "AveragePool")),
    case("MaxPool", FLAT_IMAGE, kernel_shape=[1, 2]),
    *(case(name, IMAGE, kernel_shape=[5, 5]) for name in ("MaxPool", "AveragePool", "LpPool")),
    case("MaxPool", IMAGE, outputs=2, kernel_shape=[5, 5]),
    *(case("MaxPool", IMAGE, kernel_shape=[size, 4], strides=[3, 1]) for size in (5, 6, 7, 8)),
    case("MaxPool", IMAGE, kernel_shape=[7, 4], strides=[3, 1], ceil_mode=1),
    *(case(name, IMAGE, kernel_shape=[2, 2], pads=[2, 0, 0, 0]) for name in ("MaxPool", "AveragePool", "LpPool")),
    *(case(name, IMAGE, kernel_shape=[2, 2], pads=[0, 0, 0, 2]) for name in ("MaxPool", "AveragePool")),
    case("LpPool", FLAT_IMAGE, kernel_shape=[2, 2], pads=[1, 0, 1, 0]),
    *(case("Conv", IMAGE, np.ones((1, 1, size, 5), np.float32)) for size in (5, 6)),
    case("Conv", IMAGE, np.ones((1, 1, 5, 4), np.float32), strides=[2, 1]),
    case("MaxPool", NO_IMAGES, outputs=2, kernel_shape=[2, 2]),
    case("MaxPool", IMAGE, kernel_shape=[0, 2]),
    case("AveragePool", IMAGE, kernel_shape=[0, 2]),
    *(case(f"Global{name}Pool", NO_IMAGES) for name in ("Average", "Max", "Lp")),
    *(case(f"Global{name}Pool", FLAT_IMAGE) for name in ("Average", "Max", "Lp")),
    case("Conv", NO_IMAGES, KERNEL),
    case("Conv", FLAT_IMAGE, KERNEL, pads=[1, 0, 1, 0]),
    case("Conv", IMAGE, np.zeros((0, 1, 2, 2), np.float32)),
    case("Conv", NO_CHANNELS, np.zeros((2, 0, 2, 2), np.float32)),
    case("ConvTranspose", NO_IMAGES, KERNEL),
    case("InstanceNormalization", NO_IMAGES, np.ones(1, np.float32), np.zeros(1, np.float32)),
    case("LayerNormalization", ROWS, np.ones(3, np.float32)),
    case("LayerNormalization", COLUMNS, NONE),
    case("BatchNormalization", NO_IMAGES, *(np.ones(1, np.float32),) * 4),
    case("Concat", ROWS, X, axis=0),
    case("Concat", NONE, NONE, axis=0),
    case("Concat", NONE, X, axis=0),
    case("Slice", X, whole(2), whole(1)),
    case("Slice", ROWS, whole(0), whole(9)),
    case("Slice", X, whole(5), whole(0), whole(0), whole(-1)),
    case("Slice", ROWS, whole(-1), whole(-9), whole(0), whole(-1)),
    case("Gather", X, whole()),
    case("Gather", ROWS, whole(0), axis=1),
    case("Gather", ROWS, whole(), axis=0),
    case("GatherElements", ROWS, whole().reshape(0, 3)),
    case("GatherND", X, whole().reshape(0, 1)),
    case("GatherND", X, whole().reshape(0, 2)),
    case("ScatterElements", X, whole().reshape(0, 3), ROWS),
    case("ScatterND", X, whole().reshape(0, 1), ROWS),
    case("NonZero", ROWS),
    case("NonZero", np.zeros((2, 2), np.float32)),
    case("Compress", X, np.zeros(2, bool), axis=0),
    case("Compress", ROWS, np.zeros(0, bool)),
    case("Unique", NONE, outputs=4),
    case("TopK", X, whole(0), outputs=2),
    case("TopK", COLUMNS, whole(0), outputs=2),
    case("TopK", COLUMNS, whole(1), outputs=2),
    case("OneHot", whole(), whole(3), np.array([0, 1], np.float32)),
    case("OneHot", whole(1, 2), whole(0), np.array([0, 1], np.float32)),
    case("Split", ROWS, outputs=2, num_outputs=2),
    case("Split", X, whole(0, 2), outputs=2),
    case("Split", X, whole(2, 0), outputs=2, axis=0),
    case("Resize", ROWS, None, np.array([1, 2], np.float32)),
    case("Resize", X, None, np.array([0.1, 1], np.float32)),
    case("Resize", ROWS, None, None, whole(0, 6)),
    case("Resize", ROWS, None, None, whole(2, 6)),
    case("Resize", X, None, None, whole(0, 3)),
    case("Reshape", ROWS, whole(0, -1)),
    case("Reshape", ROWS, whole(3, 0), allowzero=1),
    case("Reshape", ROWS, whole(-1, 3)),
    case("Reshape", ROWS, whole(-1)),
    case("Flatten", NO_IMAGES),
    case("Flatten", NO_CHANNELS),
    case("Expand", X[:1], whole(0, 3)),
    case("Expand", ROWS, whole(2, 1, 1)),
    case("Tile", X, whole(0, 2)),
    case("Pad", ROWS, whole(1, 0, 1, 0)),
    case("Pad", ROWS, whole(1, 0, 1, 0), mode="edge"),
    case("Pad", ROWS, whole(0, 1, 0, 1), mode="reflect"),
    case("Transpose", ROWS),
    case("MatMul", COLUMNS, ROWS),
    case("MatMul", ROWS, COLUMNS),
    case("Gemm", COLUMNS, ROWS, np.ones(3, np.float32)),
    case("Einsum", COLUMNS, ROWS, equation="ij,jk->ik"),
    case("Add", ROWS, X[:1]),
    case("Add", ROWS, X),
    case("Where", np.zeros((0, 1), bool), X[:1], X[:1]),
    case("Range", *(np.array(n, np.int64) for n in (3, 3, 1))),
    case("Range", *(np.array(n, np.float32) for n in (3, 1, 0.5))),
    case("ConstantOfShape", whole(0, 2)),
    case("ConstantOfShape", whole()),
    case("DepthToSpace", np.zeros((0, 4, 2, 2), np.float32), blocksize=2),
    case("Trilu", ROWS),
    case("EyeLike", ROWS),
    case("Cast", ROWS, to=7),
    case("Shape", ROWS),
    case("ReverseSequence", np.zeros((0, 2), np.float32), whole(0, 0)),
    case("LpNormalization", ROWS),
    case("ReduceLogSumExp", COLUMNS, whole(1)),
    case("Det", np.zeros((0, 2, 2), np.float32)),
    case("Max", ROWS, X[:1]),
    case("Mean", NONE, NONE),
    case("QuantizeLinear", NONE, np.array(0.1, np.float32), np.array(0, np.uint8)),
    case("NonMaxSuppression", np.zeros((1, 0, 4), np.float32), np.zeros((1, 1, 0), np.float32), whole(3)),
    case("RoiAlign", IMAGE, np.zeros((0, 4), np.float32), whole(), output_height=2, output_width=2),
    case("MaxRoiPool", IMAGE, np.zeros((0, 5), np.float32), pooled_shape=[2, 2]),
    case("GridSample", IMAGE, np.zeros((1, 0, 2, 2), np.float32)),
    case("SpaceToDepth", NO_IMAGES, blocksize=2),
    case("LRN", NO_IMAGES, size=3),
    case("Squeeze", np.zeros((1, 0), np.float32)),
    case("ArgMax", np.zeros((2, 0, 3), np.float32), axis=1),
    case("Col2Im", np.zeros((0, 4, 9), np.float32), whole(4, 4), whole(2, 2)),
    case("CenterCropPad", ROWS, whole(2, 2)),
    case("Resize", FLAT_IMAGE, None, np.array([1, 1, 2, 2], np.float32), mode="linear"),
    case("PRelu", ROWS, np.ones(3, np.float32)),
    case("Clip", NONE, np.array(0, np.float32), np.array(1, np.float32)),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.op_type)
def test_empty_operands(case: Case) -> None:
    model, arrays = case.model()
    expected = runtime_results(model, arrays)
    if isinstance(expected, str):
        try:
            results = ipu_results(model, arrays)
        except ipu.IpuError as error:
            assert "node 'empty'" in str(error)
        else:  # onnxruntime refuses some results without elements
            assert not any(result.size for result in results)
    else:
        assert difference(ipu_results(model, arrays), expected) == ""
