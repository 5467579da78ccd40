"""LSTM with quantised weights: operands of its products are quantised on the way, those of all times at once."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import jax.numpy as jnp
import numpy as np

from ipujax.onnx.microsoft.fused_functions import DOMAIN
from ipujax.onnx.operators.operand_types import Array, Optional, Value
from ipujax.onnx.operators.quantization import rounded_to_unsigned
from ipujax.onnx.operators.recurrent_layers import Activations, lstm_settings, run_directions
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
    activation_alpha: Sequence[float] | None = None,
    activation_beta: Sequence[float] | None = None,
    activations: Sequence[str] | None = None,
    clip: float | None = None,
    direction: str = "forward",
    hidden_size: int | None = None,
    input_forget: int = 0,
    output_count: int = 1,
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
    operands = (
        rounded_to_unsigned(array),
        _weights(w, w_scale, w_zero_point),
        _weights(r, r_scale, r_zero_point),
        b,
        sequence_lens,
    )
    results = run_directions(
        "lstm",
        operands,
        [initial_h, initial_c],
        Activations(activations, activation_alpha, activation_beta, clip),
        direction,
        0,
        hidden_size,
        lstm_settings(p, direction, bool(input_forget)),
        partial(rounded_to_unsigned, axis=-1),
    )
    return results[:output_count]
