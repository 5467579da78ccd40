"""Graphs evaluated node by node on static and traced values."""

from ipujax.onnx.evaluation.evaluate import (
    Settings as Settings,
    check_operators as check_operators,
    evaluate as evaluate,
)
from ipujax.onnx.evaluation.saturation import check_constants as check_constants, shape_sources as shape_sources
