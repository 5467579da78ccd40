"""Operators of `com.microsoft`: what ONNX Runtime's optimiser, its quantiser and exporters for it write."""

from ipujax.onnx.microsoft import (
    decoder_attention as decoder_attention,
    encoder_attention as encoder_attention,
    fused_operators as fused_operators,
    packed_weights as packed_weights,
    quantized_operators as quantized_operators,
    standard_forms as standard_forms,
)
