"""Random nodes of any opset: for each operator whose form or meaning changed, a function that draws a valid node.

An attribute that became an operand is written as the opset has it (`Draw.moved`). Operands that decide shapes are
initialisers, all others inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from tests.ipujax.onnx.models import info, model_of


@dataclass
class Draw:
    """A node that is being drawn.

    Args:
        rng: source of the numbers.
        opset: of the model.
        op_type: of the node.
    """

    rng: np.random.Generator
    opset: int
    op_type: str
    names: list[str] = field(default_factory=list)
    inputs: dict[str, np.ndarray] = field(default_factory=dict)
    constants: dict[str, np.ndarray] = field(default_factory=dict)
    attributes: dict[str, Any] = field(default_factory=dict)
    outputs: int = 1

    def integer(self, low: int, high: int) -> int:
        """Return a whole number, both ends included."""
        return int(self.rng.integers(low, high + 1))

    def often(self, probability: float = 0.5) -> bool:
        """Return True with a probability."""
        return bool(self.rng.random() < probability)

    def one_of(self, values: Sequence[Any]) -> Any:
        """Return one of some values."""
        return values[self.integer(0, len(values) - 1)]

    def shape(self, low: int = 1, high: int = 4, size: int = 5) -> tuple[int, ...]:
        """Return a shape of a rank between two."""
        return tuple(self.integer(1, size) for _ in range(self.integer(low, high)))

    def normal(self, *shape: int) -> np.ndarray:
        """Return normal numbers in single precision."""
        return self.rng.standard_normal(shape).astype(np.float32)

    def whole(self, low: int, high: int, *shape: int, dtype: type = np.int64) -> np.ndarray:
        """Return whole numbers, both ends included."""
        return self.rng.integers(low, high + 1, shape).astype(dtype)

    def axis(self, rank: int, since: int = 11) -> int:
        """Return an axis; negative ones are allowed from an opset on."""
        return self.integer(-rank if self.opset >= since else 0, rank - 1)

    def axes(self, rank: int, since: int = 11) -> list[int]:
        """Return some axes in order."""
        chosen = sorted(self.rng.permutation(rank)[: self.integer(1, rank)].tolist())
        return [axis - rank if self.opset >= since and self.often(0.3) else axis for axis in chosen]

    def operand(self, array: np.ndarray | None, *, constant: bool = False) -> np.ndarray | None:
        """Add an operand; None is one that is left out."""
        name = f"{'c' if constant else 'x'}{len(self.names)}" if array is not None else ""
        self.names.append(name)
        if array is not None:
            (self.constants if constant else self.inputs)[name] = array
        return array

    def sometimes(self, **attributes: Any) -> None:
        """Write each attribute, or leave it at its default."""
        self.attributes.update({name: value for name, value in attributes.items() if self.often(0.7)})

    def since(self, opset: int, **attributes: Any) -> None:
        """Write each attribute, or not, if the opset has it."""
        if self.opset >= opset:
            self.sometimes(**attributes)

    def before(self, opset: int, **attributes: Any) -> None:
        """Write each attribute, or not, if the opset still has it."""
        if self.opset < opset:
            self.sometimes(**attributes)

    def moved(self, name: str, values: Any, opset: int, dtype: type = np.int64, *, constant: bool = True) -> None:
        """Write an attribute that is an operand from an opset on."""
        if self.opset < opset:
            self.attributes[name] = values
        else:
            self.operand(np.asarray(values, dtype), constant=constant)

    def model(self) -> onnx.ModelProto:
        """Return the model of this node."""
        outputs = [f"y{n}" for n in range(self.outputs)]
        node = helper.make_node(self.op_type, self.names, outputs, "drawn", **self.attributes)
        inputs = [info(name, array.dtype, array.shape) for name, array in self.inputs.items()]
        results = [onnx.ValueInfoProto(name=name) for name in outputs]
        model = model_of([node], inputs, results, self.constants, opset=self.opset)
        model.ir_version = 3 if self.opset < 9 else 8 if self.opset < 21 else 10
        if model.ir_version == 3:  # initialisers are inputs too
            model.graph.input.extend(info(name, x.dtype, x.shape) for name, x in self.constants.items())
        inferred = onnx.shape_inference.infer_shapes(model).graph.output
        for value, result in zip(model.graph.output, inferred, strict=True):
            known = result.type.tensor_type.elem_type
            first = next(iter(self.inputs.values()))
            value.type.tensor_type.elem_type = known or helper.np_dtype_to_tensor_dtype(first.dtype)
        return model


Generator = Callable[[Draw], None]


def _unary(d: Draw) -> None:
    d.operand(d.normal(*d.shape()))
    if d.op_type not in ("Identity", "Softplus", "Softsign"):
        d.before(6, consumed_inputs=[0])


def _positive(d: Draw) -> None:
    d.operand(np.abs(d.normal(*d.shape())) + np.float32(0.1))
    d.before(6, consumed_inputs=[0])


def _arithmetic(d: Draw) -> None:
    shape = d.shape(1, 4)
    d.operand(np.abs(d.normal(*shape)) + np.float32(0.5))
    if d.opset < 7:
        start = d.integer(0, len(shape) - 1)
        stop = d.integer(start + 1, len(shape))
        same = d.often(0.3)
        stop = stop if d.often() else len(shape)
        d.operand(d.normal(*(shape if same else shape[start:stop])))
        d.attributes.update({} if same else {"broadcast": 1})
        if not same and (stop < len(shape) or d.often()):
            d.attributes["axis"] = start
        return
    other = tuple(size if d.often(0.7) else 1 for size in shape)
    d.operand(d.normal(*other[d.integer(0, len(shape) - 1) :]))


def _logic(d: Draw) -> None:
    _arithmetic(d)
    d.inputs = {name: array > 0.5 for name, array in d.inputs.items()}


def _comparison(d: Draw) -> None:
    _arithmetic(d)
    dtype = np.int32 if d.op_type == "Equal" or (d.opset >= 9 and d.often()) else np.float32
    d.inputs = {name: (3 * array).astype(dtype) for name, array in d.inputs.items()}


def _variadic(d: Draw) -> None:
    shape = d.shape()
    for _ in range(d.integer(1, 3)):
        d.operand(d.normal(*(shape if d.opset < 8 else [n if d.often(0.7) else 1 for n in shape])))
    d.before(6, consumed_inputs=[0])


def _arg(d: Draw) -> None:
    shape = d.shape()
    d.operand(d.whole(0, 3, *shape, dtype=np.float32))
    d.sometimes(axis=d.axis(len(shape)), keepdims=d.integer(0, 1))
    d.since(12, select_last_index=d.integer(0, 1))


def _pool(d: Draw) -> None:
    rank = d.one_of([1, 2, 2, 3])
    sizes = [d.integer(5, 9) for _ in range(rank)]
    kernel = [d.integer(1, 3) for _ in range(rank)]
    d.operand(d.normal(d.integer(1, 2), d.integer(1, 3), *sizes))
    d.attributes["kernel_shape"] = kernel
    d.sometimes(strides=[d.integer(1, 3) for _ in range(rank)])
    has_dilations = {"MaxPool": 10, "AveragePool": 19, "LpPool": 18}[d.op_type] <= d.opset
    if has_dilations:
        d.sometimes(dilations=[d.integer(1, 2) for _ in range(rank)])
    if d.often(0.3):
        d.attributes["auto_pad"] = d.one_of(["NOTSET", "SAME_UPPER", "SAME_LOWER", "VALID"])
    elif d.often():
        d.attributes["pads"] = [d.integer(0, k - 1) for k in kernel * 2]
    has_ceil = {"MaxPool": 10, "AveragePool": 10, "LpPool": 18}[d.op_type] <= d.opset
    if has_ceil:
        d.sometimes(ceil_mode=d.integer(0, 1))
    if d.op_type == "AveragePool":
        d.since(7, count_include_pad=d.integer(0, 1))
    if d.op_type == "LpPool":
        d.sometimes(p=float(d.integer(1, 3)) if d.opset < 2 else d.integer(1, 3))
    if d.op_type == "MaxPool" and d.opset >= 8:
        d.outputs = d.integer(1, 2)
        d.sometimes(storage_order=d.integer(0, 1))


def _conv(d: Draw) -> None:
    rank = d.one_of([1, 2, 2])
    group = d.integer(1, 2)
    kernel = [d.integer(1, 3) for _ in range(rank)]
    channels = group * d.integer(1, 2)
    outputs = group * d.integer(1, 2)
    is_transposed = d.op_type == "ConvTranspose"
    d.operand(d.normal(1, channels, *(d.integer(5, 8) for _ in range(rank))))
    d.operand(d.normal(*((channels, outputs // group) if is_transposed else (outputs, channels // group)), *kernel))
    if d.often():
        d.operand(d.normal(outputs))
    strides = [d.integer(1, 3) for _ in range(rank)]
    d.sometimes(kernel_shape=kernel, dilations=[d.integer(1, 2) for _ in range(rank)])
    d.attributes["strides"] = strides
    d.attributes["group"] = group
    if d.often(0.4):
        d.attributes["auto_pad"] = d.one_of(["NOTSET", "SAME_UPPER", "SAME_LOWER", "VALID"])
        if "SAME" in d.attributes["auto_pad"] and not is_transposed:
            d.attributes.pop("dilations", None)
    elif d.often():
        d.attributes["pads"] = [d.integer(0, k - 1) for k in kernel * 2]
    if is_transposed and d.often(0.3):
        d.attributes["output_padding"] = [d.integer(0, s - 1) for s in strides]


def _batch_normalization(d: Draw) -> None:
    shape = (d.integer(1, 3), d.integer(1, 4), *d.shape(0, 2))
    d.operand(d.normal(*shape))
    by_element = d.opset < 9 and len(shape) > 2 and d.often(0.4)
    statistics = shape[1:] if by_element else shape[1:2]
    for n in range(4):
        values = d.normal(*statistics)
        d.operand(np.abs(values) + np.float32(0.5) if n == 3 else values)
    d.sometimes(epsilon=1e-3, momentum=0.8)
    if by_element or d.opset < 9:
        d.attributes.update({"spatial": 0} if by_element else {})
    if d.opset < 7:
        d.attributes["is_test"] = 1
    if d.opset < 6:
        d.attributes["consumed_inputs"] = [0, 0, 0, 0, 0]
    if d.opset >= 14 and d.often():
        d.attributes["training_mode"] = 1
        d.outputs = 3


def _cast(d: Draw) -> None:
    d.operand((d.normal(*d.shape()) * 10).astype(d.one_of([np.float32, np.int32])))
    to = d.one_of(["FLOAT", "INT32", "INT64", "BOOL", "FLOAT16"])
    d.attributes["to"] = to if d.opset < 6 else TensorProto.DataType.Value(to)


def _clip(d: Draw) -> None:
    x = d.normal(*d.shape()) * 3
    x.flat[0] = d.one_of([np.inf, -np.inf, 0.0, 1.0])
    d.operand(x)
    low = float(d.normal()) if d.often() else None
    high = float(d.normal()) + 2 if d.often() else None
    d.before(6, consumed_inputs=[0])
    for name, value in (("min", low), ("max", high)):
        if d.opset < 11 and value is not None:
            d.attributes[name] = value
        elif d.opset >= 11:
            d.operand(None if value is None else np.asarray(value, np.float32), constant=d.often())


def _concat(d: Draw) -> None:
    shape = list(d.shape(2, 4))
    axis = d.axis(len(shape))
    if d.opset < 4 and d.often():
        axis = 1
    else:
        d.attributes["axis"] = axis
    for _ in range(d.integer(1, 3)):
        shape[axis] = d.integer(1, 4)
        d.operand(d.normal(*shape))


def _cumulative(d: Draw) -> None:
    shape = d.shape()
    d.operand(d.normal(*shape))
    d.operand(np.asarray(d.axis(len(shape))), constant=True)
    d.sometimes(exclusive=d.integer(0, 1), reverse=d.integer(0, 1))


def _depth_to_space(d: Draw) -> None:
    block = d.integer(1, 3)
    extent = block if d.op_type == "SpaceToDepth" else 1
    channels = 1 if d.op_type == "SpaceToDepth" else block**2
    d.operand(d.normal(d.integer(1, 2), channels * d.integer(1, 3), extent * d.integer(1, 3), extent * d.integer(1, 3)))
    d.attributes["blocksize"] = block
    if d.op_type == "DepthToSpace":
        d.since(11, mode=d.one_of(["DCR", "CRD"]))
    else:
        d.since(28, mode=d.one_of(["DCR", "CRD"]))


def _dft(d: Draw) -> None:
    shape = d.shape(2, 3, 6)
    d.operand(d.normal(*shape, d.one_of([1, 2])))
    axis = d.integer(1, len(shape) - 1)
    d.operand(np.asarray(d.integer(2, 8)) if d.often() else None, constant=True)
    d.sometimes(inverse=d.integer(0, 1))
    if not d.attributes.get("inverse") and d.inputs["x0"].shape[-1] == 1:
        d.sometimes(onesided=d.integer(0, 1))
    if d.often(0.7):
        d.moved("axis", axis, 20)
    while d.names and not d.names[-1]:
        d.names.pop()


def _dropout(d: Draw) -> None:
    d.operand(d.normal(*d.shape()))
    d.outputs = d.integer(1, 2)
    if d.opset < 12:
        d.sometimes(ratio=0.3)
    elif d.often():
        d.operand(np.float32(0.3), constant=True)
    if d.opset < 7:
        d.attributes["is_test"] = 1
    d.before(6, consumed_inputs=[0])


def _einsum(d: Draw) -> None:
    sizes = {letter: d.integer(1, 4) for letter in "ijk"}
    equation, terms = d.one_of(
        [("ij,jk->ik", ["ij", "jk"]), ("ij->ji", ["ij"]), ("ij, jk", ["ij", "jk"]), ("...i,ij->...j", ["ki", "ij"])]
    )
    for term in terms:
        d.operand(d.normal(*(sizes[letter] for letter in term)))
    d.attributes["equation"] = equation


def _eye(d: Draw) -> None:
    d.operand(d.normal(*d.shape(2, 2)))
    d.sometimes(k=d.integer(-2, 2), dtype=d.one_of([1, 6, 7, 11]))


def _flatten(d: Draw) -> None:
    shape = d.shape(1, 4)
    d.operand(d.normal(*shape))
    d.sometimes(axis=d.integer(-len(shape) if d.opset >= 11 else 0, len(shape)))


def _flattening(d: Draw) -> None:
    shape = d.shape(1, 4)
    d.operand(d.normal(*shape))
    d.sometimes(axis=d.axis(len(shape)))
    if d.opset < 13 and len(shape) == 1:
        d.attributes["axis"] = 0


def _gather(d: Draw) -> None:
    shape = d.shape(1, 3)
    axis = d.axis(len(shape), 1)
    d.operand(d.normal(*shape))
    low = -shape[axis] if d.opset >= 11 else 0
    indices = (
        d.shape(0, 2)
        if d.op_type == "Gather"
        else tuple(d.integer(1, 4) if n == axis % len(shape) else d.integer(1, size) for n, size in enumerate(shape))
    )
    d.operand(d.whole(low, shape[axis] - 1, *indices), constant=d.often())
    d.attributes["axis"] = axis


def _gather_nd(d: Draw) -> None:
    shape = d.shape(2, 4)
    batch = d.integer(0, 1) if d.opset >= 12 else 0
    length = d.integer(1, len(shape) - batch)
    vectors = [d.whole(-size, size - 1, *shape[:batch], 3) for size in shape[batch : batch + length]]
    d.operand(d.normal(*shape))
    d.operand(np.stack(vectors, -1), constant=d.often())
    if d.opset >= 12:
        d.attributes["batch_dims"] = batch


def _scatter(d: Draw) -> None:
    shape = d.shape(1, 3)
    axis = d.axis(len(shape))
    d.operand(d.normal(*shape))
    extent = d.integer(1, shape[axis])
    indices = [extent if n == axis % len(shape) else d.integer(1, size) for n, size in enumerate(shape)]
    order = np.argsort(
        d.rng.random([*indices[: axis % len(shape)], shape[axis], *indices[axis % len(shape) + 1 :]]), axis
    )
    chosen = np.take(order, np.arange(extent), axis)
    d.operand(chosen.astype(np.int64), constant=d.often())
    d.operand(d.normal(*indices))
    d.attributes["axis"] = axis
    if d.op_type == "ScatterElements" and d.opset >= 16:
        d.sometimes(reduction=d.one_of(["none", "add", "mul"] + (["max", "min"] if d.opset >= 18 else [])))


def _scatter_nd(d: Draw) -> None:
    shape = d.shape(1, 3)
    length = d.integer(1, len(shape))
    count = d.integer(1, int(np.prod(shape[:length])))
    flat = d.rng.permutation(int(np.prod(shape[:length])))[:count]
    d.operand(d.normal(*shape))
    d.operand(np.stack(np.unravel_index(flat, shape[:length]), -1).astype(np.int64), constant=d.often())
    d.operand(d.normal(count, *shape[length:]))
    if d.opset >= 16:
        d.sometimes(reduction=d.one_of(["none", "add", "mul"] + (["max", "min"] if d.opset >= 18 else [])))


def _gemm(d: Draw) -> None:
    m, k, n = (d.integer(1, 4) for _ in range(3))
    d.sometimes(transA=d.integer(0, 1), transB=d.integer(0, 1), alpha=0.5, beta=2.0)
    d.operand(d.normal(*((k, m) if d.attributes.get("transA") else (m, k))))
    d.operand(d.normal(*((n, k) if d.attributes.get("transB") else (k, n))))
    shape = d.one_of([(m, n), (n,), (1, n), (1,)])
    if d.opset < 11 or d.often():
        d.operand(d.normal(*shape))
    if d.opset < 7 and shape != (m, n):
        d.attributes["broadcast"] = 1


def _global_pool(d: Draw) -> None:
    d.operand(d.normal(d.integer(1, 2), d.integer(1, 3), *d.shape(1, 3)))
    if d.op_type == "GlobalLpPool":
        d.sometimes(p=float(d.integer(1, 3)) if d.opset < 2 else d.integer(1, 3))


def _grid_sample(d: Draw) -> None:
    rank = 2 if d.opset < 20 else d.one_of([2, 3])
    d.operand(d.normal(1, 2, *(d.integer(2, 5) for _ in range(rank))))
    d.operand(d.normal(1, *(d.integer(2, 4) for _ in range(rank)), rank))
    modes = ["bilinear", "nearest", "bicubic"] if d.opset < 20 else ["linear", "nearest"] + ["cubic"] * (rank == 2)
    padding = d.one_of(["zeros", "border", "reflection"])
    d.sometimes(align_corners=d.integer(0, 1), mode=d.one_of(modes), padding_mode=padding)


def _group_normalization(d: Draw) -> None:
    groups = d.integer(1, 3)
    channels = groups * d.integer(1, 3)
    d.operand(d.normal(d.integer(1, 2), channels, *d.shape(1, 2)))
    count = groups if d.opset < 21 else channels
    d.operand(d.normal(count))
    d.operand(d.normal(count))
    d.attributes["num_groups"] = groups
    d.sometimes(epsilon=1e-3)


def _instance_normalization(d: Draw) -> None:
    channels = d.integer(1, 3)
    d.operand(d.normal(d.integer(1, 2), channels, d.integer(3, 5), d.integer(3, 5)))
    d.operand(d.normal(channels))
    d.operand(d.normal(channels))
    d.sometimes(epsilon=1e-3)
    d.before(6, consumed_inputs=[0])


def _lrn(d: Draw) -> None:
    d.operand(d.normal(1, d.integer(2, 6), *d.shape(2, 2)))
    d.attributes["size"] = d.one_of([1, 3, 5])
    d.sometimes(alpha=0.1, beta=0.5, bias=2.0)


def _lp_normalization(d: Draw) -> None:
    shape = d.shape()
    d.operand(d.normal(*shape))
    d.sometimes(axis=d.integer(-len(shape), len(shape) - 1), p=d.integer(1, 2))


def _matmul(d: Draw) -> None:
    m, k, n = (d.integer(1, 4) for _ in range(3))
    batch = d.shape(0, 2)
    d.operand(d.normal(*batch, m, k))
    d.operand(d.normal(*d.one_of([batch, ()]), k, n))


def _mean_variance(d: Draw) -> None:
    d.operand(d.normal(2, 3, 4, 2))
    d.sometimes(axes=d.axes(4, 99))


def _mod(d: Draw) -> None:
    shape = d.shape()
    is_float = d.often()
    dtype = np.float32 if is_float else d.one_of([np.int32, np.int64])
    d.operand((d.normal(*shape) * 9).astype(dtype))
    divisor = d.whole(1, 5, *shape) * np.where(d.rng.random(shape) < 0.5, 1, -1)
    d.operand(divisor.astype(dtype))
    d.attributes["fmod"] = 1 if is_float else d.integer(0, 1)


def _one_hot(d: Draw) -> None:
    shape = d.shape(1, 3)
    depth = d.integer(2, 5)
    low, high = (-depth, depth - 1) if d.opset >= 11 else (0, depth + 1)
    d.operand(d.whole(low, high, *shape))
    d.operand(np.asarray(depth), constant=True)
    d.operand(np.asarray([-1, 2], np.float32))
    d.sometimes(axis=d.integer(-len(shape) - 1 if d.opset >= 11 else -1, len(shape)))


def _prelu(d: Draw) -> None:
    shape = d.shape(2, 4)
    d.operand(d.normal(*shape))
    channel = (shape[1],)
    d.operand(d.normal(*(d.one_of([channel, (1,)]) if d.opset < 7 else d.one_of([shape, (1,), shape[-1:]]))))
    d.before(6, consumed_inputs=[0])


def _pad(d: Draw) -> None:
    shape = d.shape(1, 3)
    modes = ["constant", "reflect", "edge"] + (["wrap"] if d.opset >= 19 else [])
    mode = d.one_of(modes)
    d.operand(d.normal(*shape))
    low = -1 if mode == "constant" and min(shape) > 2 else 0
    pads = [d.integer(low, max(0, min(2, size - 1))) for size in shape * 2]
    d.attributes["mode"] = mode
    if d.opset < 2:
        d.attributes["paddings"] = pads
    else:
        d.moved("pads", pads, 11)
    if mode == "constant" or d.opset < 11:
        if d.opset < 11:
            d.sometimes(value=1.5)
        elif d.often():
            d.operand(np.float32(1.5), constant=True)


def _recurrent(d: Draw) -> None:
    gates = {"RNN": 1, "GRU": 3, "LSTM": 4}[d.op_type]
    time, batch, size, hidden = (d.integer(1, 4) for _ in range(4))
    direction = d.one_of(["forward", "reverse", "bidirectional"])
    count = 2 if direction == "bidirectional" else 1
    layout = d.integer(0, 1) if d.opset >= 14 and d.often(0.2) else 0
    d.operand(d.normal(*((batch, time) if layout else (time, batch)), size))
    d.operand(d.normal(count, gates * hidden, size))
    d.operand(d.normal(count, gates * hidden, hidden))
    if d.often():
        d.operand(d.normal(count, 2 * gates * hidden))
        if d.often():
            d.operand(d.whole(1, time, batch, dtype=np.int32))
    d.attributes.update(hidden_size=hidden, direction=direction)
    if layout:
        d.attributes["layout"] = 1
    if d.op_type == "GRU" and d.opset >= 3:
        d.sometimes(linear_before_reset=d.integer(0, 1))
    if d.op_type == "LSTM":
        d.sometimes(input_forget=0)
    if d.often(0.3):
        names = ["Tanh", "Sigmoid", "Relu", "HardSigmoid", "Softsign", "Softplus", "tanh"]
        functions = {"RNN": 1, "GRU": 2, "LSTM": 3}[d.op_type]
        d.attributes["activations"] = [d.one_of(names) for _ in range(functions * count)]
    if d.often(0.2):
        d.attributes["clip"] = 0.5
    if d.opset < 7:
        d.attributes["output_sequence"] = 1
    d.outputs = d.integer(1, 3 if d.op_type == "LSTM" else 2)


def _reduction(d: Draw) -> None:
    shape = d.shape()
    x = d.normal(*shape)
    d.operand(np.abs(x) + np.float32(0.1) if "Log" in d.op_type else x)
    axes = d.axes(len(shape))
    if d.often(0.8):
        d.moved("axes", axes, 13 if d.op_type == "ReduceSum" else 18)
    d.sometimes(keepdims=d.integer(0, 1))
    if d.opset >= (13 if d.op_type == "ReduceSum" else 18):
        d.sometimes(noop_with_empty_axes=d.integer(0, 1))


def _reshape(d: Draw) -> None:
    shape = d.shape(2, 4)
    d.operand(d.normal(*shape))
    target = d.one_of([[-1], [0, -1], [*shape[::-1]], [0] * len(shape), [1, -1, shape[-1]]])
    if d.opset >= 14:
        allow = d.integer(0, 1)
        if not (allow and 0 in target):
            d.sometimes(allowzero=allow)
    d.moved("shape", target, 5)


def _resize(d: Draw) -> None:
    shape = [1, d.integer(1, 2), d.integer(2, 5), d.integer(2, 5)]
    d.operand(d.normal(*shape))
    factors = [1.0, 1.0, *(float(d.one_of([0.5, 0.6, 0.75, 1.0, 1.3, 1.5, 2.0, 3.0])) for _ in range(2))]
    if d.opset < 11:
        d.operand(np.asarray(factors, np.float32), constant=True)
        d.sometimes(mode=d.one_of(["nearest", "linear"]))
        return
    positions = ["half_pixel", "pytorch_half_pixel", "align_corners", "asymmetric", "tf_half_pixel_for_nn"]
    positions += ["half_pixel_symmetric"] if d.opset >= 19 else []
    mode = d.one_of(["nearest", "linear", "cubic"])
    position = d.one_of(positions if mode == "nearest" else [each for each in positions if each[:3] != "tf_"])
    roundings = ["round_prefer_floor", "round_prefer_ceil", "floor", "ceil"]
    is_sized = d.often(0.4)
    d.operand(np.zeros(0, np.float32), constant=True)
    if is_sized:
        sizes = [*shape[:2], *(max(1, int(n * f)) for n, f in zip(shape[2:], factors[2:], strict=True))]
        d.operand(np.zeros(0, np.float32) if d.opset < 13 else None, constant=True)
        d.operand(np.asarray(sizes), constant=True)
    else:
        d.operand(np.asarray(factors, np.float32), constant=True)
    d.attributes.update(mode=mode, coordinate_transformation_mode=position)
    if mode == "nearest":
        d.sometimes(nearest_mode=d.one_of(roundings))
    if mode == "cubic":
        d.sometimes(cubic_coeff_a=-0.5, exclude_outside=d.integer(0, 1))
    if d.opset >= 18 and mode != "nearest" and position != "tf_crop_and_resize":
        d.sometimes(antialias=d.integer(0, 1))


def _reverse_sequence(d: Draw) -> None:
    shape = d.shape(2, 3)
    time_axis = d.integer(0, 1)
    d.operand(d.normal(*shape))
    d.operand(d.whole(1, shape[time_axis], shape[1 - time_axis]), constant=d.often())
    d.attributes.update(time_axis=time_axis, batch_axis=1 - time_axis)


def _roi_align(d: Draw) -> None:
    count = d.integer(1, 3)
    d.operand(d.normal(2, 2, 6, 6))
    corner = d.rng.random((count, 2)) * 3
    d.operand(np.concatenate([corner, corner + 1 + d.rng.random((count, 2)) * 3], 1).astype(np.float32), constant=True)
    d.operand(d.whole(0, 1, count))
    d.attributes.update(output_height=d.integer(1, 3), output_width=d.integer(1, 3))
    d.sometimes(mode=d.one_of(["avg", "max"]), spatial_scale=0.5)
    d.attributes["sampling_ratio"] = d.integer(1, 2)
    d.since(16, coordinate_transformation_mode=d.one_of(["half_pixel", "output_half_pixel"]))


def _scan(d: Draw) -> None:
    batch, time, size = (d.integer(1, 4) for _ in range(3))
    state, row = (info(name, np.float32, (size,)) for name in ("s", "e"))
    nodes = [helper.make_node("Add", ["s", "e"], ["t"]), helper.make_node("Mul", ["t", "e"], ["o"])]
    results = [info(name, np.float32, (size,)) for name in ("t", "o")]
    d.attributes.update(body=helper.make_graph(nodes, "body", [state, row], results), num_scan_inputs=1)
    lead = (batch,) if d.opset < 9 else ()
    if d.opset < 9:
        lengths = d.whole(1, time, batch) if d.often() else None
        d.operand(lengths, constant=d.often())
        d.sometimes(directions=[d.integer(0, 1)])
    d.operand(d.normal(*lead, size))
    axis = d.integer(0, 1) if d.opset >= 9 else 0
    d.operand(d.normal(*lead, *((size, time) if axis else (time, size))))
    if d.opset >= 9:
        d.sometimes(scan_input_directions=[d.integer(0, 1)], scan_output_directions=[d.integer(0, 1)])
        d.attributes.update(scan_input_axes=[axis], scan_output_axes=[d.integer(0, 1)])
    d.outputs = 2


def _selu(d: Draw) -> None:
    _unary(d)
    if d.op_type == "HardSigmoid":
        d.sometimes(alpha=0.3, beta=0.4)
    elif d.op_type != "Celu":
        d.sometimes(alpha=0.3)


def _shape(d: Draw) -> None:
    d.operand(d.normal(*d.shape()))
    d.since(15, start=d.integer(-5, 5), end=d.integer(-5, 5))


def _slice(d: Draw) -> None:
    shape = d.shape()
    axes = d.axes(len(shape))
    bounds = [d.integer(-6, 6) for _ in axes], [d.integer(-6, 7) for _ in axes]
    d.operand(d.normal(*shape))
    if d.often(0.3):
        axes = list(range(len(axes)))
        names = ("starts", "ends")
    else:
        names = ("starts", "ends", "axes")
    for name, values in zip(names, (*bounds, axes), strict=False):
        d.moved(name, values, 10)
    if d.opset >= 10 and len(names) == 3 and d.often():
        d.operand(np.asarray([d.one_of([-2, -1, 1, 2]) for _ in axes]), constant=True)


def _split(d: Draw) -> None:
    shape = list(d.shape(1, 3))
    axis = d.axis(len(shape))
    d.outputs = d.integer(1, 3)
    is_equal = d.often()
    sizes = [d.integer(1, 3) for _ in range(d.outputs)]
    shape[axis] = sum(sizes)
    if is_equal:
        shape[axis] = d.outputs * d.integer(1, 3) if d.opset < 18 or d.often() else d.integer(d.outputs, 7)
    d.operand(d.normal(*shape))
    d.attributes["axis"] = axis
    if not is_equal:
        d.moved("split", sizes, 13)
    elif d.opset >= 18:
        d.attributes["num_outputs"] = d.outputs


def _squeeze(d: Draw) -> None:
    shape = list(d.shape())
    axes = d.axes(len(shape))
    if d.op_type == "Squeeze":
        for axis in axes:
            shape[axis] = 1
    d.operand(d.normal(*shape))
    rank = len(shape) + (len(axes) if d.op_type == "Unsqueeze" else 0)
    chosen = sorted({axis % rank for axis in axes}) if d.op_type == "Unsqueeze" else axes
    if len(chosen) == len(axes):
        d.moved("axes", chosen, 13)
    else:
        d.moved("axes", [0], 13)


def _tile(d: Draw) -> None:
    shape = d.shape()
    d.operand(d.normal(*shape))
    if d.opset < 6:
        d.operand(np.asarray([d.integer(1, 3)], np.float32), constant=True)
        d.operand(np.asarray([d.integer(0, len(shape) - 1)], np.float32), constant=True)
    else:
        d.operand(d.whole(1, 3, len(shape)), constant=True)


def _top_k(d: Draw) -> None:
    shape = d.shape()
    axis = d.axis(len(shape))
    d.operand(d.rng.permutation(int(np.prod(shape))).reshape(shape).astype(np.float32))
    d.attributes["axis"] = axis
    count = d.integer(1, shape[axis])
    d.moved("k", count if d.opset < 10 else [count], 10)
    d.since(11, largest=d.integer(0, 1))
    d.outputs = 2


def _transpose(d: Draw) -> None:
    shape = d.shape()
    d.operand(d.normal(*shape))
    d.sometimes(perm=d.rng.permutation(len(shape)).tolist())


def _trilu(d: Draw) -> None:
    d.operand(d.normal(*d.shape(2, 3)))
    if d.often():
        d.operand(np.asarray(d.integer(-2, 2)), constant=d.often())
    d.sometimes(upper=d.integer(0, 1))


def _upsample(d: Draw) -> None:
    d.operand(d.normal(1, d.integer(1, 2), d.integer(2, 4), d.integer(2, 4)))
    height, width = (float(d.one_of([1.0, 1.3, 1.5, 2.0, 3.0])) for _ in range(2))
    mode = d.one_of(["nearest", "bilinear" if d.opset < 7 else "linear"])
    d.sometimes(mode=mode)
    if d.opset < 7:
        d.attributes.update(height_scale=height, width_scale=width)
    elif d.opset < 9:
        d.attributes["scales"] = [1.0, 1.0, height, width]
    else:
        d.operand(np.asarray([1.0, 1.0, height, width], np.float32), constant=True)


def _where(d: Draw) -> None:
    shape = d.shape()
    d.operand(d.rng.random(shape) < 0.5)
    d.operand(d.normal(*shape))
    d.operand(d.normal(*shape[-1:]))


def _bit_shift(d: Draw) -> None:
    shape = d.shape()
    d.operand(d.whole(0, 200, *shape, dtype=np.uint8))
    d.operand(d.whole(0, 7, *shape, dtype=np.uint8))
    d.attributes["direction"] = d.one_of(["LEFT", "RIGHT"])


def _quantize(d: Draw) -> None:
    shape = d.shape(2, 3)
    is_reverse = d.op_type == "DequantizeLinear"
    axis = d.integer(0, len(shape) - 1)
    by_axis = d.opset >= 13 and d.often()
    count = (shape[axis],) if by_axis else ()
    dtype = d.one_of([np.uint8, np.int8])
    low = np.iinfo(dtype).min
    d.operand(d.whole(low, low + 255, *shape, dtype=dtype) if is_reverse else d.normal(*shape) * 20)
    d.operand((d.rng.random(count) + 0.1).astype(np.float32), constant=d.often())
    d.operand(d.whole(low, low + 255, *count, dtype=dtype), constant=d.often())
    if by_axis:
        d.attributes["axis"] = axis


def _max_unpool(d: Draw) -> None:
    d.operand(d.normal(1, 1, 2, 2))
    d.operand(np.sort(d.rng.permutation(16)[:4]).reshape(1, 1, 2, 2).astype(np.int64))
    d.attributes.update(kernel_shape=[2, 2], strides=[2, 2])


def _compress(d: Draw) -> None:
    shape = d.shape()
    axis = d.axis(len(shape))
    d.operand(d.normal(*shape))
    d.operand(d.rng.random(shape[axis]) < 0.6, constant=True)
    d.attributes["axis"] = axis


def _loss(d: Draw) -> None:
    shape = (d.integer(1, 3), d.integer(2, 4), *d.shape(0, 1))
    d.operand(d.normal(*shape))
    d.operand(d.whole(0, shape[1] - 1, shape[0], *shape[2:]))
    if d.often():
        d.operand(np.abs(d.normal(shape[1])))
    d.sometimes(reduction=d.one_of(["none", "sum", "mean"]), ignore_index=0)


def _layer_normalization(d: Draw) -> None:
    shape = d.shape(2, 3)
    axis = d.integer(-len(shape), -1)
    d.operand(d.normal(*shape))
    d.operand(d.normal(*shape[axis:]))
    if d.op_type == "LayerNormalization" and d.often():
        d.operand(d.normal(*shape[axis:]))
    d.attributes["axis"] = axis


def _attention(d: Draw) -> None:
    groups = d.integer(1, 2)
    heads = groups * d.integer(1, 2)
    batch, queries, keys, size = (d.integer(1, 4) for _ in range(4))
    d.operand(d.normal(batch, heads, queries, size))
    d.operand(d.normal(batch, groups, keys, size))
    d.operand(d.normal(batch, groups, keys, size))
    if d.often():
        d.operand(d.normal(queries, keys))
    d.sometimes(is_causal=d.integer(0, 1), scale=0.3, softcap=2.0)


def _rotary(d: Draw) -> None:
    time, half = d.integer(1, 3), d.integer(1, 3)
    d.operand(d.normal(2, 2, time, 2 * half))
    for _ in range(2):
        d.operand(d.normal(5, half))
    d.operand(d.whole(0, 4, 2, time), constant=d.often())
    d.sometimes(interleaved=d.integer(0, 1))


def _affine_grid(d: Draw) -> None:
    d.operand(d.normal(2, 2, 3))
    d.operand(np.asarray([2, 3, d.integer(1, 4), d.integer(1, 4)]), constant=True)
    d.sometimes(align_corners=d.integer(0, 1))


def _if(d: Draw) -> None:
    d.operand(np.asarray(d.often()), constant=d.often())
    d.operand(d.normal(3))
    name = d.names.pop()
    branches = [
        helper.make_graph([helper.make_node(op, [name], ["r"])], op, [], [info("r", np.float32, (3,))])
        for op in ("Abs", "Neg")
    ]
    d.attributes.update(then_branch=branches[0], else_branch=branches[1])


def _loop(d: Draw) -> None:
    d.operand(np.asarray(d.integer(0, 4)), constant=True)
    d.operand(np.asarray(True), constant=True)
    d.operand(d.normal(3))
    inputs = [info("i", np.int64), info("go", bool), info("v", np.float32, (3,))]
    nodes = [
        helper.make_node("Identity", ["go"], ["on"]),
        helper.make_node("Add", ["v", "v"], ["w"]),
        helper.make_node("Neg", ["v"], ["r"]),
    ]
    results = [info("on", bool), info("w", np.float32, (3,)), info("r", np.float32, (3,))]
    d.attributes["body"] = helper.make_graph(nodes, "body", inputs, results)
    d.outputs = 2


def _non_max_suppression(d: Draw) -> None:
    corner = d.rng.random((1, 5, 2))
    boxes = np.concatenate([corner, corner + 0.2 + d.rng.random((1, 5, 2))], -1)
    d.operand(boxes.astype(np.float32))
    d.operand(d.rng.permutation(10).reshape(1, 2, 5).astype(np.float32))
    d.operand(np.asarray([d.integer(1, 5)]), constant=True)
    d.operand(np.asarray([d.one_of([0.2, 0.5])], np.float32), constant=True)
    d.sometimes(center_point_box=d.integer(0, 1))


_UNARY = tuple(
    [
        "Abs",
        "Ceil",
        "Elu",
        "Exp",
        "Floor",
        "Identity",
        "LeakyRelu",
        "Neg",
        "Relu",
        "Sigmoid",
        "Softplus",
        "Softsign",
        "Tanh",
    ]
)

# Operator → function that draws a node of it.
GENERATORS: Mapping[str, Generator] = {
    **dict.fromkeys(_UNARY, _unary),
    **dict.fromkeys(("Log", "Reciprocal", "Sqrt"), _positive),
    **dict.fromkeys(("Add", "Div", "Mul", "Pow", "Sub"), _arithmetic),
    **dict.fromkeys(("And", "Or", "Xor"), _logic),
    **dict.fromkeys(("Equal", "Greater", "Less", "GreaterOrEqual", "LessOrEqual"), _comparison),
    **dict.fromkeys(("Max", "Mean", "Min", "Sum"), _variadic),
    **dict.fromkeys(("ArgMax", "ArgMin"), _arg),
    **dict.fromkeys(("AveragePool", "LpPool", "MaxPool"), _pool),
    **dict.fromkeys(("Conv", "ConvTranspose"), _conv),
    **dict.fromkeys(("DepthToSpace", "SpaceToDepth"), _depth_to_space),
    **dict.fromkeys(("Hardmax", "LogSoftmax", "Softmax"), _flattening),
    **dict.fromkeys(("Gather", "GatherElements"), _gather),
    **dict.fromkeys(("GlobalAveragePool", "GlobalLpPool", "GlobalMaxPool"), _global_pool),
    **dict.fromkeys(("GRU", "LSTM", "RNN"), _recurrent),
    **dict.fromkeys(("Scatter", "ScatterElements"), _scatter),
    **dict.fromkeys(("Celu", "HardSigmoid", "Selu"), _selu),
    **dict.fromkeys(("Squeeze", "Unsqueeze"), _squeeze),
    **dict.fromkeys(("QuantizeLinear", "DequantizeLinear"), _quantize),
    **dict.fromkeys(("NegativeLogLikelihoodLoss", "SoftmaxCrossEntropyLoss"), _loss),
    **dict.fromkeys(("LayerNormalization", "RMSNormalization"), _layer_normalization),
    **{
        f"Reduce{name}": _reduction
        for name in ("L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "Sum", "SumSquare")
    },
    "AffineGrid": _affine_grid,
    "Attention": _attention,
    "BatchNormalization": _batch_normalization,
    "BitShift": _bit_shift,
    "Cast": _cast,
    "Clip": _clip,
    "Compress": _compress,
    "Concat": _concat,
    "CumSum": _cumulative,
    "DFT": _dft,
    "Dropout": _dropout,
    "Einsum": _einsum,
    "EyeLike": _eye,
    "Flatten": _flatten,
    "GatherND": _gather_nd,
    "Gemm": _gemm,
    "GridSample": _grid_sample,
    "GroupNormalization": _group_normalization,
    "If": _if,
    "InstanceNormalization": _instance_normalization,
    "LRN": _lrn,
    "Loop": _loop,
    "LpNormalization": _lp_normalization,
    "MatMul": _matmul,
    "MaxUnpool": _max_unpool,
    "MeanVarianceNormalization": _mean_variance,
    "Mod": _mod,
    "NonMaxSuppression": _non_max_suppression,
    "OneHot": _one_hot,
    "PRelu": _prelu,
    "Pad": _pad,
    "Reshape": _reshape,
    "Resize": _resize,
    "ReverseSequence": _reverse_sequence,
    "RoiAlign": _roi_align,
    "RotaryEmbedding": _rotary,
    "Scan": _scan,
    "ScatterND": _scatter_nd,
    "Shape": _shape,
    "Slice": _slice,
    "Split": _split,
    "Tile": _tile,
    "TopK": _top_k,
    "Transpose": _transpose,
    "Trilu": _trilu,
    "Upsample": _upsample,
    "Where": _where,
}


def opsets_of(op_type: str) -> list[int]:
    """Return the opsets in which an operator has a schema: first to the one before its removal."""
    schemas = [s for s in onnx.defs.get_all_schemas_with_history() if s.name == op_type and not s.domain]
    first = min(schema.since_version for schema in schemas)
    gone = [s.since_version for s in schemas if s.deprecated and op_type in ("Scatter", "Upsample")]
    return list(range(first, min(gone, default=onnx.defs.onnx_opset_version() + 1)))


def draw(op_type: str, opset: int, seed: int) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """Return a model of one random node, and its inputs."""
    drawn = Draw(np.random.default_rng([seed, opset, *op_type.encode()]), opset, op_type)
    GENERATORS[op_type](drawn)
    return drawn.model(), drawn.inputs
