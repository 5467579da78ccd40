"""Weights of few bits, several in a byte, with a scale for each block of a row.

Element n of a row is in the bits from n · bits on, lowest first.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from ipujax.onnx.element_types import is_floating
from ipujax.onnx.onnx_errors import OnnxError
from ipujax.onnx.operators.operand_types import MAX_SIZE, Array, Optional, Value, ceil_div, on_axis, refuse_outside
from ipujax.onnx.operators.quantization import rounded_to_signed
from ipujax.onnx.registry import MICROSOFT_DOMAIN as DOMAIN, is_static, operator

_BITS = (2, 4, 8)
_INTEGERS = 4  # the `accuracy_level` of products in integers
# Blocks of 512 are rounded on some processors alone (with AVX-512 VNNI), and so not here.
_INTEGER_BLOCKS = {2: (32, 64, 128), 4: (16, 32, 64, 128, 256), 8: (16, 32, 64, 128, 256)}


def unpacked(x: Value, bits: int) -> Array:
    """Return the elements of bytes [..., bytes] as int32 [..., bytes · 8 / bits]."""
    if bits not in _BITS:
        raise OnnxError("the attribute 'bits' is not supported", expected=f"one of {_BITS}", got=bits)
    array = jnp.asarray(x).astype(jnp.int32)
    shifts = np.arange(0, 8, bits)
    parts = (array[..., None] >> shifts) & ((1 << bits) - 1)
    return parts.reshape(*array.shape[:-1], -1)


@operator("MatMulNBits", DOMAIN)
def product_with_packed_weights(
    a: Value,
    b: Value,
    scales: Value,
    zero_points: Optional = None,
    g_idx: Optional = None,
    bias: Optional = None,
    *,
    K: int,
    N: int,
    accuracy_level: int = 0,
    bits: int = 4,
    block_size: int,
    weight_prepacked: int = 0,
) -> Array:
    """Product [..., N] of a [..., K] and packed weights [N, blocks, bytes of a block], and a bias."""
    if weight_prepacked:
        raise OnnxError("weights packed for one processor are not supported", expected="weight_prepacked=0")
    refuse_outside(np.asarray(block_size), 16, MAX_SIZE, "the size of a block")
    if np.shape(a)[-1] != K:
        raise OnnxError("the rows of the operand have another length", expected=f"K={K}", got=np.shape(a)[-1])
    blocks = ceil_div(K, block_size)
    if np.size(b) != N * blocks * block_size * bits // 8:
        message = "packed weights have another size"
        raise OnnxError(message, expected=f"[{N}, {blocks}, {block_size * bits // 8}]", got=list(np.shape(b)))
    array = jnp.asarray(a)
    if _rounds_operand(accuracy_level, bits, block_size, b, zero_points, g_idx):
        array = rounded_to_signed(array.astype(jnp.float32), block_size).astype(array.dtype)
    # The last block of a row may reach beyond it.
    levels = unpacked(jnp.asarray(b).reshape(N, -1), bits).reshape(N, blocks * block_size)[:, :K]
    group = np.arange(K) // block_size if g_idx is None else jnp.asarray(g_idx)[:K]
    by_block = jnp.asarray(scales).reshape(N, blocks).astype(array.dtype)
    zero = _zero_points(zero_points, N, blocks, bits, array.dtype)
    weights = (levels.astype(array.dtype) - _of_group(zero, group)) * _of_group(by_block, group)
    y = jnp.matmul(array, weights.T)
    return y if bias is None else y + on_axis(bias, y, -1, "the bias")


def _rounds_operand(
    accuracy_level: int, bits: int, block_size: int, b: Value, zero_points: Optional, g_idx: Optional
) -> bool:
    """Whether onnxruntime has a kernel in integers for a node, which rounds the operand to int8, block by block."""
    # Source: ONNX Runtime 1.32, MlasIsQNBitGemmAvailable of x86, and what MatMulNBits packs before it runs.
    if accuracy_level != _INTEGERS or g_idx is not None or not is_static(b):
        return False
    has_floating_zeros = zero_points is not None and is_floating(zero_points)
    return block_size in _INTEGER_BLOCKS[bits] and not has_floating_zeros


def _of_group(values: Array, group: Value) -> Array:
    """Return the value of each element's block, [N, K]."""
    return jnp.take(values, jnp.asarray(group), axis=-1)


def _zero_points(zero_points: Optional, rows: int, blocks: int, bits: int, dtype: np.dtype) -> Array:
    if zero_points is None:
        return jnp.full((rows, blocks), 1 << (bits - 1), dtype)
    points = jnp.asarray(zero_points)
    if points.dtype != jnp.uint8:
        return points.reshape(rows, blocks).astype(dtype)
    return unpacked(points.reshape(rows, -1), bits)[:, :blocks].astype(dtype)


@operator("GatherBlockQuantized", DOMAIN)
def gather_quantized(
    data: Value,
    indices: Value,
    scales: Value,
    zero_points: Optional = None,
    *,
    bits: int = 4,
    block_size: int = 128,
    gather_axis: int = 0,
    quantize_axis: int = 1,
) -> Array:
    """Rows of a table of few bits, dequantised by blocks along an axis."""
    table = jnp.asarray(data)
    is_packed = table.dtype == jnp.uint8
    rank = table.ndim
    axis, quantized_axis = gather_axis % rank, quantize_axis % rank
    levels = unpacked(table, bits) if is_packed else table.astype(jnp.int32)
    scale = jnp.asarray(scales)
    if zero_points is None:
        zero = jnp.full(scale.shape, 1 << (bits - 1) if is_packed else 0, jnp.int32)
    else:
        points = jnp.asarray(zero_points)
        zero = unpacked(points, bits)[..., : scale.shape[-1]] if is_packed else points.astype(jnp.int32)
    group = np.arange(levels.shape[quantized_axis]) // block_size
    rows, row_scales, row_zeros = (jnp.take(x, jnp.asarray(indices), axis=axis) for x in (levels, scale, zero))
    place = quantized_axis if quantized_axis < axis else quantized_axis + np.ndim(indices) - 1
    spread_scales, spread_zeros = (jnp.take(x, group, axis=place) for x in (row_scales, row_zeros))
    return (rows - spread_zeros).astype(scale.dtype) * spread_scales
