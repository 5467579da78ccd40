"""Operators of ONNX as JAX functions, a file a family; importing this package fills the table of `registry`."""

from ipujax.onnx.operators import sequences as sequences, subgraphs as subgraphs
