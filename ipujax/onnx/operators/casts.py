"""Operators that change the element type: Cast, CastLike, BitCast."""

from __future__ import annotations

import jax.numpy as jnp

from ipujax.onnx.element_types import bit_cast, cast, element_dtype
from ipujax.onnx.operators.operand_types import Array, Value
from ipujax.onnx.registry import operator


@operator("Cast")
def cast_to(x: Value, *, to: int, saturate: int = 1, round_mode: str = "up") -> Array:
    return cast(x, element_dtype(to), saturate=bool(saturate), round_mode=round_mode)


@operator("CastLike")
def cast_like(x: Value, target: Value, *, saturate: int = 1, round_mode: str = "up") -> Array:
    return cast(x, jnp.asarray(target).dtype, saturate=bool(saturate), round_mode=round_mode)


@operator("BitCast")
def reinterpret(x: Value, *, to: int) -> Array:
    return bit_cast(x, element_dtype(to))
