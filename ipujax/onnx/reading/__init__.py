"""ONNX files as graphs at the newest opset.

file ──▶ ModelProto ──▶ weights apart ──▶ types, checks ──▶ old nodes ──▶ `Graph`
"""

from ipujax.onnx.reading.files import Source as Source
from ipujax.onnx.reading.onnx_protos import (
    graphs_of as graphs_of,
    onnx_step as onnx_step,
    replace_nodes as replace_nodes,
)
from ipujax.onnx.reading.read import expanded as expanded, has_body as has_body, read_graph as read_graph
