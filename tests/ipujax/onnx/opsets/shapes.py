"""Operators that move elements, and those with indices."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from tests.ipujax.onnx.opsets.draw import Draw, Generator


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


def _flatten(d: Draw) -> None:
    shape = d.shape(1, 4)
    d.operand(d.normal(*shape))
    d.sometimes(axis=d.integer(-len(shape) if d.opset >= 11 else 0, len(shape)))


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


def _reshape(d: Draw) -> None:
    shape = d.shape(2, 4)
    d.operand(d.normal(*shape))
    target = d.one_of([[-1], [0, -1], [*shape[::-1]], [0] * len(shape), [1, -1, shape[-1]]])
    if d.opset >= 14:
        allow = d.integer(0, 1)
        if not (allow and 0 in target):
            d.sometimes(allowzero=allow)
    d.moved("shape", target, 5)


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


def _transpose(d: Draw) -> None:
    shape = d.shape()
    d.operand(d.normal(*shape))
    d.sometimes(perm=d.rng.permutation(len(shape)).tolist())


def _eye(d: Draw) -> None:
    d.operand(d.normal(*d.shape(2, 2)))
    d.sometimes(k=d.integer(-2, 2), dtype=d.one_of([1, 6, 7, 11]))


def _trilu(d: Draw) -> None:
    d.operand(d.normal(*d.shape(2, 3)))
    if d.often():
        d.operand(np.asarray(d.integer(-2, 2)), constant=d.often())
    d.sometimes(upper=d.integer(0, 1))


def _reverse_sequence(d: Draw) -> None:
    shape = d.shape(2, 3)
    time_axis = d.integer(0, 1)
    d.operand(d.normal(*shape))
    d.operand(d.whole(1, shape[time_axis], shape[1 - time_axis]), constant=d.often())
    d.attributes.update(time_axis=time_axis, batch_axis=1 - time_axis)


def _compress(d: Draw) -> None:
    shape = d.shape()
    axis = d.axis(len(shape))
    d.operand(d.normal(*shape))
    d.operand(d.rng.random(shape[axis]) < 0.6, constant=True)
    d.attributes["axis"] = axis


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


def _one_hot(d: Draw) -> None:
    shape = d.shape(1, 3)
    depth = d.integer(2, 5)
    low, high = (-depth, depth - 1) if d.opset >= 11 else (0, depth + 1)
    d.operand(d.whole(low, high, *shape))
    d.operand(np.asarray(depth), constant=True)
    d.operand(np.asarray([-1, 2], np.float32))
    d.sometimes(axis=d.integer(-len(shape) - 1 if d.opset >= 11 else -1, len(shape)))


def _top_k(d: Draw) -> None:
    shape = d.shape()
    axis = d.axis(len(shape))
    d.operand(d.rng.permutation(int(np.prod(shape))).reshape(shape).astype(np.float32))
    d.attributes["axis"] = axis
    count = d.integer(1, shape[axis])
    d.moved("k", count if d.opset < 10 else [count], 10)
    d.since(11, largest=d.integer(0, 1))
    d.outputs = 2


GENERATORS: Mapping[str, Generator] = {
    **dict.fromkeys(("Gather", "GatherElements"), _gather),
    **dict.fromkeys(("Scatter", "ScatterElements"), _scatter),
    **dict.fromkeys(("Squeeze", "Unsqueeze"), _squeeze),
    "Compress": _compress,
    "Concat": _concat,
    "EyeLike": _eye,
    "Flatten": _flatten,
    "GatherND": _gather_nd,
    "OneHot": _one_hot,
    "Pad": _pad,
    "Reshape": _reshape,
    "ReverseSequence": _reverse_sequence,
    "ScatterND": _scatter_nd,
    "Shape": _shape,
    "Slice": _slice,
    "Split": _split,
    "Tile": _tile,
    "TopK": _top_k,
    "Transpose": _transpose,
    "Trilu": _trilu,
}
