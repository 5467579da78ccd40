"""Operators that change the element type: Cast, CastLike, BitCast."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import onnx

from ipujax.onnx.element_types import bit_cast, canonical, cast, element_dtype, is_floating
from ipujax.onnx.onnx_errors import WideValueError
from ipujax.onnx.operators.operand_types import Array, Value
from ipujax.onnx.registry import operator
from ipujax.onnx.wide_values import REMEDY


@operator("Cast")
def cast_to(x: Value, *, to: int, saturate: int = 1, round_mode: str = "up") -> Array:
    return cast(x, element_dtype(to), saturate=bool(saturate), round_mode=round_mode)


@operator("CastLike")
def cast_like(x: Value, target: Value, *, saturate: int = 1, round_mode: str = "up") -> Array:
    return cast(x, jnp.asarray(target).dtype, saturate=bool(saturate), round_mode=round_mode)


@operator("BitCast")
def reinterpret(x: Value, *, to: int) -> Array:
    dtype = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(to))
    if canonical(dtype) != dtype and is_floating(x) != is_floating(np.empty(0, dtype)):
        message = f"elements of {dtype} are computed with 32 bits, which are other bits"
        raise WideValueError(message, expected=f"{dtype} with 64 bits", got=str(canonical(dtype)), hint=REMEDY)
    return bit_cast(x, element_dtype(to))
