"""`ipu.ops`: the module of pipelines alone, as the other operations of Graphcore's are TensorFlow's."""

from ipujax.keras.ops import pipelining_ops as pipelining_ops
