"""Elementwise operators, casts, quantisation, and the softmax family."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from onnx import TensorProto

from tests.ipujax.onnx.opsets.draw import Draw, Generator


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


def _selu(d: Draw) -> None:
    _unary(d)
    if d.op_type == "HardSigmoid":
        d.sometimes(alpha=0.3, beta=0.4)
    elif d.op_type != "Celu":
        d.sometimes(alpha=0.3)


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


def _cast(d: Draw) -> None:
    d.operand((d.normal(*d.shape()) * 10).astype(d.one_of([np.float32, np.int32])))
    to = d.one_of(["FLOAT", "INT32", "INT64", "BOOL", "FLOAT16"])
    d.attributes["to"] = to if d.opset < 6 else TensorProto.DataType.Value(to)


def _prelu(d: Draw) -> None:
    shape = d.shape(2, 4)
    d.operand(d.normal(*shape))
    channel = (shape[1],)
    d.operand(d.normal(*(d.one_of([channel, (1,)]) if d.opset < 7 else d.one_of([shape, (1,), shape[-1:]]))))
    d.before(6, consumed_inputs=[0])


def _mod(d: Draw) -> None:
    shape = d.shape()
    is_float = d.often()
    dtype = np.float32 if is_float else d.one_of([np.int32, np.int64])
    d.operand((d.normal(*shape) * 9).astype(dtype))
    divisor = d.whole(1, 5, *shape) * np.where(d.rng.random(shape) < 0.5, 1, -1)
    d.operand(divisor.astype(dtype))
    d.attributes["fmod"] = 1 if is_float else d.integer(0, 1)


def _bit_shift(d: Draw) -> None:
    shape = d.shape()
    d.operand(d.whole(0, 200, *shape, dtype=np.uint8))
    d.operand(d.whole(0, 7, *shape, dtype=np.uint8))
    d.attributes["direction"] = d.one_of(["LEFT", "RIGHT"])


def _where(d: Draw) -> None:
    shape = d.shape()
    d.operand(d.rng.random(shape) < 0.5)
    d.operand(d.normal(*shape))
    d.operand(d.normal(*shape[-1:]))


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


def _flattening(d: Draw) -> None:
    shape = d.shape(1, 4)
    d.operand(d.normal(*shape))
    d.sometimes(axis=d.axis(len(shape)))
    if d.opset < 13 and len(shape) == 1:
        d.attributes["axis"] = 0


def _dropout(d: Draw) -> None:
    d.operand(d.normal(*d.shape()))
    # before opset 12 the oracles leave the mask open
    d.outputs = d.integer(1, 2 if d.opset >= 12 else 1)
    if d.opset < 12:
        d.sometimes(ratio=0.3)
    elif d.often():
        d.operand(np.float32(0.3), constant=True)
    if d.opset < 7:
        d.attributes["is_test"] = 1
    d.before(6, consumed_inputs=[0])


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

GENERATORS: Mapping[str, Generator] = {
    **dict.fromkeys(_UNARY, _unary),
    **dict.fromkeys(("Log", "Reciprocal", "Sqrt"), _positive),
    **dict.fromkeys(("Add", "Div", "Mul", "Pow", "Sub"), _arithmetic),
    **dict.fromkeys(("And", "Or", "Xor"), _logic),
    **dict.fromkeys(("Equal", "Greater", "Less", "GreaterOrEqual", "LessOrEqual"), _comparison),
    **dict.fromkeys(("Max", "Mean", "Min", "Sum"), _variadic),
    **dict.fromkeys(("Hardmax", "LogSoftmax", "Softmax"), _flattening),
    **dict.fromkeys(("Celu", "HardSigmoid", "Selu"), _selu),
    **dict.fromkeys(("QuantizeLinear", "DequantizeLinear"), _quantize),
    "BitShift": _bit_shift,
    "Cast": _cast,
    "Clip": _clip,
    "Dropout": _dropout,
    "Mod": _mod,
    "PRelu": _prelu,
    "Where": _where,
}
