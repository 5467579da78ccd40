"""Operators of ai.graphcore as JAX functions, registered for `ipujax.onnx`; a file for each family."""

from ipujax.popart.operators import (
    elementwise_functions as elementwise_functions,
    graphcore_sequences as graphcore_sequences,
    group_norms as group_norms,
    grouped_indexing as grouped_indexing,
    loss_functions as loss_functions,
    multi_convolution as multi_convolution,
    splines as splines,
    subgraph_calls as subgraph_calls,
    views as views,
)
