"""Operators of ONNX as JAX functions, a file a family; importing this package fills the table of `registry`."""

from __future__ import annotations

from ipujax.onnx.operators import (
    activations as activations,
    attention as attention,
    casts as casts,
    constants as constants,
    convolution as convolution,
    detection as detection,
    elementwise as elementwise,
    images as images,
    indexing as indexing,
    losses as losses,
    matmul as matmul,
    ngrams as ngrams,
    normalization as normalization,
    pooling as pooling,
    quantization as quantization,
    random as random,
    recurrent as recurrent,
    reduction as reduction,
    resize as resize,
    sequences as sequences,
    shapes as shapes,
    signals as signals,
    subgraphs as subgraphs,
    training as training,
)
