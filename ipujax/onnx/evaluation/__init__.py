"""Graphs evaluated node by node on static and traced values."""

from ipujax.onnx.evaluation.evaluate import Settings as Settings, evaluate as evaluate
from ipujax.onnx.evaluation.graph_facts import check_operators as check_operators, shape_sources as shape_sources
from ipujax.onnx.evaluation.saturation import check_constants as check_constants
