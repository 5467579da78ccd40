"""Operators of ai.graphcore as JAX functions, registered for `ipujax.onnx`; a file for each family."""

from ipujax.popart.operators import (
    ctc as ctc,
    dynamic_slices as dynamic_slices,
    elementwise_functions as elementwise_functions,
    graphcore_lstm as graphcore_lstm,
    group_norms as group_norms,
    grouped_indexing as grouped_indexing,
    loss_functions as loss_functions,
    multi_convolution as multi_convolution,
    packed_data as packed_data,
    sorts_and_buckets as sorts_and_buckets,
    splines as splines,
    subgraph_calls as subgraph_calls,
    views as views,
)
