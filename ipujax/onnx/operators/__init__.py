"""Operators of ONNX as JAX functions, a file a family; importing this package fills the table of `registry`."""

from ipujax.onnx.operators import (
    attention as attention,
    constant_arrays as constant_arrays,
    convolution as convolution,
    detection as detection,
    early_forms as early_forms,
    elementwise as elementwise,
    images as images,
    indexing as indexing,
    normalization as normalization,
    pools as pools,
    quantization as quantization,
    recurrent_layers as recurrent_layers,
    reduction as reduction,
    resize as resize,
    sequences as sequences,
    shapes as shapes,
    signals as signals,
    subgraphs as subgraphs,
    training as training,
)
