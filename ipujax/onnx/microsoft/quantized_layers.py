"""LSTM with quantised weights: operands of its products are quantised on the way, those of all times at once."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from ipujax.onnx.microsoft.fused_functions import DOMAIN
from ipujax.onnx.operators.operand_types import Array, Optional, Value
from ipujax.onnx.operators.recurrent_layers import lstm
from ipujax.onnx.registry import operator


def _weights(x: Value, scale: Value, zero_point: Value) -> Array:
    """Return quantised weights [directions, rows, units] as float32 [directions, units, rows]."""
    # Zero points are subtracted in integers, where 8 bits less 8 bits do not overflow.
    array = jnp.asarray(x).astype(jnp.int32)
    spread = [jnp.asarray(values).reshape(array.shape[0], 1, -1) for values in (scale, zero_point)]
    shifted = array - spread[1].astype(jnp.int32)
    return jnp.swapaxes(shifted.astype(jnp.float32) * spread[0], 1, 2)


@operator("DynamicQuantizeLSTM", DOMAIN)
def lstm_with_quantized_weights(
    x: Value,
    w: Value,
    r: Value,
    b: Optional,
    sequence_lens: Optional,
    initial_h: Optional,
    initial_c: Optional,
    p: Optional,
    w_scale: Value,
    w_zero_point: Value,
    r_scale: Value,
    r_zero_point: Value,
    *,
    output_count: int = 1,
    **attributes: Any,
) -> tuple[Array, ...]:
    """As LSTM, with weights [directions, rows, 4 · hidden]; their products are computed with the weights' real values.

    onnxruntime also rounds the other operand of each product to 8 bits: results differ by that, some 10⁻².
    """
    inputs, outputs = _weights(w, w_scale, w_zero_point), _weights(r, r_scale, r_zero_point)
    return lstm(x, inputs, outputs, b, sequence_lens, initial_h, initial_c, p, output_count=output_count, **attributes)
