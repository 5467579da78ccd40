"""Operators of early opsets whose meaning no node of the newest has: the domain `ipujax.early` of rewritten nodes.

Source: ONNX, docs/Changelog.md: Softmax and its kind before opset 13, GridSample 16, GroupNormalization 18, Resize 10,
Scan 8; for what it leaves open of GridSample and Resize, onnxruntime.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ipujax.onnx.operators.images import sampled
from ipujax.onnx.operators.normalization import group_normalization
from ipujax.onnx.operators.operand_types import Array, Optional, Static, Value, axis_of
from ipujax.onnx.operators.resize import resize
from ipujax.onnx.operators.shapes import checked_lengths, reversed_in_time
from ipujax.onnx.operators.subgraphs import Body, scan
from ipujax.onnx.registry import EARLY_DOMAIN, operator


@operator("AlignedOperand", EARLY_DOMAIN)
def aligned_operand(operand: Array, x: Value, *, axis: int, vectors_only: int = 0) -> Array:
    """Second operand of arithmetic with an axis: its dimensions are those of `x` from the axis on."""
    rank = np.ndim(x)
    if operand.ndim == 0 or (vectors_only and (operand.ndim != 1 or rank < 2)):
        return operand
    trailing = rank - axis_of(axis, rank) - operand.ndim
    if trailing < 0:
        raise ValueError(f"{operand.ndim} dimensions from axis {axis} on are beyond the last of {rank}")
    return operand.reshape(*operand.shape, *(1,) * trailing)


def _over_trailing_axes(function: Callable[..., Array]) -> Callable[..., Array]:
    """Return the operator over all axes from one on, as if they were one axis."""

    def flattened(x: Array, *, axis: int) -> Array:
        if not x.size:
            return x
        return function(x, axis=tuple(range(axis_of(axis, x.ndim), x.ndim)))

    return flattened


def _hardmax(x: Array, axis: tuple[int, ...]) -> Array:
    lines = x.reshape(*x.shape[: x.ndim - len(axis)], -1)
    hot = jax.nn.one_hot(jnp.argmax(lines, axis=-1), lines.shape[-1], dtype=x.dtype)
    return hot.reshape(x.shape)


for _name, _function in {"Hardmax": _hardmax, "LogSoftmax": jax.nn.log_softmax, "Softmax": jax.nn.softmax}.items():
    operator(_name, EARLY_DOMAIN)(_over_trailing_axes(_function))


@operator("GridSample", EARLY_DOMAIN)
def grid_sample_of_opset_16(
    x: Value, grid: Value, *, align_corners: int = 0, mode: str = "bilinear", padding_mode: str = "zeros"
) -> Array:
    """Array at the positions of a grid; a bicubic sample outside keeps its position, as in onnxruntime and PyTorch."""
    name = {"bicubic": "cubic", "bilinear": "linear"}.get(mode, mode)
    moved = "zeros" if name == "cubic" and padding_mode == "border" else padding_mode
    return sampled(x, grid, align_corners, name, padding_mode, moved)


@operator("GroupNormalization", EARLY_DOMAIN)
def group_normalization_by_group(
    x: Array, scale: Value, bias: Value, *, epsilon: float = 1e-5, num_groups: int
) -> Array:
    """Normalise groups of channels, with a scale and a bias for each group."""
    repeats = np.shape(x)[1] // num_groups
    by_channel = (jnp.repeat(jnp.asarray(each), repeats) for each in (scale, bias))
    return group_normalization(x, *by_channel, epsilon=epsilon, num_groups=num_groups)


@operator("Resize", EARLY_DOMAIN)
def resize_by_scales(x: Array, scales: Static, *, mode: str = "nearest") -> Array:
    """Resize with positions that are not at the middle of elements; nearest is the one before, or after if shrunk."""
    factors = np.ravel(scales).astype(np.float32)
    # An array that keeps its size stays as it is, whatever the scales: ONNX leaves it open, onnxruntime has it so.
    if np.array_equal(np.floor(factors * np.asarray(x.shape, np.float32)), x.shape):
        return x
    if mode != "nearest":
        return resize(x, None, factors, mode=mode, coordinate_transformation_mode="asymmetric")
    nearest = functools.partial(resize, coordinate_transformation_mode="asymmetric")
    enlarged = nearest(x, None, np.maximum(factors, 1), nearest_mode="floor")
    return nearest(enlarged, None, np.minimum(factors, 1), nearest_mode="ceil")


@operator("Scan", EARLY_DOMAIN)
def scan_of_batch(
    sequence_lens: Optional,
    *inputs: Any,
    body: Body,
    num_scan_inputs: int,
    directions: Sequence[int] | None = None,
    output_count: int,
) -> tuple[Any, ...]:
    """Run a subgraph over the time of each sequence; all operands are [N, …], scanned ones [N, time, …]."""
    # Behind the length of a sequence its states stay, and its rows are zero.
    states = tuple(map(jnp.asarray, inputs[: len(inputs) - num_scan_inputs]))
    scanned = tuple(map(jnp.asarray, inputs[len(states) :]))
    batch, time = scanned[0].shape[:2]
    lengths = jnp.full(batch, time) if sequence_lens is None else checked_lengths(sequence_lens, time)
    ways = directions or [0] * num_scan_inputs
    ordered = tuple(reversed_in_time(x, lengths) if way else x for x, way in zip(scanned, ways, strict=True))
    stopping = _stopping(body, len(states))

    def of_one(length: Array, *operands: Array) -> tuple[Any, ...]:
        if sequence_lens is None:
            return scan(*operands, body=body, num_scan_inputs=num_scan_inputs, output_count=output_count)
        timed = (length, *operands[: len(states)], jnp.arange(time), *operands[len(states) :])
        return scan(*timed, body=stopping, num_scan_inputs=num_scan_inputs + 1, output_count=output_count)[1:]

    return jax.vmap(of_one)(lengths, *states, *ordered)


def _stopping(body: Body, states: int) -> Body:
    """A body with the length of the sequence as first state and the time as first slice, which stops at the length."""

    def stopping(length: Array, *operands: Any) -> tuple[Any, ...]:
        before = operands[:states]
        time = operands[states]
        results = body(*before, *operands[states + 1 :])
        after = tuple(jnp.where(time < length, new, old) for new, old in zip(results, before, strict=False))
        rows = tuple(jnp.where(time < length, row, jnp.zeros_like(row)) for row in results[states:])
        return (length, *after, *rows)

    return stopping
