"""Operators of images: windows, resizing, sampling, boxes."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from tests.ipujax.onnx.opsets.draw import Draw, Generator


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
        d.attributes.pop("dilations", None)  # onnxruntime and the reference forget them
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
    # of a transposed one with a padding to a size the oracles differ, and the reference has no groups
    is_transposed = d.op_type == "ConvTranspose"
    is_padded = d.often(0.4)
    group = 1 if is_transposed and is_padded else d.integer(1, 2)
    kernel = [d.integer(1, 3) for _ in range(rank)]
    channels = group * d.integer(1, 2)
    outputs = group * d.integer(1, 2)
    d.operand(d.normal(1, channels, *(d.integer(5, 8) for _ in range(rank))))
    d.operand(d.normal(*((channels, outputs // group) if is_transposed else (outputs, channels // group)), *kernel))
    if d.often():
        d.operand(d.normal(outputs))
    strides = [d.integer(1, 3) for _ in range(rank)]
    d.sometimes(kernel_shape=kernel, dilations=[d.integer(1, 2) for _ in range(rank)])
    d.attributes["strides"] = strides
    d.attributes["group"] = group
    if is_padded:
        d.attributes["auto_pad"] = d.one_of(["NOTSET", "SAME_UPPER", "SAME_LOWER", "VALID"])
        if "SAME" in d.attributes["auto_pad"] and not is_transposed:
            d.attributes.pop("dilations", None)
    elif d.often():
        d.attributes["pads"] = [d.integer(0, k - 1) for k in kernel * 2]
    if is_transposed and d.often(0.3):
        d.attributes["output_padding"] = [d.integer(0, s - 1) for s in strides]


def _global_pool(d: Draw) -> None:
    d.operand(d.normal(d.integer(1, 2), d.integer(1, 3), *d.shape(1, 3)))
    if d.op_type == "GlobalLpPool":
        d.sometimes(p=float(d.integer(1, 3)) if d.opset < 2 else d.integer(1, 3))


def _max_unpool(d: Draw) -> None:
    d.operand(d.normal(1, 1, 2, 2))
    d.operand(np.sort(d.rng.permutation(16)[:4]).reshape(1, 1, 2, 2).astype(np.int64))
    d.attributes.update(kernel_shape=[2, 2], strides=[2, 2])


def _grid_sample(d: Draw) -> None:
    rank = 2 if d.opset < 20 else d.one_of([2, 3])
    d.operand(d.normal(1, 2, *(d.integer(2, 5) for _ in range(rank))))
    d.operand(d.normal(1, *(d.integer(2, 4) for _ in range(rank)), rank))
    modes = ["bilinear", "nearest", "bicubic"] if d.opset < 20 else ["linear", "nearest"] + ["cubic"] * (rank == 2)
    padding = d.one_of(["zeros", "border", "reflection"])
    d.sometimes(align_corners=d.integer(0, 1), mode=d.one_of(modes), padding_mode=padding)


def _affine_grid(d: Draw) -> None:
    d.operand(d.normal(2, 2, 3))
    d.operand(np.asarray([2, 3, d.integer(1, 4), d.integer(1, 4)]), constant=True)
    d.sometimes(align_corners=d.integer(0, 1))


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


def _lrn(d: Draw) -> None:
    d.operand(d.normal(1, d.integer(2, 6), *d.shape(2, 2)))
    d.attributes["size"] = d.one_of([1, 3, 5])
    d.sometimes(alpha=0.1, beta=0.5, bias=2.0)


def _non_max_suppression(d: Draw) -> None:
    corner = d.rng.random((1, 5, 2))
    boxes = np.concatenate([corner, corner + 0.2 + d.rng.random((1, 5, 2))], -1)
    d.operand(boxes.astype(np.float32))
    d.operand(d.rng.permutation(10).reshape(1, 2, 5).astype(np.float32))
    d.operand(np.asarray([d.integer(1, 5)]), constant=True)
    d.operand(np.asarray([d.one_of([0.2, 0.5])], np.float32))
    d.sometimes(center_point_box=d.integer(0, 1))


GENERATORS: Mapping[str, Generator] = {
    **dict.fromkeys(("AveragePool", "LpPool", "MaxPool"), _pool),
    **dict.fromkeys(("Conv", "ConvTranspose"), _conv),
    **dict.fromkeys(("DepthToSpace", "SpaceToDepth"), _depth_to_space),
    **dict.fromkeys(("GlobalAveragePool", "GlobalLpPool", "GlobalMaxPool"), _global_pool),
    "AffineGrid": _affine_grid,
    "GridSample": _grid_sample,
    "LRN": _lrn,
    "MaxUnpool": _max_unpool,
    "NonMaxSuppression": _non_max_suppression,
    "Resize": _resize,
    "RoiAlign": _roi_align,
    "Upsample": _upsample,
}
