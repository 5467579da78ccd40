"""LSTM with quantised weights: operands of its products are quantised on the way, those of all times at once."""

from __future__ import annotations

from typing import Unpack

import jax.numpy as jnp
import numpy as np

from ipujax.onnx.operators.operand_types import Array, Optional, Value
from ipujax.onnx.operators.quantization import centred_levels
from ipujax.onnx.operators.recurrent_layers import (
    LayerAttributes,
    lstm_settings,
    quantized_lstm_step,
    run_directions,
)
from ipujax.onnx.registry import MICROSOFT_DOMAIN as DOMAIN, operator


def _whole_weights(x: Value, zero_point: Value) -> Array:
    """Return quantised weights [directions, rows, units] as whole numbers in float32, [directions, units, rows]."""
    # Zero points are subtracted in integers, where 8 bits less 8 bits do not overflow.
    array = jnp.asarray(x).astype(jnp.int32)
    zero = jnp.asarray(zero_point).reshape(array.shape[0], 1, -1).astype(jnp.int32)
    return jnp.swapaxes((array - zero).astype(jnp.float32), 1, 2)


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
    input_forget: int = 0,
    output_count: int = 1,
    **attributes: Unpack[LayerAttributes],
) -> tuple[Array, ...]:
    """As LSTM, with weights [directions, rows, 4 · hidden]; the other operands of its products are rounded to uint8.

    The inputs of all times have one scale; outputs have one each time and sequence, as onnxruntime's of one sequence,
    or of no more sequences than threads: it divides longer batches among threads, and each part has one scale.
    """
    array = jnp.asarray(x)
    if sequence_lens is not None:
        # What follows the longest sequence is not quantised, and is no part of the range.
        is_read = np.arange(len(array)) < jnp.max(jnp.asarray(sequence_lens))
        array = jnp.where(is_read[:, None, None], array, 0)
    levels, x_scale = centred_levels(array)
    outputs = _whole_weights(r, r_zero_point)
    count, _, hidden = outputs.shape
    shape = count, 4, -1
    units = jnp.ones((count, 4, hidden), jnp.float32)
    input_scales, output_scales = (
        jnp.asarray(each).reshape(shape if np.size(each) > count else (count, 1, 1)) * units
        for each in (w_scale, r_scale)
    )
    biases = 0 * units if b is None else jnp.asarray(b).reshape(count, 2, 4, hidden).sum(1)
    of_directions = zip(x_scale * input_scales, output_scales, biases, strict=True)
    plain = lstm_settings(p, attributes.get("direction", "forward"), bool(input_forget))
    settings = [{**each, "scales": scales} for each, scales in zip(plain, of_directions, strict=False)]
    results = run_directions(
        "lstm",
        (levels, _whole_weights(w, w_zero_point), outputs, None, sequence_lens),
        [initial_h, initial_c],
        settings,
        quantized_lstm_step,
        **attributes,
    )
    return results[:output_count]
