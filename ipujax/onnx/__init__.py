"""ONNX models as JAX functions."""

from __future__ import annotations

from ipujax.onnx.onnx_errors import (
    OnnxError as OnnxError,
    OnnxModelError as OnnxModelError,
    TracedOperandError as TracedOperandError,
    UnsupportedOperatorError as UnsupportedOperatorError,
)
from ipujax.onnx.registry import register as register
from ipujax.public import public_names as _public_names

__dir__ = _public_names(globals())
