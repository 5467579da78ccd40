"""Operators of `com.microsoft`: what ONNX Runtime's optimiser, its quantiser and exporters for it write."""

from ipujax.onnx.microsoft import (
    decoder_attention as decoder_attention,
    encoder_attention as encoder_attention,
    fused_functions as fused_functions,
    fused_products as fused_products,
    packed_weights as packed_weights,
    quantized_arithmetic as quantized_arithmetic,
    quantized_layers as quantized_layers,
    quantized_products as quantized_products,
    skip_normalization as skip_normalization,
    standard_forms as standard_forms,
)
