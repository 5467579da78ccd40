"""Windows that slide over an array, from a node's attributes."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

import ipujax.onnx
from ipujax.onnx.operators.window_attributes import slide


@pytest.mark.parametrize("auto_pad", ["SAME_UPPER", "SAME_LOWER"])
def test_windows_that_need_no_padding_get_none(auto_pad: str) -> None:
    # The last window of a stride larger than the kernel ends before the last element.
    windows = slide([6], [1], strides=[2], auto_pad=auto_pad)
    assert (windows.before, windows.after, windows.counts) == ((0,), (0,), (3,))


def test_the_larger_half_of_padding_is_on_the_named_side() -> None:
    upper = slide([5], [4], auto_pad="SAME_UPPER")
    lower = slide([5], [4], auto_pad="SAME_LOWER")
    assert (upper.before, upper.after) == ((1,), (2,))
    assert (lower.before, lower.after) == ((2,), (1,))


# Attributes of nodes with more elements in all windows than a constant may have, and the shapes of their operands.
MANY_WINDOWS: dict[str, tuple[dict[str, Any], list[tuple[int, ...]]]] = {
    "MaxPool": ({"kernel_shape": [200], "strides": [10], "dilations": [2]}, [(1, 1, 220_000)]),
    "AveragePool": ({"kernel_shape": [200], "strides": [10], "pads": [50, 50]}, [(1, 1, 220_000)]),
    "Col2Im": ({"pads": [1, 1, 1, 1]}, [(1, 9, 700 * 700)]),
    "DeformConv": ({"pads": [1, 1, 1, 1]}, [(1, 1, 520, 520), (1, 1, 3, 3), (1, 18, 520, 520)]),
}


@pytest.mark.parametrize("operator", MANY_WINDOWS)
def test_large_images_have_many_windows(operator: str) -> None:
    attributes, shapes = MANY_WINDOWS[operator]
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=shape).astype(np.float32) for shape in shapes]
    names = [f"x{n}" for n in range(len(arrays))]
    sizes = {"image": np.array([700, 700]), "block": np.array([3, 3])} if operator == "Col2Im" else {}
    constants = [helper.make_tensor(name, TensorProto.INT64, [2], value) for name, value in sizes.items()]
    graph = helper.make_graph(
        [helper.make_node(operator, [*names, *sizes], ["y"], **attributes)],
        "windows",
        [
            helper.make_tensor_value_info(name, TensorProto.FLOAT, x.shape)
            for name, x in zip(names, arrays, strict=True)
        ],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        constants,
    )
    file = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 19)], ir_version=9).SerializeToString()
    model = ipujax.onnx.load(file)
    session = ort.InferenceSession(file, providers=["CPUExecutionProvider"])
    (expected,) = session.run(None, dict(zip(names, arrays, strict=True)))
    np.testing.assert_allclose(model(model.params, *arrays), expected, rtol=1e-4, atol=1e-5)


def test_a_table_beyond_all_memory_is_refused() -> None:
    windows = slide([1 << 20], [1 << 15])
    with pytest.raises(ipujax.onnx.OnnxError, match="the table of windows on spatial axis 0 is too large"):
        windows.positions(0)
