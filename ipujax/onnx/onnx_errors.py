"""Errors of ONNX models, all `ipujax.IpuError`s."""

from __future__ import annotations

from ipujax.runtime.errors import ArgumentValueError


class OnnxError(ArgumentValueError):
    """An ONNX model that cannot be read, or cannot be evaluated with these arguments."""


class OnnxModelError(OnnxError):
    """A file or model that is not valid ONNX, or is refused for safety."""


class UnsupportedOperatorError(OnnxError):
    """Operators, or attributes of operators, without an implementation; all of a model in one error."""


class TracedOperandError(OnnxError):
    """A traced operand where the shape of a result, or a branch, depends on its values."""
