"""Operators of ai.graphcore as JAX functions, registered for `ipujax.onnx`; a file for each family."""

from ipujax.popart.operators import (
    calls as calls,
    convolution as convolution,
    ctc as ctc,
    dynamic_slices as dynamic_slices,
    elementwise as elementwise,
    gathers as gathers,
    losses as losses,
    norms as norms,
    packed_data as packed_data,
    recurrent as recurrent,
    sorting as sorting,
    splines as splines,
    views as views,
)
